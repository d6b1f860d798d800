"""Qwen3.5 and Qwen3-Next (text, without experts): layers of the gated delta rule between layers of gated attention.

Source: arXiv 2412.06464, and Transformers' modeling_qwen3_5.py and modeling_qwen3_next.py for the details.
"""

from __future__ import annotations

from dataclasses import dataclass

from nano_inference.models import ops
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Add, Op, WeightSpec
from nano_inference.models.parts import attention, decoder, gated_mlp, keep, linear, norm
from nano_inference.models.program import Program
from nano_inference.types import ModelError

_OFFSET = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTerms:
    """Sizes of the layers that do not attend. Raises `ValueError` if they do not fit."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # of the convolution: the token's own and those before it
    is_grouped: bool = False  # projections in one matrix, grouped by key head (Qwen3-Next)
    is_tiled: bool = False  # value heads in llama.cpp's order: see `GatedDelta`

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.num_v_heads}) must be a multiple of linear_num_key_heads "
                f"({self.num_k_heads})"
            )


def program(config: ModelConfig) -> Program:
    """Return layers of x += mixer(norm(x)); x += mlp(norm(x))."""
    terms = config.terms
    if not isinstance(terms, DeltaTerms):
        raise ModelError(f"{config.architecture}: the sizes of its linear layers are unknown")
    layers: list[Op] = []
    for index, layer in enumerate(config.layers):
        at = f"model.layers.{index}"
        layers += [
            norm(config, f"{at}.input_layernorm", "x", "n", _OFFSET),
            *(
                attention(config, index, "n", "n", _OFFSET, gated=True)
                if layer.attends
                else _delta(config, terms, index)
            ),
            Add(x="x", y="n", out="x"),
            norm(config, f"{at}.post_attention_layernorm", "x", "n", _OFFSET),
            *gated_mlp(config, at, "n", "n"),
            Add(x="x", y="n", out="x"),
        ]
    return decoder(config, layers, norm(config, "model.norm", "x", "h", _OFFSET))


def _delta(config: ModelConfig, terms: DeltaTerms, index: int) -> list[Op]:
    """Return a layer of the gated delta rule with its projections: short convolution, rule, gated norm."""
    at, state = f"model.layers.{index}.linear_attn", 2 * sum(not layer.attends for layer in config.layers[:index])
    keys, heads = terms.num_k_heads * terms.k_dim, terms.num_v_heads
    values = heads * terms.v_dim
    projected, mixed = _grouped(config, terms, at) if terms.is_grouped else _separate(config, terms, at)
    return [
        *projected,
        ops.Convolve(
            x=mixed,
            out=("q", "k", "v"),
            widths=(keys, keys, values),
            weight=WeightSpec(f"{at}.conv1d.weight", (2 * keys + values, 1, terms.taps), "vector"),
            state=state,
        ),
        ops.GatedDelta(
            q="q",
            k="k",
            v="v",
            a="a",
            b="b",
            out="y",
            a_log=WeightSpec(f"{at}.A_log", (heads,), "number"),
            dt_bias=WeightSpec(f"{at}.dt_bias", (heads,), "number"),
            num_k_heads=terms.num_k_heads,
            num_v_heads=heads,
            k_dim=terms.k_dim,
            v_dim=terms.v_dim,
            state=state + 1,
            is_tiled=terms.is_tiled,
        ),
        *keep(config, index),
        ops.GatedNorm(
            x="y",
            gate="z",
            out="y",
            weight=WeightSpec(f"{at}.norm.weight", (terms.v_dim,), "vector"),
            eps=config.norm_eps,
            head_dim=terms.v_dim,
        ),
        linear("y", values, [("n", f"{at}.out_proj", config.hidden_size)]),
    ]


def _separate(config: ModelConfig, terms: DeltaTerms, at: str) -> tuple[list[Op], tuple[str, ...]]:
    """Return the projections to z, a, b and the convolution's input, and the buffers of that."""
    keys, values, heads = terms.num_k_heads * terms.k_dim, terms.num_v_heads * terms.v_dim, terms.num_v_heads
    sizes = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    rows = [(name, f"{at}.in_proj_{name}", size) for name, size in sizes.items()]
    return [linear("n", config.hidden_size, rows)], ("qkv",)


def _grouped(config: ModelConfig, terms: DeltaTerms, at: str) -> tuple[list[Op], tuple[str, ...]]:
    each = terms.num_v_heads // terms.num_k_heads
    values = each * terms.v_dim
    widths = (terms.k_dim, terms.k_dim, values, values)
    return [
        linear("n", config.hidden_size, [("qkvz", f"{at}.in_proj_qkvz", terms.num_k_heads * sum(widths))]),
        ops.Unzip(x="qkvz", out=("q", "k", "v", "z"), widths=widths),
        linear("n", config.hidden_size, [("ba", f"{at}.in_proj_ba", 2 * terms.num_v_heads)]),
        ops.Unzip(x="ba", out=("b", "a"), widths=(each, each)),
    ], ("q", "k", "v")
