"""`TorchExecutor`: runs any program on any torch device; the reference for all other executors.

Shapes: T tokens of a step, K kept tokens, S rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.core.step import BlockCopy, RowResult
from nano_inference.executors.batch import Rows, build
from nano_inference.executors.devices import free_bytes, release_unused
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.sampling import WHOLE, draw
from nano_inference.executors.staging import Pace
from nano_inference.executors.step import InferenceMode, Sampler, run_step
from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.attention import Backend, StepContext
from nano_inference.executors.torch.compiled import OPERATIONS, CompiledPart, Operations
from nano_inference.executors.torch.store import KVStore
from nano_inference.executors.torch.weights import TorchStaged, TorchWeights, layout_of
from nano_inference.executors.vocabulary import Vocabulary
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Copy, Keep, Store
from nano_inference.models.program import Program
from nano_inference.models.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A program bound to weights."""

    weights: TorchWeights
    body: CompiledPart
    final: CompiledPart
    logits: CompiledPart  # final norm and head


class TorchExecutor:
    """Owns a model's weights and the memory of its KV cache; satisfies `protocol.Executor`, which documents it."""

    code = "torch"
    lookahead = 1
    steps_share_processors = True
    failure = None

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
        self._layout = layout_of(program)
        self._ropes = tuple(RotaryTable(rope, device) for rope in program.ropes)
        self._mode = InferenceMode()
        self._model: TorchModel | None = None
        self._borrowed: frozenset[str] = frozenset()
        """Names of stacks in another executor's memory, which is never reused for updates."""
        self._spare: dict[str, Tensor] = {}
        """Replaced stacks; the next update reuses their memory, because filling new pages is several times slower."""
        self._store: KVStore | None = None

    # ---- steps ----

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        return self._mode.run(lambda: self._run(rows, copies, fresh))

    def _run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        self.store.prepare(fresh, copies)
        return run_step(self, rows, self.sampler, self._vocabulary)

    def close(self) -> None:
        """Do nothing: the executor has no processes."""

    def recover(self) -> None:
        """Leave inference mode if an interruption left it on."""
        self._mode.recover()

    def hidden(self, rows: Rows, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        step = build(rows, self.store.block_size, self.device)
        return self._hidden(step, self.store, kept, windows=windows)

    def step_logits(self, rows: Rows, kept: Sequence[int]) -> Tensor:
        return self.logits(self.hidden(rows, kept))

    def final(self, hidden_SE: Tensor) -> Tensor:
        return self.model.final.run([hidden_SE])

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V]; in main memory for Apple's GPUs, which lack float64."""
        logits_SV = self.model.logits.run([hidden_SE])
        return logits_SV.cpu() if self.device.type == "mps" else logits_SV

    def forward(self, inputs: ForwardInput, cache: Any) -> Tensor:
        """Return float32 logits [T, V] of every token, using the caller's `KVStore`."""
        assert isinstance(cache, KVStore)
        return self._mode.run(lambda: self.logits(self._hidden(inputs, cache, range(len(inputs.token_T)))))

    def _hidden(self, step: ForwardInput, store: KVStore, kept: Sequence[int], *, windows: bool = True) -> Tensor:
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
        )
        are_all = len(kept) == len(step.token_T)
        kept_K = None if are_all else torch.tensor(kept, dtype=torch.long, device=self.device)
        return self.model.body.run([], context, kept_K)

    @property
    def model(self) -> TorchModel:
        assert self._model is not None, "there are no weights"
        return self._model

    def step_bytes(self, block_size: int) -> int:
        return 0

    def free_bytes(self, share: float) -> int:
        return free_bytes(self.device, share)

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Do nothing: nothing is compiled in advance."""

    # ---- cache ----

    @property
    def store(self) -> KVStore:
        assert self._store is not None, "there is no cache"
        return self._store

    def cache_dtype(self, wanted: KvDtype) -> torch.dtype:
        """Return the program's precision. Raises `ValueError` for another one."""
        if wanted == "bfloat16" and self.dtype != torch.bfloat16:
            raise ValueError("kv_cache_dtype=bfloat16 needs the CPU kernels, or weights in bfloat16")
        return self.dtype

    def block_bytes(self, block_size: int, dtype: KvDtype = "auto") -> int:
        return self.program.kv_bytes_per_token(self.cache_dtype(dtype).itemsize) * block_size

    def new_cache(self, size: CacheSize) -> None:
        """Allocate the KV cache; `eager` has no effect."""
        self._store = new_store(
            self.program, size.num_blocks, size.block_size, self.cache_dtype(size.dtype), self.device
        )

    def free_cache(self) -> None:
        self.store.free()
        release_unused(self.device)

    def restore_cache(self) -> None:
        self.store.restore()

    @property
    def cache_bytes(self) -> int:
        return 0 if self._store is None else self._store.num_bytes

    # ---- weights ----

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> TorchStaged:
        """Start filling new weights, reusing the memory of replaced ones first."""
        live = None if self._model is None else self._model.weights
        spare, self._spare = self._spare, {}
        finish = self._bound
        return TorchStaged(self._layout, live, finish, spare, self.device, self.dtype, pace, check_finite=check_finite)

    def commit(self, staged: TorchModel) -> None:
        if self._model is staged:
            return
        old, new = {} if self._model is None else self._model.weights.stacks, staged.weights.stacks
        replaced = {name: stack for name, stack in old.items() if stack is not new[name]}
        is_kept = self.device.type == "cpu"
        spare = {name: stack for name, stack in replaced.items() if is_kept and name not in self._borrowed}
        # In this order, an interruption never marks memory as spare that the model still uses.
        self._model = staged
        self._spare = spare
        self._borrowed = self._borrowed - replaced.keys()

    def drop_spare(self) -> None:
        self._spare = {}

    def discard_weights(self) -> None:
        self._model, self._spare = None, {}
        release_unused(self.device)

    def move_weights(self, device: torch.device) -> None:
        """Move the weights to a device, for example to main memory while the engine sleeps."""
        if self._model is not None and any(s.device != device for s in self._model.weights.stacks.values()):
            self._model = self._bound(self._model.weights.moved(device))
            release_unused(self.device)

    def weight_values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) without copying."""
        return ((n, tensor) for n, tensor in self.model.weights.tensors.items() if names is None or n in names)

    def staged_values(self, staged: TorchModel) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) of staged weights without copying."""
        return iter(staged.weights.tensors.items())

    @property
    def weight_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def weight_bytes(self) -> int:
        return 0 if self._model is None else self._model.weights.num_bytes

    def copy(self) -> TorchExecutor:
        """Return a second executor with copies of the weights."""
        other = self._other(self.sampler)
        other.commit(self._bound(self.model.weights.copied()))
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

    def _bound(self, weights: TorchWeights) -> TorchModel:
        program, operations, x = self.program, self._operations, {"x": self.program.hidden_size}
        return TorchModel(
            weights,
            body=CompiledPart(program.body, weights, {}, "x", operations),
            final=CompiledPart(program.final, weights, x, "h", operations),
            logits=CompiledPart((*program.final, *program.head), weights, x, "logits", operations),
        )

    def on_same_weights(self, sampler: Sampler) -> TorchExecutor:
        """Return a second executor that shares the weights' memory and uses another sampler; see `lend_to`."""
        other = self._other(sampler)
        self.lend_to(other)
        return other

    def lend_to(self, other: Executor) -> None:
        """Share this executor's weights with another torch executor, between two of its steps.

        Writes to that memory change both. Updates of `other` allocate new memory.
        """
        assert isinstance(other, TorchExecutor)
        other._borrowed = frozenset(self._layout)
        other.drop_spare()
        other._model = self.model


def check_operations(program: Program, operations: Operations) -> None:
    """Raise `ValueError` naming the operations of a program that are not in `operations`."""
    unknown = {type(op) for op in program.ops} - {*operations, Store, Keep, Copy}
    if unknown:
        raise ValueError(f"torch has no operation {', '.join(sorted(one.__name__ for one in unknown))}")


def new_store(program: Program, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVStore:
    """Return a cache for a program's layers. Raises `ValueError` if layers differ in kv heads or head size."""
    sizes = {(layer.num_kv_heads, layer.head_dim) for layer in program.caches}
    if len(sizes) != 1:
        raise ValueError(f"layers with different sizes of keys and values are not supported: {sorted(sizes)}")
    ((num_kv_heads, head_dim),) = sizes
    return KVStore(len(program.caches), num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
