"""The benchmark workloads, as token ids, and what is measured of a run.

Every engine does the same work: end tokens are ignored, so token counts are equal. A repetition changes the contents of
the prompts but not their lengths, so that a prefix cache has no hits between repetitions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness import random_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts with their sampling settings."""

    prompts: tuple[list[int], ...]
    new_tokens: tuple[int, ...]
    """Tokens to generate for each prompt, in each of its samples."""
    num_samples: int = 1
    temperature: float = 0.0
    one_by_one: bool = False
    """True to send each prompt after the previous one has finished."""


def decode1(repetition: int) -> Workload:
    """Return one prompt of 32 tokens, 128 generated: batch 1, bound by memory bandwidth."""
    return Workload(prompts=(random_ids(random.Random(1000 + repetition), 32),), new_tokens=(128,))


def prefill(repetition: int) -> Workload:
    """Return one prompt of 2048 tokens, 1 generated: bound by arithmetic."""
    return Workload(prompts=(random_ids(random.Random(2000 + repetition), 2048),), new_tokens=(1,))


def rollout(repetition: int) -> Workload:
    """Return 8 prompts of about 64 tokens after 128 shared ones, 8 samples each, 128 generated at temperature 1."""
    rng, shape = random.Random(3000 + repetition), random.Random(33)
    system = random_ids(rng, 128)
    prompts = tuple(system + random_ids(rng, shape.randrange(56, 73)) for _ in range(8))
    return Workload(prompts=prompts, new_tokens=(128,) * 8, num_samples=8, temperature=1.0)


def ragged(repetition: int) -> Workload:
    """Return 64 prompts of 16-256 tokens, 8-256 generated with a long-tailed distribution."""
    rng, shape = random.Random(5000 + repetition), random.Random(5)
    sizes = []
    for _ in range(64):
        new = int(min(256, max(8, shape.lognormvariate(3.6, 1.0))))
        sizes.append((shape.randrange(16, 257), new))
    prompts = tuple(random_ids(rng, size) for size, _ in sizes)
    return Workload(prompts=prompts, new_tokens=tuple(new for _, new in sizes))


def longctx(repetition: int) -> Workload:
    """Return one prompt of 4096 tokens, 64 generated."""
    return Workload(prompts=(random_ids(random.Random(4000 + repetition), 4096),), new_tokens=(64,))


def sharedprefix(repetition: int) -> Workload:
    """Return 16 prompts, sent one by one, of 1024 shared tokens and 16 different ones, 8 generated."""
    rng = random.Random(6000 + repetition)
    shared = random_ids(rng, 1024)
    prompts = tuple(shared + random_ids(rng, 16) for _ in range(16))
    return Workload(prompts=prompts, new_tokens=(8,) * 16, one_by_one=True)


WORKLOADS: Mapping[str, Callable[[int], Workload]] = {
    make.__name__: make for make in (decode1, prefill, rollout, ragged, longctx, sharedprefix)
}


@dataclass(frozen=True, slots=True)
class Measure:
    """The measured times of one run of a workload."""

    seconds: float
    first_token_seconds: tuple[float, ...]
    """Time to first token: one value for the whole workload, or one for each request sent one by one."""
    workload: Workload

    def headline(self, name: str) -> tuple[str, float]:
        """Return the unit and the value of a workload's main figure."""
        first, new = self.first_token_seconds[0], sum(self.workload.new_tokens) * self.workload.num_samples
        if name in ("decode1", "longctx"):
            return "decode tok/s", (new - 1) / max(1e-9, self.seconds - first)
        if name == "prefill":
            return "prefill tok/s", sum(map(len, self.workload.prompts)) / first
        if name == "sharedprefix":
            later = self.first_token_seconds[1:]
            return "TTFT ms, 2nd on", 1000 * sum(later) / len(later)
        return "tok/s", new / self.seconds
