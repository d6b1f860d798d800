"""`TorchExecutor`: runs any program on any torch device; the reference for all other executors.

Shapes: T tokens of a step, K kept tokens, S rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.core.step import BlockCopy, RowResult
from nano_inference.executors.batch import Rows, adapter_numbers, build
from nano_inference.executors.cache import CacheMemory
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.sampling import WHOLE, draw
from nano_inference.executors.states import StateSlots
from nano_inference.executors.step import InferenceMode, Sampler, run_step
from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.adapters import Group, Pairs, groups_of, moved
from nano_inference.executors.torch.attention import Backend, StepContext
from nano_inference.executors.torch.compiled import OPERATIONS, CompiledPart, Operations
from nano_inference.executors.torch.states import plan_states
from nano_inference.executors.torch.store import KVStore
from nano_inference.executors.torch.weights import Bound, LiveTorchWeights, TorchWeights
from nano_inference.executors.vocabulary import Vocabulary
from nano_inference.loading.adapters import Adapter
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Copy, Keep, Store
from nano_inference.models.program import Program
from nano_inference.models.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class TorchModel(Bound):
    """A program bound to weights."""

    body: CompiledPart
    final: CompiledPart
    logits: CompiledPart  # final norm and head


class TorchExecutor(Executor):
    """Owns a model's weights and the memory of its KV cache."""

    code = "torch"

    def __init__(
        self,
        config: ModelConfig,
        program: Program,
        device: torch.device,
        dtype: torch.dtype,
        backend: Backend,
        sampler: Sampler = draw,
        operations: Operations = OPERATIONS,
        vocabulary: Vocabulary = WHOLE,
    ) -> None:
        """Create an executor without weights and cache. `dtype` is the precision P of the program (`models.ops`).

        `vocabulary` scores prompts; it must fit the logits of the program, as `sampler` must.

        Raises `ValueError` naming an operation of the program that is not in `operations`.
        """
        check_operations(program, operations)
        self.config = config
        self.program = program
        self.device = torch.empty(0, device=device).device  # with an index, to compare equal to tensors' devices
        self.dtype = dtype
        self._backend = backend
        self.sampler = sampler
        self._operations = operations
        self._vocabulary = vocabulary
        self._ropes = tuple(RotaryTable(rope, device) for rope in program.ropes)
        self._mode = InferenceMode()
        self._adapters: dict[int, Pairs] = {}
        bind = partial(bound, program, operations)
        self.weights: LiveTorchWeights[TorchModel] = LiveTorchWeights(program, self.device, dtype, bind)
        self.cache = torch_cache(program, self.device, dtype)

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        def work() -> Mapping[int, RowResult]:
            self.store.prepare(fresh, copies)
            return run_step(self, rows, self.sampler, self._vocabulary)

        return self._mode.run(work)

    def recover(self) -> None:
        self._mode.recover()

    def hidden(self, rows: Rows, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        step = build(rows, self.store.block_size, self.device)
        numbers = adapter_numbers(rows)
        groups = [self._groups(numbers), self._groups([numbers[place] for place in kept])]
        return self._hidden(step, self.store, kept, groups, windows=windows)

    def step_logits(self, rows: Rows, kept: Sequence[int]) -> Tensor:
        numbers = adapter_numbers(rows)
        return self.logits(self.hidden(rows, kept), [numbers[place] for place in kept])

    def final(self, hidden_SE: Tensor) -> Tensor:
        return self.model.final.run([hidden_SE])

    def logits(self, hidden_SE: Tensor, adapters: Sequence[int] = ()) -> Tensor:
        """Return float32 logits [S, V]; in main memory for Apple's GPUs, which lack float64."""
        logits_SV = self.model.logits.run([hidden_SE], adapters=self._groups(adapters))
        return logits_SV.cpu() if self.device.type == "mps" else logits_SV

    def forward(
        self, inputs: ForwardInput, cache: Any, kept: Sequence[int] | None = None, *, windows: bool = True
    ) -> Tensor:
        """Return float32 logits [K, V], using the caller's `KVStore`."""
        assert isinstance(cache, KVStore)
        kept = range(len(inputs.token_T)) if kept is None else kept
        return self._mode.run(lambda: self.logits(self._hidden(inputs, cache, kept, windows=windows)))

    def stage_adapter(self, adapter: Adapter) -> Pairs:
        return moved(adapter, self.device, self.dtype)

    def commit_adapter(self, number: int, staged: Pairs) -> None:
        self._adapters[number] = staged

    def drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def _groups(self, numbers: Sequence[int]) -> list[Group]:
        return groups_of(numbers, self._adapters, self.device)

    def _hidden(
        self,
        step: ForwardInput,
        store: KVStore,
        kept: Sequence[int],
        groups: Sequence[Sequence[Group]] = ((), ()),
        *,
        windows: bool = True,
    ) -> Tensor:
        longest = max(span.end for span in step.spans)
        sizes = self.program.windows  # one that no row exceeds counts as None
        effective = {size: size if windows and size is not None and size < longest else None for size in sizes}
        plans = {window: self._backend.plan(step, store.block_size, window) for window in set(effective.values())}
        context = StepContext(
            step=step,
            store=store,
            backend=self._backend,
            plans={window: plans[found] for window, found in effective.items()},
            ropes=tuple(table.at(step.position_T, store.dtype) for table in self._ropes),
            states=plan_states(step.spans, self.device) if self.program.states else None,
        )
        are_all = len(kept) == len(step.token_T)
        kept_K = None if are_all else torch.tensor(kept, dtype=torch.long, device=self.device)
        return self.model.body.run([], context, kept_K, *groups)

    @property
    def model(self) -> TorchModel:
        return self.weights.model

    @property
    def store(self) -> KVStore:
        return self.cache.store

    def copy(self) -> TorchExecutor:
        """Return a second executor with copies of the weights."""
        other = self._other(self.sampler)
        other.weights.commit(self.weights.copied())
        return other

    def _other(self, sampler: Sampler) -> TorchExecutor:
        return TorchExecutor(
            self.config,
            self.program,
            self.device,
            self.dtype,
            self._backend,
            sampler,
            self._operations,
            self._vocabulary,
        )

    def on_same_weights(self, sampler: Sampler) -> TorchExecutor:
        """Return a second executor that shares the weights' memory and uses another sampler; see `lend_to`."""
        other = self._other(sampler)
        self.lend_to(other)
        return other

    def lend_to(self, other: Executor) -> None:
        """Share this executor's weights with another torch executor, between two of its steps.

        Writes to that memory change both. Updates of either allocate new memory.
        """
        assert isinstance(other, TorchExecutor)
        self.weights.share_with(other.weights, self.model)


def bound(program: Program, operations: Operations, weights: TorchWeights) -> TorchModel:
    """Return a program bound to weights."""
    x = {"x": program.hidden_size}
    return TorchModel(
        weights,
        body=CompiledPart(program.body, weights, {}, "x", operations),
        final=CompiledPart(program.final, weights, x, "h", operations),
        logits=CompiledPart((*program.final, *program.head), weights, x, "logits", operations),
    )


def check_operations(program: Program, operations: Operations) -> None:
    """Raise `ValueError` naming the operations of a program that are not in `operations`."""
    unknown = {type(op) for op in program.ops} - {*operations, Store, Keep, Copy}
    if unknown:
        raise ValueError(f"torch has no operation {', '.join(sorted(one.__name__ for one in unknown))}")


def torch_cache(
    program: Program, device: torch.device, own: torch.dtype, on_change: Callable[[], None] = lambda: None
) -> CacheMemory[KVStore]:
    """Return the cache component of a program in the precision `own`; `CacheSize.eager` has no effect."""

    def dtype_of(wanted: KvDtype) -> torch.dtype:
        if wanted == "bfloat16" and own != torch.bfloat16:
            raise ValueError("kv_cache_dtype=bfloat16 needs the CPU kernels, or weights in bfloat16")
        return own

    def make(size: CacheSize, dtype: torch.dtype) -> KVStore:
        return new_store(program, size.num_blocks, size.block_size, dtype, device, size.num_states)

    return CacheMemory(program, device, dtype_of, make, on_change)


def new_store(
    program: Program, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, num_states: int = 0
) -> KVStore:
    """Return a cache for a program's layers. Raises `ValueError` if layers differ in kv heads or head size."""
    sizes = {(layer.num_kv_heads, layer.head_dim) for layer in program.caches}
    if len(sizes) != 1:
        raise ValueError(f"layers with different sizes of keys and values are not supported: {sorted(sizes)}")
    store = KVStore(len(program.caches), num_blocks, block_size, *sizes.pop(), dtype, device)
    if program.states:
        store.states = StateSlots(program, num_states, device)
    return store
