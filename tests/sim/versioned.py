"""Engines on the fake runner with real, tiny weights that can be updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import torch

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.executors.live_weights import LiveWeights
from nano_inference.executors.torch.attention import SdpaBackend
from nano_inference.executors.torch.executor import TorchExecutor, TorchModel
from nano_inference.loading.sources import TensorSource
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig
from nano_inference.models.families import OWN_FAMILIES, program_of
from nano_inference.types import TrainingSample
from nano_inference.weights.sync import WeightSyncManager
from tests.sim.fakes import Drawing, fake_parts, next_token

MODEL = ModelConfig(
    architecture="Fake",
    family="dense",
    vocab_size=4,
    hidden_size=2,
    intermediate_size=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    layers=(LayerConfig(),),
    ropes=(RopeConfig(rotary_dim=2),),
    max_positions=16,
)
PROGRAM = program_of(MODEL, OWN_FAMILIES)


def counting_executor(install: Callable[[int], None]) -> TorchExecutor:
    """Return real (tiny) weights that can be updated; `install` gets the number of sets committed so far."""
    executor = TorchExecutor(MODEL, PROGRAM, torch.device("cpu"), torch.float32, SdpaBackend())
    staged = executor.weights.stage()
    for spec in PROGRAM.weights:
        staged.put(spec, TensorSource(torch.zeros(spec.shape)))
    executor.weights.commit(staged.finish())
    numbers = count(1)

    def commit(staged: TorchModel) -> None:
        install(next(numbers))
        LiveWeights.commit(executor.weights, staged)

    executor.weights.commit = commit  # type: ignore[method-assign]
    return executor


def versioned_engine(
    cache_type: str,
    num_blocks: int,
    block_size: int,
    config: EngineConfig,
    drawing: Drawing = next_token,
    lookahead: int = 1,
    num_states: int = 0,
    *,
    overlaps: bool = False,
) -> InferenceEngine:
    """An engine whose runner's tokens, K/V and states depend on the version of its weights."""
    parts = fake_parts(cache_type, num_blocks, block_size, lookahead, drawing, num_states, overlaps=overlaps)
    weights = WeightSyncManager(counting_executor(parts.runner.install))
    return InferenceEngine(config, parts=replace(parts, weights=weights))


def new_weights() -> dict[str, torch.Tensor]:
    """A full set of weights for `MODEL`."""
    return {spec.name: torch.ones(spec.shape) for spec in PROGRAM.weights}


def content(samples: Sequence[TrainingSample]) -> list[tuple[object, ...]]:
    """What must not depend on interruptions."""
    return [(s.completion_tokens, s.logprobs, s.mask, s.finish_reason, s.prompt_logprobs) for s in samples]


def run_to_end(engine: InferenceEngine) -> dict[int, TrainingSample]:
    """Run all requests to their end; return samples by request."""
    samples: dict[int, TrainingSample] = {}
    while engine.has_pending():
        samples |= {sample.request_id: sample for sample in engine.step()}
    return samples
