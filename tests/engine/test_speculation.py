"""Speculation changes no token and no number: the engine with it against the engine without it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.build import assemble
from nano_inference.core.cache import RadixKVCache
from nano_inference.core.drafting import Draft, MakeDrafter
from nano_inference.core.ngram_drafter import NgramDrafter
from nano_inference.core.step import Row, RowResult
from nano_inference.types import EngineRequest, StepStats
from tests.engine.test_batch_invariance import open_engine
from tests.engine.test_lookahead import REPEATING, run_all
from tests.models.families import VOCAB_SIZE
from tests.sim.fakes import StopAfter, fake_config, fake_parts, parrot
from tests.weights.pairs import Pair


def run_one(engine: InferenceEngine, prompt: list[int], params: SamplingParams, num_samples: int = 1) -> Any:
    return run_all(engine, [EngineRequest(prompt=prompt, params=params, num_samples=num_samples)])


def drafted(stats: list[StepStats]) -> tuple[int, int]:
    """Return the numbers of computed and accepted draft tokens."""
    return sum(one.num_drafted for one in stats), sum(one.num_accepted for one in stats)


class NotingDrafter(NgramDrafter):
    """Notes which samples are open, as (request, sample)."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.open_samples: set[tuple[int, int]] = set()

    def open(self, sample_id: int, request_id: int, tokens: Sequence[int], num_prompt: int) -> None:
        super().open(sample_id, request_id, tokens, num_prompt)
        self.open_samples.add((request_id, sample_id))

    def close(self, sample_id: int, request_id: int) -> None:
        super().close(sample_id, request_id)
        self.open_samples.discard((request_id, sample_id))


class FixedDrafter:
    """Proposes the same tokens for every sample, none if there are none."""

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.num_drafts = 0
        self._disabled: set[int] = set()

    def open(self, sample_id: int, request_id: int, tokens: Sequence[int], num_prompt: int) -> None:
        self._disabled.discard(sample_id)

    def close(self, sample_id: int, request_id: int) -> None: ...

    def disable(self, sample_id: int) -> None:
        self._disabled.add(sample_id)

    def draft(self, sample_id: int) -> Draft:
        self.num_drafts += 1
        return Draft() if sample_id in self._disabled else Draft(self.tokens, 1.0)

    def last_draft(self, sample_id: int) -> tuple[int, ...]:
        return self.tokens


def fake(
    cache_type: str = "radix",
    num_blocks: int = 200,
    block_size: int = 4,
    make_drafter: MakeDrafter = NgramDrafter,
    **options: Any,
) -> InferenceEngine:
    """An engine with speculation, on a fake model that repeats itself."""
    parts = fake_parts(cache_type, num_blocks, block_size, drawing=parrot)
    parts = replace(parts, make_drafter=make_drafter)
    return InferenceEngine(fake_config(speculation="ngram", **options), parts=parts)


def test_a_text_that_repeats_takes_fewer_steps_than_tokens(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with open_engine(tiny_llama, speculation="ngram") as engine:
        samples, stats = run_one(engine, REPEATING, params)
    num_drafted, num_accepted = drafted(stats)
    assert len(samples[0].completion_tokens) == 60 == len(stats) + num_accepted
    assert len(stats) < 40
    assert sum(one.num_computed for one in stats) == len(REPEATING) + 60 - 1 + num_drafted - num_accepted
    assert sum(one.num_sampled for one in stats) == 60


def test_drafts_come_from_an_ended_sample() -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, seed=1)
    counts = []
    for num_samples in (1, 2):
        engine = fake(max_batch_size=1)
        engine.parts.runner.drawing = lambda seen, *_: random.Random(len(seen)).randrange(50)
        samples, stats = run_one(engine, [1, 2, 3], params, num_samples)
        assert len({sample.completion_tokens for sample in samples}) == 1
        counts.append(len(stats))
    assert counts[0] > 35, "nothing comes twice by itself"
    assert counts[1] - counts[0] < 20


def test_ended_samples_are_closed_in_the_drafter() -> None:
    drafter = NotingDrafter(5)
    engine = fake(make_drafter=lambda limit: drafter)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ids = [engine.add_request([1, 2, 3], params, 3, make_matcher=matcher) for matcher in (None, StopAfter, None)]
    assert {request for request, _ in drafter.open_samples} == {ids[0], ids[2]}, "a matcher excludes drafts"
    engine.step()
    engine.abort(ids[0])
    assert {request for request, _ in drafter.open_samples} == {ids[2]}
    while engine.has_pending():
        engine.step()
    assert not drafter.open_samples


@pytest.mark.parametrize(
    "options",
    [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"min_tokens": 30}],
    ids=str,
)
def test_requests_that_need_every_token_get_no_drafts(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=30, seed=1, stop_token_ids=[45], **options)
    assert drafted(run_one(fake(), REPEATING, params)[1]) == (0, 0)
    plain = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    assert drafted(run_one(fake(), REPEATING, plain)[1])[1] > 0


@pytest.mark.slow
def test_length_and_stop_inside_accepted_drafts(tiny_llama: Path) -> None:
    def one(engine: InferenceEngine, **options: Any) -> TrainingSample:
        params = SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True, "seed": 1} | options))
        return run_one(engine, REPEATING, params)[0][0]

    with open_engine(tiny_llama) as plain, open_engine(tiny_llama, speculation="ngram") as guessing:
        whole = one(plain)
        for length in range(1, 41):
            short = one(guessing, max_tokens=length)
            assert (short.completion_tokens, short.logprobs) == (
                whole.completion_tokens[:length],
                whole.logprobs[:length],
            )
            assert short.finish_reason == "length"
        for token in set(whole.completion_tokens):
            ours, theirs = (one(engine, stop_token_ids=[token], min_tokens=12) for engine in (guessing, plain))
            assert replace(ours, request_id=0) == replace(theirs, request_id=0)
            assert ours.stop_reason == token or ours.finish_reason == "length"


def test_accepted_drafts_are_cached_and_rejected_ones_are_not() -> None:
    engine = fake(num_blocks=400)
    for seed in range(20):
        params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
        prompt = [40 + seed % 5, *REPEATING]
        first = engine.generate([prompt], params)[0]
        turn = [*first.prompt_tokens, *first.completion_tokens, 1, 2]
        second = engine.generate([turn], params)[0]
        assert len(turn) - 3 <= second.num_cached_tokens <= len(turn) - 2
        fresh = InferenceEngine(fake_config(), parts=fake_parts("radix", 200, 4, drawing=parrot))
        assert second.completion_tokens == fresh.generate([turn], params)[0].completion_tokens


def test_rejected_drafts_hold_no_blocks() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        size = rng.choice([1, 2, 4])
        engine = fake(num_blocks=rng.choice([40, 200]) // size, block_size=size)
        sizes: dict[int, int] = {}
        for _ in range(8):
            params = SamplingParams(max_tokens=rng.randrange(1, 20), seed=rng.randrange(9), ignore_eos=True)
            sizes[engine.add_request([rng.randrange(40, 50) for _ in range(8)], params, claim=True)] = 8
        started: set[int] = set()
        while engine.has_pending():
            result = engine.tick()
            engine.parts.kv.check()
            started.update(request_id for request_id, _ in result.started)
            for delta in result.deltas:
                sizes[delta.request_id] += len(delta.token_ids)
            started -= {delta.request_id for delta in result.deltas if delta.sample is not None}
            held = engine.parts.kv.num_blocks - engine.parts.kv.num_free_blocks()
            assert held <= sum(-(-(sizes[one] - 1) // size) for one in started), "the last token is not computed yet"


class CountingKV(RadixKVCache):
    """Counts the blocks that are published."""

    num_published = 0

    def publish(self, *arguments: Any) -> Any:
        self.num_published += 1
        return super().publish(*arguments)


def test_drafts_do_not_change_what_is_published() -> None:
    """A row with drafts is no prefill chunk: its partly filled block is not published."""
    counts = []
    for speculation in ("off", "ngram"):
        kv = CountingKV(200, 16)
        parts = replace(fake_parts("radix", 200, 16, drawing=parrot), kv=kv)
        engine = InferenceEngine(fake_config(speculation=speculation), parts=parts)  # type: ignore[arg-type]
        engine.generate([REPEATING], SamplingParams(max_tokens=70, seed=1, ignore_eos=True))
        counts.append(kv.num_published)
    assert counts[0] == counts[1] < 10


@pytest.mark.parametrize("on_running", ["keep", "recompute"])
def test_weight_update_takes_effect_at_the_same_token(untied: Pair, on_running: Any) -> None:
    changed = {name: weight.detach() * 1.01 for name, weight in untied.old.named_parameters()}
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, seed=1)

    def story(speculation: str, lengths: list[int]) -> tuple[TrainingSample, list[int], int]:
        """One sample with updates once it has so many tokens; how many it really had, and how many were guessed."""
        seen, num_accepted = [], 0
        with open_engine(untied.directory, speculation=speculation) as engine:
            request = engine.add_request(REPEATING, params, claim=True)
            num_tokens = 0
            while engine.has_pending():
                done = engine.tick()
                num_tokens += sum(len(delta.token_ids) for delta in done.deltas)
                num_accepted += done.stats.num_accepted
                if len(seen) < len(lengths) and num_tokens >= lengths[len(seen)]:
                    seen.append(num_tokens)
                    engine.update_weights(changed, blocking=True, on_running=on_running, version=f"at {num_tokens}")
            return replace(engine.collect(request)[0], num_preemptions=0), seen, num_accepted

    ours, lengths, num_accepted = story("ngram", [15, 31])
    theirs, same, _ = story("off", lengths)
    assert same == lengths and num_accepted > 5
    assert ours == theirs and len(ours.version_spans) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_failed_step_with_drafts_changes_no_output(tiny_llama: Path, error: BaseException) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [REPEATING, [7, 7, 7], [1, 2, 3, 1, 2]]
    with open_engine(tiny_llama) as plain, open_engine(tiny_llama, speculation="ngram") as engine:
        expected = plain.generate(prompts, params)
        executor: Any = engine.parts.executor
        inner, failures = executor.sampler, iter([error])
        num_failed = 0

        def failing(logits_BV: torch.Tensor, rows: Sequence[Row]) -> Sequence[RowResult]:
            nonlocal num_failed
            if len({row.id for row in rows}) < len(rows):  # a row with draft tokens is drawn from several times
                for failure in failures:
                    num_failed += 1
                    raise failure
            found: Sequence[RowResult] = inner(logits_BV, rows)
            return found

        executor.sampler = failing
        ids = [engine.add_request(prompt, params, claim=True) for prompt in prompts]
        while engine.has_pending():
            try:
                engine.tick()
            except KeyboardInterrupt:
                assert engine.is_alive
        samples = [engine.collect(one)[0] for one in ids]
    assert num_failed == 1
    assert [(s.completion_tokens, s.logprobs, s.finish_reason) for s in samples] == [
        (s.completion_tokens, s.logprobs, s.finish_reason) for s in expected
    ]


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_draft_with_nonfinite_logits_changes_no_output(tiny_llama: Path, kernels: Any) -> None:
    params, drafter = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), FixedDrafter()
    config = EngineConfig(
        str(tiny_llama), kernels=kernels, speculation="ngram", block_size=8, device="cpu", num_threads=1
    )
    parts = replace(assemble(replace(config, kv_cache_bytes=16 << 20)), make_drafter=lambda limit: drafter)
    with InferenceEngine(config, parts=parts) as engine:
        assert parts.executor is not None
        torn = {name: weight.clone() for name, weight in parts.executor.weights.values()}
        poison = next(token for token in range(VOCAB_SIZE) if token not in (1, 2, 3))
        torn["model.embed_tokens.weight"][poison] = float("nan")
        engine.update_weights(torn, allow_nonfinite=True, blocking=True)
        expected = engine.generate([[1, 2, 3]], params)[0]
        assert poison not in expected.completion_tokens and expected.finish_reason == "length"
        drafter.tokens, drafter.num_drafts = (expected.completion_tokens[1], poison, poison), 0
        sample = engine.generate([[1, 2, 3]], params)[0]
    assert drafter.num_drafts and sample.finish_reason == "length"
    assert sample.num_preemptions == 1, "the sample gets no more draft tokens"
    assert sample.completion_tokens == expected.completion_tokens
    assert torch.tensor(sample.logprobs).sub(torch.tensor(expected.logprobs)).abs().max() < 1e-5
