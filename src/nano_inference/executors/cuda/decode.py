"""`DecodeStep`: the launches that sample one token for every slot of a window, and the steppers that repeat them.

All memory is allocated before: a step reads and writes the same addresses each time, waits for nothing and copies
nothing to the host, so that a CUDA graph can replay it.

Shapes: S slots, R rows, Q tiles of rows that share a prefix, X rows per tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nano_inference.executors.cuda.passes import AttendPart, PartialMemory, Pass
from nano_inference.executors.cuda.records import Groups, Rows, States
from nano_inference.executors.cuda.registers import Lowered, Machine
from nano_inference.executors.cuda.sample_records import Scratch
from nano_inference.executors.cuda.slots import SlotMemory
from nano_inference.executors.cuda.vocabulary import VocabularyTables
from nano_inference.executors.torch.store import KVStore


class StepKey(NamedTuple):
    """What determines the launches of a step."""

    num_rows: int
    num_splits: int  # splits of the longest row that the step can attend to
    has_cut: bool  # a row truncates
    has_tops: bool  # a row wants its most probable tokens
    has_groups: bool  # rows share prefixes
    has_adapters: bool = False


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of a step for R rows, int32; `load` writes the first four."""

    token_R: Tensor
    previous_R: Tensor
    position_R: Tensor
    length_R: Tensor
    start_R: Tensor  # 0, 1, 2, … R
    shared_R: Tensor
    row_QX: Tensor
    shared_Q: Tensor


def step_tensors(num_rows: int, num_grouped: int, device: torch.device) -> StepTensors:
    """Allocate the inputs of steps of up to `num_rows` rows, with tiles of `num_grouped` rows that share a prefix."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    tiles = max(1, num_rows // 2)
    return StepTensors(
        token_R=zeros(num_rows),
        previous_R=zeros(num_rows),
        position_R=zeros(num_rows),
        length_R=zeros(num_rows),
        start_R=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        shared_R=zeros(num_rows),
        row_QX=zeros(tiles, num_grouped).fill_(-1),
        shared_Q=zeros(tiles),
    )


@dataclass(slots=True, kw_only=True)
class DecodeStep:
    """Owns nothing; runs one token of a window on the memory it is given."""

    machine: Machine
    body: Lowered
    head: Lowered  # reads the result of the body
    slots: SlotMemory
    vocabulary: VocabularyTables
    scratch: Scratch
    partials: PartialMemory
    tensors: StepTensors
    store: KVStore
    has_full_decode: bool = False  # Windows of the program restrict prompt tokens only
    reads_prefixes_once: bool = True
    """Use groups of rows that share a prefix; a row has the same bits with and without its group."""

    def run(self, key: StepKey) -> None:
        """Sample a token for each running slot among the first `key.num_rows`."""
        n, kernels, tensors = key.num_rows, self.machine.kernels, self.tensors
        slots, slot_B = self.slots.slots, self.slots.slot_S.narrow(0, 0, n)
        inputs = [
            one.narrow(0, 0, n) for one in (tensors.token_R, tensors.previous_R, tensors.position_R, tensors.length_R)
        ]
        kernels.sample.load(slot_B, slots, *inputs)
        step = self._pass(key)
        for launch in (*self.body.launches, *self.head.launches):
            launch(step, n)
        logits_BV, cap = self.machine.registers.read(self.head.result, n), self.head.softcap
        sampler, tables = kernels.sample, self.vocabulary.tables
        sampler.adjust(self.scratch, logits_BV, slot_B, slots, tables, cap)
        if key.has_cut:
            sampler.cut(self.scratch, slot_B, slots)
        sampler.draw(self.scratch, logits_BV, slot_B, slots, has_cut=key.has_cut, softcap=cap)
        if key.has_tops:
            sampler.tops(self.scratch, logits_BV, slot_B, slots, has_cut=key.has_cut, softcap=cap)
        rings = self.slots.ring_token_SK, self.slots.ring_logprob_SK
        sampler.advance(self.scratch, slot_B, slots, tables, *rings)

    def _pass(self, key: StepKey) -> Pass:
        n, tensors = key.num_rows, self.tensors
        part = AttendPart(
            first_token=0,
            num_tokens=n,
            first_row=0,
            rows=Rows(
                tensors.start_R.narrow(0, 0, n + 1), tensors.length_R.narrow(0, 0, n), tensors.shared_R.narrow(0, 0, n)
            ),
            max_queries=1,
            position_T=tensors.position_R.narrow(0, 0, n),
            partials=self.partials.views(n, key.num_splits),
            groups=Groups(tensors.row_QX, tensors.shared_Q) if key.has_groups else None,
        )
        start_R, recurrent_R = tensors.start_R.narrow(0, 0, n + 1), self.slots.recurrent_S.narrow(0, 0, n)
        states = States(start_R, start_R, recurrent_R, recurrent_R) if self.store.states else None
        return Pass(
            token_T=tensors.token_R,
            previous_T=tensors.previous_R,
            position_T=tensors.position_R,
            row_T=self.slots.slot_S,
            table_RB=self.slots.table_SB,
            store=self.store,
            parts=(part,),
            has_windows=not self.has_full_decode,
            states=states,
            adapter_T=self.slots.adapter_S.narrow(0, 0, n) if key.has_adapters else None,
        )


class Stepper(Protocol):
    """Repeats a step."""

    def replay(self, key: StepKey) -> None:
        """Run one step; returns before the device has finished."""

    def warm_up(self, keys: list[StepKey], progress: Callable[[int, int], None]) -> None:
        """Prepare for steps, none of which may have a running slot; `progress` receives (done, total)."""


class EagerStepper:
    """Runs the launches one after the other, on any device: the reference for `CapturedStepper`."""

    def __init__(self, step: Callable[[StepKey], None]) -> None:
        self._step = step

    def replay(self, key: StepKey) -> None:
        self._step(key)

    def warm_up(self, keys: list[StepKey], progress: Callable[[int, int], None]) -> None:
        """Do nothing."""


class CapturedStepper:
    """Owns a CUDA graph for each key, captured when it is first needed; all use one memory pool."""

    def __init__(self, step: Callable[[StepKey], None], device: torch.device) -> None:
        self._step, self._device = step, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: dict[StepKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, key: StepKey) -> None:
        if key not in self._graphs:
            self._step(key)  # the step itself: compiling a kernel is not allowed while a graph is captured
            self._graphs[key] = self._captured(key)
            return
        self._graphs[key].replay()

    def _captured(self, key: StepKey) -> torch.cuda.CUDAGraph:
        """Record a step without running it. Other threads may use the device meanwhile.

        Without `torch.cuda.graph`, which first frees torch's unused pinned memory: it takes 0.2 s for a gigabyte, and
        the next update of weights, which allocates it anew, stops all launches for as long.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(key)
            finally:
                graph.capture_end()
        return graph

    def warm_up(self, keys: list[StepKey], progress: Callable[[int, int], None]) -> None:
        """Run and capture each step."""
        for index, key in enumerate(keys):
            self.replay(key)
            progress(index + 1, len(keys))
        torch.cuda.synchronize(self._device)
