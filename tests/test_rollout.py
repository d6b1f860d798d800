"""Multi-turn rollouts: earlier tokens never change, rollouts do not wait for each other, no sample is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, Rollout, SamplingParams, run_rollouts
from nano_inference.core.seeds import derive_seed
from nano_inference.rl.rollout import extend, observe, start, to_trl
from nano_inference.types import EnginePaused, StepResult, TrainingSample
from tests.models.families import make_model
from tests.sim.fakes import Calculator, Failing, fake_config, fake_parts, load, reference

PROMPTS = [[5, 9, 30, 2, 44], [11, 12, 13], [5, 9, 30, 2, 44, 1, 1, 8, 3]]
PARAMS = SamplingParams(max_tokens=9, seed=4)
TOOL = (21, 22, 23)


def fake(cache_type: str = "radix", num_blocks: int = 400, *, max_model_len: int = 1000, **options: Any) -> Any:
    parts = replace(fake_parts(cache_type, num_blocks, 4), max_model_len=max_model_len)
    return InferenceEngine(fake_config(**options), parts=parts)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("tiny_rollout")
    return directory, make_model("llama3-rope-ratio3-tied", directory)


def real(tiny: tuple[Path, Any], **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 16 << 20, "device": "cpu", "block_size": 4} | options
    return InferenceEngine(EngineConfig(model_path=str(tiny[0]), **options))


def tool(rollout: Rollout) -> Iterable[int]:
    """An environment that always answers, by how much there is to answer to."""
    return TOOL[: 1 + len(rollout.turns[-1].sample.completion_tokens) % 3]


def is_idle(engine: InferenceEngine) -> bool:
    kv = engine.parts.kv
    kv.check()
    return not engine.has_pending() and kv.num_free_blocks() == kv.num_blocks


def sample_after(tokens: Iterable[int], completion: tuple[int, ...], **fields: Any) -> TrainingSample:
    size = len(completion)
    plain = {"logprobs": (-0.5,) * size, "mask": (1,) * size, "token_versions": (0,) * size}
    plain |= {"request_id": 0, "sample_index": 0, "weight_version": 0, "finish_reason": "stop"}
    return TrainingSample(prompt_tokens=tuple(tokens), completion_tokens=completion, **(plain | fields))


# --- the tokens


@pytest.mark.parametrize("cache_type", ["radix", "paged"])
@pytest.mark.parametrize("program", [None, Calculator()])
def test_every_turn_continues_the_exact_earlier_tokens(cache_type: str, program: Calculator | None) -> None:
    rollouts = run_rollouts(
        fake(cache_type), PROMPTS, tool, PARAMS, num_samples_per_prompt=3, max_turns=5, program=program
    )
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(i, j) for i in range(3) for j in range(3)]
    for rollout in rollouts:
        seed = derive_seed(derive_seed(4, rollout.prompt_index), rollout.sample_index)
        tokens = list(PROMPTS[rollout.prompt_index])
        assert len(rollout.turns) == 5 and rollout.finish_reason == "max_turns"
        for turn in rollout.turns:  # the fake model's draw is a function of everything before it
            drawn, mask, finish = reference(tokens, replace(PARAMS, seed=seed), 0, program=program is not None)
            assert (list(turn.sample.completion_tokens), list(turn.sample.mask)) == (drawn, mask)
            assert turn.sample.finish_reason == finish
            is_last = turn is rollout.turns[-1]
            assert turn.observation == (() if is_last else TOOL[: 1 + len(drawn) % 3])
            tokens += [*drawn, *turn.observation]
        assert list(rollout.tokens) == tokens
        assert [len(s.prompt_tokens) for s in rollout.samples] == [
            len(rollout.tokens) - sum(len(t.sample.completion_tokens + t.observation) for t in rollout.turns[k:])
            for k in range(5)
        ]
    reasons = {turn.sample.finish_reason for rollout in rollouts for turn in rollout.turns}
    assert reasons == {"stop", "length"}, "a truncated turn is passed to the environment too"


def test_a_sample_of_any_other_prompt_is_refused() -> None:
    rollout = extend(start([1, 2, 3]), sample_after([1, 2, 3], (4, 5)))
    rollout = observe(rollout, [6])
    assert rollout.tokens == (1, 2, 3, 4, 5, 6) and rollout.completion_tokens == (4, 5, 6)
    for wrong, position in (([1, 2, 3, 4, 9, 6], 4), ([1, 2, 3], 3), ([1, 2, 3, 4, 5, 6, 7], 6), ([0], 0)):
        with pytest.raises(ValueError, match=f"not the rollout's 6: they differ at position {position}"):
            extend(rollout, sample_after(wrong, (7,)))
    assert extend(rollout, sample_after(rollout.tokens, (7,))).tokens == (1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(ValueError, match="the rollout has no turn yet"):
        observe(start([1, 2]), [3])


# --- what a trainer reads


def test_masks_logprobs_and_versions_are_aligned_with_the_tokens() -> None:
    rollout = extend(
        start([1, 2]),
        sample_after(
            [1, 2], (3, 4, 5, 6), mask=(1, 1, 0, 1), logprobs=(-0.1, -0.2, 0.0, -0.3), token_versions=(4, 4, 5, 5)
        ),
    )
    rollout = observe(observe(rollout, [7]), (token for token in (8,)))
    rollout = extend(rollout, sample_after(rollout.tokens, (9,), logprobs=(-0.4,), token_versions=(6,)))
    assert rollout.tokens == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert rollout.loss_mask == (0, 0, 1, 1, 0, 1, 0, 0, 1)
    assert rollout.logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, -0.3, 0.0, 0.0, -0.4)
    assert rollout.token_versions == (-1, -1, 4, 4, 5, 5, -1, -1, 6)
    assert rollout.segment_spans == (
        *((0, 2, "prompt"), (2, 4, "sampled"), (4, 5, "forced")),
        *((5, 6, "sampled"), (6, 8, "environment"), (8, 9, "sampled")),
    )
    for segment, (begin, end, _) in zip(rollout.segments, rollout.segment_spans, strict=True):
        assert segment.tokens == rollout.tokens[begin:end] and segment.logprobs == rollout.logprobs[begin:end]
        assert segment.token_versions == rollout.token_versions[begin:end]
    other = extend(start([5]), sample_after([5], (6,)))
    assert to_trl([rollout, other]) == {
        "prompt_ids": [[1, 2], [5]],
        "completion_ids": [[3, 4, 5, 6, 7, 8, 9], [6]],
        "logprobs": [[-0.1, -0.2, 0.0, -0.3, 0.0, 0.0, -0.4], [-0.5]],
        "env_mask": [[1, 1, 0, 1, 0, 0, 1], [1]],
    }
    with pytest.raises(ValueError, match="logprobs_mode must be processed or tempered, got 'raw'"):
        to_trl([extend(start([5]), sample_after([5], (6,), logprobs_mode="raw"))])


def test_a_rollout_survives_json() -> None:
    params = replace(PARAMS, logprobs=1)
    for rollout in run_rollouts(fake(), PROMPTS, tool, params, num_samples_per_prompt=2, max_turns=3):
        assert Rollout.from_dict(rollout.to_dict()) == rollout
        back = Rollout.from_dict(json.loads(json.dumps(rollout.to_dict())))
        assert back == rollout and back.samples == rollout.samples
        assert not any(turn.sample.prompt_tokens for turn in back.turns), "a prompt is kept once"
        assert all(sample.top_logprobs for sample in back.samples), "what was asked for is still there"
    with pytest.raises(ValueError, match="Rollout has no field 'reward'"):
        Rollout.from_dict(rollout.to_dict() | {"reward": 1})


# --- how it runs


def test_later_turn_reuses_all_but_the_last_token() -> None:
    engine = fake()
    for rollout in run_rollouts(engine, PROMPTS, tool, PARAMS, num_samples_per_prompt=3, max_turns=4):
        for before, after in zip(rollout.samples, rollout.samples[1:], strict=False):
            known = len(before.prompt_tokens) + len(before.completion_tokens)
            assert after.num_cached_tokens == known - 1, "only what was drawn last has no K/V yet"
    assert is_idle(engine)


def test_rollouts_do_not_wait_for_each_other() -> None:
    order: list[tuple[int, int]] = []
    rows: list[tuple[int, int]] = []

    def environment(rollout: Rollout) -> Iterable[int] | None:
        order.append((rollout.prompt_index, len(rollout.turns)))
        return TOOL if len(rollout.turns) < 4 else None

    def progress(result: StepResult) -> None:
        num_ended = sum(num_turns == 4 for _, num_turns in order)
        rows.append((result.stats.num_rows, 6 - num_ended))

    prompts = [[1 + i, 40 - i, 3 * i] for i in range(6)]
    params = SamplingParams(max_tokens=40, seed=40)
    run_rollouts(fake(max_batch_size=6), prompts, environment, params, max_turns=9, progress=progress)
    assert len(rows) > 20 and all(num_rows == num_open for num_rows, num_open in rows), "no rollout is idle"
    first_turns = [order.index((i, 1)) for i in range(6)]
    assert min(order.index((i, 2)) for i in range(6)) < max(first_turns)
    assert min(order.index((i, 4)) for i in range(6)) < max(first_turns)


def test_draws_depend_on_seed_and_place_alone() -> None:
    def tokens_of(engine: InferenceEngine, seed: int | None, n: int = 4) -> list[tuple[int, ...]]:
        params = replace(PARAMS, seed=seed, ignore_eos=True)
        found = run_rollouts(engine, [*PROMPTS, PROMPTS[0]], tool, params, num_samples_per_prompt=n, max_turns=3)
        assert is_idle(engine)
        return [rollout.tokens for rollout in found]

    expected = tokens_of(fake(), 8)
    assert len(set(expected)) == 16, "samples of a prompt differ, and so do equal prompts"
    for options in ({"max_batch_size": 2}, {"max_tokens_per_batch": 3}, {"num_blocks": 40}):
        assert tokens_of(fake(**options), 8) == expected
    assert tokens_of(fake(), 8, n=2) == [expected[4 * i + j] for i in range(4) for j in range(2)]
    assert not set(tokens_of(fake(), 9)) & set(expected)
    engine = fake()
    unseeded = tokens_of(engine, None) + tokens_of(engine, None)
    assert len(set(unseeded)) == 32
    assert tokens_of(fake(), None) == unseeded[:16], "an engine with a seed repeats its run"


def test_other_requests_run_during_rollouts() -> None:
    alone = fake().generate([[7, 8], [9]], replace(PARAMS, max_tokens=30, ignore_eos=True))
    expected = run_rollouts(fake(), PROMPTS, tool, PARAMS, max_turns=3)
    engine = fake(max_batch_size=32)
    foreign = engine.add_request([7, 8], replace(PARAMS, max_tokens=30, ignore_eos=True))
    stream = engine.stream([9], replace(PARAMS, max_tokens=30, ignore_eos=True))
    stolen: list[TrainingSample] = []

    def busy(rollout: Rollout) -> Iterable[int]:
        engine.score(list(rollout.tokens))
        engine.generate([[3, 4]], replace(PARAMS, max_tokens=12))
        run_rollouts(engine, [[6]], lambda inner: None, PARAMS, max_turns=1)
        stolen.extend(engine.step())
        return tool(rollout)

    found = run_rollouts(engine, PROMPTS, busy, PARAMS, max_turns=3)
    assert [rollout.tokens for rollout in found] == [rollout.tokens for rollout in expected]
    assert [token for delta in stream for token in delta.token_ids] == list(alone[1].completion_tokens)
    while engine.has_pending():
        stolen += engine.step()
    assert [(sample.request_id, sample.completion_tokens) for sample in stolen] == [
        (foreign, alone[0].completion_tokens)
    ]
    assert is_idle(engine)


# --- how it ends


def test_turns_have_the_adapter_and_its_version() -> None:
    engine = fake()
    load(engine, "policy", version="step-1")
    versions = iter(["step-2", "step-3"])

    def environment(rollout: Rollout) -> Any:
        load(engine, "policy", version=next(versions))
        return TOOL

    (rollout,) = run_rollouts(engine, PROMPTS[:1], environment, PARAMS, max_turns=2, adapter="policy")
    assert [(turn.sample.adapter, *set(turn.sample.adapter_versions)) for turn in rollout.turns] == [
        ("policy", "step-1"),
        ("policy", "step-2"),
    ]
    assert Rollout.from_dict(json.loads(json.dumps(rollout.to_dict()))) == rollout


def test_environment_can_end_a_rollout() -> None:
    asked: list[Rollout] = []

    def environment(rollout: Rollout) -> Iterable[int] | None:
        asked.append(rollout)
        return TOOL if len(rollout.turns) <= rollout.prompt_index else None

    rollouts = run_rollouts(fake(), PROMPTS, environment, PARAMS, max_turns=3)
    assert [(len(r.turns), r.finish_reason) for r in rollouts] == [(1, "stop"), (2, "stop"), (3, "stop")]
    assert len(asked) == 6, "it is asked after the last turn too"
    assert all(r.finish_reason is None and r.segments[-1].kind == "sampled" for r in asked)
    assert all(r.segments[-1].kind == "sampled" for r in rollouts)


@pytest.mark.parametrize("options", [{}, {"max_model_len": 30}, {"num_blocks": 7, "max_batch_size": 1}])
@pytest.mark.parametrize("max_tokens", [9, None])
def test_rollout_length_is_limited(options: dict[str, Any], max_tokens: int | None) -> None:
    limit = 28 if "num_blocks" in options else 30
    total = None if options else 30
    engine = fake(**options)
    params = replace(PARAMS, max_tokens=max_tokens, min_tokens=6, ignore_eos=True)
    rollouts = run_rollouts(engine, PROMPTS, lambda r: TOOL, params, max_turns=99, max_tokens_total=total)
    for rollout in rollouts:
        assert rollout.finish_reason == "length" and len(rollout.turns) < 9
        assert limit - len(TOOL) <= len(rollout.tokens) <= limit
        assert rollout.segments[-1].kind == "sampled", "an answer that nothing can follow is left out"
    assert any(len(rollout.tokens) == limit for rollout in rollouts)
    assert is_idle(engine)
    ended = run_rollouts(engine, PROMPTS, lambda r: None, params, max_turns=99, max_tokens_total=total)
    assert {rollout.finish_reason for rollout in ended} == {"stop"}


def test_last_answer_is_kept_if_one_more_token_fits() -> None:
    params = replace(PARAMS, max_tokens=4, ignore_eos=True)
    lengths = {}
    for total in range(12, 18):
        (rollout,) = run_rollouts(fake(), [[1] * 5], lambda r: TOOL, params, max_turns=2, max_tokens_total=total)
        lengths[total] = (len(rollout.tokens), rollout.finish_reason)
    assert lengths == {12: (9, "length"), **{t: (min(t, 16), "max_turns") for t in range(13, 18)}}


@pytest.mark.parametrize("program", [None, Calculator()])
def test_resumed_rollouts_equal_uninterrupted_ones(tiny: tuple[Path, Any], program: Any) -> None:
    params = replace(PARAMS, max_tokens=20, seed=5)
    options: dict[str, Any] = {"num_samples_per_prompt": 4, "max_turns": 3, "program": program}
    expected = run_rollouts(real(tiny), PROMPTS, lambda rollout: TOOL, params, **options)
    engine = real(tiny, max_batch_size=32)

    def environment(rollout: Rollout) -> Iterable[int]:
        if len(rollout.turns) == 2:
            engine.abort_all()
        return TOOL

    found = run_rollouts(engine, PROMPTS, environment, params, **options)
    assert any(r.finish_reason == "abort" and r.turns[-1].sample.completion_tokens for r in found)
    assert all(Rollout.from_dict(json.loads(json.dumps(r.to_dict()))) == r for r in found)
    for _ in range(30):
        if all(rollout.finish_reason != "abort" for rollout in found):
            break
        found = run_rollouts(engine, [], environment, params, **options, resume=found)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert [r.loss_mask for r in found] == [r.loss_mask for r in expected]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert is_idle(engine)


def test_rollout_ended_by_its_program_is_not_resumed() -> None:
    engine = fake()
    options: dict[str, Any] = {"max_turns": 2, "program": Failing()}
    first = run_rollouts(engine, [[1, 2]], tool, replace(PARAMS, seed=5, ignore_eos=True), **options)
    assert first[0].finish_reason == "abort" and first[0].turns[-1].sample.stop_reason is not None
    assert run_rollouts(engine, [], tool, replace(PARAMS, seed=5), **options, resume=first) == first


def test_a_turn_that_is_resumed_after_an_update_has_both_versions(tiny: tuple[Path, Any]) -> None:
    engine = real(tiny, max_batch_size=32)
    params = replace(PARAMS, max_tokens=20, seed=5, ignore_eos=True)

    def environment(rollout: Rollout) -> Iterable[int]:
        if len(rollout.turns) == 2:
            engine.abort_all()
        return TOOL

    first = run_rollouts(engine, PROMPTS, environment, params, num_samples_per_prompt=4, max_turns=3)
    engine.update_weights(dict(tiny[1].state_dict()), blocking=True)
    second = run_rollouts(engine, [[7, 7]], lambda rollout: TOOL, params, max_turns=3, resume=first)
    assert len(second) == len(first) + 1 and second[-1].prompt_index == len(PROMPTS)
    for before, after in zip(first, second, strict=False):
        assert after.finish_reason == "max_turns" if before.finish_reason == "abort" else after == before
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert after.logprobs[: len(before.tokens)] == before.logprobs
        assert after.token_versions[: len(before.tokens)] == before.token_versions
    assert any({0, 1} <= set(turn.sample.token_versions) for rollout in second for turn in rollout.turns)


class Stop(Exception):
    """An exception that only these tests raise."""


@pytest.mark.parametrize(("error", "when"), [(Stop, 7), (KeyboardInterrupt, 2), (EnginePaused, 3)])
def test_environment_exception_aborts_all_requests(error: type[BaseException], when: int) -> None:
    engine = fake(max_batch_size=32)
    foreign = engine.add_request([7, 8], replace(PARAMS, max_tokens=200, ignore_eos=True))
    num_asked = 0

    def environment(rollout: Rollout) -> Iterable[int]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == when and error is EnginePaused:
            engine.pause()  # the next step raises
        elif num_asked == when:
            raise error
        return TOOL

    with pytest.raises(error):
        run_rollouts(engine, PROMPTS, environment, PARAMS, num_samples_per_prompt=3, max_turns=5)
    engine.resume()
    (sample,) = engine.abort(foreign)
    assert sample.finish_reason == "abort" and len(sample.completion_tokens) >= 1
    assert is_idle(engine)
    assert len(run_rollouts(engine, PROMPTS, tool, PARAMS, max_turns=2)) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: [3, 50], "token id 50 at position .* outside the vocabulary"),
        (lambda: (token for token in [1.5]), "the environment's tokens"),
    ],
)
def test_invalid_answer_raises_and_aborts_all_requests(answer: Callable[[], Any], message: str) -> None:
    engine = fake()
    with pytest.raises(ValueError, match=message):
        run_rollouts(engine, PROMPTS, lambda rollout: answer(), PARAMS, max_turns=3)
    assert is_idle(engine)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"prompts\[1\] must hold at least one token"),
        ([[1], [2, "x"]], {}, r"prompts\[1\]: a token id must be an integer"),
        ("text", {}, "prompts must be a list"),
        ([[1], [2, 50]], {}, "token id 50 at position 1"),
        ([[1], [2] * 12], {"max_tokens_total": 12}, r"prompts\[1\] has 12 tokens; a rollout may have 12"),
        ([[1]], {"max_turns": 0}, "max_turns must be >= 1"),
        ([[1]], {"max_tokens_total": 1}, "max_tokens_total must be >= 2"),
        ([[1]], {"num_samples_per_prompt": 0}, "num_samples_per_prompt must be >= 1"),
        ([[1]], {"sampling_params": SamplingParams(max_tokens=0)}, "max_tokens must be >= 1"),
        ([[1]], {"sampling_params": SamplingParams(prompt_logprobs=0)}, "prompt_logprobs"),
        ([[1]], {"sampling_params": SamplingParams(stop="x")}, "stop: this engine was made without a tokenizer"),
    ],
)
def test_invalid_arguments_raise_before_anything_runs(prompts: Any, options: Any, message: str) -> None:
    engine = fake()
    ticks: list[StepResult] = []
    with pytest.raises(ValueError, match=message):
        run_rollouts(engine, prompts, tool, **({"max_turns": 2, "progress": ticks.append} | options))
    assert is_idle(engine) and not ticks


# --- a real model


def test_collected_logprobs_are_those_of_one_pass_over_the_whole(tiny: tuple[Path, Any]) -> None:
    engine = real(tiny)
    params = SamplingParams(max_tokens=7, seed=3, temperature=1.0, ignore_eos=True)
    rollouts = run_rollouts(engine, PROMPTS, tool, params, num_samples_per_prompt=2, max_turns=4)
    assert is_idle(engine)
    assert len({rollout.tokens for rollout in rollouts}) == 6
    again = run_rollouts(real(tiny, cache_type="paged"), PROMPTS, tool, params, num_samples_per_prompt=2, max_turns=4)
    assert [rollout.tokens for rollout in again] == [rollout.tokens for rollout in rollouts]
    for rollout in rollouts:
        assert sum(rollout.loss_mask) == 28
        for before, after in zip(rollout.samples, rollout.samples[1:], strict=False):
            assert after.num_cached_tokens == len(before.prompt_tokens) + 6
        engine.flush_cache()
        scores = engine.score(list(rollout.tokens))
        for position, is_drawn in enumerate(rollout.loss_mask):
            if is_drawn:
                assert rollout.logprobs[position] == pytest.approx(scores[position - 1], abs=1e-4)
