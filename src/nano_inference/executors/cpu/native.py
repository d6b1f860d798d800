"""Runs programs in C.

Shapes: T tokens of a step, K kept tokens, W width of a buffer, S rows, B rows of logits, V vocabulary, L layers,
N cache blocks, J kv heads, D head size, Z slots per block, P positions, R rotary size.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano_inference.executors.cpu import program as ops
from nano_inference.executors.cpu.adapters import AdapterRows
from nano_inference.executors.cpu.library import (
    DrawsStruct,
    Library,
    MatrixStruct,
    OpStruct,
    ProgramStruct,
    RopeStruct,
    SpecialStruct,
    StatesStruct,
    StepStruct,
    SumsStruct,
)
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.executors.cpu.program import Op, Program

_ADD, _NORM_FIRST, _NORM_LAST = 1, 2, 4
_ROWS = ("token", "previous", "pair")
_ACTIVATIONS = ("silu", "gelu_tanh", "relu_squared")
_LINE_FLOATS = 16
MAX_SPLIT_TOKENS = 64  # steps with more tokens occupy all threads without splitting the keys of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The slots that a step's rows read and write, as int32 arrays; c/delta.h documents them."""

    row_T: array[int]
    begin_S: array[int]
    source_S: array[int]
    first_S: array[int]  # one more than rows
    end: array[int]
    slot: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A step's tokens, row after row, as int32 arrays."""

    token_T: array[int]
    previous_T: array[int]  # -1 if there is no previous token
    num_tokens_S: array[int]
    start_S: array[int]
    table_begin_S: array[int]  # start of each row's block table in `tables`
    tables: array[int]
    keep_K: array[int]  # indices of the tokens that `Keep` selects, ascending
    states: StateRows | None = None  # None for programs without recurrent states
    adapters: AdapterRows | None = None  # None if no row has one


@dataclass(frozen=True, slots=True)
class Cache:
    """Memory of keys [N, L, J, D, Z] and values [N, L, J, Z, D], with space for one vector after the last block.

    float32 or bfloat16.
    """

    k: Tensor
    v: Tensor
    block_size: int
    block_values: int  # l · J · D · Z
    slots_ZF: Tensor | None = None  # recurrent states


@dataclass(frozen=True, slots=True)
class Continuation:
    """A program to run in the same C call; its buffer `x` is the buffer `given` of the first program."""

    program: NativeProgram
    x: str
    given: str


class NativeProgram:
    """Owns a program as C structures, and its buffers, which the next run overwrites."""

    def __init__(
        self,
        library: Library,
        program: Program,
        ropes: Sequence[tuple[Tensor, Tensor]] = (),
        *,
        part: str = "body",  # of the decoder, for the tables of adapters
        max_split_tokens: int = MAX_SPLIT_TOKENS,
    ) -> None:
        self._library = library
        self._max_split_tokens = max_split_tokens
        self._program = program
        self._part = part
        self._names = tuple(program.widths)
        self._matrices: list[Matrix] = []
        self._columns: list[int] = []
        self._kept: list[Any] = [ropes]
        structs = (OpStruct * len(program.ops))(*(self._op(op) for op in program.ops))
        matrices = (MatrixStruct * max(1, len(self._matrices)))(
            *(
                MatrixStruct(m.format, m.num_out, m.num_in, column, m.rounds, m.by_rows, m.packed.data_ptr())
                for m, column in zip(self._matrices, self._columns, strict=True)
            )
        )
        tables = (RopeStruct * max(1, len(ropes)))(
            *(RopeStruct(c_PR.data_ptr(), s_PR.data_ptr(), c_PR.size(1)) for c_PR, s_PR in ropes)
        )
        self._strides = {name: stride_of(width) for name, width in program.widths.items()}
        widths = (ctypes.c_int32 * len(self._names))(*program.widths.values())
        strides = (ctypes.c_int32 * len(self._names))(*self._strides.values())
        heads = (program.num_heads, program.num_kv_heads, program.head_dim)
        self._struct = ProgramStruct(structs, len(program.ops), matrices, tables, widths, strides, *heads)
        self._kept += [structs, matrices, tables, widths, strides]
        rounded = [m.num_in for m in self._matrices if m.rounds]
        self._byte_stride = max((int(library.code.nano_int8_row_bytes(num_in)) for num_in in rounded), default=0)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._arena = torch.empty(0)
        self._capacity = 0
        self._starts = dict(zip(self._names, accumulate(self._strides.values(), initial=0), strict=False))
        self._pointers = (ctypes.c_void_p * len(self._names))()
        self._step = StepStruct(buffers=ctypes.addressof(self._pointers))

    def run(self, layout: Layout, cache: Cache, then: Continuation | None = None) -> None:
        """Run the program for a step's tokens, and `then` for the kept rows, in one C call. Raises `MemoryError`."""
        num_tokens = len(layout.token_T)
        self._reserve(num_tokens)
        step = self._step
        step.token, step.previous = _address(layout.token_T), _address(layout.previous_T)
        step.k, step.v, step.is_short = cache.k.data_ptr(), cache.v.data_ptr(), cache.k.dtype == torch.bfloat16
        step.block_bytes = cache.block_values * cache.k.itemsize
        if layout.states is not None:
            rows, slots_ZF = layout.states, cache.slots_ZF
            assert slots_ZF is not None, "the cache has no slots"
            arrays = (rows.row_T, rows.begin_S, rows.source_S, rows.first_S, rows.end, rows.slot)
            sizes = (slots_ZF.data_ptr(), slots_ZF.size(1), len(rows.begin_S))
            step.states = StatesStruct(*sizes, *map(_address, arrays))
        held = self._plan(layout, cache.block_size)
        self._adapt(layout.adapters)
        if then is None:
            self._go()
        else:
            last, num_kept = then.program, len(layout.keep_K)  # uses the kept rows without copying them
            assert last._strides[then.x] == self._strides[then.given]
            last._reserve(num_kept)
            last._pointers[last._at(then.x)] = self._place(then.given)
            last._step.all.tokens.num_tokens = num_kept
            last._adapt(layout.adapters and layout.adapters.kept)
            self._go(last)
        del held

    def run_rows(self, inputs: Mapping[str, Tensor], adapters: AdapterRows | None = None) -> None:
        """Run a program without attention on given rows: float32 [S, W] for each named buffer."""
        num_rows = next(iter(inputs.values())).size(0)
        self._reserve(num_rows)
        for name, rows_SW in inputs.items():
            self._pointers[self._at(name)] = self._place(name)
            self.buffer(name, num_rows).copy_(rows_SW)
        self._step.all.tokens.num_tokens = num_rows
        self._adapt(adapters)
        self._go()

    def buffer(self, name: str, num_rows: int, width: int | None = None) -> Tensor:
        """Return a view of the first rows (and the first `width` columns) of a buffer, float32 [S, W]."""
        assert num_rows <= self._capacity
        shape = (num_rows, self._program.widths[name] if width is None else width)
        return self._arena.as_strided(shape, (self._strides[name], 1), self._starts[name] * self._capacity)

    def _place(self, name: str) -> int:
        return self._arena.data_ptr() + 4 * self._starts[name] * self._capacity

    def _adapt(self, adapters: AdapterRows | None) -> None:
        """Set the adapters of all rows and of the kept ones."""
        step = self._step
        step.all.adapter = step.kept.adapter = None
        if adapters is not None:
            step.all.adapter, step.kept.adapter = _address(adapters.all_T), _address(adapters.kept_K)
            step.adapters = _address(adapters.tables[self._part])
            step.low, step.low_stride = adapters.low_TW.ctypes.data, adapters.low_TW.shape[1]

    def _go(self, then: NativeProgram | None = None) -> None:
        more = (None, None) if then is None else (then._struct, then._step)
        failed = self._library.code.nano_run(self._library.pool, self._struct, self._step, *more)
        if failed:
            raise MemoryError("a step needs more memory than there is")

    def _reserve(self, num_rows: int) -> None:
        """Grow every buffer to at least `num_rows` rows."""
        if num_rows <= self._capacity:
            return
        capacity = max(16, 1 << (num_rows - 1).bit_length())
        self._capacity = 0  # an interruption before the end must not leave pointers to freed memory
        self._bytes = torch.empty(capacity * self._byte_stride, dtype=torch.uint8)
        self._arena = torch.from_numpy(np.empty(capacity * sum(self._strides.values()), np.float32))
        self._step.bytes, self._step.byte_stride = self._bytes.data_ptr(), self._byte_stride
        for index, name in enumerate(self._names):
            self._pointers[index] = self._arena.data_ptr() + 4 * self._starts[name] * capacity
        self._capacity = capacity

    def _plan(self, layout: Layout, block_size: int) -> tuple[object, ...]:
        """Compute positions and crews (`nano_plan`); return the memory that the step refers to."""
        room = array("i", bytes(16 * (len(layout.token_T) + len(layout.keep_K)) + 8))
        num_floats = self._library.code.nano_plan(
            self._struct,
            self._step,
            self._library.num_threads,
            len(layout.num_tokens_S),
            _address(layout.num_tokens_S),
            _address(layout.start_S),
            _address(layout.table_begin_S),
            _address(layout.tables),
            block_size,
            _address(layout.keep_K),
            len(layout.keep_K),
            self._max_split_tokens,
            _address(room),
        )
        if num_floats < 0:
            raise MemoryError("a step needs more memory than there is")
        if not num_floats:
            return (room,)
        parts = np.empty(num_floats, np.float32)
        self._step.parts = parts.ctypes.data
        return room, parts

    def _op(self, op: Op) -> OpStruct:
        out = OpStruct(kind=ops.KINDS.index(type(op)), rope=-1, scale=1.0)
        if isinstance(op, ops.Embed):
            out.out, out.matrix, out.choice = self._at(op.out), self._add((op.table,)), _ROWS.index(op.rows)
            out.scale, out.count = op.scale, op.table.num_out
        elif isinstance(op, ops.Norm):
            out.in_, out.out, out.weight = self._at(op.x), self._at(op.out), self._pointer(op.weight)
            out.eps, out.offset, out.flags = op.eps, op.offset, _ADD * op.add
        elif isinstance(op, ops.Product):
            assert not any(m.by_rows for m in op.matrices), "products read panels"
            out.in_, out.out, out.weight = self._at(op.x), self._at(op.out), self._pointer(op.bias)
            out.matrix, out.num_matrices, out.flags = self._add(op.matrices), len(op.matrices), _ADD * op.add
        elif isinstance(op, ops.Heads):
            out.in_, out.layer, out.rope = self._at(op.x), op.layer, -1 if op.rope is None else op.rope
            out.flags = {"none": 0, "before": _NORM_FIRST, "after": _NORM_LAST}[op.norm]
            out.weight, out.weight2 = self._pointer(op.q_weight), self._pointer(op.k_weight)
            out.eps, out.offset = op.eps, op.offset
        elif isinstance(op, ops.Attend):
            assert op.scale > 0
            out.in_, out.out, out.layer = self._at(op.x), self._at(op.out), op.layer
            out.scale, out.cap, out.choice = op.scale, op.softcap or 0.0, op.window or 0
        elif isinstance(op, ops.DeltaOp):
            self._delta_op(op, out)
        else:
            self._small_op(op, out)
        return out

    def _delta_op(self, op: ops.DeltaOp, out: OpStruct) -> None:
        """Fill the C structure of an operation of layers with recurrent states."""
        out.in_, out.out = self._at(op.x), self._at(op.out)
        if isinstance(op, ops.Arrange):
            self._kept.append(op.pieces)
            out.dim, out.count, out.pieces = op.dim, op.pieces.numel(), op.pieces.data_ptr()
        elif isinstance(op, ops.Convolve):
            out.weight, out.dim, out.state = self._pointer(op.weight), op.weight.size(0), op.state
        elif isinstance(op, ops.Delta):
            out.in2, out.column, out.column2, out.state = self._at(op.more), op.a, op.b, op.state
            out.weight, out.weight2 = self._pointer(op.a_log), self._pointer(op.dt_bias)
            out.dim, out.num_keys, out.num_values = op.k_dim, op.num_k_heads, op.num_v_heads
            out.choice = int(op.is_tiled)
        else:
            out.in2, out.column = self._at(op.more), op.column
            if isinstance(op, ops.GatedNorm):
                out.weight, out.eps, out.dim = self._pointer(op.weight), op.eps, op.head_dim

    def _small_op(self, op: ops.SmallOp, out: OpStruct) -> None:
        """Fill the C structure of an operation that computes each row on its own."""
        if isinstance(op, ops.Activate):
            out.in_, out.out, out.choice = self._at(op.x), self._at(op.out), _ACTIVATIONS.index(op.kind)
        elif isinstance(op, ops.Mix):
            out.in_, out.in2, out.out, out.scale = self._at(op.x), self._at(op.y), self._at(op.out), op.scale
            out.weight, out.weight2 = self._pointer(op.a), self._pointer(op.b)
        elif isinstance(op, ops.Softcap):
            out.out, out.cap = self._at(op.x), op.cap
        elif isinstance(op, ops.Keep):
            places = [self._at(name) for name in op.buffers]
            out.in_, out.in2, out.out = *places, *[-1] * (3 - len(places))
        elif isinstance(op, ops.GateValues):
            out.in_, out.in2, out.out, out.scale = self._at(op.x), self._at(op.gate), self._at(op.more), op.scale
        else:
            out.in_, out.in2, out.out = self._at(op.before), self._at(op.gate), self._at(op.x)
            out.weight = self._pointer(op.weight)

    def _at(self, name: str) -> int:
        return self._names.index(name)

    def _add(self, matrices: tuple[Matrix, ...]) -> int:
        """Append matrices whose outputs are adjacent columns; return the index of the first."""
        first, column = len(self._matrices), 0
        for matrix in matrices:
            self._matrices.append(matrix)
            self._columns.append(column)
            column += matrix.num_out
        return first

    def _pointer(self, weight: Tensor | None) -> int | None:
        """Return the address of a float32 tensor, and keep it alive."""
        if weight is None:
            return None
        assert weight.dtype == torch.float32 and weight.is_contiguous()
        self._kept.append(weight)
        return weight.data_ptr()


def _address(values: array[Any]) -> int:
    """Return the address of an array, which must outlive its use."""
    return values.buffer_info()[0]


def stride_of(width: int) -> int:
    """Return the row stride of a buffer in floats: an odd number of cache lines.

    With an even number, especially a power of two, neighbouring rows would map to the same cache sets.
    """
    return (-(-width // _LINE_FLOATS) | 1) * _LINE_FLOATS


REPORTS = ("raw", "tempered", "processed")


@dataclass(slots=True, kw_only=True)
class Special:
    """What one row wants beyond a temperature and its token's log-probability; `draw` writes the results."""

    report: str  # one of `REPORTS`
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    times: Mapping[int, int]  # tokens so far, and how often each is in the output
    bias: Mapping[int, float]  # -inf excludes a token
    mask: bytes | None  # a bit for each allowed id
    named: Sequence[int]
    num_tops: int
    wants_raw: bool
    wants_kept: bool
    named_logprobs: Sequence[float] = ()
    tops: Sequence[tuple[int, float]] = ()
    raw_logprob: float = 0.0
    kept: Sequence[int] = ()  # ids that can be sampled, if `wants_kept`


def draw(
    library: Library,
    logits_BV: Tensor,
    temperatures: Sequence[float],
    uniforms: Sequence[float],
    is_raw: Sequence[bool],
    special: Sequence[Special | None] = (),
) -> tuple[list[int], list[float]]:
    """Draw one token per row from float32 logits; return tokens and log-probabilities (c/sample.h).

    `is_raw` requests the log-probability at temperature 1. `special` has an entry for each row, or none. A
    log-probability is NaN if the logits contain NaN or +inf, or are all -inf. Rows with `wants_kept` are overwritten.
    """
    num_rows, vocab_size = logits_BV.shape
    temperature_B, uniform_B, raw_B = array("f", temperatures), array("d", uniforms), array("i", is_raw)
    token_B, logprob_B = array("i", bytes(4 * num_rows)), array("f", bytes(4 * num_rows))
    options = [None if one is None else _SpecialMemory(one) for one in special]
    addresses = array("Q", (0 if one is None else ctypes.addressof(one.struct) for one in options))
    draws = DrawsStruct(
        *(logits_BV.data_ptr(), logits_BV.stride(0), vocab_size),
        *(_address(temperature_B), _address(uniform_B), _address(raw_B)),
        *(_address(addresses) if options else None, _address(token_B), _address(logprob_B)),
    )
    failed = library.code.nano_draw(library.pool, ctypes.byref(draws), num_rows)
    if failed:
        raise MemoryError("a step needs more memory than there is")
    for row, one in enumerate(options):
        if one is not None:
            one.read(logits_BV[row])
    return token_B.tolist(), logprob_B.tolist()


class _SpecialMemory:
    """The C structure of a row's options, and the arrays it refers to."""

    def __init__(self, special: Special) -> None:
        self._special = one = special
        seen, times = array("i", one.times.keys()), array("i", one.times.values())
        biased, bias, mask = array("i", one.bias.keys()), array("f", one.bias.values()), array("B", one.mask or b"")
        named, self._logprobs = array("i", one.named), array("f", bytes(4 * len(one.named)))
        self._ids, self._tops = array("i", bytes(4 * one.num_tops)), array("f", bytes(4 * one.num_tops))
        self._arrays: tuple[array[Any], ...] = (seen, times, biased, bias, mask, named)
        addresses = [_address(values) for values in (*self._arrays, self._logprobs, self._ids, self._tops)]
        addresses[4] = 0 if one.mask is None else addresses[4]
        self.struct = SpecialStruct(
            *(one.top_p, one.min_p, one.repetition, one.presence, one.frequency),
            *(one.top_k, REPORTS.index(one.report), one.wants_raw, one.wants_kept),
            *(len(seen), len(bias), len(named), one.num_tops, len(mask), *addresses),
        )

    def read(self, logits_V: Tensor) -> None:
        """Write the results into the `Special`."""
        one, ids = self._special, self._ids.tolist()
        count = ids.index(-1) if -1 in ids else len(ids)
        one.tops = list(zip(ids[:count], self._tops.tolist(), strict=False))
        one.named_logprobs, one.raw_logprob = self._logprobs.tolist(), self.struct.raw_logprob
        if one.wants_kept:
            one.kept = np.flatnonzero(logits_V.numpy() > -np.inf).tolist()


def normalise(library: Library, logits_BV: Tensor, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, float32 [B], and log(sum(e^((logit - largest) / temperature))), float64 [B].

    The logits are float32, contiguous within a row. Temperature 0 counts as 1. The second result is NaN if the logits
    contain NaN or +inf, or are all -inf.
    """
    assert logits_BV.dtype == torch.float32 and logits_BV.stride(1) == 1
    num_rows, vocab_size = logits_BV.shape
    temperature_B = array("f", temperatures)
    best_B, log_mass_B = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.float64)
    sums = SumsStruct(
        logits_BV.data_ptr(),
        logits_BV.stride(0),
        vocab_size,
        _address(temperature_B),
        best_B.data_ptr(),
        log_mass_B.data_ptr(),
    )
    library.code.nano_normalise(library.pool, ctypes.byref(sums), num_rows)
    return best_B, log_mass_B
