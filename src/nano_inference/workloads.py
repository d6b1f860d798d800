"""The benchmark workloads, as token ids, and how this engine is measured on them.

Every peer runs the same work: end tokens are ignored, so token counts are equal; a repetition changes the contents of
the prompts and never their shapes, so that no prefix cache can answer repetition 2 from repetition 1.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams, TrainingSample

_LOW_ID, _HIGH_ID = 1000, 40_000
"""Ordinary tokens of the default model: its special ones lie below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and what is asked of each."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]
    """For each prompt, tokens to add to each of its samples."""
    num_samples: int = 1
    temperature: float = 0.0
    one_by_one: bool = False
    """Whether each prompt is sent when the one before it is done."""

    @property
    def total_new(self) -> int:
        """Tokens drawn over all samples."""
        return sum(self.new_tokens) * self.num_samples

    @property
    def total_prompt(self) -> int:
        """Prompt tokens, each prompt counted once."""
        return sum(map(len, self.prompts))


def decode1(repetition: int = 0) -> Workload:
    """One prompt of 32 tokens, 128 drawn: batch 1, bound by memory bandwidth."""
    rng = random.Random(1000 + repetition)
    return Workload(name="decode1", prompts=(_ids(rng, 32),), new_tokens=(128,))


def prefill(repetition: int = 0) -> Workload:
    """One prompt of 2048 tokens, 1 drawn: bound by arithmetic."""
    rng = random.Random(2000 + repetition)
    return Workload(name="prefill", prompts=(_ids(rng, 2048),), new_tokens=(1,))


def rollout(repetition: int = 0) -> Workload:
    """8 prompts of about 64 tokens behind a common 128, 8 samples each, 128 drawn at temperature 1 with logprobs."""
    rng = random.Random(3000 + repetition)
    system = _ids(rng, 128)
    shape = random.Random(33)
    lengths = [shape.randrange(56, 73) for _ in range(8)]
    prompts = tuple(system + _ids(rng, length) for length in lengths)
    return Workload(name="rollout", prompts=prompts, new_tokens=(128,) * 8, num_samples=8, temperature=1.0)


def ragged(repetition: int = 0) -> Workload:
    """64 requests of 16-256 tokens, 8-256 drawn with a long tail."""
    rng = random.Random(5000 + repetition)
    shape = random.Random(5)
    sizes = []
    for _ in range(64):
        new = int(min(256, max(8, shape.lognormvariate(3.6, 1.0))))
        sizes.append((shape.randrange(16, 257), new))
    return Workload(
        name="ragged", prompts=tuple(_ids(rng, size) for size, _ in sizes), new_tokens=tuple(new for _, new in sizes)
    )


def longctx(repetition: int = 0) -> Workload:
    """One prompt of 4096 tokens, 64 drawn."""
    rng = random.Random(4000 + repetition)
    return Workload(name="longctx", prompts=(_ids(rng, 4096),), new_tokens=(64,))


def sharedprefix(repetition: int = 0) -> Workload:
    """16 requests one after another that share 1024 tokens and end in 16 of their own, 8 drawn."""
    rng = random.Random(6000 + repetition)
    shared = _ids(rng, 1024)
    prompts = tuple(shared + _ids(rng, 16) for _ in range(16))
    return Workload(name="sharedprefix", prompts=prompts, new_tokens=(8,) * 16, one_by_one=True)


WORKLOADS: tuple[Callable[[int], Workload], ...] = (decode1, prefill, rollout, ragged, longctx, sharedprefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What one run of a workload took, in seconds and tokens a second."""

    seconds: float
    first_token_seconds: tuple[float, ...]
    """From sending to the first token: of the whole workload, or of each request sent one by one."""
    new_tokens: int
    prompt_tokens: int

    @property
    def generated_per_second(self) -> float:
        """Drawn tokens over the whole time."""
        return self.new_tokens / self.seconds

    @property
    def decoded_per_second(self) -> float:
        """Drawn tokens after the first, over the time after the first."""
        return (self.new_tokens - 1) / max(1e-9, self.seconds - self.first_token_seconds[0])

    @property
    def prefilled_per_second(self) -> float:
        """Prompt tokens over the time to the first token."""
        return self.prompt_tokens / self.first_token_seconds[0]

    def headline(self, name: str) -> tuple[str, float]:
        """The one figure a workload is known by, with its unit."""
        if name in ("decode1", "longctx"):
            return "decode tok/s", self.decoded_per_second
        if name == "prefill":
            return "prefill tok/s", self.prefilled_per_second
        if name == "sharedprefix":
            later = self.first_token_seconds[1:]
            return "TTFT ms, 2nd on", 1000 * sum(later) / len(later)
        return "tok/s", self.generated_per_second


def measure(engine: InferenceEngine, workload: Workload) -> Measure:
    """Run a workload on this engine and say what it took."""
    parts = [(i,) for i in range(len(workload.prompts))] if workload.one_by_one else [range(len(workload.prompts))]
    start = time.perf_counter()
    firsts = []
    for indices in parts:
        firsts.append(_run(engine, workload, list(indices))[0])
    return Measure(
        seconds=time.perf_counter() - start,
        first_token_seconds=tuple(firsts),
        new_tokens=workload.total_new,
        prompt_tokens=workload.total_prompt,
    )


def _run(engine: InferenceEngine, workload: Workload, indices: list[int]) -> tuple[float, list[TrainingSample]]:
    """Send some of a workload's prompts together; return the seconds to the first token, and the samples."""
    start = time.perf_counter()
    for i in indices:
        params = SamplingParams(
            temperature=workload.temperature, max_tokens=workload.new_tokens[i], ignore_eos=True, seed=i
        )
        engine.add_request(workload.prompts[i], params, workload.num_samples)
    first = 0.0
    samples: list[TrainingSample] = []
    while len(samples) < len(indices) * workload.num_samples:
        result = engine.tick()
        if result.deltas and not first:
            first = time.perf_counter() - start
        samples += result.samples
    engine.step()  # take what `tick` put aside
    return first, samples


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_LOW_ID, _HIGH_ID) for _ in range(count))
