"""`CudaExecutor`: computes decode rows in windows on the device, and all other rows in passes of the same launches.

The same code runs on CPU tensors with the plain kernels, which is how it is tested without a GPU.

Shapes: T tokens of a pass, K kept tokens, S rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nano_inference.core.step import BlockCopy, Launch, Row, RowResult, RowState
from nano_inference.executors.batch import Rows
from nano_inference.executors.cuda.adapters import AdapterStacks
from nano_inference.executors.cuda.decode import CapturedStepper, EagerStepper, StepKey, Stepper
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.memory import Limits, StepMemory, check_program
from nano_inference.executors.cuda.passes import Pass, PassRow, TokenRow, build_pass
from nano_inference.executors.cuda.ranks import Ranks
from nano_inference.executors.cuda.registers import Lowered
from nano_inference.executors.cuda.shrink import run_in_parts
from nano_inference.executors.cuda.weights import LiveCudaWeights
from nano_inference.executors.cuda.windows import Windows, fits_window
from nano_inference.executors.devices import release_unused
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.sampling import WHOLE
from nano_inference.executors.step import InferenceMode, Result, run_step
from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.adapters import Pairs
from nano_inference.executors.torch.executor import torch_cache
from nano_inference.executors.torch.store import KVStore
from nano_inference.loading.adapters import Adapter
from nano_inference.models.config import ModelConfig
from nano_inference.models.program import Program
from nano_inference.types import SamplingParams

StepperFactory = Callable[[Callable[[StepKey], None], torch.device], Stepper]


def make_stepper(step: Callable[[StepKey], None], device: torch.device) -> Stepper:
    """Return a stepper that captures graphs on CUDA, and an eager one elsewhere."""
    return CapturedStepper(step, device) if device.type == "cuda" else EagerStepper(step)


@dataclass(slots=True)
class Made:
    """What an executor allocates at its first step; refers to the weights, and the windows to the cache."""

    memory: StepMemory | None = None
    windows: Windows | None = None

    def drop_windows(self) -> None:
        self.windows = None

    def drop(self) -> None:
        self.memory = self.windows = None


class CudaExecutor(Executor):
    """Owns a model's weights, its KV cache and the memory of its steps."""

    code = "cuda"
    steps_share_processors = False

    def __init__(
        self,
        config: ModelConfig,
        program: Program,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        limits: Limits,
        stepper: StepperFactory = make_stepper,
        ranks: Ranks | None = None,
    ) -> None:
        """Create an executor without weights and cache. `dtype` is the precision P of the program (`models.ops`).

        With `ranks`, `program` is this rank's part, with the `vocab_size` of the whole.

        Raises `ValueError` if the kernels do not support the program.
        """
        check_program(program, kernels, limits, ranks)
        self.config = config
        self.program = program
        self.device = torch.empty(0, device=device).device  # with an index, to compare equal to tensors' devices
        self.dtype = dtype
        self.lookahead = limits.lookahead
        self._kernels, self._limits, self._stepper, self._ranks = kernels, limits, stepper, ranks
        self._mode = InferenceMode()
        self._made = Made()
        self._adapters = AdapterStacks(program, self.device, dtype, limits.max_tokens, self._made.drop_windows)
        self.weights = LiveCudaWeights(program, self.device, dtype, self._made.drop)
        self.cache = torch_cache(program, self.device, dtype, self._made.drop_windows)

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        return self._inside(lambda: self._run(rows, copies))

    def _inside(self, work: Callable[[], Result]) -> Result:
        """Call `work` in inference mode, with this executor's GPU as the current one: Triton launches there."""
        if self.device.type != "cuda":
            return self._mode.run(work)
        with torch.cuda.device(self.device):
            return self._mode.run(work)

    def _run(self, rows: Rows, copies: tuple[BlockCopy, ...]) -> Mapping[int, RowResult]:
        """Run rows after copying blocks. Fresh blocks are not cleared: the kernels read written slots only."""
        if (collect := self._start(rows, copies)) is not None:
            return collect()
        self.store.prepare((), copies)
        return run_in_parts(rows, self._run_pass, self._limits.max_tokens)

    @property
    def launch(self) -> Launch | None:
        return self._launch if self._ranks is None else None

    def _launch(
        self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...], *, is_next: bool
    ) -> Callable[[], Mapping[int, RowResult]] | None:
        collect = self._inside(lambda: self._start(rows, copies, is_next=is_next))
        return None if collect is None else lambda: self._inside(collect)

    def _start(
        self, rows: Rows, copies: tuple[BlockCopy, ...], *, is_next: bool = False
    ) -> Callable[[], Mapping[int, RowResult]] | None:
        """Start a window; return what reads it, or None if the rows need a pass."""
        is_full = self.program.has_full_decode
        if len(rows) > self._limits.max_rows or not all(fits_window(row, has_full_decode=is_full) for row in rows):
            return None
        if not is_next:
            self.store.prepare((), copies)
            self._fork(rows)
        with suppress(torch.OutOfMemoryError):
            collect = self._once(lambda: self.windows.launch(rows, is_next=is_next))
            return lambda: self._once(collect)
        self._made.drop_windows()
        release_unused(self.device)
        return None

    def _fork(self, rows: Rows) -> None:
        """Copy states that rows start from to the rows' slots: in a window, a row reads and writes one slot."""
        for row in rows:
            if row.state is not None and row.start and row.state.source != row.state.slot:
                assert self.store.states is not None
                self.store.states.slots_ZF[row.state.slot].copy_(self.store.states.slots_ZF[row.state.source])

    def _run_pass(self, rows: Rows) -> dict[int, RowResult]:
        return self._once(lambda: run_step(self, rows, self.memory.draws.draw, WHOLE))

    def _once(self, work: Callable[[], Result]) -> Result:
        """Call `work`. If its memory runs out, a caller repeats it in parts.

        A rank must not, because others do not, nor a program whose rows have overwritten the states that they read.
        """
        try:
            return work()
        except torch.OutOfMemoryError as error:
            if self._ranks is None and not self.program.states:
                raise
            self._made.drop_windows()  # the host does not know how far a window got
            raise MemoryError("a step needs more memory than there is") from error

    def stage_adapter(self, adapter: Adapter) -> Pairs:
        return self._adapters.stage(adapter)

    def commit_adapter(self, number: int, staged: Pairs) -> None:
        self._adapters.commit(number, staged)

    def drop_adapter(self, number: int) -> None:
        self._adapters.drop(number)

    def recover(self) -> None:
        self._mode.recover()
        self._made.drop_windows()

    def hidden(self, rows: Rows, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        """Return the residual [K, E] in memory that the next pass overwrites."""
        return self._hidden(self._pass(rows, self.store, has_windows=windows), kept)

    def _pass(self, rows: Sequence[PassRow], store: KVStore, *, has_windows: bool = True) -> Pass:
        is_deterministic = self._limits.is_deterministic
        step = build_pass(rows, store, self.memory.partials, has_windows=has_windows, is_deterministic=is_deterministic)
        if not any(row.adapter for row in rows):
            return step
        places = self._adapters.places([row.adapter for row in rows for _ in row.tokens])
        place_T = torch.tensor(places, dtype=torch.int32).to(self.device)
        return replace(step, adapter_T=place_T)

    def _hidden(self, step: Pass, kept: Sequence[int]) -> Tensor:
        body, registers, size = self.memory.parts.body, self.memory.registers, step.token_T.size(0)
        for launch in body.launches[: body.keep_after]:
            launch(step, size)
        if len(kept) < size:
            kept_K = torch.tensor(kept, dtype=torch.long).to(self.device)
            for register in body.kept:
                registers.rows(register, len(kept)).copy_(registers.rows(register, size)[kept_K])
            if step.adapter_T is not None:
                step = replace(step, adapter_T=step.adapter_T[kept_K])
        for launch in body.launches[body.keep_after :]:
            launch(step, len(kept))
        return registers.read(body.result, len(kept))

    def step_logits(self, rows: Rows, kept: Sequence[int]) -> Tensor:
        return self.logits(self.hidden(rows, kept))

    def final(self, hidden_SE: Tensor) -> Tensor:
        return self._of_rows(self.memory.parts.final, hidden_SE)

    def logits(self, hidden_SE: Tensor, adapters: Sequence[int] = ()) -> Tensor:
        """Return the logits; adapters have none of the head's matrices."""
        logits_SV = self._of_rows(self.memory.parts.logits, hidden_SE).float()
        cap = self.memory.parts.logits.softcap
        if cap is not None:
            self._kernels.operate.softcap(logits_SV, cap)
        return logits_SV

    def _of_rows(self, part: Lowered, hidden_SE: Tensor) -> Tensor:
        """Return a part's result for any number of rows, in new memory."""
        memory = self.memory
        out_SW = torch.empty((hidden_SE.size(0), part.result.width), dtype=self.dtype, device=self.device)
        for start in range(0, hidden_SE.size(0), self._limits.max_rows):
            piece_SE = hidden_SE[start : start + self._limits.max_rows]
            size = piece_SE.size(0)
            memory.registers.read(memory.parts.given, size).copy_(piece_SE)
            for launch in part.launches:
                launch(None, size)
            out_SW[start : start + size].copy_(memory.registers.read(part.result, size))
        return out_SW

    def forward(
        self, inputs: ForwardInput, cache: Any, kept: Sequence[int] | None = None, *, windows: bool = True
    ) -> Tensor:
        """Return float32 logits [K, V], using the caller's `KVStore`."""
        assert isinstance(cache, KVStore)

        def work() -> Tensor:
            step = self._pass(rows_of(inputs), cache, has_windows=windows)
            return self.logits(self._hidden(step, range(step.token_T.size(0)) if kept is None else kept))

        return self._inside(work)

    @property
    def memory(self) -> StepMemory:
        """Return the memory of the steps; it is allocated when it is first needed after the weights."""
        if self._made.memory is None:
            weights = self.weights.model.weights
            self._made.memory = StepMemory(
                self.program, weights, self._kernels, self._limits, self.dtype, self._adapters, self._ranks
            )
        return self._made.memory

    @property
    def windows(self) -> Windows:
        if self._made.windows is None:
            step = self.memory.decode_step(self.store)
            self._made.windows = Windows(step, self._stepper(step.run, self.device))
        return self._made.windows

    def step_bytes(self, block_size: int) -> int:
        """Return what the largest pass and window allocate on CUDA, beside the memory of steps, allocated here."""
        if self.device.type != "cuda":
            return 0
        steps = tuple(largest_steps(self.memory.limits, block_size))
        num_blocks = 1 + max(block for rows in steps for row in rows for block in row.blocks)
        self.cache.allocate(CacheSize(num_blocks=num_blocks, block_size=block_size, num_states=1))
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        for rows in steps:
            self.run(rows, (), ())
        peak = torch.cuda.max_memory_allocated(self.device)
        self.cache.drop()
        release_unused(self.device)
        return peak - before

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile the kernels, and capture the steps of windows without truncation, for rows of up to 2,048 keys."""

        def work() -> None:
            for rows in usual_passes(self._limits, self.store):
                run_in_parts(rows, self._run_pass, self._limits.max_tokens)
            self.windows.warm_up(progress)

        self._inside(work)

    @property
    def store(self) -> KVStore:
        return self.cache.store

    def copy(self) -> CudaExecutor:
        """Return a second executor with copies of the weights."""
        other = CudaExecutor(
            *(self.config, self.program, self.device, self.dtype),
            *(self._kernels, self._limits, self._stepper, self._ranks),
        )
        other.weights.commit(self.weights.copied())
        return other


def rows_of(inputs: ForwardInput) -> list[TokenRow]:
    """Return the rows of a step that is given as tensors."""
    tokens, previous = inputs.token_T.tolist(), inputs.prev_T.tolist()
    return [
        TokenRow(
            tuple(tokens[one.offset : one.offset + one.num_tokens]),
            *(previous[one.offset], one.start, one.blocks, one.state),
        )
        for one in inputs.spans
    ]


_PLAIN = SamplingParams(temperature=1.0, logprobs=1)
_CUT = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, raw_logprobs=True)
"""Without and with truncation; both want top tokens, which have kernels of their own."""


def largest_steps(limits: Limits, block_size: int) -> Iterator[Rows]:
    """Yield a pass with the most tokens and draws, and a window with the most rows; their blocks are the first ones."""
    num_tokens = min(limits.max_tokens // limits.max_rows, limits.max_len - 1)
    num_blocks = -(-(num_tokens + 1) // block_size)

    def row(index: int, size: int, start: int) -> Row:
        return _row(index, size, start, range(index * num_blocks, (index + 1) * num_blocks), _CUT)

    yield tuple(row(index, num_tokens, 0) for index in range(limits.max_rows))
    yield tuple(row(index, 1, num_tokens) for index in range(limits.max_rows))


def usual_passes(limits: Limits, store: KVStore) -> Iterator[Rows]:
    """Yield passes that together launch every kernel of a pass, in each form that Triton compiles.

    Decode rows and a prompt: 3 and 16 tokens, because Triton distinguishes multiples of 16; and as many as can be,
    because `Variant.launch` distinguishes many programs. Each with and without truncation. All rows share blocks.
    Deterministic products have tiles, and so kernels, for some numbers of tokens between.
    """
    most = min(limits.max_tokens, limits.max_len, store.num_blocks * store.block_size)
    many = min(limits.max_rows, most - 1) - 1
    sizes = [(1, 2), (1, 15), (many, most - many)]
    if limits.is_deterministic:
        sizes += [(1, 24 << power) for power in range(most.bit_length()) if 24 << power < most]
    for (size, num_tokens), params in product(sizes, (_PLAIN, _CUT)):
        blocks = range(-(-num_tokens // store.block_size))
        decode = (_row(index, 1, 1, blocks, params) for index in range(size))
        yield (*decode, _row(size, num_tokens, 0, blocks, params))


def _row(index: int, size: int, start: int, blocks: range, params: SamplingParams) -> Row:
    return Row(
        id=index,
        tokens=(0,) * size,
        prev_token=-1 if not start else 0,
        start=start,
        blocks=tuple(blocks),
        num_sampled=1,
        params=params,
        logprobs_mode="processed",
        seed=0,
        sample_index=0,
        state=RowState(0, 0),
    )
