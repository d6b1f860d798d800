"""The benchmark workloads, as token ids, and what is measured of a run.

Every engine does the same work: end tokens are ignored, so token counts are equal. A repetition changes the contents of
the prompts but not their lengths, so that a prefix cache has no hits between repetitions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_LOW_ID, _HIGH_ID = 1000, 40_000
"""Range of ordinary token ids of the default model; its special tokens have lower ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts with their sampling settings."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]
    """Tokens to generate for each prompt, in each of its samples."""
    num_samples: int = 1
    temperature: float = 0.0
    one_by_one: bool = False
    """True to send each prompt after the previous one has finished."""

    @property
    def total_new(self) -> int:
        """Generated tokens over all samples."""
        return sum(self.new_tokens) * self.num_samples

    @property
    def total_prompt(self) -> int:
        """Prompt tokens, each prompt counted once."""
        return sum(map(len, self.prompts))


def decode1(repetition: int = 0) -> Workload:
    """Return one prompt of 32 tokens, 128 generated: batch 1, bound by memory bandwidth."""
    rng = random.Random(1000 + repetition)
    return Workload(name="decode1", prompts=(_ids(rng, 32),), new_tokens=(128,))


def prefill(repetition: int = 0) -> Workload:
    """Return one prompt of 2048 tokens, 1 generated: bound by arithmetic."""
    rng = random.Random(2000 + repetition)
    return Workload(name="prefill", prompts=(_ids(rng, 2048),), new_tokens=(1,))


def rollout(repetition: int = 0) -> Workload:
    """Return 8 prompts of about 64 tokens after 128 shared ones, 8 samples each, 128 generated at temperature 1."""
    rng = random.Random(3000 + repetition)
    system = _ids(rng, 128)
    shape = random.Random(33)
    lengths = [shape.randrange(56, 73) for _ in range(8)]
    prompts = tuple(system + _ids(rng, length) for length in lengths)
    return Workload(name="rollout", prompts=prompts, new_tokens=(128,) * 8, num_samples=8, temperature=1.0)


def ragged(repetition: int = 0) -> Workload:
    """Return 64 prompts of 16-256 tokens, 8-256 generated with a long-tailed distribution."""
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
    """Return one prompt of 4096 tokens, 64 generated."""
    rng = random.Random(4000 + repetition)
    return Workload(name="longctx", prompts=(_ids(rng, 4096),), new_tokens=(64,))


def sharedprefix(repetition: int = 0) -> Workload:
    """Return 16 prompts, sent one by one, of 1024 shared tokens and 16 different ones, 8 generated."""
    rng = random.Random(6000 + repetition)
    shared = _ids(rng, 1024)
    prompts = tuple(shared + _ids(rng, 16) for _ in range(16))
    return Workload(name="sharedprefix", prompts=prompts, new_tokens=(8,) * 16, one_by_one=True)


WORKLOADS: tuple[Callable[[int], Workload], ...] = (decode1, prefill, rollout, ragged, longctx, sharedprefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The measured times of one run of a workload."""

    seconds: float
    first_token_seconds: tuple[float, ...]
    """Time to first token: one value for the whole workload, or one for each request sent one by one."""
    new_tokens: int
    prompt_tokens: int

    @property
    def generated_per_second(self) -> float:
        """Generated tokens per second of the whole time."""
        return self.new_tokens / self.seconds

    @property
    def decoded_per_second(self) -> float:
        """Generated tokens per second after the first token."""
        return (self.new_tokens - 1) / max(1e-9, self.seconds - self.first_token_seconds[0])

    @property
    def prefilled_per_second(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.first_token_seconds[0]

    def headline(self, name: str) -> tuple[str, float]:
        """Return the unit and the value of a workload's main figure."""
        if name in ("decode1", "longctx"):
            return "decode tok/s", self.decoded_per_second
        if name == "prefill":
            return "prefill tok/s", self.prefilled_per_second
        if name == "sharedprefix":
            later = self.first_token_seconds[1:]
            return "TTFT ms, 2nd on", 1000 * sum(later) / len(later)
        return "tok/s", self.generated_per_second


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_LOW_ID, _HIGH_ID) for _ in range(count))
