"""A runner whose K/V is (token, weight version) and whose tokens depend on the weights: detects stale reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch

from nano_inference.build import EngineParts
from nano_inference.config import EngineConfig
from nano_inference.core.cache import make_kv
from nano_inference.core.step import BlockCopy, DrawExtras, Row, RowResult
from nano_inference.engine import InferenceEngine
from nano_inference.executors.live_weights import LiveWeights
from nano_inference.executors.torch.attention import SdpaBackend
from nano_inference.executors.torch.executor import TorchExecutor, TorchModel
from nano_inference.loading.sources import TensorSource
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig
from nano_inference.models.families import OWN_FAMILIES, program_of
from nano_inference.types import SamplingParams, TrainingSample
from nano_inference.weights.sync import WeightSyncManager
from tests.sim.fakes import EOS, VOCAB_SIZE, Calculator, OnStep, StopAfter

Slot = tuple[int, int]
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


def next_token(seen: Sequence[int], seed: int, sample_index: int, version: int) -> int:
    """The fake model's draw under one version of the weights."""
    return random.Random(repr((tuple(seen), seed, sample_index, len(seen), version))).randrange(VOCAB_SIZE)


def parrot(seen: Sequence[int], seed: int, sample_index: int, version: int) -> int:
    """The draw of a model that repeats itself, each version in its own way."""
    rng = random.Random(repr((tuple(seen), seed, sample_index, len(seen), version)))
    period = 3 + version % 2
    return seen[-period] if len(seen) > period and rng.random() < 0.8 else rng.randrange(40, VOCAB_SIZE)


Drawing = Callable[[Sequence[int], int, int, int], int]
"""What `next_token` is."""


def score(seen: Sequence[int], token: int, version: int) -> float:
    """The fake model's log-probability of a known token under one version of the weights."""
    return -random.Random(repr((tuple(seen), token, version))).random()


class VersionedRunner:
    """Owns slots of (token, version). `oldest` is the oldest version whose K/V may still be read."""

    failure = None

    def __init__(self, num_blocks: int, block_size: int, drawing: Drawing = next_token) -> None:
        self.block_size = block_size
        self.drawing = drawing
        self.num_drafted = 0
        self.num_blocks = num_blocks
        self.version = 0
        self.oldest = 0
        self.num_mixed_reads = 0
        self.num_steps = 0
        self.on_step: OnStep = lambda number: None
        self._ends: dict[int, range] = {}
        """Where a row may stand after its last step: behind its own tokens and those of its guesses that were right."""
        self.restore_cache()

    def install(self, version: int) -> None:
        """Set the version; weights are not used."""
        self.version = version

    def free_cache(self) -> None:
        self.slots: list[Slot | None] = []

    def recover(self) -> None:
        pass

    def restore_cache(self) -> None:
        self.slots = [None] * (self.num_blocks * self.block_size)

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        self.num_steps += 1
        self.on_step(self.num_steps)
        size = self.block_size
        copied = [(c.target * size + i, self.slots[c.source * size + i]) for c in copies for i in range(c.num_tokens)]
        for block in fresh:
            self.slots[block * size : (block + 1) * size] = [None] * size
        for slot, value in copied:
            self.slots[slot] = value
        for row in rows:
            self._check_prefix(row)
            for i, token in enumerate(row.tokens):
                self.slots[self._slot(row, row.start + i)] = (token, self.version)
        return {row.id: self.result(row) for row in rows}

    def _check_prefix(self, row: Row) -> None:
        """Check versions: a started row reads K/V of the installed weights, a continued one nothing before `oldest`."""
        versions = {slot[1] for slot in self.read(row, row.start)}
        is_continued = row.start in self._ends.get(row.id, ())
        assert all(version >= (self.oldest if is_continued else self.version) for version in versions), "a stale read"
        self.num_mixed_reads += bool(versions - {self.version})
        end = row.start + len(row.tokens)
        self._ends[row.id] = range(end - row.num_drafts, end + max(1, row.num_sampled))

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, row: Row, end: int) -> Iterator[Slot]:
        """Yield the slots of a row before position `end`."""
        for position in range(end):
            slot = self.slots[self._slot(row, position)]
            assert slot is not None, "a row read a slot that was never written"
            yield slot

    def result(self, row: Row) -> RowResult:
        """Sample for a row whose tokens are written."""
        end = row.start + len(row.tokens)
        seen = [token for token, _ in self.read(row, end)]
        ends = range(end - row.num_drafts, end + 1) if row.num_sampled else ()
        tokens = [self.drawing(seen[:place], row.seed, row.sample_index, self.version) for place in ends]
        for place in range(end, end + row.num_sampled - 1):
            self.slots[self._slot(row, place)] = (tokens[-1], self.version)
            tokens.append(self.drawing((*seen, *tokens), row.seed, row.sample_index, self.version))
        self.num_drafted += row.num_drafts
        scores = ()
        if row.score_from is not None:
            known = seen if row.next_token < 0 else [*seen, row.next_token]
            first = max(row.score_from, row.start + 1)
            scores = tuple(
                score(known[:p], known[p], self.version) for p in range(first, min(len(known), row.score_end))
            )
        return RowResult(
            id=row.id,
            tokens=tuple(tokens),
            logprobs=(-0.5,) * len(tokens),
            extras=tuple(DrawExtras(raw_logprob=-0.25) for _ in tokens),
            scores=scores,
            score_tops=((),) * len(scores),
        )


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
) -> InferenceEngine:
    """An engine on such a runner, with real (tiny) weights that can be updated."""
    runner = VersionedRunner(num_blocks, block_size, drawing)
    parts = EngineParts(
        runner=runner,
        kv=make_kv(cache_type, num_blocks, block_size),  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
        max_model_len=100_000,
        lookahead=lookahead,
        eos_token_ids=frozenset([EOS]),
        weights=WeightSyncManager(counting_executor(runner.install)),
    )
    return InferenceEngine(config, parts=parts)


def new_weights() -> dict[str, torch.Tensor]:
    """A full set of weights for `MODEL`."""
    return {spec.name: torch.ones(spec.shape) for spec in PROGRAM.weights}


def replay(
    prompt: Sequence[int],
    params: SamplingParams,
    sample_index: int,
    versions: Sequence[int],
    *,
    program: bool,
    matcher: bool,
    drawing: Drawing = next_token,
) -> tuple[list[int], list[int], str | None]:
    """Write a sample out naively, each token under the version it claims: (tokens, mask, why it ends, if it does)."""
    assert params.max_tokens is not None and params.seed is not None
    tokens, mask = list(prompt), []
    state: object = None
    tool, stop_after = Calculator(), StopAfter() if matcher else None
    end: str | None = "length" if params.max_tokens == 0 else None

    def add(token: int, sampled: int) -> str | None:
        tokens.append(token)
        mask.append(sampled)
        if stop_after is not None and stop_after.advance(token):
            return "stop"
        return "length" if len(mask) == params.max_tokens else None

    while end is None and len(mask) < len(versions):
        token = drawing(tokens, params.seed, sample_index, versions[len(mask)])
        end = add(token, 1)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            end = "stop"
        elif program and not end:
            state, forced = tool.step(state, token)
            for forced_token in forced:
                end = end or add(forced_token, 0)
    return tokens[len(prompt) :], mask, end


def content(samples: Sequence[TrainingSample]) -> list[tuple[object, ...]]:
    """What must not depend on interruptions."""
    return [(s.completion_tokens, s.logprobs, s.mask, s.finish_reason, s.prompt_logprobs) for s in samples]


def run_to_end(engine: InferenceEngine) -> dict[int, TrainingSample]:
    """Run all requests to their end; return samples by request."""
    samples: dict[int, TrainingSample] = {}
    while engine.has_pending():
        samples |= {sample.request_id: sample for sample in engine.step()}
    return samples
