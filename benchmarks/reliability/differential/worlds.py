"""A world: an engine on a random model, what is asked of it, and everything that came back."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import torch
import transformers

from differential.asks import Bounds, PlannedRequest, random_ask, without_host
from differential.models import Checkpoint, make_checkpoint
from differential.recorder import Recorder
from nano_inference import EngineConfig, InferenceEngine, TrainingSample
from nano_inference.build import assemble, parts_of
from nano_inference.core.step import Runner
from nano_inference.executors.opening import load_cuda_model
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.types import Beginning, Delta, EnginePaused, LogprobsMode, OnRunning
from tests.cuda.plain import plain_kernels

ComputePath = Literal["c", "torch", "cuda"]
"""`cuda` is the CUDA executor on CPU tensors, with plain kernels."""
GATHER_S = 120.0
"""Longest wait for the thread that gathers an update."""


class Fault(AssertionError):
    """The engine did what it must not do."""


def require(is_so: bool, what: str) -> None:
    """Raise `Fault` unless it is so."""
    if not is_so:
        raise Fault(what)


class HeldWeights:
    """Weights of which all but the first come only after `release`, so that the world chooses their step."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._released = threading.Event()
        self.gathered = threading.Event()

    def release(self) -> None:
        """Let the rest come, and wait until all is gathered."""
        self._released.set()
        require(self.gathered.wait(GATHER_S), "an update was not gathered")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        items = iter(self._weights.items())
        yield next(items)
        self._released.wait(GATHER_S)
        yield from items


@dataclass
class StreamView:
    """A request that is followed by its deltas."""

    request_id: int
    deltas: Iterator[Delta]
    seen: dict[int, list[Delta]] = field(default_factory=dict)
    """By sample index."""


@dataclass(kw_only=True)
class World:
    """Owns an engine and its history."""

    path: ComputePath
    rng: random.Random
    checkpoint: Checkpoint
    config: EngineConfig
    engine: InferenceEngine
    recorder: Recorder | None
    models: dict[int, transformers.PreTrainedModel]
    """Version -> Transformers' model of the same weights."""
    arrivals: list[PlannedRequest]
    plans: dict[int, OnRunning] = field(default_factory=dict)
    """Version -> what its installation did to running requests."""
    asked: dict[int, PlannedRequest] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    """Requests whose samples come from `step`, and that have not all ended."""
    left: Counter[int] = field(default_factory=Counter)
    """How many samples of each are still to come."""
    may_abort: set[int] = field(default_factory=set)
    """Requests that something may have aborted."""
    samples: list[TrainingSample] = field(default_factory=list)
    streams: list[StreamView] = field(default_factory=list)
    ended_streams: list[StreamView] = field(default_factory=list)
    held: HeldWeights | None = None
    counts: Counter[str] = field(default_factory=Counter)


def make_world(
    seed: int,
    family: str,
    path: ComputePath,
    directory: Path,
    wrap: Callable[[Runner], Runner] | None = None,
) -> World:
    """Return the world of that seed; all arguments but `directory` decide what happens in it.

    `wrap` may put something before the runner, to see that an error there is found.
    """
    rng = random.Random(f"{seed} {family} {path}")
    has_windows = path == "cuda" and random.Random(f"windows {seed}").random() < 0.7
    checkpoint = make_checkpoint(family, rng, directory)
    block_size = rng.choice([1, 2, 4, 8, 16])
    num_tokens = rng.choice([60, 110, 110, 150, 200, 800])
    config = EngineConfig(
        model_path=str(directory),
        device="cpu",
        kernels="auto" if path == "c" else "off",
        cache_type="radix" if checkpoint.state_bytes else rng.choice(["paged", "radix"]),
        block_size=block_size,
        kv_cache_bytes=checkpoint.cache_bytes(-(-num_tokens // block_size) * block_size),
        max_model_len=rng.choice([100, 180, 256]),
        max_batch_size=rng.choice([1, 4, 8, 16]),
        max_tokens_per_batch=rng.choice([4, 16, 64, 512]),
        speculation=rng.choice(["off", "off" if has_windows else "ngram"]),
        max_draft_tokens=rng.choice([1, 3, 5]),
        lookahead=random.Random(f"lookahead {seed} {family} {path}").choice([1, 2, 5, 16]),
        logprobs_mode=rng.choice(get_args(LogprobsMode)),
        seed=rng.randrange(100),
    )
    if path == "cuda":
        executor = load_cuda_model(open_checkpoint(directory), torch.device("cpu"), plain_kernels(), config)
        parts = parts_of(executor, config)
    else:
        parts = assemble(config)
    if wrap is not None:
        parts = replace(parts, runner=wrap(parts.runner), launch=None)
    recorder = None
    if rng.random() < 0.75:
        recorder = Recorder(parts.runner, parts.kv.num_blocks, parts.kv.block_size, parts.kv.num_states)
        launch = None if parts.launch is None else recorder.wrapped(parts.launch)
        parts = replace(parts, runner=recorder, launch=launch)
    engine = InferenceEngine(config, parts=parts)
    if recorder is not None:
        recorder.version = engine.get_weight_version
    num_slots = parts.kv.num_blocks * parts.kv.block_size
    bounds = Bounds(vocab_size=checkpoint.vocab_size, room=min(num_slots, parts.max_model_len))
    base = tuple(rng.randrange(checkpoint.vocab_size) for _ in range(60))
    arrivals = [random_ask(rng, bounds, base) for _ in range(rng.randrange(3, 16))]
    if has_windows:
        arrivals = [without_host(ask) for ask in arrivals]
    parts_of_world = {"path": path, "rng": rng, "checkpoint": checkpoint, "config": config, "engine": engine}
    return World(**parts_of_world, recorder=recorder, models={0: checkpoint.model}, arrivals=arrivals)


# ---- requests


def submit(world: World, ask: PlannedRequest, *, is_claimed: bool = False) -> int:
    """Queue a request."""
    ask = replace(ask, version=world.engine.get_weight_version())
    params = ask.params if ask.partial is None else replace(ask.params, seed=None)
    request_id = world.engine.add_request(
        ask.prompt,
        params,
        ask.count,
        salt=ask.salt,
        make_matcher=ask.rules,
        program=ask.tool,
        partial=ask.partial,
        beginning=ask.beginning,
        claim=is_claimed,
    )
    world.asked[request_id] = ask
    world.counts["requests"] += 1
    return request_id


def arrive(world: World) -> None:
    """Queue the next request, or run it by another of the ways there are."""
    ask = world.arrivals.pop(0)
    way = world.rng.random()
    if way < 0.2:
        request_id = submit(world, ask, is_claimed=True)
        world.streams.append(StreamView(request_id, world.engine.deltas(request_id)))
        world.counts["streams"] += 1
    elif way < 0.35 and not world.engine.is_halted and not (ask.rules or ask.salt or ask.beginning != Beginning()):
        generate(world, ask)
    else:
        request_id = submit(world, ask)
        world.open.add(request_id)
        world.left[request_id] = ask.count


def generate(world: World, ask: PlannedRequest) -> None:
    """Run a request to its end while the others run beside it."""
    ask = replace(ask, version=world.engine.get_weight_version())
    try:
        samples = world.engine.generate([ask.prompt], ask.params, ask.count, program=ask.tool)
    except EnginePaused:  # a pause that waited for running requests came first
        return
    require(len(samples) == ask.count, "generate lost samples")
    world.asked[samples[0].request_id] = ask
    world.samples += samples
    world.counts["requests"] += 1
    world.counts["generated"] += 1


def take(world: World, samples: Sequence[TrainingSample]) -> None:
    """Keep samples that came; continue some of the unfinished ones as new requests."""
    for sample in samples:
        require(sample.request_id in world.open, f"a sample of request {sample.request_id} came, which is not open")
        world.left[sample.request_id] -= 1
        if not world.left[sample.request_id]:
            world.open.discard(sample.request_id)
        world.samples.append(sample)
        ask = world.asked[sample.request_id]
        is_short = len(sample.completion_tokens) < (ask.params.max_tokens or 0)
        if sample.finish_reason == "abort" and sample.stop_reason is None and is_short and world.rng.random() < 0.6:
            request_id = submit(world, replace(ask, count=1, partial=sample))
            world.open.add(request_id)
            world.left[request_id] = 1
            world.counts["resumed"] += 1


def follow(world: World) -> None:
    """Read a little of a stream, or close it."""
    view = world.rng.choice(world.streams)
    try:
        for _ in range(world.rng.randrange(1, 6)):
            delta = next(view.deltas)
            view.seen.setdefault(delta.sample_index, []).append(delta)
        is_over = world.rng.random() < 0.05
    except (StopIteration, EnginePaused):
        is_over = True
    if is_over:
        close_stream(world, view)


def close_stream(world: World, view: StreamView) -> None:
    """Stop following; what has not ended is aborted."""
    close = getattr(view.deltas, "close", None)
    if close is not None:
        close()
    world.streams.remove(view)
    world.ended_streams.append(view)


def abort(world: World) -> None:
    """Abort one request, some, or all."""
    rng = world.rng
    if not world.open:
        return
    ids = rng.sample(sorted(world.open), rng.randrange(1, min(3, len(world.open)) + 1))
    world.may_abort |= set(ids)
    partial = world.engine.abort(ids if rng.random() < 0.5 else ids[:1])
    world.counts["aborts"] += len(partial)
    take(world, partial)
