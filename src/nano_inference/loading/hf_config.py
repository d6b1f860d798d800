"""Converts Hugging Face `config.json` (and `generation_config.json`) to `ModelConfig`, without transformers or torch.

Names and defaults are those of transformers 5 (`configuration_*.py`, `modeling_rope_utils.py`). Rotary parameters may
be `rope_theta` with `rope_scaling`, or `rope_parameters`, flat or with one object per layer type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nano_inference.loading.fields import Fields, shown
from nano_inference.loading.hf_rope import filled, rope_of, stretched
from nano_inference.loading.wrappers import WRAPPERS, media_tokens, text_fields, wrapper_of
from nano_inference.models.config import Activation, LayerConfig, ModelConfig, RopeConfig
from nano_inference.models.names import PLAIN_NAMES, TEXT_NAMES
from nano_inference.models.qwen35 import DeltaTerms
from nano_inference.types import ModelError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MAX_LAYERS = 10_000
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MIXTURE_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """Properties of an architecture, and defaults of fields that the file omits."""

    model_type: str  # the name in the field `model_type`
    family: str = "dense"
    delta: Literal["none", "separate", "grouped"] = "none"
    """Layers of the gated delta rule; their projections are several matrices, or one that is grouped by key head."""
    rotated: float = 1.0  # the share of a head's dimensions that is rotated, by default
    windows: Literal["none", "all", "upper", "unrotated", "pattern"] = "none"
    """Layers with a sliding window if there is no `layer_types`: none; all; those from `max_window_layers` on; those
    without rotary embedding; all but every nth."""
    window_period: int | None = 2  # None: the field `sliding_window_pattern`, by default 6
    window: int | None = None
    theta: float = 10000.0
    rope: Mapping[str, Any] | None = None  # the rotary parameters of a file without any
    vocab_size: int | None = None  # None: the field is required, as the next one
    heads: int | None = None
    kv_heads: int | None = None  # None: the number of heads
    head_dim: int | None = None  # None: hidden_size / heads
    max_positions: int = 32768
    eps: float = 1e-6
    tied: bool = False
    bos: int | None = None
    eos: int | None = None
    bias: Literal["none", "qkv", "field"] = "field"
    mlp_bias: bool = False  # True if the `mlp_bias` field is read
    qk_norm: bool = False
    softcaps: tuple[tuple[str, float | None], ...] = ()  # fields of soft caps with their defaults


_GEMMA_2 = _Rules(
    model_type="gemma2",
    family="gemma",
    windows="pattern",
    window_period=2,
    window=4096,
    kv_heads=4,
    head_dim=256,
    max_positions=8192,
    tied=True,
    bos=2,
    eos=1,
    softcaps=(("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)),
)
_GEMMA_3 = replace(
    _GEMMA_2,
    model_type="gemma3_text",
    vocab_size=262208,
    heads=8,
    window_period=None,
    theta=1e6,
    max_positions=131072,
    qk_norm=True,
    softcaps=(("final_logit_softcapping", None),),
)
_QWEN_3_5 = _Rules(
    model_type="qwen3_5_text", family="qwen35", delta="separate", rotated=0.25, kv_heads=4, head_dim=256, qk_norm=True
)
_RULES: Mapping[str, _Rules] = {
    "LlamaForCausalLM": _Rules(model_type="llama", max_positions=2048, bos=1, eos=2, mlp_bias=True),
    "MistralForCausalLM": _Rules(
        model_type="mistral", windows="all", window=4096, kv_heads=8, max_positions=131072, bos=1, eos=2, bias="none"
    ),
    "Ministral3ForCausalLM": _Rules(
        model_type="ministral3",
        windows="all",
        theta=1e6,
        rope={"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        heads=32,
        kv_heads=8,
        head_dim=128,
        max_positions=262144,
        eps=1e-5,
        bos=1,
        eos=2,
        bias="none",
    ),
    "Qwen2ForCausalLM": _Rules(model_type="qwen2", windows="upper", window=4096, kv_heads=32, bias="qkv"),
    "Qwen3ForCausalLM": _Rules(
        model_type="qwen3", windows="upper", window=4096, kv_heads=32, head_dim=128, qk_norm=True
    ),
    "SmolLM3ForCausalLM": _Rules(
        model_type="smollm3",
        windows="unrotated",
        theta=2e6,
        kv_heads=4,
        tied=True,
        bos=128000,
        eos=128001,
        mlp_bias=True,
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3NextForCausalLM": replace(_QWEN_3_5, model_type="qwen3_next", delta="grouped", kv_heads=2),
}


def known_architectures() -> dict[str, tuple[str, str]]:
    """Return the `model_type` and the family of each architecture that is no wrapper of another."""
    return {name: (rules.model_type, rules.family) for name, rules in _RULES.items()}


def model_config(config: Fields, generation: Fields | None = None) -> ModelConfig:
    """Return the configuration of `config.json`, with additional end tokens of `generation_config.json`.

    Of a multimodal model, it is that of the text part. Raises `ModelError` naming an invalid field or an unsupported
    feature.
    """
    name = wrapper_of(config)
    if name is not None:
        _refuse_quantized(config)
        found = model_config(text_fields(config, WRAPPERS[name]), generation)
        media = media_tokens(config, WRAPPERS[name], found.vocab_size)
        shown_name = f"{found.architecture}, text part of {name}"
        return replace(found, architecture=shown_name, names=TEXT_NAMES, media_token_ids=media)
    architecture = _architecture(config)
    rules = _RULES[architecture]
    heads = config.integer("num_attention_heads", rules.heads)
    hidden = config.integer("hidden_size")
    # The default is one kv head per query head for an explicit null, otherwise the family's.
    default = heads if rules.kv_heads is None or "num_key_value_heads" in config.values else rules.kv_heads
    kv_heads = config.integer("num_key_value_heads", default)
    if heads % kv_heads:
        raise ModelError(f"{config.origin}: num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")
    if not (rules.head_dim or hidden // heads):
        raise ModelError(f"{config.origin}: hidden_size ({hidden}) is less than num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", rules.head_dim or hidden // heads)
    layer_types, rotated = _layers(config, rules)
    if FULL not in layer_types and LINEAR in layer_types:
        raise ModelError(f"{config.origin}: a model without {FULL} layers is not supported")
    ropes = _ropes(config, rules, architecture, head_dim, sorted({*layer_types} - {LINEAR}))
    window, distinct = _window(config, rules), list(dict.fromkeys(ropes.values()))  # equal ones share one index
    if window is None and SLIDING in layer_types:
        raise ModelError(f"{config.origin}: layer_types names {SLIDING}, but there is no sliding_window")
    vocab_size = config.integer("vocab_size", rules.vocab_size)
    eos_token_ids, bos_token_id = _end_and_start(config, generation, rules, vocab_size)
    is_gemma = rules.family == "gemma"
    activation = _activation(config, rules)
    try:
        return ModelConfig(
            architecture=architecture,
            family=rules.family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layers=tuple(
                LayerConfig(attends=False, rope=None)
                if kind == LINEAR
                else LayerConfig(
                    window=window if kind == SLIDING else None, rope=distinct.index(ropes[kind]) if rotates else None
                )
                for kind, rotates in zip(layer_types, rotated, strict=True)
            ),
            ropes=tuple(distinct),
            max_positions=_longest(config, rules, distinct),
            norm_eps=config.number("rms_norm_eps", rules.eps, high=1.0),
            activation=activation,
            tie_embeddings=config.flag("tie_word_embeddings", rules.tied),
            qkv_bias=rules.bias == "qkv" or (rules.bias == "field" and config.flag("attention_bias", False)),
            out_bias=rules.bias == "field" and config.flag("attention_bias", False),
            mlp_bias=rules.mlp_bias and config.flag("mlp_bias", False),
            qk_norm=rules.qk_norm,
            attention_scale=config.number("query_pre_attn_scalar", 256.0, high=1e9) ** -0.5 if is_gemma else None,
            attention_softcap=_softcap(config, rules, "attn_logit_softcapping"),
            logits_softcap=_softcap(config, rules, "final_logit_softcapping"),
            embedding_scale=math.sqrt(hidden) if is_gemma else None,
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
            names=PLAIN_NAMES if rules.delta == "none" else TEXT_NAMES,
            terms=None if rules.delta == "none" else _delta_terms(config, rules, activation),
        )
    except ValueError as error:
        raise error if isinstance(error, ModelError) else ModelError(f"{config.origin}: {error}") from error


def _architecture(config: Fields) -> str:
    """Return the architecture's name. Raises `ModelError` listing the known ones, and for unsupported settings."""
    names = config.sequence("architectures") or ()
    model_type = config.text("model_type", "")
    by_type = {rules.model_type: architecture for architecture, rules in _RULES.items()}
    name = names[0] if names else by_type.get(model_type, model_type)
    if not isinstance(name, str):
        raise config.bad("architectures", "a list of names")
    if name in _RULES:
        _refuse_quantized(config)
    if name in _RULES and config.flag("use_bidirectional_attention", False):
        raise ModelError(f"{config.origin}: use_bidirectional_attention is not supported")
    if name in _RULES and not _has_experts(config, _RULES[name]):
        return name
    if name in _RULES or "Moe" in name or any(config.get(field) is not None for field in _MIXTURE_FIELDS):
        raise ModelError(f"{config.origin}: {shown(name)} is a mixture of experts, which is not supported")
    if "ConditionalGeneration" in name or config.get("vision_config") is not None:
        raise ModelError(f"{config.origin}: {shown(name)} is a multimodal model, which is not supported")
    raise ModelError(f"{config.origin}: unknown architecture {shown(name)}; known: {', '.join(_RULES)}")


def _has_experts(config: Fields, rules: _Rules) -> bool:
    """Return whether a Qwen3-Next has layers of experts; the other known architectures have none."""
    if rules.model_type != "qwen3_next" or config.integer("num_experts", 512, low=0) == 0:
        return False
    step, plain = config.integer("decoder_sparse_step", 1), config.sequence("mlp_only_layers") or ()
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return any(i not in plain and (i + 1) % step == 0 for i in range(num_layers))


def _delta_terms(config: Fields, rules: _Rules, activation: Activation) -> DeltaTerms:
    """Return the sizes of the layers of the gated delta rule."""
    if activation != "silu":
        raise ModelError(f"{config.origin}: hidden_act must be silu in a model with linear attention")
    if not config.flag("attn_output_gate", True):
        raise ModelError(f"{config.origin}: attn_output_gate false is not supported")
    if config.text("output_gate_type", "swish") not in ("swish", "silu"):
        raise ModelError(f"{config.origin}: output_gate_type {shown(config.get('output_gate_type'))} is not supported")
    return DeltaTerms(
        num_k_heads=config.integer("linear_num_key_heads", 16),
        num_v_heads=config.integer("linear_num_value_heads", 32),
        k_dim=config.integer("linear_key_head_dim", 128),
        v_dim=config.integer("linear_value_head_dim", 128),
        taps=config.integer("linear_conv_kernel_dim", 4, low=2),
        is_grouped=rules.delta == "grouped",
    )


def _refuse_quantized(config: Fields) -> None:
    for field in ("quantization_config", "compression_config"):  # would otherwise be ignored
        if config.get(field) is not None:
            method = shown(config.within(field).text("quant_method", "unnamed"))
            raise ModelError(f"{config.origin}: {field} ({method}) is not supported; use plain weights or a GGUF")


def _activation(config: Fields, rules: _Rules) -> Activation:
    field, default = ("hidden_activation", "gelu_pytorch_tanh") if rules.family == "gemma" else ("hidden_act", "silu")
    name = config.text(field, default)
    if name not in _ACTIVATIONS:
        raise ModelError(f"{config.origin}: {field} {shown(name)} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _softcap(config: Fields, rules: _Rules, name: str) -> float | None:
    defaults = dict(rules.softcaps)
    is_given = name in defaults and name in config.values
    return config.optional_number(name, high=1e6) if is_given else defaults.get(name)


def _layers(config: Fields, rules: _Rules) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Return each layer's type, and whether it has a rotary embedding."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    rotated = (True,) * num_layers
    if rules.windows == "unrotated":  # SmolLM3: 1 in `no_rope_layers`; by default not every fourth
        flags = config.sequence("no_rope_layers")
        interval = config.integer("no_rope_layer_interval", 4) if flags is None else 0
        flags = [int((i + 1) % interval != 0) for i in range(num_layers)] if flags is None else flags
        if len(flags) < num_layers:
            raise ModelError(f"{config.origin}: no_rope_layers has {len(flags)} entries for {num_layers} layers")
        for flag in flags:
            if type(flag) is not int or flag not in (0, 1):
                raise ModelError(f"{config.origin}: no_rope_layers must hold 0 and 1, got {shown(flag)}")
        rotated = tuple(flag == 1 for flag in flags[:num_layers])
    known = (FULL, SLIDING) if rules.delta == "none" else (FULL, LINEAR)
    is_read = rules.windows in ("upper", "unrotated", "pattern") or LINEAR in known
    explicit = config.sequence("layer_types") if is_read else None
    if explicit is None:
        return tuple(_default_types(config, rules, rotated)), rotated
    if len(explicit) != num_layers:
        raise ModelError(f"{config.origin}: layer_types has {len(explicit)} entries for {num_layers} layers")
    explicit = [FULL if kind == "attention" else kind for kind in explicit]  # an older name
    for kind in explicit:
        if kind not in known:
            raise ModelError(f"{config.origin}: layer_types holds {shown(kind)}; known: {', '.join(known)}")
    return tuple(explicit), rotated


def _default_types(config: Fields, rules: _Rules, rotated: tuple[bool, ...]) -> Iterable[str]:
    """Yield each layer's type for a file without `layer_types`."""
    if rules.delta != "none":
        interval = config.integer("full_attention_interval", 4)
        yield from (LINEAR if (i + 1) % interval else FULL for i in range(len(rotated)))
        return
    first_window = config.integer("max_window_layers", 28, low=0)
    period = rules.window_period or config.integer("sliding_window_pattern", 6)
    has_window = _window(config, rules) is not None
    for i, is_rotated in enumerate(rotated):
        slides = {
            "none": False,
            "all": True,
            "upper": i >= first_window,
            "unrotated": not is_rotated and config.flag("use_sliding_window", False),
            "pattern": (i + 1) % period != 0,
        }[rules.windows]
        # Gemma's types also select the rotary embedding, so they are needed even without a window.
        yield SLIDING if slides and (has_window or rules.windows == "pattern") else FULL


def _window(config: Fields, rules: _Rules) -> int | None:
    """Return the window size of sliding layers: visible keys, the query's own included."""
    if rules.windows == "none" or (rules.windows == "upper" and not config.flag("use_sliding_window", False)):
        return None
    if "sliding_window" not in config.values:
        return rules.window
    return config.optional_integer("sliding_window")


def _ropes(
    config: Fields, rules: _Rules, architecture: str, head_dim: int, kinds: Iterable[str]
) -> dict[str, RopeConfig]:
    """Return the rotary embedding of each layer type."""
    out: dict[str, RopeConfig] = {}
    for kind in kinds:
        if rules.model_type == "gemma3_text":
            fields = _gemma_3_rope(config, rules, kind)
        else:  # `rope_scaling` takes precedence over `rope_parameters`
            fields = config.within("rope_scaling" if config.mapping("rope_scaling") else "rope_parameters")
            if FULL in fields.values or SLIDING in fields.values:
                raise ModelError(f"{fields.origin} must not differ between layer types")
            outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
            found = filled(
                fields.values or rules.rope or {}, {**outer, "rope_theta": outer["rope_theta"] or rules.theta}
            )
            # The original length of a context extension may be outside the rotary parameters.
            length = config.get("original_max_position_embeddings")
            found |= {} if length is None else {"original_max_position_embeddings": length}
            fields = Fields(fields.origin, found)
        try:
            positions = config.integer("max_position_embeddings", rules.max_positions)
            rotary_dim = head_dim
            if rules.rotated < 1:  # the other families ignore the field, unless the embedding is scaled
                rotary_dim = int(head_dim * fields.number("partial_rotary_factor", rules.rotated, high=1.0))
                fields = Fields(fields.origin, {**fields.values, "partial_rotary_factor": 1.0})
            out[kind] = rope_of(fields, positions, rotary_dim)
        except ValueError as error:
            raise error if isinstance(error, ModelError) else ModelError(f"{fields.origin}: {error}") from error
    return out


def _gemma_3_rope(config: Fields, rules: _Rules, kind: str) -> Fields:
    """Return one layer type's rotary parameters for Gemma 3: only full layers are scaled; sliding ones have a base."""
    given, scaling = config.within("rope_parameters"), config.within("rope_scaling")
    if given.values and not any(key in (FULL, SLIDING) for key in given.values):
        raise ModelError(f"{given.origin} must have {FULL} and {SLIDING}")
    found = dict(given.mapping(kind))
    # Transformers does not read these two forms, other programs do.
    if False in (found.get("truncate"), given.get("truncate"), scaling.get("truncate")):
        raise ModelError(f"{given.origin}: truncate is not supported")
    if scaling.get("rope_type") is None and scaling.text("type", "default") != "default":
        raise ModelError(f"{scaling.origin}: rope_type is missing")
    if kind == SLIDING:
        return Fields(given.origin, filled(found, {"rope_theta": config.number("rope_local_base_freq", 10000.0)}))
    found.update(scaling.values)
    return Fields(given.origin, filled(found, {"rope_theta": config.number("rope_theta", rules.theta)}))


def _longest(config: Fields, rules: _Rules, ropes: Iterable[RopeConfig]) -> int:
    """Return the longest supported sequence. Ministral 3 multiplies queries by more than 1 from the original length."""
    longest = stretched(config.integer("max_position_embeddings", rules.max_positions), ropes)
    if rules.model_type != "ministral3":
        return longest
    return min(longest, *(rope.original_max_positions for rope in ropes))


def _end_and_start(
    config: Fields, generation: Fields | None, rules: _Rules, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    """Return the end tokens of both files, the family's default if neither has any, and the start token."""
    found: list[int] = []
    for fields in (config, generation):
        value = fields.get("eos_token_id") if fields is not None else None
        ids = list(value) if isinstance(value, list | tuple) else [value] if value is not None else []
        if fields is not None and any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
            raise fields.bad("eos_token_id", "a token id or a list of them")
        found += ids
    if not found and rules.eos is not None and "eos_token_id" not in config.values:
        found = [rules.eos]
    # Small test models made from a large model's defaults may have ids outside their vocabulary.
    ends = tuple(sorted({token for token in found if token < vocab_size}))
    start = config.optional_integer("bos_token_id", low=0) if "bos_token_id" in config.values else rules.bos
    if start is None and generation is not None:
        start = generation.optional_integer("bos_token_id", low=0)
    return ends, start if start is not None and start < vocab_size else None
