"""What a world asks of the engine: random requests, and the matchers and token programs that go with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from nano_inference import SamplingParams, TrainingSample
from nano_inference.types import Beginning, LogprobsMode, StopReason

TEMPERATURES = (0.0, 0.0, 0.5, 0.8, 1.0, 1.0, 1.3, 2.5)


@dataclass(frozen=True, slots=True)
class Rules:
    """Makes matchers: what one allows depends on the tokens it has seen, and on nothing else."""

    seed: int
    vocab_size: int

    def __call__(self) -> Follower:
        return Follower(self)


class Follower:
    """A matcher that allows everything, about half of the vocabulary or one token, and stops a sample now and then."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._last = 0
        self._num_seen = 0

    def advance(self, token: int) -> StopReason | None:
        """Take a token; stop on a rare pair of tokens."""
        is_end = self._num_seen > 0 and (7 * self._last + token) % 31 == 0
        self._last = token
        self._num_seen += 1
        return "pair" if is_end else None

    def mask(self) -> bytes | None:
        """Return what is allowed next."""
        rng = random.Random(repr((self._rules.seed, self._last, self._num_seen)))
        size = self._rules.vocab_size
        kind = rng.random()
        if kind < 0.4:
            return None
        num_bytes = -(-size // 8)
        if kind < 0.55:
            return (1 << rng.randrange(size)).to_bytes(num_bytes, "little")
        bits = rng.getrandbits(size) | 1 << rng.randrange(size)
        return bits.to_bytes(num_bytes, "little")


@dataclass(frozen=True, slots=True)
class Tool:
    """A token program: some drawn tokens force up to four more."""

    vocab_size: int

    def start(self) -> object:
        """Return the number of calls so far."""
        return 0

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Force tokens after each that is 3 modulo 7."""
        assert isinstance(state, int)
        if token % 7 != 3:
            return state, ()
        return state + 1, tuple((token * 5 + state + i) % self.vocab_size for i in range(1 + token % 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    count: int = 1
    salt: str = ""
    rules: Rules | None = None
    tool: Tool | None = None
    beginning: Beginning = Beginning()
    partial: TrainingSample | None = None
    version: int = 0
    """The weights in force when it was queued: it reads no older K/V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What requests of a world must fit into."""

    vocab_size: int
    room: int
    """Tokens of prompt and completion."""


def random_prompt(rng: random.Random, bounds: Bounds, base: tuple[int, ...]) -> tuple[int, ...]:
    """Return a prompt that often shares a prefix with others, and often repeats itself."""
    longest = max(1, min(90, bounds.room - 2))
    length = rng.randrange(1, longest + 1)
    kind = rng.random()
    if kind < 0.2:
        period = [rng.randrange(bounds.vocab_size) for _ in range(rng.randrange(2, 6))]
        return tuple(period[i % len(period)] for i in range(length))
    head = base[: rng.randrange(min(length, len(base)) + 1)] if kind < 0.8 else ()
    return (*head, *(rng.randrange(bounds.vocab_size) for _ in range(length - len(head))))


def random_params(rng: random.Random, bounds: Bounds, num_prompt: int, *, has_matcher: bool) -> SamplingParams:
    """Return random parameters under which some token can always be drawn."""
    size = bounds.vocab_size

    def maybe(chance: float, make: Callable[[], float], default: float) -> float:
        return make() if rng.random() < chance else default

    max_tokens = rng.randrange(max(0, min(40, bounds.room - num_prompt)) + 1)
    stops = frozenset(rng.randrange(size) for _ in range(rng.choice([0, 0, 2, 4])))
    top_p = maybe(0.25, lambda: rng.uniform(0.2, 0.99), 1.0)
    return SamplingParams(
        temperature=rng.choice(TEMPERATURES),
        max_tokens=max_tokens,
        min_tokens=rng.randrange(max_tokens + 1) if rng.random() < 0.2 else 0,
        top_k=rng.choice([1, 2, 5, 40]) if rng.random() < 0.25 else 0,
        top_p=top_p,
        min_p=maybe(0.15, lambda: rng.uniform(0.01, 0.5), 0.0),
        repetition_penalty=maybe(0.2, lambda: rng.uniform(0.7, 1.8), 1.0),
        presence_penalty=maybe(0.15, lambda: rng.uniform(-1, 1.5), 0.0),
        frequency_penalty=maybe(0.15, lambda: rng.uniform(-1, 1.5), 0.0),
        logit_bias={rng.randrange(size): rng.uniform(-5, 5) for _ in range(rng.choice([0, 0, 0, 1, 6]))},
        allowed_token_ids=None if has_matcher else random_allowed(rng, size, stops),
        stop_token_ids=stops,
        ignore_eos=rng.random() < 0.5,
        seed=rng.randrange(-100, 2**40) if rng.random() < 0.7 else None,
        logprobs=rng.choice([None, None, 0, 1, 5]),
        prompt_logprobs=rng.choice([None, None, None, 0, 3]),
        logprobs_mode=rng.choice([None, *get_args(LogprobsMode)]),
        raw_logprobs=rng.random() < 0.4,
        sampling_mask=rng.random() < 0.3,
    )


def random_allowed(rng: random.Random, size: int, stops: frozenset[int]) -> frozenset[int] | None:
    """Return a few allowed ids, more than those that could be banned; mostly None."""
    if rng.random() < 0.8:
        return None
    return stops | {rng.randrange(size) for _ in range(rng.choice([8, 8, 40]))} | {0, 1, 2, 3}


def without_host(ask: PlannedRequest) -> PlannedRequest:
    """Return a request whose next tokens need no host, so that its windows overlap."""
    plain = {"min_tokens": 0, "sampling_mask": False, "repetition_penalty": 1.0}
    params = replace(ask.params, presence_penalty=0.0, frequency_penalty=0.0, **plain)
    return replace(ask, params=params, tool=None)


def random_ask(rng: random.Random, bounds: Bounds, base: tuple[int, ...]) -> PlannedRequest:
    """Return a random request."""
    prompt = random_prompt(rng, bounds, base)
    rules = Rules(rng.randrange(1000), bounds.vocab_size) if rng.random() < 0.2 else None
    params = random_params(rng, bounds, len(prompt), has_matcher=rules is not None)
    beginning = Beginning()
    if rng.random() < 0.15:
        beginning = Beginning(rng.randrange(len(prompt) + 1), rng.randrange(4))
    return PlannedRequest(
        prompt=prompt,
        params=params,
        count=rng.choice([1, 1, 2, 4]),
        salt=rng.choice(["", "", "", "a"]),
        rules=rules,
        tool=Tool(bounds.vocab_size) if rng.random() < 0.2 else None,
        beginning=beginning,
    )
