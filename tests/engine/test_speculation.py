"""Speculation changes no token and no number: the engine with it against the engine without it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from nano_inference.types import StepStats
from tests.engine.test_batch_invariance import KINDS, ThreadsKept, open_engine
from tests.models.families import VOCAB_SIZE
from tests.sim.fakes import StopAfter, fake_config, fake_parts, parrot
from tests.weights.pairs import Pair

Ask = tuple[list[int], SamplingParams, int]
REPEATING = [5, 9, 30, 2, 44, 5, 9, 30]


def asks() -> list[Ask]:
    """Requests of all kinds, most of which say the same again: greedy, or out of few tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(60) for _ in range(21)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "raw_logprobs": True},
        {"allowed_token_ids": [3, 4]},
        {"allowed_token_ids": [3, 4, 7], "temperature": 0.3, "sampling_mask": True, "logprobs": 3},
        {"temperature": 0.05, "logprobs_mode": "raw"},
        {"temperature": 0.2, "top_k": 3, "prompt_logprobs": 1},
        {"temperature": 0.3, "top_p": 0.5, "logit_bias": {5: 3.0, 6: 3.0}},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0.1, "frequency_penalty": 0.1},
        {"temperature": 0, "min_tokens": 9, "stop_token_ids": list(range(0, 60, 3))},
        {"temperature": 0.1, "min_p": 0.2, "stop_token_ids": [1, 8, 9]},
    ]
    made: list[Ask] = []
    for i, options in enumerate(kinds):
        prompt = shared[: rng.randrange(21)] + [rng.randrange(60) for _ in range(rng.randrange(1, 30))] * (1 + i % 2)
        options |= {"max_tokens": rng.randrange(20, 45), "seed": i, "ignore_eos": True}
        made.append((prompt, SamplingParams(**options), 1 + 2 * (i % 3 == 0)))
    return made


ASKS = asks()


def run_all(engine: InferenceEngine, wanted: list[Ask] = ASKS) -> tuple[list[TrainingSample], list[StepStats]]:
    """Everything at once; what depends on how it was computed is left out of the samples."""
    ids = [engine.add_request(prompt, params, count, claim=True) for prompt, params, count in wanted]
    stats = []
    while engine.has_pending():
        stats.append(engine.tick().stats)
        engine.parts.kv.check()
    samples = [sample for one in ids for sample in engine.collect(one)]
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    return [replace(sample, num_cached_tokens=0, num_preemptions=0) for sample in samples], stats


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


# ---- the same bits


@dataclass(frozen=True)
class Witness:
    """A model's files, how it is kept, and what it gives without speculation."""

    path: Path
    options: dict[str, Any]
    expected: list[TrainingSample]


@pytest.fixture(scope="module", params=list(KINDS))
def witness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Witness:
    write, options = KINDS[request.param]
    path = write(tmp_path_factory.mktemp("witness"))
    with ThreadsKept(), open_engine(path, **options) as engine:
        samples, stats = run_all(engine)
    assert drafted(stats) == (0, 0)
    return Witness(path, options, samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens_per_batch": 25, "block_size": 4},
        {"cache_type": "paged", "num_threads": 2, "max_batch_size": 3, "max_draft_tokens": 11},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_speculation_changes_no_bit(witness: Witness, options: dict[str, Any]) -> None:
    with open_engine(witness.path, **witness.options, **options, speculation="ngram") as engine:
        samples, stats = run_all(engine)
    assert samples == witness.expected
    num_drafted, num_accepted = drafted(stats)
    assert 0 < num_accepted < num_drafted


def test_speculation_changes_no_bit_with_preemption(tiny_llama: Path) -> None:
    wanted = [(prompt, replace(params, max_tokens=25), count) for prompt, params, count in ASKS]
    with open_engine(tiny_llama, block_size=4) as engine:
        expected, _ = run_all(engine, wanted)
        block_bytes = engine.parts.executor.block_bytes(4)
    tight = {"block_size": 4, "kv_cache_bytes": 45 * block_bytes, "max_tokens_per_batch": 32}
    with open_engine(tiny_llama, **tight, speculation="ngram") as engine:
        samples, stats = run_all(engine, wanted)
    assert samples == expected
    assert sum(one.num_preempted for one in stats) > 0 and drafted(stats)[1] > 0


@pytest.mark.slow
def test_speculation_with_torch_is_equal_up_to_rounding(tiny_llama: Path) -> None:
    with open_engine(tiny_llama, kernels="off") as engine:
        expected, _ = run_all(engine)
    with open_engine(tiny_llama, kernels="off", speculation="ngram") as engine:
        samples, stats = run_all(engine)
    assert drafted(stats)[1] > 0
    for ours, theirs in zip(samples, expected, strict=True):
        assert (ours.completion_tokens, ours.finish_reason) == (theirs.completion_tokens, theirs.finish_reason)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


# ---- what it saves


def test_a_text_that_repeats_takes_fewer_steps_than_tokens(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with open_engine(tiny_llama, speculation="ngram") as engine:
        samples, stats = run_all(engine, [(REPEATING, params, 1)])
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
        samples, stats = run_all(engine, [([1, 2, 3], params, num_samples)])
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


# ---- which samples get drafts


@pytest.mark.parametrize(
    "options",
    [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"min_tokens": 30}],
    ids=str,
)
def test_requests_that_need_every_token_get_no_drafts(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=30, seed=1, stop_token_ids=[45], **options)
    assert drafted(run_all(fake(), [(REPEATING, params, 1)])[1]) == (0, 0)
    plain = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    assert drafted(run_all(fake(), [(REPEATING, plain, 1)])[1])[1] > 0


# ---- where it ends


@pytest.mark.slow
def test_length_and_stop_inside_accepted_drafts(tiny_llama: Path) -> None:
    def one(engine: InferenceEngine, **options: Any) -> TrainingSample:
        params = SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True, "seed": 1} | options))
        return run_all(engine, [(REPEATING, params, 1)])[0][0]

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


# ---- interruptions


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


def test_aborted_samples_resume_identically(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0.05, max_tokens=50, seed=4, ignore_eos=True)
    with open_engine(tiny_llama) as plain, open_engine(tiny_llama, speculation="ngram") as engine:
        whole = plain.generate([REPEATING], params, 3)
        for num_steps in (1, 4, 9):
            request = engine.add_request(REPEATING, params, 3)
            for _ in range(num_steps):
                engine.step()
            parts = engine.abort(request)
            for part, full in zip(parts, whole, strict=True):
                assert part.completion_tokens == full.completion_tokens[: len(part.completion_tokens)]
            for done, full in zip(engine.complete(parts, params), whole, strict=True):
                assert (done.completion_tokens, done.logprobs) == (full.completion_tokens, full.logprobs)
        engine.parts.kv.check()


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
        torn = {name: weight.clone() for name, weight in parts.executor.weight_values()}
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
