"""`SpmdEngine`: one engine divided among the ranks of a trainer, for example inside `torchrun`.

Every rank calls the same methods in the same order with the same arguments; those of rank 0 are used. Rank 0 has the
queues, the cache manager and the random numbers; the others compute their parts inside the calls and return the same
results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nano_inference.build import environment, parts_with
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.executors.devices import rank_device
from nano_inference.loading.catalog import default_cache
from nano_inference.loading.kinds import installed_kinds, opened
from nano_inference.loading.sources import WeightSource
from nano_inference.parallel.executor import ShardedExecutor
from nano_inference.parallel.follower import Fill, Follower
from nano_inference.parallel.leader import Leader
from nano_inference.parallel.links import trainer_links
from nano_inference.parallel.opening import divided_model, load_rank
from nano_inference.parallel.staged import Whole
from nano_inference.types import (
    BadRequest,
    EngineDead,
    EnginePaused,
    Pooling,
    SamplingParams,
    TrainingSample,
    UpdateBusy,
    WeightError,
    WeightLabel,
)
from nano_inference.weights.directory import weights_in
from nano_inference.weights.staging import as_source, pairs

_ERRORS = (EnginePaused, UpdateBusy, WeightError, ValueError, TimeoutError)
"""Exceptions of rank 0 that the other ranks raise as the same class; others become `RuntimeError`."""
Result = TypeVar("Result")


class SpmdEngine:
    """Owns this rank's part of an engine. A context manager; every method is called by all ranks together."""

    def __init__(self, config: EngineConfig) -> None:
        """Load this rank's part. `tensor_parallel` consecutive ranks of the default process group form one engine.

        If there is no default group, one is created from the environment (Gloo, or NCCL on CUDA) until `shutdown`.
        Raises `ValueError` if the model cannot be divided, or the ranks have different checkpoints, as far as
        `parallel.fingerprint` sees: it reads the shapes and at most 32 KiB of every tensor.
        """
        local_rank = int(environment().get("LOCAL_RANK", "0"))
        device = rank_device(config.device, local_rank, local_rank + 1)
        self._owns_default = not dist.is_initialized()
        if self._owns_default:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self._engine: InferenceEngine | None = None
        self._follower: Follower | None = None
        try:
            kinds = installed_kinds()
            checkpoint = opened(config, kinds, default_cache(environment()))
            model, program = divided_model(checkpoint, config, kinds)
            self._links = trainer_links(config.tensor_parallel, device)
            own = load_rank(checkpoint, model, program, config, self._links, device)
            if self._links.rank:
                self._follower = Follower(own, program, self._links, is_fed=False)
            else:
                self._leader = Leader(self._links, lambda: None, lambda: None, is_fed=False)
                executor = ShardedExecutor(own, Whole(program, config.tensor_parallel), self._leader)
                self._engine = InferenceEngine(config, parts=parts_with(executor, config, checkpoint, kinds))
        except BaseException:
            self._leave_default()
            raise
        self._shared(lambda engine: None)  # the other ranks allocate their caches in it

    @property
    def rank(self) -> int:
        """This rank's number in its engine; 0 has the queues."""
        return self._links.rank

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        adapter: str | None = None,
    ) -> list[TrainingSample]:
        """Return what `InferenceEngine.generate` does, on every rank."""

        def generate(engine: InferenceEngine) -> list[dict[str, Any]]:
            samples = engine.generate(prompts, sampling_params, num_samples_per_prompt, adapter=adapter)
            return [one.to_dict() for one in samples]

        return [TrainingSample.from_dict(one) for one in self._shared(generate)]

    def score(
        self,
        token_ids: Seq[int] | Seq[Seq[int]],
        start: int | Seq[int] = 0,
        *,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> list[float] | list[list[float]]:
        """Return what `InferenceEngine.score` does, on every rank."""
        return self._shared(lambda engine: engine.score(token_ids, start, temperature=temperature, adapter=adapter))

    def embed(
        self, token_ids: Seq[int] | Seq[Seq[int]], pooling: Pooling = "mean", *, normalize: bool = False
    ) -> list[float] | list[list[float]]:
        """Return what `InferenceEngine.embed` does, on every rank."""
        return self._shared(lambda engine: engine.embed(token_ids, pooling, normalize=normalize))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def update_weights(
        self,
        weights: Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path,
        *,
        version: WeightLabel | None = None,
        partial: bool = False,
        allow_nonfinite: bool = False,
        checksum: str | None = None,
    ) -> int:
        """Replace the weights on every rank, or on none; return the new version.

        Every rank gives all tensors, of which it keeps its part: whole ones, `DTensor`s (gathered one by one, in the
        order given, which must be the same on all ranks), or a directory. Raises as `InferenceEngine.update_weights`.
        """
        named = weights_in(weights) if isinstance(weights, str | Path) else weights

        def install(engine: InferenceEngine) -> int:
            return engine.update_weights(
                gathered(named),
                blocking=True,
                version=version,
                partial=partial,
                allow_nonfinite=allow_nonfinite,
                checksum=checksum,
            )

        def fill(put: Callable[[str, WeightSource], None]) -> None:
            for name, value in gathered(named):
                put(str(name), as_source(str(name), value))

        return self._shared(install, fill)

    def load_adapter(
        self,
        name: str,
        source: Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        version: WeightLabel | None = None,
    ) -> WeightLabel:
        """Load an adapter on every rank, or on none, as `InferenceEngine.load_adapter`; `DTensor`s are gathered."""
        whole = source if isinstance(source, str | Path) else list(gathered(source))
        return self._shared(lambda engine: engine.load_adapter(name, whole, config=config, version=version))

    def unload_adapter(self, name: str) -> bool:
        """Forget an adapter; return whether it was loaded."""
        return self._shared(lambda engine: engine.unload_adapter(name))

    def weights_checksum(self) -> str:
        """Return the checksum of the whole weights."""
        return self._shared(lambda engine: engine.weights_checksum())

    def get_weight_version(self) -> int:
        """Return the number of weight installations since the start."""
        return self._shared(lambda engine: engine.get_weight_version())

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Free the memory of the KV cache on every rank; see `InferenceEngine.sleep`."""
        self._shared(lambda engine: engine.sleep(discard_weights=discard_weights))

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed."""
        self._shared(lambda engine: engine.wake())

    def shutdown(self) -> None:
        """Free the engine on every rank; later calls raise `EngineDead`. Can be called twice."""
        if self._engine is not None:
            self._engine.shutdown()
        elif self._follower is not None:
            follower, self._follower = self._follower, None
            follower.serve()
        self._leave_default()

    def _leave_default(self) -> None:
        """Destroy the default group if this engine has created it."""
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_default = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None or not issubclass(error, EngineDead):
            self.shutdown()

    def _shared(self, work: Callable[[InferenceEngine], Result], fill: Fill | None = None) -> Result:
        """Return the plain values that `work(engine)` returns on rank 0; raise its exception on every rank."""
        if self._engine is None:
            if self._follower is None:
                raise EngineDead("the engine was shut down")
            reply = self._follower.serve(fill)
            if reply is None:
                self._follower = None
                raise EngineDead("rank 0 has shut the engine down")
            fault, received = reply
            if fault is not None:
                name, text = fault
                if name == BadRequest.__name__:
                    raise BadRequest("", text)
                raise next((one for one in _ERRORS if one.__name__ == name), RuntimeError)(text)
            result: Result = received
            return result
        try:
            value = work(self._engine)
        except EngineDead:
            raise
        except Exception as error:
            self._send([type(error).__name__, str(error)], None)
            raise
        self._send(None, value)
        return value

    def _send(self, error: list[str] | None, value: Any) -> None:
        self._leader.step("return", 0, lambda: [[error, value]], lambda: None)


def gathered(named: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Generator[tuple[str, Any]]:
    """Yield the (name, tensor) pairs of an update with every `DTensor` gathered, which all its ranks do together.

    If it is closed early, gathers the rest, so that no rank waits for this one.
    """
    source = pairs(named)
    for name, value in source:
        tensor = _whole(value)
        try:
            yield str(name), tensor
        except GeneratorExit:
            for _, rest in source:
                _whole(rest)
            raise


def _whole(value: object) -> object:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value
