"""The engine's promises to its callers, on a tiny random model and on fake parts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.types import LogprobsMode
from tests.models.families import VOCAB_SIZE, gap, make_model
from tests.sim.fakes import EOS, fake_config, fake_engine, fake_parts, is_idle

PROMPT = [5, 9, 30, 2, 44]
LONG = SamplingParams(max_tokens=25, seed=4, ignore_eos=True)


def engine(directory: Path, **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 16 << 20, "device": "cpu", "block_size": 4} | options
    return InferenceEngine(EngineConfig(model_path=str(directory), **options))


def tokens_of(samples: list[TrainingSample]) -> list[tuple[int, ...]]:
    return [sample.completion_tokens for sample in samples]


def run_to_end(running: InferenceEngine) -> dict[int, list[TrainingSample]]:
    found: dict[int, list[TrainingSample]] = {}
    while running.has_pending():
        for sample in running.step():
            found.setdefault(sample.request_id, []).append(sample)
    return found


def test_samples_are_prompt_major_in_any_order_of_ending() -> None:
    prompts = [[1], [2, 3], [4, 5, 6]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 3, 9)]
    for options in ({"num_samples_per_prompt": 2}, {"num_samples": 2}):
        samples = fake_engine().generate(prompts, params, **options)
        assert [list(s.prompt_tokens) for s in samples] == [p for p in prompts for _ in range(2)]
        assert [s.sample_index for s in samples] == [0, 1] * 3
        assert [len(s.completion_tokens) for s in samples] == [20, 20, 3, 3, 9, 9]
    assert fake_engine().generate([]) == []


def test_a_seeded_request_gives_different_reproducible_samples(tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=12, seed=8)
    first = tokens_of(engine(tiny_llama).generate([PROMPT], params, 8))
    assert len(set(first)) == 8
    ours = engine(tiny_llama, cache_type="paged", max_tokens_per_batch=3)
    assert tokens_of(ours.generate([PROMPT], params, 8)) == first
    assert tokens_of(ours.generate([PROMPT], params, 1)) == first[:1]


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them() -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    twice = [tokens_of(fake_engine().generate([PROMPT, PROMPT], params)) for _ in range(2)]
    assert twice[0] == twice[1] and twice[0][0] != twice[0][1]
    unseeded = replace(fake_config(), seed=None)
    found = [tokens_of(InferenceEngine(unseeded, parts=fake_parts("radix", 60, 4)).generate([PROMPT], params))[0]]
    found += tokens_of(InferenceEngine(unseeded, parts=fake_parts("radix", 60, 4)).generate([PROMPT, PROMPT], params))
    assert len(set(found)) == 3


def test_a_stream_yields_what_generate_returns() -> None:
    params = SamplingParams(max_tokens=15, seed=2, ignore_eos=True, logprobs=1)
    expected = fake_engine().generate([PROMPT], params, 2)
    parts: dict[int, list[int]] = {0: [], 1: []}
    last = {}
    for delta in fake_engine().stream(PROMPT, params, 2):
        parts[delta.sample_index] += delta.token_ids
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.mask) == len(delta.top_logprobs or ())
        assert delta.sample_index not in last, "nothing comes after the last delta"
        if delta.sample is not None:
            last[delta.sample_index] = delta.sample
            assert delta.finish_reason == "length"
    assert [last[0], last[1]] == expected
    assert [tuple(parts[0]), tuple(parts[1])] == tokens_of(expected)


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_closing_a_stream_aborts_it_and_frees_its_blocks(num_read: int) -> None:
    ours = fake_engine()
    stream = ours.stream(PROMPT, LONG, 3)
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert is_idle(ours)


def test_deltas_requires_a_claimed_request() -> None:
    ours = fake_engine()
    claimed, other = ours.add_request(PROMPT, LONG, claim=True), ours.add_request(PROMPT, LONG)
    assert sum(len(delta.token_ids) for delta in ours.deltas(claimed)) == 25
    for request_id in (claimed, other, 99):
        with pytest.raises(BadRequest, match=f"request_id: {request_id} was not added with claim"):
            ours.deltas(request_id)


def test_take_deltas_leaves_those_of_other_requests() -> None:
    ours = fake_engine()
    first, second = (ours.add_request([n, n], LONG, claim=True) for n in (7, 8))
    ours.tick()
    for wanted in (first, second):
        assert [delta.request_id for delta in ours.take_deltas([wanted])] == [wanted]


def test_streams_and_other_requests_share_the_steps() -> None:
    a, b = [7, 8], [9, 10, 11]
    alone = tokens_of(fake_engine().generate([a, b, PROMPT], LONG))
    ours = fake_engine()
    pending = ours.add_request(PROMPT, LONG)
    streams = [ours.stream(a, LONG), ours.stream(b, LONG)]
    found: list[list[int]] = [[], []]
    for first, second in zip(*streams, strict=True):
        found[0] += first.token_ids
        found[1] += second.token_ids
    assert [tuple(tokens) for tokens in found] == alone[:2]
    assert tokens_of(run_to_end(ours)[pending]) == alone[2:]
    late = ours.add_request(a, LONG)
    assert tokens_of(ours.generate([b], LONG)) == alone[1:2], "generate returns its own only"
    assert tokens_of(run_to_end(ours)[late]) == alone[:1]
    assert is_idle(ours)


def test_abort_returns_partial_samples_at_every_stage() -> None:
    whole = fake_engine().generate([PROMPT], LONG, 2)
    for num_steps in (0, 1, 4, 9):
        ours = fake_engine(max_tokens_per_batch=3)
        other = ours.add_request([1, 2], LONG)
        mine = ours.add_request(PROMPT, LONG, 2)
        for _ in range(num_steps):
            ours.step()
        partial = ours.abort(mine)
        assert [sample.finish_reason for sample in partial] == ["abort", "abort"]
        for sample, full in zip(partial, whole, strict=True):
            assert sample.completion_tokens == full.completion_tokens[: len(sample.completion_tokens)]
            assert len(sample.logprobs) == len(sample.mask) == len(sample.completion_tokens)
        assert ours.abort(mine) == ours.abort(99) == ()
        assert run_to_end(ours)[other][0].finish_reason == "length"
        assert is_idle(ours)
    assert any(partial[0].completion_tokens)


def test_lengths_and_stops() -> None:
    def one(prompt: list[int] = PROMPT, **options: Any) -> TrainingSample:
        return fake_engine().generate([prompt], SamplingParams(**({"seed": 4, "max_tokens": 400} | options)))[0]

    nothing = one(max_tokens=0)
    assert (nothing.completion_tokens, nothing.finish_reason) == ((), "length")
    free = fake_engine(num_blocks=200).generate([PROMPT], SamplingParams(seed=4, max_tokens=400, ignore_eos=True))[0]
    end = free.completion_tokens.index(EOS)
    stopped = fake_engine(num_blocks=200).generate([PROMPT], SamplingParams(seed=4, max_tokens=400))[0]
    assert (stopped.completion_tokens, stopped.finish_reason) == (free.completion_tokens[: end + 1], "stop")
    assert stopped.stop_reason is None
    token = free.completion_tokens[3]
    named = fake_engine().generate(
        [PROMPT], SamplingParams(seed=4, max_tokens=9, stop_token_ids=[token], ignore_eos=True)
    )[0]
    assert (named.finish_reason, named.stop_reason) == ("stop", token)
    assert named.completion_tokens == free.completion_tokens[: free.completion_tokens.index(token) + 1]
    room = fake_engine(num_blocks=5).generate([PROMPT], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(room.completion_tokens) == 15, "as many as there is room for"
    short = InferenceEngine(fake_config(), parts=replace(fake_parts("radix", 60, 4), max_model_len=12))
    cut = short.generate([PROMPT], LONG)[0]
    assert (len(cut.completion_tokens), cut.finish_reason) == (7, "length"), "up to the model's length"


def test_min_tokens_bans_all_stop_tokens(tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=30, min_tokens=6, stop_token_ids=range(VOCAB_SIZE // 2), temperature=1.5, seed=1)
    for sample in engine(tiny_llama).generate([PROMPT], params, 8):
        assert len(sample.completion_tokens) >= 7
        assert not set(sample.completion_tokens[:6]) & params.stop_token_ids
        assert all(logprob <= 0 for logprob in sample.logprobs)


def test_logprobs_have_the_requested_shape_and_raw_values(tiny_llama: Path) -> None:
    ours = engine(tiny_llama)
    sample = ours.generate([PROMPT], SamplingParams(max_tokens=5, seed=1, logprobs=3, prompt_logprobs=2))[0]
    assert sample.top_logprobs is not None and [len(top) for top in sample.top_logprobs] == [3] * 5
    assert sample.prompt_top_logprobs is not None and [len(top) for top in sample.prompt_top_logprobs] == [2] * 4
    whole = [*PROMPT, *sample.completion_tokens]
    scores = ours.score(whole)
    assert sample.prompt_logprobs == pytest.approx(scores[:4], abs=1e-5)
    assert sample.logprobs == pytest.approx(scores[4:], abs=1e-5)
    assert gap(AutoModelForCausalLM.from_pretrained(tiny_llama), whole, scores) < 1e-4
    assert ours.score([whole, PROMPT]) == [pytest.approx(scores, abs=1e-5), pytest.approx(scores[:4], abs=1e-5)]
    for start in (0, 1, 4, 9, 10, 99):
        assert ours.score(whole, start) == pytest.approx(scores[max(0, start - 1) :], abs=1e-5)
    assert list(map(len, ours.score([whole, PROMPT, [1]], [3, 0, 1]))) == [7, 4, 0]  # type: ignore[arg-type]
    everything = ours.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=VOCAB_SIZE))[0]
    assert everything.prompt_top_logprobs is not None and everything.prompt_ranks is not None
    for token, top, rank in zip(PROMPT[1:], everything.prompt_top_logprobs, everything.prompt_ranks, strict=True):
        assert top[rank - 1].token == token
    scored = ours.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert scored.prompt_logprobs == sample.prompt_logprobs and scored.prompt_top_logprobs is None
    plain = ours.generate([PROMPT], SamplingParams(max_tokens=1))[0]
    assert plain.prompt_ranks is None
    assert plain.top_logprobs is plain.prompt_logprobs is plain.prompt_top_logprobs is None


@pytest.mark.parametrize("start", [-1, True, 1.5, [0], [0, -1], "0"])
def test_score_rejects_invalid_start(start: object) -> None:
    with pytest.raises(BadRequest, match="start must be an integer"):
        fake_engine().score([[1, 2], [3, 4]], start)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "top_k"), [("raw", 0), ("tempered", 6), ("processed", 0), ("processed", 6)])
def test_named_tokens_are_reported_at_every_position(tiny_llama: Path, mode: LogprobsMode, top_k: int) -> None:
    """They equal those of a report of the whole vocabulary; a token that cannot be sampled has -9999."""
    named = (VOCAB_SIZE - 1, 0, 5, 0)
    params = SamplingParams(max_tokens=5, seed=1, temperature=0.7, top_k=top_k, logprobs_mode=mode, logprobs=2)
    sample = engine(tiny_llama).generate([PROMPT], replace(params, logprob_token_ids=named))[0]
    whole = engine(tiny_llama).generate([PROMPT], replace(params, logprobs=VOCAB_SIZE))[0]
    assert sample.top_logprobs is not None and whole.top_logprobs is not None
    assert sample.completion_tokens == whole.completion_tokens and sample.logprobs == whole.logprobs
    for top, every in zip(sample.top_logprobs, whole.top_logprobs, strict=True):
        values = dict(every)
        assert top[:4] == tuple((token, values.get(token, -9999.0)) for token in named)
        assert top[4:] == every[:2]
    assert any(one.logprob == -9999 for top in sample.top_logprobs for one in top) is (
        mode == "processed" and top_k > 0
    )
    with pytest.raises(BadRequest, match=f"logprob_token_ids: token id {VOCAB_SIZE} is outside"):
        engine(tiny_llama).generate([PROMPT], SamplingParams(logprobs=0, logprob_token_ids=[VOCAB_SIZE]))


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_cached_kv_of_a_failed_sample_leaves_others_unaffected(tmp_path: Path, kernels: Any) -> None:
    make_model("llama-ratio1-untied", tmp_path)
    config = EngineConfig(model_path=str(tmp_path), device="cpu", block_size=8, kv_cache_bytes=1 << 16, kernels=kernels)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with InferenceEngine(config) as healthy:
        expected = healthy.generate([[1, 2, 3]], params)[0].completion_tokens
    with InferenceEngine(config) as engine:
        torn = {name: weight.clone() for name, weight in engine.parts.executor.weights.values()}
        torn["model.embed_tokens.weight"][7] = float("nan")
        engine.update_weights(torn, allow_nonfinite=True, blocking=True)
        broken = engine.generate([[7] * 20], params)[0]
        assert broken.finish_reason == "abort"
        engine.flush_cache()
        for _ in range(4):  # until the blocks that hold NaN are taken again
            assert engine.generate([[1, 2, 3]], params)[0].completion_tokens == expected
            engine.generate([[4] * 30], params)
            engine.flush_cache()


def test_out_of_memory_aborts_the_youngest_request(tiny_llama: Path) -> None:
    with engine(tiny_llama) as running:
        alone = [running.generate([prompt], LONG)[0].completion_tokens for prompt in (PROMPT, [7, 7])]
        executor: Any = running.parts.executor
        inner, failures = executor.sampler, iter((RuntimeError("DefaultCPUAllocator: can't allocate memory"),))

        def short(logits_BV: Any, rows: Any) -> Any:
            if len(rows) == 3:
                raise next(failures)
            return inner(logits_BV, rows)

        executor.sampler = short
        samples = running.generate([PROMPT, [7, 7], [1, 2, 3]], LONG)
        assert tokens_of(samples[:2]) == alone
        assert (samples[2].finish_reason, samples[2].completion_tokens) == ("abort", ())
        assert str(samples[2].stop_reason).startswith("out of memory")
        assert is_idle(running)


def test_other_runtime_errors_are_not_out_of_memory(tiny_llama: Path) -> None:
    with engine(tiny_llama) as running:
        executor: Any = running.parts.executor

        def broken(logits_BV: Any, rows: Any) -> Any:
            raise RuntimeError("shapes do not fit")

        executor.sampler = broken
        with pytest.raises(RuntimeError, match="shapes"):
            running.generate([PROMPT], LONG)
        assert running.is_alive


def test_step_result_lists_started_sequences() -> None:
    running = fake_engine(max_batch_size=2)
    first = running.add_request(PROMPT, LONG, 2)
    second = running.add_request([1, 2], LONG)
    started = [one for _ in range(60) if running.has_pending() for one in running.tick().started]
    assert sorted(started) == [(first, 0), (first, 1), (second, 0)]
    assert started.index((first, 0)) == 0


@pytest.mark.parametrize("is_paused", [False, True])
def test_step_without_work_counts_nothing(is_paused: bool) -> None:
    running = fake_engine()
    if is_paused:
        running.pause()
    counted = asdict(running.tick().stats)
    assert counted.pop("num_free_blocks") == 100 and set(counted.values()) == {0}
