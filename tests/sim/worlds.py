"""Random histories of requests, for engines on the fake runner."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.types import SamplingParams, TrainingSample
from tests.sim.fakes import Calculator, Drawing, StopAfter, fake_config, fake_parts, next_token, parrot

MakeEngine = Callable[[str, int, int, EngineConfig, Drawing, int], InferenceEngine]
"""Arguments: kind of cache, blocks, tokens of a block, configuration, drawing, lookahead."""


@dataclass
class World:
    """One random history: an engine, the requests still to come, what was asked and what came back."""

    rng: random.Random
    engine: InferenceEngine
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: list[TrainingSample] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def runner(self) -> Any:
        return self.engine.parts.runner

    def arrive(self) -> None:
        """Add the next request."""
        ask = self.arrivals.pop(0)
        loaded = [one.name for one in self.engine.adapters()]
        ask["adapter"] = self.rng.choice([None, *loaded]) if loaded else None
        request_id = self.engine.add_request(
            ask["prompt"],
            ask["params"],
            ask["n"],
            salt=ask["salt"],
            make_matcher=StopAfter if ask["matcher"] else None,
            program=Calculator() if ask["program"] else None,
            adapter=ask["adapter"],
        )
        self.asked[request_id] = ask

    def abort(self) -> None:
        """Abort one of the requests, which may have ended."""
        partial = self.engine.abort(self.rng.choice(list(self.asked)))
        self.samples += partial
        self.aborted |= {sample.request_id for sample in partial}


def plain_engine(
    cache_type: str,
    num_blocks: int,
    block_size: int,
    config: EngineConfig,
    drawing: Drawing,
    lookahead: int,
    *,
    overlaps: bool = False,
) -> InferenceEngine:
    parts = fake_parts(cache_type, num_blocks, block_size, lookahead, drawing, overlaps=overlaps)
    return InferenceEngine(config, parts=parts)


def make_world(
    seed: int,
    cache_type: str,
    *,
    tight: bool,
    lookahead: int = 1,
    guesses: bool = False,
    make_engine: MakeEngine = plain_engine,
) -> World:
    """Any world; with `guesses`, of a model that repeats itself, and with speculation."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = -(-(80 if tight else rng.choice([160, 400, 800])) // block_size)
    limits = rng.choice([1, 2, 4, 16]), rng.choice([3, 4, 16, 64])
    config = fake_config(*limits, speculation="ngram" if guesses else "off")
    drawing = parrot if guesses else next_token
    world = World(rng, make_engine(cache_type, num_blocks, block_size, config, drawing, lookahead))
    base = [rng.randrange(50) for _ in range(30)]
    for _ in range(rng.randrange(2, 8)):
        prompt = base[: rng.randrange(30)] + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        params = SamplingParams(
            max_tokens=rng.randrange(0, 30),
            stop_token_ids=[11] if rng.random() < 0.5 else [],
            ignore_eos=rng.random() < 0.3,
            seed=rng.randrange(100),
            prompt_logprobs=0 if rng.random() < 0.3 else None,
        )
        ask = {"prompt": prompt, "params": params, "n": rng.randrange(1, 5), "program": rng.random() < 0.3}
        world.arrivals.append(ask | {"matcher": rng.random() < 0.3, "salt": rng.choice(["", "", "a"])})
    return world
