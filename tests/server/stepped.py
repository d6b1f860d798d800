"""An engine whose steps a test can delay or make fail: `make` of `tiny.running`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nano_inference import InferenceEngine
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.types import StepResult
from tests.server.tiny import Running, opened


def nothing() -> None:
    """Do nothing."""


class SteppedEngine:
    """An engine that calls `before_step` on its thread before every step; everything else is the engine's."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.before_step: Callable[[], None] = nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def tick(self) -> StepResult:
        self.before_step()
        return self._engine.tick()


def stepped(directory: Path, config: ServerConfig, **options: Any) -> LoadedModel:
    """Load the tiny model with such an engine."""
    one = opened(directory, config, **options)
    assert isinstance(one.engine, InferenceEngine)
    return replace(one, engine=SteppedEngine(one.engine))  # type: ignore[arg-type]


def steps_of(server: Running) -> SteppedEngine:
    """Return the engine of a server that was opened with `stepped`."""
    assert isinstance(server.opened.engine, SteppedEngine)
    return server.opened.engine


class Gate:
    """Blocks the engine after `free_steps` steps until `open` is called."""

    def __init__(self, server: Running, *, free_steps: int = 0) -> None:
        self.num_steps = 0
        self._free_steps = free_steps
        self._is_open = threading.Event()
        self.is_blocked = threading.Event()
        """Set when a step waits; the deltas of earlier steps have been sent to the loop."""
        steps_of(server).before_step = self.before_step

    def before_step(self) -> None:
        if self.num_steps >= self._free_steps:
            self.is_blocked.set()
            assert self._is_open.wait(60), "the test did not open the gate"
        self.num_steps += 1

    def open(self) -> None:
        self._is_open.set()


@contextmanager
def gated(server: Running, **options: Any) -> Iterator[Gate]:
    gate = Gate(server, **options)
    try:
        yield gate
    finally:
        gate.open()
