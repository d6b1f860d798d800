"""Engines of a pool's tests: on the CPU kernels, where results do not depend on the batch; some fail on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl.pool.local import LocalFleet
from nano_inference.types import StepResult
from tests.weights.pairs import Pair

SEED = 5
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, n % 7, n] for n in range(8)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
"""Without a seed: the engine's and the pool's are compared."""
LONG = SamplingParams(max_tokens=600, ignore_eos=True)


def config_of(pair: Pair) -> EngineConfig:
    return EngineConfig(
        model_path=str(pair.directory), device="cpu", num_threads=1, block_size=4, kv_cache_bytes=16 << 20, seed=SEED
    )


class Mortal(InferenceEngine):
    """An engine that fails or pauses after some turns of its thread, once that is set."""

    steps_left: int | None = None  # until it fails
    steps_to_pause: int | None = None  # that sample a token

    def tick(self) -> StepResult:
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise RuntimeError("killed by the test")
        result = super().tick()
        if self.steps_to_pause is not None and result.stats.num_sampled:
            self.steps_to_pause -= 1
            if self.steps_to_pause == 0:
                self.pause("keep")
        return result


class Engines:
    """Opens the engines of a `LocalFleet`, and keeps them by worker, the newest last."""

    def __init__(self, pair: Pair) -> None:
        self._config = config_of(pair)
        self.opened: dict[int, list[Mortal]] = {}

    def open(self, index: int) -> InferenceEngine:
        engine = Mortal(self._config)
        self.opened.setdefault(index, []).append(engine)
        return engine

    def fleet(self, size: int = 2) -> LocalFleet:
        return LocalFleet(self.open, size)


def transient(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights as `WeightGroup.receive` does: a tensor is valid until the next is requested."""
    buffer = torch.empty(max(tensor.numel() for tensor in named.values()))
    for name, tensor in named.items():
        part = buffer[: tensor.numel()].view(tensor.shape)
        part.copy_(tensor)
        yield name, part
        buffer.fill_(0.0)


def facts(samples: Sequence[TrainingSample]) -> list[tuple[object, ...]]:
    """What a trainer reads of samples: everything but what routing may change."""
    return [
        (
            *(s.request_id, s.sample_index, s.prompt_tokens, s.completion_tokens, s.logprobs, s.mask, s.finish_reason),
            *(s.seed, s.token_versions, s.weight_version, dict(s.version_labels)),
        )
        for s in samples
    ]
