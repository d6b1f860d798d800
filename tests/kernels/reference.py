"""A slow, simple implementation of the kernels in torch, with which tests compare the C code.

Shapes: T tokens of a step, S rows, W width of a buffer, V vocabulary, N outputs and K inputs of a matrix, H heads, J kv
heads, Q query heads of a kv head, D head size, Z slots per cache block, C visible keys of a token; in `keep_K`, K is
the number of kept tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_inference.executors.cpu.compile import compile_library
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.executors.cpu.matrix import unpack as unpack_with
from nano_inference.executors.cpu.native import Cache, Layout
from nano_inference.executors.cpu.program import (
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
from nano_inference.loading.catalog import default_cache

_GROUP = 64
"""Inputs whose eight-bit activations share a scale."""
_COLDEST = 1e-30
_SMALLEST_EXPONENT = -87.33654


# ---- weights --------------------------------------------------------------------------------------------------------


@cache
def library() -> Library:
    """Return the library without special instructions, which unpacks weights; ggml's values are those of its blocks."""
    return Library(compile_library("generic", default_cache(os.environ), os.environ), 1)


def unpack(matrix: Matrix, first: int = 0, count: int | None = None) -> Tensor:
    """Return rows [first, first + count) as float32, the exact values that the kernels use."""
    return unpack_with(library(), matrix, first, count)


def dequantised(x_TK: Tensor) -> Tensor:
    """Return activations rounded to eight bits, in groups of 64 inputs, in float64."""
    groups = [quantised(group_TK) for group_TK in torch.split(x_TK.float(), _GROUP, dim=1)]
    return torch.cat([byte_TK.double() * scale_T.double().unsqueeze(-1) for byte_TK, scale_T in groups], dim=-1)


def quantised(x_SK: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers up to 127 (as float32) and each row's scale, which is NaN if the row contains NaN."""
    top_S1 = x_SK.abs().amax(dim=-1, keepdim=True)
    inverse_S1 = torch.where(top_S1 > 0, torch.full_like(top_S1, 127.0) / top_S1, 0.0)  # one rounding, as in C
    byte_SK = torch.where(top_S1.isfinite(), (x_SK * inverse_S1).round(), 0.0)
    return byte_SK, torch.where(top_S1.isfinite(), top_S1 / 127.0, torch.nan).squeeze(-1)


# ---- running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """State of a run: the buffers, and for steps with tokens their positions and block tables."""

    program: Program
    buffers: dict[str, Tensor]
    dtype: torch.dtype
    token_T: Tensor
    previous_T: Tensor
    position_T: Tensor
    tables: tuple[Tensor, ...]
    """Each token's block table (`tables` from the row's first block on)."""
    keep_K: Tensor
    cache: Cache | None
    ropes: Sequence[tuple[Tensor, Tensor]]


def run(
    program: Program,
    layout: Layout,
    cache: Cache,
    ropes: Sequence[tuple[Tensor, Tensor]] = (),
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Run the program for a step's tokens; return the buffers that it wrote, [T, W] each.

    Behind a `Keep` these are the ones that it names and the ones written later, with the rows that are kept.

    Keys and values go into `cache`, whose tensors may have any float type.
    """
    spans = list(zip(layout.num_tokens_S.tolist(), layout.start_S.tolist(), layout.table_begin_S.tolist(), strict=True))
    tables = torch.tensor(layout.tables, dtype=torch.long)
    step = _Step(
        program,
        {},
        dtype,
        torch.tensor(layout.token_T, dtype=torch.long),
        torch.tensor(layout.previous_T, dtype=torch.long),
        torch.cat([torch.arange(start, start + count) for count, start, _ in spans]),
        tuple(tables[begin:] for count, _, begin in spans for _ in range(count)),
        torch.tensor(layout.keep_K, dtype=torch.long),
        cache,
        ropes,
    )
    return _run(step)


def run_rows(program: Program, inputs: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Run a program without tokens on given rows: [S, W] for each named buffer."""
    nothing = torch.empty(0, dtype=torch.long)
    buffers = {name: rows_SW.to(dtype) for name, rows_SW in inputs.items()}
    return _run(_Step(program, buffers, dtype, nothing, nothing, nothing, (), nothing, None, ()))


def _run(step: _Step) -> dict[str, Tensor]:
    for op in step.program.ops:
        if isinstance(op, Keep):
            step = _keep(op, step)
        else:
            name, value_TW = _apply(op, step)
            step.buffers[name] = value_TW
    return step.buffers


def _keep(op: Keep, step: _Step) -> _Step:
    """Return the step with the kept rows of the named buffers; other buffers are dropped."""
    index_K = step.keep_K
    return replace(
        step,
        buffers={name: step.buffers[name][index_K] for name in op.buffers if name in step.buffers},
        position_T=step.position_T[index_K],
        tables=tuple(step.tables[t] for t in index_K.tolist()),
    )


def _apply(op: Op, step: _Step) -> tuple[str, Tensor]:
    """Return the name and the contents of the buffer that an operation writes."""
    match op:
        case Embed():
            return op.out, _embed(op, step)
        case Norm():
            normed_TW = _norm(step.buffers[op.x], op.weight, op.offset, op.eps)
            return op.out, step.buffers[op.out] + normed_TW if op.add else normed_TW
        case Product():
            product_TN = _product(op, step.buffers[op.x])
            return op.out, step.buffers[op.out] + product_TN if op.add else product_TN
        case Heads():
            return op.x, _heads(op, step)
        case Attend():
            return op.out, _attend_all(op, step)
        case Activate():
            return op.out, _activate(op, step.buffers[op.x])
        case Mix():
            return op.out, _mix(op, step.buffers[op.x], step.buffers[op.y])
        case Softcap():
            return op.x, op.cap * torch.tanh(step.buffers[op.x] / op.cap)
        case GateValues():
            return op.x, _gate_values(op, step)
        case Smear():
            return op.x, _smear(op, step)


def _embed(op: Embed, step: _Step) -> Tensor:
    """Return rows of the table: of the token, of the previous one (0 if none), or of nanochat's hashed pair."""
    row_T = step.token_T
    if op.rows == "previous":
        row_T = step.previous_T.clamp(min=0)
    elif op.rows == "pair":
        last = op.table.num_out - 1
        hash_T = (step.token_T * 36313) ^ (step.previous_T * 27191)
        row_T = torch.where(step.previous_T < 0, last, hash_T % max(1, last))
    rows = [unpack(op.table, row, 1) for row in row_T.tolist()]
    return torch.cat(rows).to(step.dtype) * op.scale


def _norm(x: Tensor, weight: Tensor | None, offset: float, eps: float) -> Tensor:
    normed = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return normed if weight is None else normed * (offset + weight.to(x.dtype))


def _product(op: Product, x_TW: Tensor) -> Tensor:
    """Return the outputs of all matrices in adjacent columns; a matrix uses the first inputs of the row."""
    product_TN = torch.cat([_times(x_TW[:, : matrix.num_in], matrix) for matrix in op.matrices], dim=-1)
    return product_TN if op.bias is None else product_TN + op.bias.to(x_TW.dtype)


def _times(x_TK: Tensor, matrix: Matrix) -> Tensor:
    exact_TK = dequantised(x_TK).to(x_TK.dtype) if matrix.rounds else x_TK
    return exact_TK @ unpack(matrix).to(x_TK.dtype).T


def _heads(op: Heads, step: _Step) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values to the cache; return the row."""
    program, cache = step.program, step.cache
    assert cache is not None
    num_heads, num_kv, dim = program.num_heads, program.num_kv_heads, program.head_dim
    row_TYD = step.buffers[op.x].view(step.position_T.numel(), -1, dim)
    q_THD, k_TJD, v_TJD = torch.split(row_TYD, [num_heads, num_kv, num_kv], dim=1)
    q_THD, k_TJD = _turn(op, step, q_THD, op.q_weight), _turn(op, step, k_TJD, op.k_weight)
    k_NJDZ, v_NJZD = _layer(cache, max(0, op.layer), num_kv, dim)
    for t, position in enumerate(step.position_T.tolist() if op.layer >= 0 else ()):
        block, slot = step.tables[t][position // cache.block_size], position % cache.block_size
        k_NJDZ[block, :, :, slot] = k_TJD[t].to(k_NJDZ.dtype)
        v_NJZD[block, :, slot] = v_TJD[t].to(v_NJZD.dtype)
    return torch.cat((q_THD, k_TJD, v_TJD), dim=1).flatten(1)


def _turn(op: Heads, step: _Step, x_TYD: Tensor, weight: Tensor | None) -> Tensor:
    """Normalise before or after the rotation; dimension i is paired with i + R/2 (GPT-NeoX layout)."""
    if op.norm == "before":
        x_TYD = _norm(x_TYD, weight, op.offset, op.eps)
    if op.rope is not None:
        cosine_T1R, sine_T1R = (
            table_PR[step.position_T].unsqueeze(1).to(x_TYD.dtype) for table_PR in step.ropes[op.rope]
        )
        size = cosine_T1R.size(-1)
        turning, still = x_TYD[..., :size], x_TYD[..., size:]
        turned = turning * cosine_T1R + turning.roll(size // 2, dims=-1) * sine_T1R
        x_TYD = torch.cat((turned, still), dim=-1)
    return _norm(x_TYD, weight, op.offset, op.eps) if op.norm == "after" else x_TYD


def _layer(cache: Cache, layer: int, num_kv: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return views of one layer of the cache: keys [N, J, D, Z] and values [N, J, Z, D]."""
    size, floats = cache.block_size, cache.block_values
    num_blocks = cache.k.numel() // floats
    k, v = (memory[: num_blocks * floats].view(num_blocks, -1) for memory in (cache.k, cache.v))
    k_NLJDZ, v_NLJZD = k.view(num_blocks, -1, num_kv, dim, size), v.view(num_blocks, -1, num_kv, size, dim)
    return k_NLJDZ[:, layer], v_NLJZD[:, layer]


def _attend_all(op: Attend, step: _Step) -> Tensor:
    rows = [_attend(op, step, t) for t in range(len(step.tables))]
    width = step.program.num_heads * step.program.head_dim
    return torch.stack(rows) if rows else torch.empty(0, width, dtype=step.dtype)


def _attend(op: Attend, step: _Step, t: int) -> Tensor:
    """Return one token's attention: gather visible keys, softmax, weighted sum of values."""
    program, cache = step.program, step.cache
    assert cache is not None
    k_NJDZ, v_NJZD = _layer(cache, op.layer, program.num_kv_heads, program.head_dim)
    position = int(step.position_T[t])
    seen_C = torch.arange(max(0, position + 1 - op.window) if op.window else 0, position + 1)
    block_C, slot_C = step.tables[t][seen_C // cache.block_size], seen_C % cache.block_size
    k_CJD, v_CJD = k_NJDZ[block_C, :, :, slot_C].to(step.dtype), v_NJZD[block_C, :, slot_C].to(step.dtype)
    q_HD = step.buffers[op.x][t, : program.num_heads * program.head_dim].view(-1, program.head_dim)
    q_JQD = q_HD.view(program.num_kv_heads, -1, program.head_dim)
    score_JQC = torch.einsum("jqd,cjd->jqc", q_JQD, k_CJD) * op.scale
    if op.softcap:
        score_JQC = op.softcap * torch.tanh(score_JQC / op.softcap)
    return torch.einsum("jqc,cjd->jqd", score_JQC.softmax(dim=-1), v_CJD).reshape(-1)


def _activate(op: Activate, x_TW: Tensor) -> Tensor:
    if op.kind == "relu_squared":
        return F.relu(x_TW).square()
    gate, up = x_TW.chunk(2, dim=-1)
    return (F.silu(gate) if op.kind == "silu" else F.gelu(gate, approximate="tanh")) * up


def _mix(op: Mix, x_TW: Tensor, y_TW: Tensor) -> Tensor:
    a, b = (1.0 if each is None else each.to(x_TW.dtype) for each in (op.a, op.b))
    return a * x_TW + b * op.scale * y_TW


def _gate_values(op: GateValues, step: _Step) -> Tensor:
    """Add a table's values to the values in the row, gated per kv head."""
    program = step.program
    num_kv, dim = program.num_kv_heads, program.head_dim
    qk_TW, v_TW = step.buffers[op.x].tensor_split(((program.num_heads + num_kv) * dim,), dim=-1)
    share_TJ1 = op.scale * torch.sigmoid(step.buffers[op.gate][:, :num_kv]).unsqueeze(-1)
    more_TW = (share_TJ1 * step.buffers[op.more].view(-1, num_kv, dim)).flatten(1)
    return torch.cat((qk_TW, v_TW + more_TW), dim=-1)


def _smear(op: Smear, step: _Step) -> Tensor:
    x_TW = step.buffers[op.x]
    share_T1 = op.weight.to(x_TW.dtype) * torch.sigmoid(step.buffers[op.gate][:, :1])
    return torch.where(step.previous_T.unsqueeze(-1) < 0, x_TW, x_TW + share_T1 * step.buffers[op.before])


# ---- drawing --------------------------------------------------------------------------------------------------------


def draw(
    logits_BV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float], is_raw: Sequence[bool]
) -> tuple[list[int], list[float]]:
    """Draw one token per row from float32 logits; return tokens and log-probabilities.

    `is_raw` asks for the log-probability at temperature 1. It is not a number where nothing can be drawn.
    """
    rows = zip(logits_BV, temperatures, uniforms, is_raw, strict=True)
    drawn = [_draw_row(*row) for row in rows]
    return [token for token, _ in drawn], [logprob for _, logprob in drawn]


def _draw_row(logit_V: Tensor, temperature: float, uniform: float, is_raw: bool) -> tuple[int, float]:
    """Draw greedily at temperature 0, else the token at which the cumulative probability exceeds the uniform."""
    below_V = logit_V - logit_V.max()
    temperature = float(torch.tensor(temperature))
    coldness = 1.0 if temperature == 0 else max(temperature, _COLDEST)
    weight_V = _weights(below_V, coldness)
    total = float(weight_V.sum())
    if not 0 < total < float("inf"):
        return 0, float("nan")
    token = int((below_V == 0).nonzero()[0]) if temperature == 0 else _token_at(weight_V, uniform * total)
    exact_V = (logit_V.double() - logit_V.double().max()) / (1.0 if is_raw else coldness)
    return token, float((exact_V[token] - exact_V.exp().sum().log()).float())


def _weights(below_V: Tensor, temperature: float) -> Tensor:
    """Return float32 exponentials as float64; subnormal ones are 0."""
    exponent_V = below_V / temperature
    return torch.where(exponent_V < _SMALLEST_EXPONENT, 0.0, exponent_V.exp()).double()


def _token_at(weight_V: Tensor, target: float) -> int:
    """Return the first token whose cumulative weight exceeds the target, or the last token with a weight."""
    possible = (weight_V > 0).nonzero().squeeze(-1)
    passed = (weight_V.cumsum(dim=0)[possible] > target).nonzero()
    return int(possible[passed[0, 0]] if passed.numel() else possible[-1])
