"""GGUF files as models: metadata → `ModelConfig`, and weights under Hugging Face names, dequantised in bounded pieces.

Sources: ggml-org/ggml, docs/gguf.md, for key names; ggml-org/llama.cpp, src/models/*.cpp, for defaults of missing keys
and for facts without a key (Gemma's window pattern, SmolLM3's layers without rotary embedding). Undoes two changes of
llama.cpp's converter: it permutes the rows of Llama's q and k (ggml rotates adjacent dimensions, Hugging Face halves),
and adds 1 to the norms of Gemma and Qwen3.5. Qwen3.5's value heads are moved to Hugging Face's order, unless a block
holds columns of several heads (`GatedDelta.is_tiled`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from nano_inference.loading.fields import Fields, shown
from nano_inference.loading.gguf_file import PLAIN, GgufFile
from nano_inference.loading.gguf_hybrid import (
    HYBRID_PARTS,
    hybrid_fields,
    hybrid_number,
    hybrid_source,
    layer_of,
)
from nano_inference.loading.hf_config import MAX_LAYERS
from nano_inference.loading.hf_rope import stretched
from nano_inference.loading.packed import Exchanged, PackedTensor
from nano_inference.loading.pieces import FileRange
from nano_inference.loading.sources import WeightSource
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig
from nano_inference.models.qwen35 import DeltaTerms
from nano_inference.text.gguf_vocab import end_ids
from nano_inference.types import ModelError

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_MAX_ROPE_FACTORS = 4096
_LARGEST_LAYERS: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest Gemma models, whose factor of q·k is 1 / sqrt(hidden / heads) without a key."""

_TOP: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OWN_PARTS: Mapping[str, Mapping[str, str]] = {
    "dense": {"ffn_norm": "post_attention_layernorm"},
    "gemma": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "qwen35": HYBRID_PARTS,
}
_DERIVED = ("rope_freqs.weight", "rope_freqs", "attn_rot_embd", "rotary_emb.inv_freq")
"""Rotary frequencies: `gguf_config` reads those that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """Properties of an architecture that its files do not state."""

    name: str  # Hugging Face's name of the architecture
    family: str = "dense"
    qk_norm: bool = False
    permuted: bool = False  # True if the rows of q and k are stored in the order of ggml's rotation
    window_period: int = 0  # n: all layers but every nth have the sliding window. 1: all layers. 0: none.
    window: int | None = None  # default of `attention.sliding_window`
    local_theta: float | None = None  # default rotary base of the windowed layers, whose frequencies are never scaled
    unrotated_period: int = 0  # n: every nth layer has no rotary embedding. 0: all layers have one.


RULES: Mapping[str, _Rules] = {
    "llama": _Rules(name="LlamaForCausalLM", permuted=True, window_period=1),
    "qwen2": _Rules(name="Qwen2ForCausalLM"),
    "qwen3": _Rules(name="Qwen3ForCausalLM", qk_norm=True),
    "smollm3": _Rules(name="SmolLM3ForCausalLM", permuted=True, unrotated_period=4),
    "gemma2": _Rules(name="Gemma2ForCausalLM", family="gemma", window_period=2, window=4096),
    "gemma3": _Rules(name="Gemma3ForCausalLM", family="gemma", qk_norm=True, window_period=6, local_theta=10000.0),
    "qwen35": _Rules(name="Qwen3_5ForCausalLM", family="qwen35", qk_norm=True),
}


def architecture_of(file: GgufFile) -> str:
    """Return `general.architecture`. Raises `ModelError` if it is unknown or a mixture of experts."""
    fields = Fields(str(file.path), file.metadata)
    name = fields.text("general.architecture", "")
    if name not in RULES:
        raise ModelError(f"{file.path}: unknown architecture {shown(name)}; known: {', '.join(RULES)}")
    if fields.integer(f"{name}.expert_count", 0, low=0):
        raise ModelError(f"{file.path}: a mixture of experts ({name}.expert_count) is not supported")
    return name


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the configuration of a GGUF file. Raises `ModelError` naming the invalid key."""
    architecture = architecture_of(file)
    rules = RULES[architecture]
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = Fields(f"{file.path}: {architecture}", values)
    hidden, heads = fields.integer("embedding_length"), _uniform(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{fields.origin}: attention.value_length differs from key_length, which is not supported")
    vocab_size = _vocab_size(file, hidden)
    max_positions = fields.integer("context_length")
    is_largest = fields.integer("block_count") == _LARGEST_LAYERS.get(architecture)
    default_scale = 1 / math.sqrt(max(1, hidden // heads)) if is_largest else None
    try:
        ropes = _ropes(file, fields, rules, head_dim, max_positions)
        return ModelConfig(
            architecture=rules.name,
            family=rules.family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_uniform(fields, "feed_forward_length"),
            num_heads=heads,
            num_kv_heads=_uniform(fields, "attention.head_count_kv", heads),
            head_dim=head_dim,
            layers=_layers(file, fields, rules, len(ropes)),
            ropes=ropes,
            max_positions=stretched(max_positions, ropes),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
            activation="gelu_tanh" if rules.family == "gemma" else "silu",
            tie_embeddings=HEAD not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            out_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm=rules.qk_norm,
            attention_scale=fields.optional_number("attention.scale", high=1e6) or default_scale,
            attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0 if architecture == "gemma2" else None),
            logits_softcap=_softcap(fields, "final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
            embedding_scale=math.sqrt(hidden) if rules.family == "gemma" else None,
            eos_token_ids=_eos_ids(file, vocab_size),
            bos_token_id=_token(file, "bos", vocab_size),
            **(hybrid_fields(file, fields, vocab_size) if rules.family == "qwen35" else {}),
        )
    except ValueError as error:
        raise error if isinstance(error, ModelError) else ModelError(f"{file.path}: {error}") from error


def _uniform(fields: Fields, name: str, default: int | None = None) -> int:
    """Return an integer that is given once, or as a list of equal values, one per layer."""
    listed = fields.get(name)
    if not isinstance(listed, tuple):
        return fields.integer(name, default)
    if not listed or any(value != listed[0] for value in listed):
        raise ModelError(f"{fields.origin}: {name} differs from layer to layer, which is not supported")
    return Fields(fields.origin, {name: listed[0]}).integer(name)


def _vocab_size(file: GgufFile, hidden: int) -> int:
    """Return the embedding's number of rows: converters drop rows that no token uses."""
    tensor = file.tensors.get(EMBEDDING)
    if tensor is None:
        raise ModelError(f"{file.path}: has no tensor {EMBEDDING}")
    if len(tensor.shape) != 2 or tensor.shape[1] != hidden:
        raise ModelError(f"{file.path}: {EMBEDDING} has the shape {tensor.shape}, embedding_length is {hidden}")
    return tensor.shape[0]


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    found = fields.optional_number(name, low=-1.0, high=1e6)
    return default if found is None else found or None


def _layers(file: GgufFile, fields: Fields, rules: _Rules, num_ropes: int) -> tuple[LayerConfig, ...]:
    num_layers = fields.integer("block_count", high=MAX_LAYERS) - fields.integer("nextn_predict_layers", 0, low=0)
    if rules.family == "qwen35":
        attends = [f"blk.{i}.attn_q.weight" in file.tensors for i in range(num_layers)]
        return tuple(LayerConfig() if one else LayerConfig(attends=False, rope=None) for one in attends)
    window = fields.integer("attention.sliding_window", rules.window or 0, low=0) if rules.window_period else 0
    name = "attention.sliding_window_pattern"  # a period, or a flag for each layer
    slides: Sequence[bool] = (False,) * num_layers
    if window and isinstance(pattern := fields.get(name), tuple):
        if len(pattern) != num_layers or any(flag not in (0, 1) for flag in pattern):
            raise fields.bad(name, f"a period or {num_layers} flags")
        slides = [bool(flag) for flag in pattern]
    elif window:
        period = fields.integer(name, rules.window_period)
        slides = [rules.window_period == 1 or (i + 1) % period != 0 for i in range(num_layers)]
    return tuple(
        LayerConfig(
            window=window if slides[i] else None,
            rope=None if (i + 1) % (rules.unrotated_period or num_layers + 1) == 0 else (num_ropes - 1) * slides[i],
        )
        for i in range(num_layers)
    )


def _ropes(file: GgufFile, fields: Fields, rules: _Rules, head_dim: int, max_positions: int) -> tuple[RopeConfig, ...]:
    """Return the rotary embedding, and Gemma 3's second one for its windowed layers."""
    dimensions = fields.integer("rope.dimension_count", head_dim)
    if dimensions > head_dim:
        raise fields.bad("rope.dimension_count", f"at most the head size, {head_dim}")
    theta = fields.number("rope.freq_base", 10000.0)
    main = _rope(fields, theta, dimensions, max_positions)
    if ROPE_FACTORS in file.tensors:
        main = _with_factors(file, main)
    if rules.local_theta is None:
        return (main,)
    local_theta = fields.number("rope.freq_base_swa", rules.local_theta)
    local = RopeConfig(theta=local_theta, rotary_dim=dimensions, max_positions=max_positions)
    return (main,) if local == main else (main, local)


def _rope(fields: Fields, theta: float, dimensions: int, max_positions: int) -> RopeConfig:
    """Return the rotary embedding described by the `rope.*` keys."""
    kind = fields.text("rope.scaling.type", "linear" if fields.get("rope.scale_linear") is not None else "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0, high=1e6), high=1e6)
    config = partial(RopeConfig, theta=theta, rotary_dim=dimensions, max_positions=max_positions)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return config()
    if kind == "linear":
        return config(kind="linear", factor=factor)
    if kind != "yarn":
        raise ModelError(f"{fields.origin}: rope.scaling.type {shown(kind)} is not supported; known: linear, yarn")
    if theta <= 1:
        raise ModelError(f"{fields.origin}: yarn needs a rope.freq_base above 1, got {theta:g}")
    # ggml multiplies the file's factor by YaRN's. None: YaRN's only.
    given = fields.optional_number("rope.scaling.attn_factor", high=1e6)
    return config(
        kind="yarn",
        factor=factor,
        original_max_positions=fields.integer("rope.scaling.original_context_length", max_positions),
        attention_factor=None if given is None else given * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, high=1e6),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, high=1e6),
    )


def _with_factors(file: GgufFile, rope: RopeConfig) -> RopeConfig:
    """Return `rope` with a divisor per frequency from `rope_freqs.weight` (Llama 3)."""
    tensor = file.tensors[ROPE_FACTORS]
    if rope.kind not in ("default", "linear"):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} together with rope.scaling.type {rope.kind} is not supported")
    if tensor.type_name != "F32" or tensor.shape != (rope.rotary_dim // 2,) or tensor.shape[0] > _MAX_ROPE_FACTORS:
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} must be F32 ({rope.rotary_dim // 2},), got {tensor.type_name} {tensor.shape}"
        )
    values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    FileRange(file.path, tensor.offset, tensor.shape, "float32").read_into(values)
    factors: list[float] = values.tolist()
    if not all(1e-6 < factor < 1e6 for factor in factors):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} holds a factor outside (1e-6, 1e6)")
    return replace(rope, kind="factors", factors=tuple(factor * rope.factor for factor in factors), factor=1.0)


def _token(file: GgufFile, which: str, vocab_size: int) -> int | None:
    token = Fields(str(file.path), file.metadata).optional_integer(
        f"tokenizer.ggml.{which}_token_id", low=0, high=2**32
    )
    return token if token is not None and token < vocab_size else None


def _eos_ids(file: GgufFile, vocab_size: int) -> tuple[int, ...]:
    for which in ("eos", "eot", "eom"):
        _token(file, which, vocab_size)  # raises for a damaged one
    return tuple(sorted(token for token in end_ids(file.metadata) if token < vocab_size))


def gguf_sources(file: GgufFile, config: ModelConfig) -> dict[str, WeightSource]:
    """Return the source of every weight by Hugging Face name, in file order.

    Raises `ModelError` for a tensor that the architecture does not have, or whose type cannot be unpacked.
    """
    from nano_inference.loading.ggml import can_dequantize

    architecture = architecture_of(file)
    for type_name in sorted({tensor.type_name for tensor in file.tensors.values()} - PLAIN.keys()):
        if not can_dequantize(type_name):
            raise ModelError(f"{file.path}: tensors of type {type_name} cannot be unpacked")
    drafting = range(config.num_layers, int(file.metadata[f"{architecture}.block_count"]))
    sources: dict[str, WeightSource] = {}
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        part = tensor.name.split(".")[-2:][0]
        if tensor.name in _DERIVED or part in _DERIVED:
            continue
        name = hf_name(tensor.name, RULES[architecture].family)
        if layer_of(tensor.name) in drafting:
            sources[f"mtp.{tensor.name}"] = PackedTensor(file.path, tensor)  # of a block that drafts tokens
            continue
        if name is None:
            raise ModelError(f"{file.path}: tensor {shown(tensor.name)} is not known in architecture {architecture}")
        rules = RULES[architecture]
        head_rows = config.head_dim if rules.permuted and part in ("attn_q", "attn_k") else 0
        order = Exchanged((-1, head_rows // 2, 2, 1)) if head_rows else None
        is_shifted = rules.family != "dense" and name.endswith("norm.weight")
        shift = -1.0 if is_shifted and not name.endswith("linear_attn.norm.weight") else 0.0
        if head_rows % 2 or (head_rows and tensor.shape[0] % head_rows):
            rows = f"{tensor.shape[0]} rows, not whole heads of {head_rows}"
            raise ModelError(f"{file.path}: tensor {shown(tensor.name)} has {rows}")
        if isinstance(config.terms, DeltaTerms) and ".linear_attn." in name:
            sources[name] = hybrid_source(file, tensor, name, config.terms)
        elif head_rows or shift or tensor.type_name not in PLAIN:
            sources[name] = PackedTensor(file.path, tensor, order, shift=shift)
        else:
            sources[name] = FileRange(file.path, tensor.offset, tensor.shape, PLAIN[tensor.type_name])
    return sources


def hf_name(name: str, family: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None."""
    if family == "qwen35" and (number := hybrid_number(name)) is not None:
        return number
    *where, part, kind = name.split(".") if "." in name else ("", name)
    if kind not in ("weight", "bias"):
        return None
    if not where and part in _TOP:
        return f"{_TOP[part]}.{kind}"
    if len(where) != 2 or where[0] != "blk" or not (where[1].isascii() and where[1].isdigit()):
        return None
    found = _LAYER.get(part) or _OWN_PARTS[family].get(part)
    return None if found is None else f"model.layers.{where[1]}.{found}.{kind}"
