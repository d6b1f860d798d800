"""A slow, simple implementation of the kernels in torch, with which tests compare the C code.

Does not need the compiled library: weights are packed and unpacked in torch (layouts: c/formats.h).

Shapes: T tokens of a step, S rows, W width of a buffer, V vocabulary, N outputs and K inputs of a matrix, P panels of
64 outputs, B blocks of inputs, G groups and Y bytes of a field, H heads, J kv heads, Q query heads of a kv head, D head
size, Z slots per cache block, C visible keys of a token; in `keep_K`, K is the number of kept tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_inference.executors.cpu.library import BF16, F16, F32, INT8, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0
from nano_inference.executors.cpu.matrix import GGML, Matrix, int8_parts
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

_PANEL = 64
_Field = tuple[int, int]
_HALF: _Field = (1, 2)
_NIBBLES: _Field = (4, 4)
_FIELDS: Mapping[int, tuple[_Field, ...]] = MappingProxyType(
    {
        F32: ((1, 4),),
        BF16: ((1, 4),),
        F16: (_HALF,),
        Q4_0: (_HALF, _NIBBLES),
        Q4_1: (_HALF, _HALF, _NIBBLES),
        Q8_0: (_HALF, (32, 1)),
        Q4_K: (_HALF, _HALF, *[(1, 1), (1, 1), _NIBBLES] * 8),
        Q6_K: (_HALF, *[(1, 1), (1, 4), (2, 4)] * 16),
        INT8: ((1, 4),),
    }
)
"""Fields of a panel's block of inputs, in order: (groups G, bytes Y per output); a group has 64 outputs."""
_PLAIN_BYTES: Mapping[int, int] = MappingProxyType({F32: 4, BF16: 4, F16: 2, INT8: 4})
"""Bytes per block of a plain format in a row of the file."""
_BLOCK_BYTES: Mapping[int, int] = MappingProxyType({Q4_0: 18, Q4_1: 20, Q8_0: 34, Q4_K: 144, Q6_K: 210})
"""Bytes of a ggml block (ggml-common.h)."""
_PLAIN: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16})
_GROUP = 64
"""Inputs whose eight-bit activations share a scale."""
_COLDEST = 1e-30
_SMALLEST_EXPONENT = -87.33654


# ---- weights --------------------------------------------------------------------------------------------------------


def pack(weight_NK: Tensor) -> Matrix:
    """Pack float32, bfloat16 or float16 weights; float32 values that fit bfloat16 are stored as bfloat16."""
    weight_NK = weight_NK.contiguous()
    if weight_NK.dtype == torch.float32 and not (weight_NK.view(torch.int32) & 0xFFFF).any():
        weight_NK = weight_NK.bfloat16()
    kind, (num_out, num_in) = _PLAIN[weight_NK.dtype], weight_NK.shape
    packed = _join(kind, [_blocks(weight_NK.view(torch.uint8), _PLAIN_BYTES[kind]).unsqueeze(2)])
    return Matrix(kind, num_out, num_in, packed)


def pack_blocks(
    type_name: str, rows: Tensor, num_in: int, order_N: Tensor | None = None, *, rounds: bool = False
) -> Matrix:
    """Pack rows of ggml blocks (uint8 [N, bytes]); `order_N` gives the source row of each output."""
    rows = rows if order_N is None else rows[order_N.long()]
    kind = GGML[type_name]
    packed = _join(kind, _fields_of(kind, _blocks(rows, _BLOCK_BYTES[kind])))
    return Matrix(kind, rows.size(0), num_in, packed, rounds)


def pack_int8(weight_NK: Tensor) -> Matrix:
    """Round float weights to eight bits, with a scale per output; the scales follow the panels."""
    byte_NK, scale_N = _quantise(weight_NK.float())
    num_out, num_in = weight_NK.shape
    panels = _join(INT8, [_blocks(byte_NK.to(torch.int8).view(torch.uint8), 4).unsqueeze(2)])
    behind = F.pad(scale_N, (0, -num_out % _PANEL)).view(torch.uint8)
    return Matrix(INT8, num_out, num_in, torch.cat((panels, behind)), rounds=True)


def unpack(matrix: Matrix, first: int = 0, count: int | None = None) -> Tensor:
    """Return rows [first, first + count) as float32, the exact values that the kernels use."""
    stop = matrix.num_out if count is None else first + count
    if matrix.format == INT8:
        byte_NK, scale_N = int8_parts(matrix)
        return (byte_NK.float() * scale_N.unsqueeze(-1))[first:stop]
    panel = first // _PANEL
    fields = _split(matrix, panel, -(-stop // _PANEL))
    value_NK = _values(matrix.format, fields).flatten(1)[:, : matrix.num_in]
    return value_NK[first - panel * _PANEL : stop - panel * _PANEL]


def _blocks(rows: Tensor, size: int) -> Tensor:
    """Split bytes [N, ...] into blocks [N, B, size]; the last is padded with zeros."""
    return F.pad(rows, (0, -rows.size(1) % size)).view(rows.size(0), -1, size)


def _join(kind: int, fields: Sequence[Tensor]) -> Tensor:
    """Return the bytes of panels from fields [N, B, G, Y]."""
    parts = []
    for field_NBGY in fields:
        missing = -field_NBGY.size(0) % _PANEL
        full_NBGY = F.pad(field_NBGY, (0, 0, 0, 0, 0, 0, 0, missing))
        parts.append(full_NBGY.view(-1, _PANEL, *full_NBGY.shape[1:]).permute(0, 2, 3, 1, 4).flatten(2))
    assert len(parts) == len(_FIELDS[kind])
    return torch.cat(parts, dim=-1).reshape(-1)


def _split(matrix: Matrix, panel: int, stop: int) -> list[Tensor]:
    """Return the fields [N, B, G, Y] of panels [panel, stop)."""
    shapes = _FIELDS[matrix.format]
    sizes = [groups * _PANEL * width for groups, width in shapes]
    num_inputs = {BF16: 2, Q4_0: 32, Q4_1: 32, Q8_0: 32, Q4_K: 256, Q6_K: 256}.get(matrix.format, 1)
    panel_bytes = -(-matrix.num_in // num_inputs) * sum(sizes)
    bytes_PBX = matrix.packed[panel * panel_bytes : stop * panel_bytes].view(stop - panel, -1, sum(sizes))
    fields = zip(torch.split(bytes_PBX, sizes, dim=-1), shapes, strict=True)
    lanes = [part.view(*part.shape[:2], groups, _PANEL, width) for part, (groups, width) in fields]
    return [lane_PBGNY.permute(0, 3, 1, 2, 4).flatten(0, 1) for lane_PBGNY in lanes]


def _fields_of(kind: int, blocks: Tensor) -> list[Tensor]:
    """Return the fields of ggml blocks [N, B, bytes]."""
    if kind == Q8_0:
        return [blocks[..., None, :2], blocks[..., 2:, None]]
    if kind in (Q4_0, Q4_1):
        scales = [blocks[..., None, at : at + 2] for at in range(0, 2 if kind == Q4_0 else 4, 2)]
        return [*scales, _nibble_words(_halves(blocks[..., -16:]))]
    return _fields_of_q4_k(blocks) if kind == Q4_K else _fields_of_q6_k(blocks)


def _fields_of_q4_k(blocks: Tensor) -> list[Tensor]:
    """Return the fields of Q4_K: eight parts of 32 inputs, each with a six-bit scale and minimum, stored in parts."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=-1)
    fields = [blocks[..., None, :2], blocks[..., None, 2:4]]
    for part in range(8):
        both = blocks[..., 16 + part // 2 * 32 : 48 + part // 2 * 32]
        words = _nibble_words(both >> 4 if part % 2 else both & 15)
        fields += [scales[..., part, None, None], minima[..., part, None, None], words]
    return fields


def _fields_of_q6_k(blocks: Tensor) -> list[Tensor]:
    """Return the fields of Q6_K: sixteen parts of 16 inputs, each with an eight-bit scale; upper bits are separate."""
    values = []
    for half in (0, 1):
        low, high = blocks[..., half * 64 : half * 64 + 64], blocks[..., 128 + half * 32 : 160 + half * 32]
        nibbles = torch.cat((low & 15, low >> 4), dim=-1)
        upper = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
        values.append(nibbles | upper << 4)
    parts = torch.cat(values, dim=-1).view(*blocks.shape[:2], 16, 16)
    fields = [blocks[..., None, 208:210]]
    for part in range(16):
        value = parts[..., part, :]
        quads = (value >> 4).view(*blocks.shape[:2], 4, 4)
        upper = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
        fields += [blocks[..., 192 + part, None, None], upper.unsqueeze(-2), _nibble_words(value & 15)]
    return fields


def _halves(nibbles: Tensor) -> Tensor:
    """Return ggml's 32 nibbles in order: the low halves of 16 bytes are the first 16 values."""
    return torch.cat((nibbles & 15, nibbles >> 4), dim=-1)


def _nibble_words(values: Tensor) -> Tensor:
    """Pack values below 16 in words of eight, the first four in the low halves: [N, B, inputs] -> [N, B, G, 4]."""
    low, high = values.view(*values.shape[:2], -1, 2, 4).unbind(-2)
    return low | high << 4


def _nibbles(words_NBGY: Tensor) -> Tensor:
    """Unpack the result of `_nibble_words`."""
    return torch.stack((words_NBGY & 15, words_NBGY >> 4), dim=-2).flatten(2)


def _half(field: Tensor) -> Tensor:
    """Return a field of one half float per output as float64 [N, B, 1]."""
    return field.contiguous().view(torch.float16).flatten(2).double()


def _values(kind: int, fields: list[Tensor]) -> Tensor:
    """Return float32 weights [N, B, inputs of a block]: exact float64 values, rounded once."""
    if kind in _PLAIN_BYTES:
        dtype = next(dtype for dtype, plain in _PLAIN.items() if plain == kind)
        return fields[0].contiguous().view(dtype).flatten(2).float()
    if kind == Q4_0:
        return ((_nibbles(fields[1]).double() - 8) * _half(fields[0])).float()
    if kind == Q4_1:
        return (_nibbles(fields[2]).double() * _half(fields[0]) + _half(fields[1])).float()
    if kind == Q8_0:
        return (fields[1].view(torch.int8).flatten(2).double() * _half(fields[0])).float()
    if kind == Q4_K:
        d, e = _half(fields[0]), _half(fields[1])
        parts = zip(fields[2::3], fields[3::3], fields[4::3], strict=True)
        each = [_nibbles(q) * (d * s.flatten(2)) - e * t.flatten(2) for s, t, q in parts]
        return torch.cat(each, dim=-1).float()
    d = _half(fields[0])
    parts = zip(fields[1::3], fields[2::3], fields[3::3], strict=True)
    return torch.cat([_q6(d, s, upper, low) for s, upper, low in parts], dim=-1).float()


def _q6(d: Tensor, scale: Tensor, upper: Tensor, low: Tensor) -> Tensor:
    """Return sixteen values of Q6_K: the upper two bits are in one word, the lower four in two."""
    high = torch.stack([(upper >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(2)
    return ((_nibbles(low) | high << 4).double() - 32) * (d * scale.contiguous().view(torch.int8).flatten(2))


def _quantise(x_SK: Tensor) -> tuple[Tensor, Tensor]:
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
    """Multiply with one matrix; for eight-bit formats, sums within groups of 64 inputs are exact integers."""
    if not matrix.rounds:
        return x_TK @ unpack(matrix).to(x_TK.dtype).T
    if matrix.format != INT8:
        return _times_nibbles(x_TK, matrix)
    weight_NK, scale_N = int8_parts(matrix)
    total_TN = torch.zeros(x_TK.size(0), matrix.num_out)
    groups = (torch.split(each, _GROUP, dim=1) for each in (x_TK.float(), weight_NK))
    for group_TK, weights_NK in zip(*groups, strict=True):
        byte_TK, scale_T = _quantise(group_TK)
        sum_TN = (byte_TK.double() @ weights_NK.double().T).float()
        total_TN = total_TN + sum_TN * scale_T.unsqueeze(-1)
    return (total_TN * scale_N).to(x_TK.dtype)


def _times_nibbles(x_TK: Tensor, matrix: Matrix) -> Tensor:
    """Multiply with blocks of 32 weights q a + b: sums with q are exact integers; b multiplies a sum of inputs."""
    q_NK, a_NB, b_NB = _nibble_parts(matrix)
    total_TN = torch.zeros(x_TK.size(0), matrix.num_out)
    for start in range(0, matrix.num_in, _GROUP):
        byte_TK, scale_T = _quantise(x_TK[:, start : start + _GROUP].float())
        for at, block_TK in enumerate(torch.split(byte_TK, 32, dim=1), start // 32):
            sum_TN = (block_TK.double() @ q_NK[:, at * 32 : (at + 1) * 32].double().T).float()
            shift_T1 = (block_TK.sum(dim=1) * scale_T).unsqueeze(-1)
            total_TN = _fused(sum_TN, a_NB[:, at] * scale_T.unsqueeze(-1), total_TN)
            total_TN = _fused(b_NB[:, at], shift_T1, total_TN)
    return total_TN.to(x_TK.dtype)


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a b + c in float32, rounded once (nearly always: the sum is first rounded to float64)."""
    return (a.double() * b.double() + c.double()).float()


def _nibble_parts(matrix: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [N, K] and, for each block of 32, a and b [N, B] of weights q a + b; float32 and exact."""
    fields = _split(matrix, 0, -(-matrix.num_out // _PANEL))
    if matrix.format == Q4_K:
        d, e = _half(fields[0]), _half(fields[1])
        a = torch.cat([d * scale.flatten(2) for scale in fields[2::3]], dim=-1)
        b = torch.cat([-e * minimum.flatten(2) for minimum in fields[3::3]], dim=-1)
        q = torch.cat([_nibbles(words) for words in fields[4::3]], dim=-1)
    else:
        a, q = _half(fields[0]), _nibbles(fields[-1])
        b = _half(fields[1]) if matrix.format == Q4_1 else -8 * a
    q_NK, a_NB, b_NB = (part.flatten(1)[: matrix.num_out].float() for part in (q, a, b))
    return q_NK, a_NB, b_NB


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
