"""`CpuExecutor`: runs a program in compiled C, one call per step.

Shapes: T tokens of a step, K kept tokens, S rows, E hidden size, V vocabulary, P positions, R rotary size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.core.step import BlockCopy, RowResult
from nano_inference.executors.batch import Rows, previous_tokens
from nano_inference.executors.cpu.drawing import KernelSampler, kernel_normalise
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.lower import LOWERINGS, CpuWeights, Lowerings, check_operations, head_sizes, lowered
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.executors.cpu.native import Cache, Continuation, Layout, NativeProgram
from nano_inference.executors.cpu.store import KernelStore
from nano_inference.executors.cpu.weights import CpuStaged, Rounding, values_of
from nano_inference.executors.devices import free_bytes
from nano_inference.executors.protocol import CacheSize
from nano_inference.executors.sampling import WholeVocabulary
from nano_inference.executors.staging import Pace
from nano_inference.executors.step import InferenceMode, Sampler, run_step
from nano_inference.executors.step_input import ForwardInput
from nano_inference.models.config import ModelConfig
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


class CpuExecutor:
    """Owns packed weights, the KV cache and a step's buffers; satisfies `protocol.Executor`, which documents it."""

    lookahead = 1
    steps_share_processors = True
    failure = None

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
        self._ropes = rope_tables(program, max_len)
        self._mode = InferenceMode()
        self._model: CpuModel | None = None
        self._shared: frozenset[str] = frozenset()
        """Names of matrices that a copy may share: their memory is never reused."""
        self._spare: dict[str, Matrix] = {}
        """Replaced matrices; the next update reuses their memory, because filling new pages is several times slower."""
        self._store: KernelStore | None = None

    @property
    def code(self) -> str:
        return self.library.isa

    # ---- steps ----

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        return self._mode.run(lambda: self._run(rows, copies, fresh))

    def _run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        self.store.prepare(fresh, copies)
        return run_step(self, rows, self.sampler, self._vocabulary)

    def close(self) -> None:
        """Do nothing: the executor has no processes."""

    def recover(self) -> None:
        """Undo what an interrupted `run` left in this thread."""
        if self._store is not None:
            self._store.recover()
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

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V]; the next call overwrites the result."""
        self.model.logits.run_rows({"x": hidden_SE})
        return self.model.logits.buffer("logits", hidden_SE.size(0), self.program.vocab_size)

    def forward(self, inputs: ForwardInput, cache: Any) -> Tensor:
        """Return float32 logits [T, V] of every token, using the caller's `KernelStore`."""
        assert isinstance(cache, KernelStore)
        assert max(span.end for span in inputs.spans) <= self._max_len
        spans = [(span.num_tokens, span.start, span.blocks) for span in inputs.spans]
        tokens = inputs.token_T.tolist()
        layout = layout_of(tokens, inputs.prev_T.tolist(), spans, range(len(tokens)))
        return self._mode.run(lambda: self.logits(self._hidden(layout, cache.cache)))

    def _hidden(self, layout: Layout, cache: Cache, *, windows: bool = True) -> Tensor:
        body = self.model.body if windows else self.model.full_body
        assert body is not None
        body.run(layout, cache)
        return body.buffer("x", len(layout.keep_K))

    def _layout(self, rows: Rows, kept: Sequence[int]) -> Layout:
        assert max(row.start + len(row.tokens) for row in rows) <= self._max_len
        spans = [(len(row.tokens), row.start, row.blocks) for row in rows]
        return layout_of(chain.from_iterable(row.tokens for row in rows), previous_tokens(rows), spans, kept)

    @property
    def model(self) -> CpuModel:
        assert self._model is not None, "there are no weights"
        return self._model

    def step_bytes(self, block_size: int) -> int:
        return 0

    def free_bytes(self, share: float) -> int:
        return free_bytes(self.device, share)

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Do nothing: the kernels are compiled already."""

    # ---- cache ----

    @property
    def store(self) -> KernelStore:
        assert self._store is not None, "there is no cache"
        return self._store

    def cache_dtype(self, wanted: KvDtype) -> torch.dtype:
        """Return float32 for "auto"."""
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32

    def block_bytes(self, block_size: int, dtype: KvDtype = "auto") -> int:
        return self.program.kv_bytes_per_token(self.cache_dtype(dtype).itemsize) * block_size

    def new_cache(self, size: CacheSize) -> None:
        self._store = new_store(
            self.program,
            size.num_blocks,
            size.block_size,
            self.library,
            self.cache_dtype(size.dtype),
            eager=size.eager,
        )

    def free_cache(self) -> None:
        self.store.free()

    def restore_cache(self) -> None:
        self.store.restore()

    @property
    def cache_bytes(self) -> int:
        return 0 if self._store is None else self._store.num_bytes

    # ---- weights ----

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> CpuStaged:
        """Start filling new weights, reusing the memory of replaced ones first."""
        live = None if self._model is None else self._model.weights
        spare, self._spare = self._spare, {}
        tables = self.program.tables
        return CpuStaged(
            self.library, self._rounding, live, self._bound, spare, tables, pace, check_finite=check_finite
        )

    def _bound(self, weights: CpuWeights) -> CpuModel:
        program, x = self.program, {"x": self.program.hidden_size}

        def native(of: Program, part: str, given: Mapping[str, int], result: str) -> NativeProgram:
            ops = {"body": of.body, "final": of.final, "logits": (*of.final, *of.head)}[part]
            ropes = self._ropes if part == "body" else ()
            return NativeProgram(self.library, lowered(of, ops, weights, given, result, self._lowerings), ropes)

        full = program.without_windows() if program.has_full_decode else None
        return CpuModel(
            weights=weights,
            body=native(program, "body", {}, "x"),
            full_body=None if full is None else native(full, "body", {}, "x"),
            final=native(program, "final", x, "h"),
            logits=native(program, "logits", x, "logits"),
        )

    def commit(self, staged: CpuModel) -> None:
        if self._model is staged:
            return
        old, new = {} if self._model is None else self._model.weights.matrices, staged.weights.matrices
        replaced = {name: matrix for name, matrix in old.items() if matrix is not new[name]}
        spare = {name: matrix for name, matrix in replaced.items() if name not in self._shared}
        # In this order, an interruption never marks memory as spare that the model still uses.
        self._model = staged
        self._spare = spare
        self._shared = self._shared - replaced.keys()

    def drop_spare(self) -> None:
        self._spare = {}

    def discard_weights(self) -> None:
        """Free the memory of the weights, unless a copy shares it."""
        self._model, self._spare = None, {}

    def move_weights(self, device: torch.device) -> None:
        """Do nothing: the weights are always in main memory."""

    def weight_values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight), each unpacked when it is yielded."""
        yield from self._values(self.model.weights, names)

    def staged_values(self, staged: CpuModel) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) of staged weights, each unpacked when it is yielded."""
        yield from self._values(staged.weights, None)

    def _values(self, weights: CpuWeights, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        for spec in self.program.weights:
            if names is None or spec.name in names:
                yield spec.name, values_of(self.library, weights, spec, self._rounding)

    @property
    def weight_dtype(self) -> str:
        return "float32" if self._rounding == "own" else self._rounding

    @property
    def weight_bytes(self) -> int:
        return 0 if self._model is None else self._model.weights.num_bytes

    def copy(self) -> CpuExecutor:
        """Return a second executor that shares the packed weights."""
        other = CpuExecutor(
            self.config, self.program, self.library, self._max_len, self._rounding, self.sampler, self._lowerings
        )
        other.commit(other._bound(self.model.weights))
        self._shared = other._shared = frozenset(self.model.weights.matrices)
        return other


def new_store(
    program: Program, num_blocks: int, block_size: int, library: Library, dtype: torch.dtype, *, eager: bool = False
) -> KernelStore:
    """Return a cache for a program's layers; `eager` faults in all of its pages in the background."""
    _, num_kv_heads, head_dim = head_sizes(program)
    num_layers = len(program.caches)
    return KernelStore(num_layers, num_blocks, block_size, num_kv_heads, head_dim, library, dtype=dtype, eager=eager)


def rope_tables(program: Program, max_len: int) -> Ropes:
    """Return, for each rotary embedding, cosines and signed sines [P, R] of every position."""
    position_P = torch.arange(max_len)
    tables = (RotaryTable(rope, torch.device("cpu")) for rope in program.ropes)
    pairs = (table.at(position_P, torch.float32) for table in tables)
    return tuple((cos_P1R.squeeze(1).contiguous(), sin_P1R.squeeze(1).contiguous()) for cos_P1R, sin_P1R in pairs)


def layout_of(
    tokens: Iterable[int],
    previous: Iterable[int],
    spans: Sequence[tuple[int, int, tuple[int, ...]]],
    kept: Iterable[int],
) -> Layout:
    """Return a step's `Layout`; each span is (number of tokens, first position, block table)."""
    lengths = [len(blocks) for _, _, blocks in spans]
    return Layout(
        token_T=array("i", tokens),
        previous_T=array("i", previous),
        num_tokens_S=array("i", [num_tokens for num_tokens, _, _ in spans]),
        start_S=array("i", [start for _, start, _ in spans]),
        table_begin_S=array("i", accumulate(lengths[:-1], initial=0)),
        tables=array("i", chain.from_iterable(blocks for _, _, blocks in spans)),
        keep_K=array("i", kept),
    )
