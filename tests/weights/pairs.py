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
PIECES = {
    "off": "nano_inference.executors.torch.weights.is_finite",
    "auto": "nano_inference.executors.cpu.weights.scan",
}
"""For each value of `kernels`: the function that checks each piece of an update when it is copied or packed."""


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Return a function that opens an engine with a pair's old weights; all engines are shut down at the end."""
    engines: list[InferenceEngine] = []

    def open_one(pair: Pair, **options: Any) -> InferenceEngine:
        options = {"kv_cache_bytes": 16 << 20, "device": "cpu", "block_size": 4} | options
        engines.append(InferenceEngine(EngineConfig(model_path=str(pair.directory), **options)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.shutdown()
