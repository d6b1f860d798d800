"""`CpuExecutor`: runs a program in compiled C, one call per step.

Shapes: T tokens of a step, K kept tokens, S rows, E hidden size, V vocabulary, P positions, R rotary size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.core.step import BlockCopy, RowResult
from nano_inference.executors.batch import Rows, adapter_numbers, previous_tokens, spans_of
from nano_inference.executors.cache import CacheMemory
from nano_inference.executors.cpu.adapters import CpuAdapter, adapter_rows, pack_adapter
from nano_inference.executors.cpu.drawing import KernelSampler, kernel_normalise
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.lower import LOWERINGS, CpuWeights, Lowerings, check_operations, head_sizes, lowered
from nano_inference.executors.cpu.native import Cache, Continuation, Layout, NativeProgram, StateRows
from nano_inference.executors.cpu.store import KernelStore
from nano_inference.executors.cpu.weights import LiveCpuWeights, Rounding
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.sampling import WholeVocabulary
from nano_inference.executors.states import StateSlots, ends_of
from nano_inference.executors.step import InferenceMode, Sampler, run_step
from nano_inference.executors.step_input import ForwardInput, Span
from nano_inference.loading.adapters import Adapter
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Op
from nano_inference.models.program import Program
from nano_inference.models.rope import RotaryTable

Ropes = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class CpuModel:
    """A program lowered onto packed weights, with the buffers of one step."""

    weights: CpuWeights
    body: NativeProgram
    full_body: NativeProgram | None
    """`body` without windows, for generated tokens of programs with `has_full_decode`; None for other programs."""
    final: NativeProgram
    logits: NativeProgram  # final norm and head


class CpuExecutor(Executor):
    """Owns packed weights, the KV cache and a step's buffers."""

    def __init__(
        self,
        config: ModelConfig,
        program: Program,
        library: Library,
        max_len: int,
        rounding: Rounding = "own",
        sampler: Sampler | None = None,
        lowerings: Lowerings = LOWERINGS,
    ) -> None:
        """Create an executor without weights and cache, for sequences of up to `max_len` positions.

        Raises `ValueError` naming an operation that the kernels do not support.
        """
        check_operations(program, lowerings)
        self.config = config
        self.program = program
        self.device = torch.device("cpu")
        self.library = library
        self._max_len = max_len
        self._rounding: Rounding = rounding
        self.sampler = KernelSampler(library) if sampler is None else sampler
        self._vocabulary = WholeVocabulary(kernel_normalise(library))
        self._lowerings = lowerings
        self._mode = InferenceMode()
        self._adapters: dict[int, CpuAdapter] = {}
        bind = partial(bound, program, library, rope_tables(program, max_len), lowerings)
        self.weights: LiveCpuWeights[CpuModel] = LiveCpuWeights(program, library, rounding, bind)
        make = partial(new_store, program, library)
        self.cache: CacheMemory[KernelStore] = CacheMemory(program, self.device, kv_dtype, make)

    @property
    def code(self) -> str:
        return self.library.isa

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        def work() -> Mapping[int, RowResult]:
            self.store.prepare(fresh, copies)
            return run_step(self, rows, self.sampler, self._vocabulary)

        return self._mode.run(work)

    def recover(self) -> None:
        if self.cache.is_allocated:
            self.store.recover()
        self._mode.recover()

    def hidden(self, rows: Rows, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        """Return the residual [K, E] in a buffer that the next step overwrites; see `Forward.hidden`."""
        return self._hidden(self._layout(rows, kept), self.store.cache, windows=windows)

    def step_logits(self, rows: Rows, kept: Sequence[int]) -> Tensor:
        """Return float32 logits [K, V] from a single C call, in a buffer that the next step overwrites."""
        head = self.model.logits
        self.model.body.run(self._layout(rows, kept), self.store.cache, Continuation(head, "x", "x"))
        return head.buffer("logits", len(kept), self.program.vocab_size)

    def final(self, hidden_SE: Tensor) -> Tensor:
        """Apply the final norm to [S, E]; the next call overwrites the result."""
        self.model.final.run_rows({"x": hidden_SE})
        return self.model.final.buffer("h", hidden_SE.size(0))

    def logits(self, hidden_SE: Tensor, adapters: Sequence[int] = ()) -> Tensor:
        """Return float32 logits [S, V]; the next call overwrites the result."""
        numbers = adapters or [0] * hidden_SE.size(0)
        self.model.logits.run_rows({"x": hidden_SE}, adapter_rows(numbers, (), self._adapters))
        return self.model.logits.buffer("logits", hidden_SE.size(0), self.program.vocab_size)

    def forward(
        self, inputs: ForwardInput, cache: Any, kept: Sequence[int] | None = None, *, windows: bool = True
    ) -> Tensor:
        """Return float32 logits [K, V], using the caller's `KernelStore`; the next step overwrites the result."""
        assert isinstance(cache, KernelStore)
        assert max(span.end for span in inputs.spans) <= self._max_len
        tokens = inputs.token_T.tolist()
        kept = range(len(tokens)) if kept is None else kept
        states = state_rows(inputs.spans) if self.program.states else None
        layout = layout_of(tokens, inputs.prev_T.tolist(), inputs.spans, kept, states)
        return self._mode.run(lambda: self.logits(self._hidden(layout, cache.cache, windows=windows)))

    def _hidden(self, layout: Layout, cache: Cache, *, windows: bool = True) -> Tensor:
        body = self.model.body if windows else self.model.full_body
        assert body is not None
        body.run(layout, cache)
        return body.buffer("x", len(layout.keep_K))

    def _layout(self, rows: Rows, kept: Sequence[int]) -> Layout:
        assert max(row.start + len(row.tokens) for row in rows) <= self._max_len
        spans = spans_of(rows)
        states = state_rows(spans) if self.program.states else None
        tokens = chain.from_iterable(row.tokens for row in rows)
        layout = layout_of(tokens, previous_tokens(rows), spans, kept, states)
        if not any(row.adapter for row in rows):
            return layout
        return replace(layout, adapters=adapter_rows(adapter_numbers(rows), kept, self._adapters))

    def stage_adapter(self, adapter: Adapter) -> CpuAdapter:
        return pack_adapter(self.library, self.program, adapter)

    def commit_adapter(self, number: int, staged: CpuAdapter) -> None:
        self._adapters[number] = staged

    def drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    @property
    def model(self) -> CpuModel:
        return self.weights.model

    @property
    def store(self) -> KernelStore:
        return self.cache.store

    def copy(self) -> CpuExecutor:
        """Return a second executor that shares the packed weights."""
        other = CpuExecutor(
            self.config, self.program, self.library, self._max_len, self._rounding, self.sampler, self._lowerings
        )
        self.weights.share_with(other.weights, self.weights.rebound())
        return other


def kv_dtype(wanted: KvDtype) -> torch.dtype:
    """Return the precision of keys and values: float32 by default."""
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def new_store(program: Program, library: Library, size: CacheSize, dtype: torch.dtype) -> KernelStore:
    """Return a cache for a program's layers."""
    _, num_kv_heads, head_dim = head_sizes(program)
    shape = (len(program.caches), size.num_blocks, size.block_size, num_kv_heads, head_dim)
    states = StateSlots(program, size.num_states, torch.device("cpu")) if program.states else None
    return KernelStore(*shape, library, dtype=dtype, eager=size.eager, states=states)


def bound(program: Program, library: Library, ropes: Ropes, lowerings: Lowerings, weights: CpuWeights) -> CpuModel:
    """Return a program lowered onto weights."""
    x = {"x": program.hidden_size}

    def native(of: Program, ops: Sequence[Op], given: Mapping[str, int], result: str) -> NativeProgram:
        kernel_ops = lowered(of, ops, weights, given, result, lowerings)
        part = "head" if given else "body"
        return NativeProgram(library, kernel_ops, () if given else ropes, part=part)  # only bodies rotate

    full = program.without_windows() if program.has_full_decode else None
    return CpuModel(
        weights=weights,
        body=native(program, program.body, {}, "x"),
        full_body=None if full is None else native(full, full.body, {}, "x"),
        final=native(program, program.final, x, "h"),
        logits=native(program, (*program.final, *program.head), x, "logits"),
    )


def rope_tables(program: Program, max_len: int) -> Ropes:
    """Return, for each rotary embedding, cosines and signed sines [P, R] of every position."""
    position_P = torch.arange(max_len)
    tables = (RotaryTable(rope, torch.device("cpu")) for rope in program.ropes)
    pairs = (table.at(position_P, torch.float32) for table in tables)
    return tuple((cos_P1R.squeeze(1).contiguous(), sin_P1R.squeeze(1).contiguous()) for cos_P1R, sin_P1R in pairs)


def layout_of(
    tokens: Iterable[int],
    previous: Iterable[int],
    spans: Sequence[Span],
    kept: Iterable[int],
    states: StateRows | None,
) -> Layout:
    """Return a step's `Layout`."""
    return Layout(
        token_T=array("i", tokens),
        previous_T=array("i", previous),
        num_tokens_S=array("i", [span.num_tokens for span in spans]),
        start_S=array("i", [span.start for span in spans]),
        table_begin_S=array("i", accumulate((len(span.blocks) for span in spans[:-1]), initial=0)),
        tables=array("i", chain.from_iterable(span.blocks for span in spans)),
        keep_K=array("i", kept),
        states=states,
    )


def state_rows(spans: Sequence[Span]) -> StateRows:
    """Return the slots of a step's rows, which all have some."""
    source, ends, first = array("i"), array("i"), array("i", [0])
    slots = array("i")
    for span in spans:
        assert span.state is not None, "a row without slots"
        source.append(span.state.source if span.start else -1)
        for end, slot in ends_of(span.state, span.end):
            ends.append(span.offset + end - span.start)
            slots.append(slot)
        first.append(len(ends))
    return StateRows(
        row_T=array("i", chain.from_iterable([row] * span.num_tokens for row, span in enumerate(spans))),
        begin_S=array("i", [span.offset for span in spans]),
        source_S=source,
        first_S=first,
        end=ends,
        slot=slots,
    )
