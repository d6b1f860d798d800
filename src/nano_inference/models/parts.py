"""Building blocks shared by families: functions that return operations, with Hugging Face weight names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nano_inference.models import ops
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Linear, Norm, Op, WeightSpec
from nano_inference.models.program import Program

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def norm(config: ModelConfig, name: str, x: str, out: str, offset: float = 0.0) -> Norm:
    """Return an RMSNorm with the weight `{name}.weight`."""
    weight = WeightSpec(f"{name}.weight", (config.hidden_size,), "vector")
    return Norm(x=x, out=out, weight=weight, eps=config.norm_eps, offset=offset)


def linear(x: str, num_in: int, outs: Sequence[tuple[str, str, int]], *, bias: bool = False) -> Linear:
    """Return projections of x; `outs` holds (buffer, weight name, number of outputs) of each."""
    return Linear(
        x=x,
        out=tuple(out for out, _, _ in outs),
        matrices=tuple(WeightSpec(f"{name}.weight", (num_out, num_in)) for _, name, num_out in outs),
        biases=tuple(WeightSpec(f"{name}.bias", (num_out,), "vector") for _, name, num_out in outs) if bias else (),
    )


def attention(
    config: ModelConfig, index: int, x: str, out: str, norm_offset: float = 0.0, *, gated: bool = False
) -> list[Op]:
    """Return a layer's attention with its projections; queries and keys are normalised, then rotated.

    `gated`: each head of `q_proj` is a query and then a gate of the head's output.
    """
    at, layer, dim = f"model.layers.{index}.self_attn", config.layers[index], config.head_dim
    num_q, num_kv = config.num_heads * dim, config.num_kv_heads * dim
    queries = ("qg", f"{at}.q_proj", 2 * num_q) if gated else ("q", f"{at}.q_proj", num_q)
    rows = [queries, ("k", f"{at}.k_proj", num_kv), ("v", f"{at}.v_proj", num_kv)]
    found: list[Op] = [linear(x, config.hidden_size, rows, bias=config.qkv_bias)]
    if gated:
        found.append(ops.Unzip(x="qg", out=("q", "og"), widths=(dim, dim)))
    if config.qk_norm:
        norms = tuple(WeightSpec(f"{at}.{name}_norm.weight", (dim,), "vector") for name in "qk")
        found.append(ops.HeadNorm(x=("q", "k"), norms=norms, head_dim=dim, eps=config.norm_eps, offset=norm_offset))
    if layer.rope is not None:
        found.append(ops.Rotate(x=("q", "k"), head_dim=dim, rope=layer.rope))
    return [
        *found,
        *attend(config, index, config.scale),
        *([ops.Gate(x="att", gate="og", out="att")] if gated else []),
        linear("att", num_q, [(out, f"{at}.o_proj", config.hidden_size)], bias=config.out_bias),
    ]


def attend(config: ModelConfig, index: int, scale: float) -> list[Op]:
    """Return operations that store buffers k and v and attend with buffer q, into buffer att."""
    kv_layer = config.kv_layers.index(index)
    attended = ops.Attend(
        q="q",
        k="k",
        v="v",
        out="att",
        layer=kv_layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=scale,
        window=config.layers[index].window,
        softcap=config.attention_softcap,
    )
    return [ops.Store(k="k", v="v", layer=kv_layer, head_dim=config.head_dim), attended, *keep(config, index)]


def keep(config: ModelConfig, index: int) -> list[Op]:
    """Return the `Keep` of the last layer, for the place after the operation that reads other tokens."""
    return [ops.Keep()] if index == config.num_layers - 1 else []


def gated_mlp(config: ModelConfig, at: str, x: str, out: str) -> list[Op]:
    """Return down(act(gate(x)) · up(x))."""
    size, inner = config.hidden_size, config.intermediate_size
    rows = [(name, f"{at}.mlp.{name}_proj", inner) for name in ("gate", "up")]
    return [
        linear(x, size, rows, bias=config.mlp_bias),
        ops.Activate(gate="gate", up="up", out="act", kind=config.activation),
        linear("act", inner, [(out, f"{at}.mlp.down_proj", size)], bias=config.mlp_bias),
    ]


def decoder(config: ModelConfig, layers: Iterable[Op], final: Norm) -> Program:
    """Return a decoder: embedding, `layers`, the norm `final`, head and soft cap."""
    shape = (config.vocab_size, config.hidden_size)
    table = WeightSpec(EMBEDDING, shape, tied=(HEAD,) if config.tie_embeddings else ())
    matrix = table if config.tie_embeddings else WeightSpec(HEAD, shape)
    return Program(
        body=(ops.Embed(out="x", table=table, scale=config.embedding_scale or 1.0), *layers),
        final=(final,),
        head=logits(Linear(x="h", out=("logits",), matrices=(matrix,)), config.logits_softcap),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        ropes=config.ropes,
    )


def logits(head: Linear, cap: float | None) -> tuple[Op, ...]:
    """Return operations that compute buffer logits in float32, soft-capped unless `cap` is None."""
    capped = () if cap is None else (ops.Softcap(x="logits", cap=cap),)
    return (head, ops.Widen(x="logits", out="logits"), *capped)
