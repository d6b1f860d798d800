"""`LoadedModel`: an engine with its metrics and served model."""

from __future__ import annotations

from dataclasses import dataclass

from nano_inference.engine_thread import DrivenEngine
from nano_inference.server.metrics import Metrics
from nano_inference.server.model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model, ready to be served."""

    engine: DrivenEngine
    metrics: Metrics
    model: ServedModel
    step_tokens: int = 256
    """Maximum tokens of one step."""
