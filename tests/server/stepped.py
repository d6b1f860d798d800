"""An engine whose steps a test can delay or make fail: `make` of `tiny.running`."""

from __future__ import annotations

from collections.abc import Callable
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
