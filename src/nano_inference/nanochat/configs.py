"""Convert nanochat's configurations and those of Transformers' port to `ModelConfig` and back. No torch.

Sizes in `model_config` are compared with the shapes of the weights; a contradiction is an error.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nano_inference.loading.fields import Fields, read_json
from nano_inference.models.config import ROPE_DTYPES, LayerConfig, ModelConfig, RopeConfig
from nano_inference.nanochat.checkpoint import CONFIG_KEYS, Constants, NanochatTerms, Shapes, has_lambdas, terms_of
from nano_inference.support.files import is_present
from nano_inference.types import ModelError

HF_TYPE = "nanochat"  # `model_type` of Transformers' port, which implements G0 only
OWN_TYPE = "nanochat_"  # prefix of `model_type` in exported directories of any generation, such as nanochat_g4
HF_ROPE_DTYPE = "nanochat_rope_dtype"
"""Field of config.json with the precision of rotary tables; written by `models export`, ignored by Transformers."""
MAX_LAYERS = 10_000


def nanochat_config(origin: str, shapes: Shapes, config: Fields, constants: Constants) -> ModelConfig:
    """Return the configuration from the weights' shapes, `model_config` and the inferred constants.

    Without end tokens, which the tokenizer defines. Raises `ModelError` for sizes that contradict each other.
    """
    vocab_size, hidden = config.integer("vocab_size"), config.integer("n_embd")
    num_layers, num_heads = config.integer("n_layer", high=MAX_LAYERS), config.integer("n_head")
    num_kv_heads = config.integer("n_kv_head", num_heads)
    if hidden % num_heads:
        raise ModelError(f"{origin}: n_embd ({hidden}) must be a multiple of n_head ({num_heads})")
    head_dim = hidden // num_heads
    _check_shapes(origin, shapes, num_layers, vocab_size, hidden, num_kv_heads * head_dim)
    # The pattern is tiled over the layers; the last one has no window. N tokens before a query give N + 1 keys.
    pattern = constants.window_pattern or "L"
    kinds = [pattern[i % len(pattern)] for i in range(num_layers - 1)]
    windows = [constants.short_window + 1 if kind == "S" else None for kind in kinds]
    try:
        rope = RopeConfig(
            theta=constants.rope_base, rotary_dim=head_dim, reverse=True, table_dtype=constants.rope_dtype
        )
        return ModelConfig(
            architecture=f"nanochat {constants.generation}",
            family="nanochat",
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layers=tuple(LayerConfig(window=window) for window in (*windows, None)),
            ropes=(rope,),
            max_positions=constants.sequence_len,
            norm_eps=constants.norm_eps,
            logits_softcap=constants.softcap,
            terms=_terms(shapes, constants),
        )
    except ValueError as error:
        raise ModelError(f"{origin}: {error}") from None


def _check_shapes(origin: str, shapes: Shapes, num_layers: int, vocab_size: int, hidden: int, num_keys: int) -> None:
    """Compare shapes with `model_config`, before memory is allocated. Raises `ModelError`."""
    found = {int(match[1]) for name in shapes if (match := re.match(r"transformer\.h\.(\d{1,6})\.", name))}
    if found != set(range(num_layers)):
        raise ModelError(f"{origin}: n_layer is {num_layers}, but there are weights of {len(found)} layers")
    tables = {"transformer.wte.weight": None, "transformer.h.0.attn.c_k.weight": (num_keys, "n_kv_head and n_embd")}
    if "bigram_embed.embed.weight" in shapes:
        tables["bigram_embed.embed.weight"] = (5 * vocab_size, "vocab_size")
    for name, wanted in tables.items():
        shape = shapes.get(name)
        if shape is None:
            raise ModelError(f"{origin}: has no {name}")
        if len(shape) != 2:
            raise ModelError(f"{origin}: {name} must be a matrix, got the shape {shape}")
        if wanted is not None and shape[0] != wanted[0]:
            raise ModelError(f"{origin}: {name} must have {wanted[0]} rows by {wanted[1]}, the file has {shape[0]}")
        if wanted is None and shape[0] < vocab_size:
            raise ModelError(f"{origin}: vocab_size is {vocab_size}, but the embedding has {shape[0]} rows")
        if wanted is None and shape[1] != hidden:
            raise ModelError(f"{origin}: n_embd is {hidden}, but the embedding has {shape[1]} columns")


def _terms(shapes: Shapes, constants: Constants) -> NanochatTerms:
    """Determine the terms of the forward pass from the names and shapes of the weights."""
    gates = [shape[-1] for name, shape in shapes.items() if name.endswith(".ve_gate.weight")]
    return NanochatTerms(
        generation=constants.generation,
        padded_vocab_size=shapes["transformer.wte.weight"][0],
        qk_scale=constants.qk_scale,
        long_window=constants.sequence_len + 1 if constants.window_pattern else None,
        has_lambdas=has_lambdas(shapes),
        gate_columns=gates[0] if gates else 0,
        gate_scale=constants.gate_scale,
        smear_columns=shapes.get("smear_gate.weight", (0,))[-1],
        has_backout="backout_lambda" in shapes,
        bigram_rows=shapes.get("bigram_embed.embed.weight", (0,))[0],
        has_full_decode=constants.decode_window == "full",
    )


def model_config_of(config: ModelConfig) -> dict[str, Any]:
    """Return `model_config` as in nanochat's meta files."""
    kinds = "".join("L" if layer.window is None else "S" for layer in config.layers)
    values = (config.max_positions, config.vocab_size, config.num_layers, config.num_heads, config.num_kv_heads)
    out: dict[str, Any] = dict(zip(CONFIG_KEYS, (*values, config.hidden_size, kinds), strict=True))
    if isinstance(config.terms, NanochatTerms) and config.terms.long_window is None:
        del out["window_pattern"]
    return out


def own_config(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of an exported directory with nanochat's names: any generation, every constant.

    Transformers does not know its `model_type`; as "nanochat" it would load a later generation as G0.
    """
    terms, model_config = terms_of(config), model_config_of(config)
    windows = [layer.window for layer in config.layers if layer.window is not None]
    constants = Constants(
        generation=terms.generation,
        sequence_len=config.max_positions,
        rope_base=config.ropes[0].theta,
        qk_scale=terms.qk_scale,
        softcap=config.logits_softcap or 0.0,
        gate_scale=terms.gate_scale,
        window_pattern=model_config.get("window_pattern", ""),
        short_window=windows[0] - 1 if windows else 0,
        norm_eps=config.norm_eps,
        rope_dtype=config.ropes[0].table_dtype,
        decode_window="full" if terms.has_full_decode else "short",
    )
    return {
        "model_type": f"{OWN_TYPE}{terms.generation.lower()}",
        "architectures": [f"Nanochat{terms.generation}"],
        "model_config": model_config,
        "constants": asdict(constants),
    }


def is_exported(directory: Path) -> bool:
    """Return whether a directory is an exported nanochat model: for Transformers' port, or with nanochat's names."""
    path = directory / "config.json"
    if not is_present(path):
        return False
    kind = read_json(path).get("model_type")
    return isinstance(kind, str) and (kind == HF_TYPE or kind.startswith(OWN_TYPE))


def hf_nanochat_config(config: Fields, generation: Fields | None = None) -> ModelConfig:
    """Return the configuration in a `config.json` of Transformers' port: G0, with the port's default values.

    Raises `ModelError` naming the wrong field.
    """
    hidden, num_heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 6)
    head_dim = config.integer("head_dim", hidden // num_heads)
    activation = config.text("hidden_act", "relu2")
    if activation != "relu2" or config.flag("attention_bias", False) or config.flag("tie_word_embeddings", False):
        raise ModelError(f"{config.origin}: only relu2 without attention_bias or tie_word_embeddings is supported")
    parameters = config.within("rope_parameters")  # or the older rope_theta beside them
    kind = parameters.text("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise ModelError(f"{config.origin}: rope type {kind!r} is not supported for nanochat")
    table_dtype = config.text(HF_ROPE_DTYPE, "float32")
    if table_dtype not in ROPE_DTYPES:
        raise config.bad(HF_ROPE_DTYPE, f"one of {', '.join(ROPE_DTYPES)}")
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    vocab_size = config.integer("vocab_size", 50304)
    num_layers = config.integer("num_hidden_layers", 12, high=MAX_LAYERS)
    ends = [*_ids(config), *(_ids(generation) if generation else [])]
    try:
        return ModelConfig(
            architecture="NanoChatForCausalLM",
            family="nanochat",
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size", 8192),
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            layers=(LayerConfig(),) * num_layers,
            ropes=(RopeConfig(theta=theta, rotary_dim=head_dim, reverse=True, table_dtype=table_dtype),),
            max_positions=config.integer("max_position_embeddings", 2048),
            norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0),
            logits_softcap=config.number("final_logit_softcapping", 15.0),
            eos_token_ids=tuple(dict.fromkeys(token for token in ends if token < vocab_size)),
            bos_token_id=config.optional_integer("bos_token_id", low=0),
            terms=NanochatTerms(generation="G0", padded_vocab_size=vocab_size, has_hf_names=True),
        )
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{config.origin}: {error}") from None


def _ids(fields: Fields) -> list[int]:
    """Return `eos_token_id`, an id or a list, as a list."""
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if value is not None and any(type(token) is not int or token < 0 for token in ids):
        raise fields.bad("eos_token_id", "a token id or a list of them")
    return [] if value is None else ids
