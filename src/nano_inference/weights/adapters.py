"""Loads an adapter: any thread reads and packs it beside the others, then the engine installs it between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.core.core import Core
from nano_inference.core.step import Runner
from nano_inference.executors.protocol import Executor
from nano_inference.loading.adapters import adapter_from, read_adapter
from nano_inference.support.files import path_of
from nano_inference.types import AdapterInfo, WeightLabel
from nano_inference.weights.staging import plain_pairs
from nano_inference.weights.updates import AdapterLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedAdapter:
    """An adapter that is read, checked and packed."""

    load: AdapterLoad
    rank: int
    num_bytes: int
    packed: Any  # what `Runner.commit_adapter` takes


def stage_adapter(load: AdapterLoad, executor: Executor, max_rank: int) -> StagedAdapter:
    """Read an adapter, check it against the model, and pack it. Thread-safe. Raises `BadRequest` and `WeightError`."""
    program, names, source = executor.program, executor.config.names, load.source
    if isinstance(source, str | Path):
        adapter = read_adapter(path_of(source, "source"), program, names, max_rank=max_rank)
    else:
        adapter = adapter_from(load.config or {}, plain_pairs(source), program, names, max_rank=max_rank)
    packed = executor.stage_adapter(adapter)
    return StagedAdapter(load=load, rank=adapter.rank, num_bytes=adapter.num_bytes, packed=packed)


def room_for(staged: StagedAdapter, core: Core) -> list[str]:
    """Return the adapters that must be unloaded for a staged one. Raises as `Adapters.room_for` does."""
    return core.adapters.room_for(staged.load.name, staged.num_bytes, _staying(staged, core))


def install_adapter(staged: StagedAdapter, core: Core, runner: Runner) -> WeightLabel:
    """Make a staged adapter its name's current one, and return its version. Raises as `Adapters.room_for` does."""
    load, staying = staged.load, _staying(staged, core)
    drop_unused(core, runner)
    for name in room_for(staged, core):
        core.adapters.unload(name)
    drop_unused(core, runner)
    number = core.adapters.next_number()
    runner.commit_adapter(number, staged.packed)
    version = number if load.version is None else load.version
    source = str(load.source) if isinstance(load.source, str | Path) else ""
    info = AdapterInfo(load.name, version, staged.rank, staged.num_bytes, source)
    core.install_adapter(number, info, staying)
    drop_unused(core, runner)
    return version


def _staying(staged: StagedAdapter, core: Core) -> frozenset[int]:
    """Return the requests that keep the adapter which they have."""
    return core.started_requests() if staged.load.on_running == "keep" else frozenset()


def drop_unused(core: Core, runner: Runner) -> None:
    """Free the adapters that neither a name nor a request needs. Call between two steps, without one in flight."""
    for number in core.adapters.take_unused():
        runner.drop_adapter(number)
