"""Each family's forward pass as a program for the kernels: the same terms, in the same order, as its torch module.

Buffers, a row a token: x residual, n normalised, qkv queries, keys and values side by side, att attention's output,
gate_up the MLP's inner values, act what is left of them. The head's: h hidden states, n, logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nano_inference.kernels.matrix import Matrix
from nano_inference.kernels.program import (
    Activate,
    Attend,
    Embed,
    GateValues,
    Heads,
    Keep,
    Mix,
    Norm,
    Op,
    Product,
    Program,
    Smear,
    Softcap,
)
from nano_inference.models.config import ModelConfig, NanochatTerms


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights under the names that its torch modules give them."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Tensor]
    """float32."""

    def bias(self, *names: str) -> Tensor | None:
        """Return the biases of projections side by side, None where they have none."""
        found = [self.vectors[name] for name in names if name in self.vectors]
        return torch.cat(found) if found else None


@dataclass(frozen=True, slots=True)
class Programs:
    """A model in three parts."""

    body: Program
    """Tokens -> hidden states of those that are kept, in buffer x."""
    final: Program
    """h -> n: the last norm."""
    head: Program
    """h -> logits."""


def programs_of(config: ModelConfig, weights: Weights) -> Programs:
    """Return the programs of a model of any family."""
    if config.family == "nanochat":
        return _nanochat(config, weights)
    return _transformer(config, weights, is_gemma=config.family == "gemma")


# ---- Llama and its kin, Gemma ---------------------------------------------------------------------------------------


def _transformer(config: ModelConfig, weights: Weights, *, is_gemma: bool) -> Programs:
    """One pre-norm decoder; Gemma's norms have 1 added, and stand behind each part, too."""
    offset = 1.0 if is_gemma else 0.0
    table = weights.matrices["embed_tokens.weight"]
    ops: list[Op] = [Embed(out="x", table=table, scale=_float32(config.embedding_scale or 1.0))]
    for index in range(config.num_layers):
        ops += _attention(config, weights, index, offset, is_gemma=is_gemma)
        ops += _mlp(config, weights, index, offset, is_gemma=is_gemma)
    norm = Norm(x="h", out="n", weight=weights.vectors["norm.weight"], eps=config.norm_eps, offset=offset)
    head = weights.matrices["embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return _programs(config, tuple(ops), norm, head, config.vocab_size, gate_up=2 * config.intermediate_size)


def _attention(config: ModelConfig, weights: Weights, index: int, offset: float, *, is_gemma: bool) -> list[Op]:
    """Norm, projections, heads, attention, projection back onto the residual."""
    at, layer = f"layers.{index}", config.layers[index]
    qkv = tuple(f"{at}.self_attn.{name}_proj" for name in "qkv")
    return [
        _norm(weights, f"{at}.input_layernorm", config, offset),
        Product(
            x="n",
            out="qkv",
            matrices=tuple(weights.matrices[f"{name}.weight"] for name in qkv),
            bias=weights.bias(*(f"{name}.bias" for name in qkv)),
        ),
        Heads(
            x="qkv",
            layer=index,
            rope=layer.rope,
            norm="before" if config.qk_norm else "none",
            q_weight=weights.vectors.get(f"{at}.self_attn.q_norm.weight"),
            k_weight=weights.vectors.get(f"{at}.self_attn.k_norm.weight"),
            eps=config.norm_eps,
            offset=offset,
        ),
        Attend(
            x="qkv",
            out="att",
            layer=index,
            scale=config.scale,
            window=layer.window,
            softcap=config.attention_softcap,
        ),
        *_back(config, weights, "att", f"{at}.self_attn.o_proj", f"{at}.post_attention_layernorm", offset, is_gemma),
    ]


def _mlp(config: ModelConfig, weights: Weights, index: int, offset: float, *, is_gemma: bool) -> list[Op]:
    """Norm, gate and up, activation, down onto the residual."""
    at = f"layers.{index}"
    inner = tuple(f"{at}.mlp.{name}_proj" for name in ("gate", "up"))
    first = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
    return [
        _norm(weights, f"{at}.{first}", config, offset),
        Product(
            x="n",
            out="gate_up",
            matrices=tuple(weights.matrices[f"{name}.weight"] for name in inner),
            bias=weights.bias(*(f"{name}.bias" for name in inner)),
        ),
        Activate(x="gate_up", out="act", kind=config.activation),
        *_back(config, weights, "act", f"{at}.mlp.down_proj", f"{at}.post_feedforward_layernorm", offset, is_gemma),
    ]


def _norm(weights: Weights, name: str, config: ModelConfig, offset: float) -> Norm:
    return Norm(x="x", out="n", weight=weights.vectors[f"{name}.weight"], eps=config.norm_eps, offset=offset)


def _back(
    config: ModelConfig, weights: Weights, x: str, projection: str, norm: str, offset: float, is_gemma: bool
) -> list[Op]:
    """Project back onto the residual; Gemma normalises in between."""
    matrices, bias = (weights.matrices[f"{projection}.weight"],), weights.bias(f"{projection}.bias")
    if not is_gemma:
        return [Product(x=x, out="x", matrices=matrices, bias=bias, add=True)]
    after = Norm(x="n", out="x", weight=weights.vectors[f"{norm}.weight"], eps=config.norm_eps, offset=offset, add=True)
    return [Product(x=x, out="n", matrices=matrices, bias=bias), after]


def _programs(
    config: ModelConfig,
    ops: tuple[Op, ...],
    norm: Norm,
    head: Matrix,
    num_logits: int,
    *,
    gate_up: int,
    more: Mapping[str, int] | None = None,
) -> Programs:
    """Put a model's three programs together. `num_logits` is the width of the logits with their padding.

    Once the last layer's keys and values are in the cache, only rows that something is asked of are gone on with.
    """
    size, heads = config.hidden_size, (config.num_heads, config.num_kv_heads, config.head_dim)
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2]}
    widths = {
        "x": size,
        "n": size,
        "qkv": (heads[0] + 2 * heads[1]) * heads[2],
        "att": heads[0] * heads[2],
        "gate_up": gate_up,
        "act": config.intermediate_size,
    } | dict(more or {})
    last = max(index for index, op in enumerate(ops) if isinstance(op, Heads)) + 1
    terms = config.nanochat
    kept = Keep(buffers=("x", "qkv", "middle") if terms and terms.has_backout else ("x", "qkv"))
    cap: tuple[Op, ...] = ()
    if config.logits_softcap is not None:
        cap = (Softcap(x="logits", cap=config.logits_softcap),)
    final = {"h": size, "n": size}
    return Programs(
        body=Program(ops=(*ops[:last], kept, *ops[last:]), widths=widths, **shape),
        final=Program(ops=(norm,), widths=final),
        head=Program(
            ops=(norm, Product(x="n", out="logits", matrices=(head,)), *cap), widths=final | {"logits": num_logits}
        ),
    )


def _float32(value: float) -> float:
    """Return a number as float32 has it."""
    return float(torch.tensor(value, dtype=torch.float32))


# ---- nanochat -------------------------------------------------------------------------------------------------------


def _nanochat(config: ModelConfig, weights: Weights) -> Programs:
    """Every generation's terms; further buffers: start, middle, pair, before, gate, values."""
    terms = config.nanochat
    assert terms is not None
    ops = _nanochat_start(config, terms, weights)
    for index in range(config.num_layers):
        ops += _nanochat_layer(config, terms, weights, index)
        if terms.has_backout and index == config.num_layers // 2:
            ops.append(Mix(x="x", y="x", out="middle", scale=0.0))
    if terms.has_backout:
        ops.append(Mix(x="x", y="middle", out="x", b=weights.vectors["backout_lambda"], scale=-1.0))
    norm = Norm(x="h", out="n", weight=None, eps=config.norm_eps)
    size, num_kv = config.hidden_size, config.num_kv_heads
    more = {"start": size, "middle": size, "pair": size, "before": size, "gate": max(1, num_kv)}
    more["values"] = num_kv * config.head_dim
    head = weights.matrices["lm_head.weight"]
    return _programs(config, tuple(ops), norm, head, head.num_out, gate_up=config.intermediate_size, more=more)


def _nanochat_start(config: ModelConfig, terms: NanochatTerms, weights: Weights) -> list[Op]:
    """The normalised embedding, smeared with its predecessor's where the generation does so."""
    table, eps = weights.matrices["transformer.wte.weight"], config.norm_eps
    ops: list[Op] = [Embed(out="n", table=table), Norm(x="n", out="x", weight=None, eps=eps)]
    if terms.smear_columns:
        ops += [
            Embed(out="n", table=table, rows="previous"),
            Norm(x="n", out="before", weight=None, eps=eps),
            Product(x="x", out="gate", matrices=(weights.matrices["smear_gate.weight"],)),
            Smear(x="x", gate="gate", before="before", weight=weights.vectors["smear_lambda"]),
        ]
    if terms.has_lambdas:
        ops.append(Mix(x="x", y="x", out="start", scale=0.0))
    if terms.bigram_rows:
        ops.append(Embed(out="pair", table=weights.matrices["bigram_embed.embed.weight"], rows="pair"))
    return ops


def _nanochat_layer(config: ModelConfig, terms: NanochatTerms, weights: Weights, index: int) -> list[Op]:
    """Mix the residual, attend, then the squared MLP."""
    at, eps = f"transformer.h.{index}", config.norm_eps
    ops: list[Op] = []
    if terms.has_lambdas:
        ops.append(Mix(x="x", y="start", out="x", a=_at(weights, "resid", index), b=_at(weights, "x0", index)))
    if terms.has_lambdas and terms.bigram_rows:
        ops.append(Mix(x="x", y="pair", out="x", b=_at(weights, "bigram", index)))
    qkv = tuple(weights.matrices[f"{at}.attn.c_{name}.weight"] for name in "qkv")
    ops += [Norm(x="x", out="n", weight=None, eps=eps), Product(x="n", out="qkv", matrices=qkv)]
    if terms.has_value_embedding(index, config.num_layers):
        ops += [
            Product(x="n", out="gate", matrices=(weights.matrices[f"{at}.attn.ve_gate.weight"],)),
            Embed(out="values", table=weights.matrices[f"value_embeds.{index}.weight"]),
            GateValues(x="qkv", gate="gate", more="values", scale=terms.gate_scale),
        ]
    norm: Literal["after"] = "after"
    attend = Attend(
        x="qkv",
        out="att",
        layer=index,
        scale=config.scale * terms.qk_scale**2,
        window=config.layers[index].window,
        softcap=config.attention_softcap,
    )
    return [
        *ops,
        Heads(x="qkv", layer=index, rope=0, norm=norm, eps=eps),
        attend,
        Product(x="att", out="x", matrices=(weights.matrices[f"{at}.attn.c_proj.weight"],), add=True),
        Norm(x="x", out="n", weight=None, eps=eps),
        Product(x="n", out="gate_up", matrices=(weights.matrices[f"{at}.mlp.c_fc.weight"],)),
        Activate(x="gate_up", out="act", kind="relu_squared"),
        Product(x="act", out="x", matrices=(weights.matrices[f"{at}.mlp.c_proj.weight"],), add=True),
    ]


def _at(weights: Weights, name: str, index: int) -> Tensor:
    """Return a layer's own number, as a tensor of one."""
    return weights.vectors[f"{name}_lambdas"][index : index + 1]
