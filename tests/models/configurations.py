"""Random `config.json`s of every family, and what Transformers and an engine make of the same random weights."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers.initialization import no_init_weights

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.build import assemble
from nano_inference.loading.fields import Fields
from nano_inference.loading.formats import Checkpoint, ModelFormat
from nano_inference.loading.hf_config import model_config
from nano_inference.loading.kinds import ModelKinds, installed_kinds
from nano_inference.loading.sources import TensorSource
from nano_inference.text.kinds import TokenizerSource
from nano_inference.types import ModelError
from tests.models.families import gap_to

TOLERANCE = 1e-4
VOCAB_SIZE = 40
IDS = random.Random(3).choices(range(VOCAB_SIZE), k=24)
FULL, SLIDING = "full_attention", "sliding_attention"
FAMILIES: Mapping[str, tuple[str, type[Any]]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config),
    "smollm3": ("SmolLM3ForCausalLM", transformers.SmolLM3Config),
    "gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config),
    "gemma3_text": ("Gemma3ForCausalLM", transformers.Gemma3TextConfig),
}
Result = Literal["equal", "refused", "no reference", "failed"]
Draw = Callable[[random.Random, dict[str, Any]], Any]


class Outcome(NamedTuple):
    """The comparison of one configuration."""

    result: Result
    """"refused": by the engine, with a field's name; "no reference": Transformers refuses it, or has no numbers."""
    about: str
    """The largest difference, or the error."""


def any_of(*values: Any) -> Draw:
    return lambda rng, config: deepcopy(rng.choice(values))


def _layer_types(rng: random.Random, config: dict[str, Any]) -> Any:
    count = config["num_hidden_layers"] + (rng.random() < 0.05)
    kinds = rng.choice(
        [(FULL, SLIDING)] * 9 + [(FULL,), (SLIDING,), ("attention", SLIDING), ("chunked_attention", FULL)]
    )
    return rng.choice([None, *[[rng.choice(kinds) for _ in range(count)] for _ in range(6)]])


def _rope(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Return one object of rotary parameters, in one of its forms."""
    kind = rng.choice(["default", "linear", "dynamic", "llama3", "llama3", "yarn", "yarn", None, "longrope", "mrope"])
    fields: dict[str, Any] = {rng.choice(["rope_type", "rope_type", "type"]): kind} if kind else {}
    if rng.random() < 0.1:
        fields["type"] = rng.choice(["default", "linear"])
    if kind not in ("default", None) or rng.random() < 0.2:
        fields["factor"] = rng.choice([1.0, 2, 4.0, 8.0, None])
    if kind == "llama3":
        fields |= {"low_freq_factor": rng.choice([1, 1.0, 2.0]), "high_freq_factor": rng.choice([4, 4.0, 8.0])}
    options = {
        "rope_theta": any_of(10000, 5e5, 100.0),
        "original_max_position_embeddings": any_of(8, 16, 32, 64),
        "partial_rotary_factor": any_of(0.25, 0.5, 1.0, None),
        **(
            {"attention_factor": any_of(0.9, 1.25, None), "beta_fast": any_of(32, 16.0, None)} if kind == "yarn" else {}
        ),
        **({"beta_slow": any_of(1, 2.0, None), "truncate": any_of(True, False)} if kind == "yarn" else {}),
        **({"mscale": any_of(0.7, 1.0, None), "mscale_all_dim": any_of(0.9, 1.0, 0)} if kind == "yarn" else {}),
    }
    chance = {"partial_rotary_factor": 0.12}
    fields |= {name: draw(rng, config) for name, draw in options.items() if rng.random() < chance.get(name, 0.35)}
    return fields


def _ropes(rng: random.Random, config: dict[str, Any]) -> Any:
    """Return rotary parameters: none, flat, or with an object for each layer type."""
    form = rng.choice(["flat"] * 5 + ["nested"] * (5 if config["model_type"] == "gemma3_text" else 1) + [None, {}])
    if form == "flat":
        return _rope(rng, config)
    if form == "nested":
        kinds = rng.choice([(FULL, SLIDING)] * 4 + [(FULL,), (SLIDING,)])
        return {kind: rng.choice([_rope(rng, config)] * 5 + [None]) for kind in kinds}
    return form


_SHAPE: Mapping[str, Draw] = {
    "num_hidden_layers": any_of(1, 2, 3, 4),
    "num_attention_heads": any_of(4, 4, 4, 2),
    "hidden_size": any_of(16, 32),
    "intermediate_size": any_of(16, 24),
}
_USUAL: Mapping[str, Draw] = {
    "num_key_value_heads": lambda rng, config: rng.choice([1, 2, config["num_attention_heads"]]),
    "head_dim": any_of(4, 6, 8, 16),
    "max_position_embeddings": any_of(32, 64, 64, 4096),
    "rms_norm_eps": any_of(1e-6, 1e-5, 1e-2),
    "tie_word_embeddings": any_of(True, False),
    "sliding_window": any_of(1, 3, 7, 30, None),
    "use_sliding_window": any_of(True, True, False),
    "max_window_layers": any_of(0, 1, 2, 28),
    "layer_types": _layer_types,
    "query_pre_attn_scalar": any_of(4, 16, 24),
    "attention_bias": any_of(True, False),
    "mlp_bias": any_of(True, False),
}
"""Fields that most files of a family have, or that a family ignores."""
_ROPE: Mapping[str, Draw] = {
    "rope_theta": any_of(10000, 10000.0, 5e5, 50.0),
    "rope_parameters": _ropes,
    "rope_scaling": _ropes,
    "rope_local_base_freq": any_of(10000.0, 100.0),
    "partial_rotary_factor": any_of(0.25, 0.5, 1.0, None),
    "original_max_position_embeddings": any_of(8, 16, 64, None),
}
_RARE: Mapping[str, Draw] = {
    "architectures": any_of(None, []),
    "hidden_act": any_of("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": any_of("gelu_pytorch_tanh", "silu", "gelu", None),
    "sliding_window_pattern": any_of(1, 2, 3, 6, None),
    "_sliding_window_pattern": any_of(1, 2, 3),
    "attn_logit_softcapping": any_of(0.5, 5.0, 50.0, None),
    "final_logit_softcapping": any_of(0.5, 2.0, 30.0, None),
    "no_rope_layers": lambda rng, config: rng.choice([None, [rng.randrange(2) for _ in range(rng.choice([4, 5]))]]),
    "no_rope_layer_interval": any_of(1, 2, 3, 4),
    "use_bidirectional_attention": any_of(True, False, None),
    "qkv_bias": any_of(True, False),
    "use_qk_norm": any_of(True, False),
    "qk_layernorm": any_of(True, False),
    "logit_scale": any_of(0.5),
    "logits_scaling": any_of(2.0),
    "embedding_multiplier": any_of(2.0),
    "residual_multiplier": any_of(0.5),
    "attention_multiplier": any_of(0.1),
    "layer_norm_eps": any_of(1e-2),
    "norm_eps": any_of(1e-2),
    "pretraining_tp": any_of(1, 2),
    "rope_interleaved": any_of(True, False),
    "scale_embeddings": any_of(False),
    "attention_dropout": any_of(0.1),
    "torch_dtype": any_of("float32"),
    "num_experts": any_of(None),
    "quantization_config": any_of(None),
    "use_cache": any_of(True, False),
    "is_decoder": any_of(True),
    "attention_chunk_size": any_of(4),
    "num_kv_shared_layers": any_of(1),
    "per_layer_config": any_of(None, None, {}, {"0": {"sliding_window": 2}}, {"0": {"intermediate_size": 8}}),
}
"""Fields of few files, many of them of other families or of later versions."""


def random_config(family: str, rng: random.Random) -> dict[str, Any]:
    """Return a configuration with fields that are absent, null, of another family, or of an older or newer form."""
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family][0]], "model_type": family, "vocab_size": VOCAB_SIZE,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    config |= {name: draw(rng, config) for name, draw in _SHAPE.items()}
    is_tidy = rng.random() < 0.3
    for fields, chance in ((_USUAL, 0.6), (_ROPE, 0.3), (_RARE, 0.02 if is_tidy else 0.07)):
        config |= {name: draw(rng, config) for name, draw in fields.items() if rng.random() < chance}
    if family != "llama" and rng.random() < 0.9:
        config.setdefault("num_key_value_heads", 2)  # the default is mostly more than these heads
    if family in ("llama", "mistral") and rng.random() < 0.8:
        config.pop("layer_types", None)  # Transformers needs further fields then
    if rng.random() < 0.05:
        config[rng.choice([name for name in config if name not in ("model_type", "vocab_size", *_SHAPE)])] = None
    return config


def compared(config: Mapping[str, Any], seed: int) -> Outcome:
    """Compare log-probabilities of an engine and of Transformers with the same configuration and random weights."""
    weights: dict[str, torch.Tensor] = {}
    table, about = None, ""
    try:
        weights, table = _reference(config, seed)
    except Exception as error:
        about = f"{type(error).__name__}: {error}"
    try:
        with _engine(config, weights) as engine:
            worst = 0.0 if table is None else gap_to(table, IDS, engine.score(IDS))
    except ModelError as error:
        is_named = any(re.search(rf"\b{name}\b", str(error)) for name in _names(config))
        return (
            Outcome("no reference", about)
            if table is None
            else Outcome("refused" if is_named else "failed", str(error))
        )
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")
    if table is None:
        return Outcome("no reference", about)
    return Outcome("equal" if worst <= TOLERANCE else "failed", f"{worst:.1e}")


def _reference(config: Mapping[str, Any], seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return weights that make every field matter, and the log-probabilities [tokens, V] of Transformers' model."""
    architecture, config_class = FAMILIES[config["model_type"]]
    own = config_class.from_dict(deepcopy(dict(config)), attn_implementation="eager")
    torch.manual_seed(seed)
    with no_init_weights():
        model = getattr(transformers, architecture)(own).eval().float()
    if seed % 4:
        model.tie_weights()  # a quarter of the tied models have a head of their own
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name
            offset = 1.0 if is_norm and "Gemma" not in architecture else 0.0
            weight.copy_(torch.randn_like(weight) * (0.3 if is_norm else 0.4 * own.hidden_size**-0.25) + offset)
        logits = model(torch.tensor([IDS]), use_cache=False).logits[0, :-1]
    if not torch.isfinite(logits).all():
        raise ValueError("the logits are not finite")
    return dict(model.named_parameters()), torch.log_softmax(logits.double(), dim=-1).float()


def _engine(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> InferenceEngine:
    """Open an engine without files; without weights, only read the configuration. Raises `ModelError`."""

    def opened(path: Path, overrides: Iterable[str]) -> Checkpoint:
        return Checkpoint(
            path=path,
            config=model_config(Fields("config.json", config)),
            tokenizer=TokenizerSource(str(path)),
            dtype="float32",
            sources=MappingProxyType({name: TensorSource(value.detach()) for name, value in weights.items()}),
            generation=MappingProxyType({}),
        )

    in_memory = ModelFormat(title="a configuration in memory", recognises=lambda path: True, open=opened)
    kinds: ModelKinds = replace(installed_kinds(), formats={"memory": in_memory})
    options = EngineConfig(
        model_path=str(Path(__file__).parent), device="cpu", kernels="off", max_model_len=64, kv_cache_bytes=4 << 20
    )
    return InferenceEngine(options, parts=assemble(options, kinds=kinds))


def _names(config: Mapping[str, Any]) -> set[str]:
    """Return the names of all fields that a message may name."""
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    return {*config, *_USUAL, *_ROPE, *(name for one in inner for name in (*one, *_names(one)))}
