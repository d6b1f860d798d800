"""Engines whose ranks are threads of this process: the same classes and messages, without the start of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.build import locate, parts_with
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.protocol import Executor
from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.loading.kinds import ModelKinds, installed_kinds
from nano_inference.models.config import ModelConfig
from nano_inference.models.program import Program
from nano_inference.parallel.executor import ShardedExecutor
from nano_inference.parallel.follower import Follower
from nano_inference.parallel.leader import Leader
from nano_inference.parallel.links import WAIT, Links, local_links
from nano_inference.parallel.opening import divided_model, load_rank
from nano_inference.parallel.staged import Whole
from nano_inference.types import EngineDead

CPU = torch.device("cpu")
Result = TypeVar("Result")


def on_ranks(size: int, work: Callable[[Links], Result]) -> list[Result]:
    """Call `work` on every rank, each in its own thread; return the results in order of the ranks."""
    found: dict[int, Result] = {}
    faults: list[BaseException] = []

    def run(directory: Path, rank: int) -> None:
        links = local_links(directory, rank, size, CPU)
        try:
            found[rank] = work(links)
        except BaseException as error:
            faults.append(error)
        finally:
            links.close()

    with TemporaryDirectory() as directory:
        threads = [threading.Thread(target=run, args=(Path(directory), rank)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if faults:
        raise faults[0]
    return [found[rank] for rank in range(size)]


@contextmanager
def open_ranks(
    config: EngineConfig,
    *,
    wait: timedelta = WAIT,
    kernels: Kernels | None = None,
    changed: Callable[[Executor], Executor] = lambda own: own,
    on_failure: Callable[[], None] = lambda: None,
) -> Iterator[InferenceEngine]:
    """Open an engine of `config.tensor_parallel` ranks; `changed` returns the executors of ranks other than 0.

    With `kernels`, they compute on the CUDA executor. `on_failure` is called where an engine with processes would kill
    them.
    """
    with TemporaryDirectory() as name:
        directory, others = Path(name), range(1, config.tensor_parallel)
        shared = (directory, config, wait, kernels, changed)
        threads = [threading.Thread(target=serve, args=(rank, *shared), daemon=True) for rank in others]
        for thread in threads:
            thread.start()

        def join() -> None:
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()

        with leading(directory, config, wait, kernels, join, on_failure) as engine:
            yield engine


def serve(
    rank: int,
    directory: Path,
    config: EngineConfig,
    wait: timedelta = WAIT,
    kernels: Kernels | None = None,
    changed: Callable[[Executor], Executor] = lambda own: own,
) -> None:
    """Be a rank other than 0 until the engine ends."""
    checkpoint, model, program, _ = _opened(config)
    links = local_links(directory, rank, config.tensor_parallel, CPU, wait)
    own = changed(load_rank(checkpoint, model, program, config, links, CPU, kernels=kernels))
    with suppress(EngineDead):
        Follower(own, program, links, is_fed=True).serve()


@contextmanager
def leading(
    directory: Path,
    config: EngineConfig,
    wait: timedelta = WAIT,
    kernels: Kernels | None = None,
    on_close: Callable[[], None] = lambda: None,
    on_failure: Callable[[], None] = lambda: None,
    has_lost: Callable[[], bool] = lambda: False,
) -> Iterator[InferenceEngine]:
    """Be rank 0."""
    (checkpoint, model, program, kinds), size = _opened(config), config.tensor_parallel
    links = local_links(directory, 0, size, CPU, wait)
    own = load_rank(checkpoint, model, program, config, links, CPU, kernels=kernels)
    leader = Leader(links, on_close, on_failure, is_fed=True, has_lost=has_lost)
    executor = ShardedExecutor(own, Whole(program, size), leader)
    with InferenceEngine(config, parts=parts_with(executor, config, checkpoint, kinds)) as engine:
        yield engine


def _opened(config: EngineConfig) -> tuple[Checkpoint, ModelConfig, Program, ModelKinds]:
    kinds = installed_kinds()
    checkpoint = open_checkpoint(locate(config.model_path), config.overrides, kinds.formats)
    return (checkpoint, *divided_model(checkpoint, config, kinds), kinds)
