"""The program of nanochat's decoder, generations G0 to G4; `NanochatTerms` selects its terms.

Terms that mix a token with the previous one (smear, hashed pairs) are functions of the previous id, which is part of
every step. No state is kept between steps, so chunks, prefix hits and preemption do not change results.
"""

from __future__ import annotations

from collections.abc import Mapping

from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import (
    Activate,
    Add,
    Copy,
    Embed,
    GateValues,
    HeadNorm,
    Linear,
    Mix,
    Norm,
    Number,
    Op,
    Rotate,
    Smear,
    WeightSpec,
)
from nano_inference.models.parts import attend, logits
from nano_inference.models.program import Program
from nano_inference.nanochat.checkpoint import NanochatTerms, terms_of

_HF_NAMES: Mapping[str, str] = {
    **{"transformer.wte.": "model.embed_tokens.", "transformer.h.": "model.layers."},
    **{".attn.c_proj.": ".self_attn.o_proj.", ".mlp.c_fc.": ".mlp.fc1.", ".mlp.c_proj.": ".mlp.fc2."},
    **{f".attn.c_{part}.": f".self_attn.{part}_proj." for part in "qkv"},
}


def hf_name(name: str) -> str:
    """Return the name of a weight in Transformers' port (models/nanochat, G0 only)."""
    for ours, theirs in _HF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def program(config: ModelConfig) -> Program:
    """Return the program of any generation. Buffers: x, start, middle, pair; before and gate for smear."""
    terms, size = terms_of(config), config.hidden_size
    table = _matrix(terms, "transformer.wte.weight", terms.padded_vocab_size, size)
    ops: list[Op] = [Embed(out="n", table=table), _norm(config, "n", "x")]
    if terms.smear_columns:  # a gated share of the previous token's embedding (G4)
        gate = _matrix(terms, "smear_gate.weight", 1, terms.smear_columns)
        ops += [
            Embed(out="n", table=table, rows="previous"),
            _norm(config, "n", "before"),
            Linear(x="x", out=("gate",), matrices=(gate,)),
            Smear(x="x", gate="gate", before="before", share=_number("smear_lambda", 1)),
        ]
    if terms.has_lambdas:
        ops.append(Copy(x="x", out="start"))
    if terms.bigram_rows:
        pairs = _matrix(terms, "bigram_embed.embed.weight", terms.bigram_rows, size)
        ops.append(Embed(out="pair", table=pairs, rows="pair"))
    for index in range(config.num_layers):
        ops += _layer(config, terms, index)
        if terms.has_backout and index == config.num_layers // 2:
            ops.append(Copy(x="x", out="middle"))
    if terms.has_backout:
        ops.append(Mix(x="x", y="middle", out="x", a=None, b=_number("backout_lambda", 1), sign=-1))
    matrix = _matrix(terms, "lm_head.weight", terms.padded_vocab_size, size)
    head = Linear(x="h", out=("logits",), matrices=(matrix,), num_rows=config.vocab_size)
    return Program(
        body=tuple(ops),
        final=(_norm(config, "x", "h"),),
        head=logits(head, config.logits_softcap),
        vocab_size=config.vocab_size,
        hidden_size=size,
        ropes=config.ropes,
        has_full_decode=terms.has_full_decode,
    )


def _layer(config: ModelConfig, terms: NanochatTerms, index: int) -> list[Op]:
    """Mix the residual, then x += attention(norm(x)), then x += mlp(norm(x))."""
    at, size, inner, count = f"transformer.h.{index}", config.hidden_size, config.intermediate_size, config.num_layers
    ops: list[Op] = []
    if terms.has_lambdas:  # x = r · x + z · start (from G1), plus b · pair (G2e)
        a, b = (_number(f"{name}_lambdas", count, index) for name in ("resid", "x0"))
        ops.append(Mix(x="x", y="start", out="x", a=a, b=b))
        if terms.bigram_rows:
            ops.append(Mix(x="x", y="pair", out="x", a=None, b=_number("bigram_lambdas", count, index)))
    return [
        *ops,
        _norm(config, "x", "n"),
        *_attention(config, terms, index),
        Add(x="x", y="n", out="x"),
        _norm(config, "x", "n"),
        Linear(x="n", out=("up",), matrices=(_matrix(terms, f"{at}.mlp.c_fc.weight", inner, size),)),
        Activate(gate="up", up=None, out="act", kind="relu_squared"),
        Linear(x="act", out=("n",), matrices=(_matrix(terms, f"{at}.mlp.c_proj.weight", size, inner),)),
        Add(x="x", y="n", out="x"),
    ]


def _attention(config: ModelConfig, terms: NanochatTerms, index: int) -> list[Op]:
    """n -> n: values plus gated value embeddings (from G2); queries and keys rotated, then normalised."""
    at, size, dim = f"transformer.h.{index}.attn", config.hidden_size, config.head_dim
    num_q, num_kv = config.num_heads * dim, config.num_kv_heads * dim
    rows = {"q": num_q, "k": num_kv, "v": num_kv}
    matrices = tuple(_matrix(terms, f"{at}.c_{name}.weight", num_out, size) for name, num_out in rows.items())
    ops: list[Op] = [Linear(x="n", out=tuple(rows), matrices=matrices)]
    if terms.gate_columns and index % 2 == (config.num_layers - 1) % 2:  # every other layer, including the last
        gate = _matrix(terms, f"{at}.ve_gate.weight", config.num_kv_heads, terms.gate_columns)
        table = _matrix(terms, f"value_embeds.{index}.weight", terms.padded_vocab_size, num_kv)
        ops += [
            Linear(x="n", out=("gate",), matrices=(gate,)),
            Embed(out="values", table=table),
            GateValues(v="v", gate="gate", more="values", head_dim=dim, scale=terms.gate_scale),
        ]
    return [
        *ops,
        Rotate(x=("q", "k"), head_dim=dim, rope=0),
        HeadNorm(x=("q", "k"), norms=(), head_dim=dim, eps=config.norm_eps),
        # q and k are each scaled by qk_scale; scaling their product by its square is equivalent.
        *attend(config, index, config.scale * terms.qk_scale**2),
        Linear(x="att", out=("n",), matrices=(_matrix(terms, f"{at}.c_proj.weight", size, num_q),)),
    ]


def _norm(config: ModelConfig, x: str, out: str) -> Norm:
    return Norm(x=x, out=out, weight=None, eps=config.norm_eps)


def _matrix(terms: NanochatTerms, name: str, num_out: int, num_in: int) -> WeightSpec:
    return WeightSpec(hf_name(name) if terms.has_hf_names else name, (num_out, num_in))


def _number(name: str, count: int, index: int = 0) -> Number:
    return Number(WeightSpec(name, (count,), "number"), index)
