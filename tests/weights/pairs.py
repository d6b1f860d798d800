"""Tiny models with two sets of weights: one that an engine opens, one that a trainer sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.build import EngineParts, assemble
from nano_inference.executors.protocol import Executor, Staged, Weights
from nano_inference.executors.staging import Pace
from tests.models.families import make_model


@dataclass(frozen=True)
class Pair:
    """Old and new weights of one architecture."""

    directory: Path
    old: transformers.PreTrainedModel
    new: transformers.PreTrainedModel

    def named(self) -> dict[str, torch.Tensor]:
        """Return the new weights by Hugging Face name, tied ones once."""
        return {name: weight.detach() for name, weight in self.new.named_parameters()}


def make_pair(family: str, directory: Path, more: Mapping[str, Any] | None = None) -> Pair:
    """Write a model; `more` overrides fields of the family's configuration."""
    old = make_model(family, directory, more)
    new = type(old)(old.config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in new.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(old.get_parameter(name) + 0.3 * noise * old.get_parameter(name).std().nan_to_num(1.0))
    return Pair(directory, old, new)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Tied embeddings, fused projections."""
    return make_pair("llama3-rope-ratio3-tied", tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Separate head, biases in all projections."""
    return make_pair("llama-linear-rope-biases", tmp_path_factory.mktemp("untied"))


OpenEngine = Callable[..., InferenceEngine]
Change = Callable[[EngineParts], EngineParts]


class InPieces:
    """An executor that calls `on_piece`, in the staging thread, before it copies or packs a piece of an update."""

    def __init__(self, inner: Executor, on_piece: Callable[[], None]) -> None:
        self._inner, self.weights = inner, _WeightsInPieces(inner.weights, on_piece)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _WeightsInPieces:
    def __init__(self, inner: Weights, on_piece: Callable[[], None]) -> None:
        self._inner, self._on_piece = inner, on_piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> Staged:
        assert pace is not None, "the update is not divided into pieces"

        def start_piece(num_bytes: int) -> None:
            pace(num_bytes)
            self._on_piece()

        return self._inner.stage(pace=start_piece, check_finite=check_finite)


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Return a function that opens an engine with a pair's old weights; all engines are shut down at the end.

    Its argument `change` returns the engine's parts, given those of the configuration.
    """
    engines: list[InferenceEngine] = []

    def open_one(pair: Pair, change: Change | None = None, **options: Any) -> InferenceEngine:
        options = {"kv_cache_bytes": 16 << 20, "device": "cpu", "block_size": 4} | options
        config = EngineConfig(model_path=str(pair.directory), **options)
        engines.append(InferenceEngine(config, parts=None if change is None else change(assemble(config))))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.shutdown()
