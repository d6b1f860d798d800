"""What a trainer reads of a sample: versions and labels, raw log-probabilities, sampling masks, finite numbers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.core.appending import advance
from nano_inference.core.sequence import Sequence, finish, start_sequences, to_delta, to_sample
from nano_inference.core.step import DrawExtras, RowResult
from nano_inference.executors.batch import Scored
from nano_inference.executors.cpu.drawing import kernel_normalise
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.sampling import WholeVocabulary
from nano_inference.executors.step import score_rows
from nano_inference.types import EngineRequest, LogprobsMode, TokenLogprob, VersionSpan
from tests.draws import draw
from tests.executors.test_sampling import draw_one, naive_support, randn, row
from tests.models.families import VOCAB_SIZE, make_model
from tests.sim.fakes import Calculator, fake_config, fake_parts

INF, NAN = math.inf, math.nan
MODES: tuple[LogprobsMode, ...] = ("raw", "tempered", "processed")
PROMPT = [5, 9, 30, 2, 44]


def sample(versions: tuple[int, ...] = (), **changes: Any) -> TrainingSample:
    size = len(versions)
    base: dict[str, Any] = {
        "request_id": 1, "sample_index": 0, "prompt_tokens": (1,), "completion_tokens": tuple(range(size)),
        "logprobs": (-0.5,) * size, "mask": (1,) * size, "token_versions": versions,
        "weight_version": min(versions, default=9), "finish_reason": "length",
    }  # fmt: skip
    return TrainingSample(**(base | changes))


def through_json(one: TrainingSample) -> TrainingSample:
    return TrainingSample.from_dict(json.loads(json.dumps(one.to_dict(), allow_nan=False)))


def test_a_sample_of_required_fields_counts_nothing_else() -> None:
    assert (sample().num_cached_tokens, sample().num_preemptions) == (0, 0)


# ---- versions and labels


def test_version_spans_are_the_longest_runs_and_carry_the_labels() -> None:
    one = sample((3, 3, 3, 5, 3, 8, 8), version_labels={3: "step-3", 8: 80, 4: "never used"})
    assert one.version_spans == (
        VersionSpan(3, 0, 3, "step-3"),
        VersionSpan(5, 3, 4, None),
        VersionSpan(3, 4, 5, "step-3"),
        VersionSpan(8, 5, 7, 80),
    )
    assert dict(one.version_labels) == {3: "step-3", 8: 80}, "only versions that occur"
    assert sample().version_spans == () and sample((2,)).version_spans == (VersionSpan(2, 0, 1, None),)
    assert one.to_dict()["weight_versions"][:2] == [
        {"version": 3, "start": 0, "end": 3, "label": "step-3"},
        {"version": 5, "start": 3, "end": 4},
    ]
    assert not {"token_versions", "version_labels"} & one.to_dict().keys()


def test_plain_token_versions_are_read_too() -> None:
    one = sample((3, 3, 4), version_labels={3: "x"})
    plain = one.to_dict()
    del plain["weight_versions"]
    assert TrainingSample.from_dict(plain | {"token_versions": [3, 3, 4]}) == sample((3, 3, 4))
    labelled = json.loads(json.dumps(plain | {"token_versions": [3, 3, 4], "version_labels": {3: "x"}}))
    assert TrainingSample.from_dict(labelled) == one


SPAN = {"version": 3, "start": 0, "end": 2}


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [SPAN, {"version": 3, "start": 1, "end": 3}],
        [SPAN, {"version": 3, "start": 2, "end": 4}],
        [{"version": 3, "start": 0, "end": 10**12}],
        [{"version": -1, "start": 0, "end": 3}],
        [{"version": 3, "end": 3}],
        [SPAN | {"end": 3, "lable": "x"}],
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_rejected(spans: Any) -> None:
    with pytest.raises(ValueError, match="weight_versions") as caught:
        TrainingSample.from_dict(sample((3, 3, 3)).to_dict() | {"weight_versions": spans})
    assert "\n" not in str(caught.value)


def test_a_sample_whose_fields_disagree_is_refused_by_name() -> None:
    optional = ("ref_logprobs", "top_logprobs", "raw_logprobs", "sampling_masks")
    for name in ("logprobs", "mask", "token_versions", *optional):
        with pytest.raises(ValueError, match=f"{name} must hold one entry for each of 2 completion tokens, got 1"):
            sample((1, 1), **{name: (1,)})
    for label in (True, 1.5, None, b"x"):
        with pytest.raises(ValueError, match=r"version_labels\[1\] must be an integer or a string"):
            sample((1,), version_labels={1: label})
    both = sample((3,)).to_dict() | {"token_versions": [3]}
    with pytest.raises(ValueError, match="weight_versions and token_versions"):
        TrainingSample.from_dict(both)


# ---- the sequence: what is drawn and what is forced, step by step


def sequence(**params: Any) -> Sequence:
    options: dict[str, Any] = {"max_tokens": 20, "seed": 1} | params
    request = EngineRequest(prompt=(1, 2), params=SamplingParams(**options), program=Calculator())
    (seq,) = start_sequences(
        request,
        request_id=4,
        first_id=0,
        seed=1,
        max_new_tokens=20,
        eos_token_ids=frozenset([7]),
        logprobs_mode="tempered",
    )
    return seq


def test_forced_tokens_have_raw_logprob_zero_and_an_empty_mask() -> None:
    seq = sequence(raw_logprobs=True, sampling_mask=True)
    deltas = []
    for version, token in enumerate((3, 11, 4, 7)):  # 3 opens a call, 4 closes it, 7 ends
        num_added = advance(seq, token, -0.5, (), version, DrawExtras(-1.5, (token, 40) if version else None))
        deltas.append(to_delta(seq, num_added, 9, {0: "first", 2: "third", 9: "later"}))
    done = deltas[-1].sample
    assert done is not None
    assert done.completion_tokens == (3, 11, 4, 48, 11, 49, 7) and done.mask == (1, 1, 1, 0, 0, 0, 1)
    assert done.raw_logprobs == (-1.5, -1.5, -1.5, 0.0, 0.0, 0.0, -1.5)
    assert done.sampling_masks == (None, (11, 40), (4, 40), (), (), (), (7, 40))
    assert done.token_versions == (0, 1, 2, 2, 2, 2, 3)
    assert dict(done.version_labels) == {0: "first", 2: "third"} and done.logprobs_mode == "tempered"
    assert through_json(done) == done
    for name, whole in (
        ("token_ids", done.completion_tokens), ("logprobs", done.logprobs), ("mask", done.mask),
        ("versions", done.token_versions), ("raw_logprobs", done.raw_logprobs),
        ("sampling_masks", done.sampling_masks),
    ):  # fmt: skip
        assert tuple(x for delta in deltas for x in getattr(delta, name)) == whole


@pytest.mark.parametrize("allowed", [0, 1, 9])
def test_token_without_alternative_counts_as_forced(allowed: int) -> None:
    seq = sequence(raw_logprobs=True)
    seq.token_mask = (1 << allowed).to_bytes(2, "little")
    advance(seq, allowed, -0.5, (), 0, DrawExtras(-1.5))
    assert (seq.tokens, seq.mask, seq.logprobs, seq.raw_logprobs) == ([1, 2, allowed], [0], [0.0], [0.0])


def test_unrequested_fields_are_not_stored() -> None:
    seq = sequence()
    advance(seq, 7, -0.5, (), 0, DrawExtras(-1.5, (7,)))
    delta = to_delta(seq, 1, 0)
    assert delta.raw_logprobs is delta.sampling_masks is None and delta.versions == (0,)
    assert delta.sample is not None and delta.sample.raw_logprobs is delta.sample.sampling_masks is None
    assert not seq.raw_logprobs and not seq.sampling_masks
    with pytest.raises(AssertionError, match="no raw log-probability"):
        advance(sequence(raw_logprobs=True), 7, -0.5, (), 0)


def test_nonfinite_scores_abort_the_sample() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    request = EngineRequest(prompt=(1, 2, 3, 4), params=params, num_samples=2)
    leader, follower = start_sequences(request, request_id=4, first_id=0, seed=1, max_new_tokens=0)
    leader.scores, leader.score_tops = [-1.0, NAN, -2.0], [(TokenLogprob(2, -1.0),), (), ()]
    for seq in (leader, follower):
        finish(seq, "length", None)
        done = to_sample(seq, 0)
        assert (done.finish_reason, done.prompt_logprobs) == ("abort", (-1.0,))
        assert done.prompt_top_logprobs == ((TokenLogprob(2, -1.0),),) and "not finite" in str(done.stop_reason)
        assert through_json(done) == done


# ---- draws: raw log-probabilities


ADJUSTED: dict[str, Any] = {"logit_bias": {2: 3.0, 5: -2.0}, "repetition_penalty": 1.5, "presence_penalty": 0.5}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0, 0.6, 1])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, ADJUSTED, {"allowed_token_ids": [1, 4]}], ids=lambda p: str(len(p))
)
def test_raw_logprobs_are_the_models_own(mode: LogprobsMode, temperature: float, params: dict[str, Any]) -> None:
    logits_V = randn(30, seed=6)
    history = {"history": (1, 2, 3, 2), "num_prompt": 2} if "presence_penalty" in params else {}
    one = row(mode=mode, temperature=temperature, raw_logprobs=True, more=history, **params)
    drawn = draw_one(logits_V, one)
    raw_V = torch.log_softmax(logits_V.double(), -1).float()
    assert drawn.extras == (DrawExtras(float(raw_V[drawn.tokens[0]]), None),)
    without = draw_one(logits_V, one._replace(params=dataclasses.replace(one.params, raw_logprobs=False)))
    assert (without.tokens, without.logprobs) == (drawn.tokens, drawn.logprobs) and not without.extras
    if mode == "raw":
        assert drawn.logprobs[0] == drawn.extras[0].raw_logprob


def test_an_impossible_token_has_a_finite_raw_logprob_and_broken_logits_none() -> None:
    logits_V = torch.tensor([1e38, 0.0, -INF, 1.0])
    drawn = draw_one(logits_V, row(raw_logprobs=True, allowed_token_ids=[1]))
    assert drawn.logprobs == (0.0,) and -INF < drawn.extras[0].raw_logprob < -1e37  # type: ignore[operator]
    huge_V = torch.tensor([3e38, -3e38])  # their difference is no float32
    for mode in MODES:
        drawn = draw_one(huge_V, row(mode=mode, raw_logprobs=True, allowed_token_ids=[1], logprobs=2))
        assert drawn.extras[0].raw_logprob == -9999.0
        assert drawn.logprobs[0] == (-9999.0 if mode == "raw" else 0.0)
        assert all(math.isfinite(top.logprob) for top in drawn.top_logprobs[0])
    for wrong in (NAN, INF):
        broken_V = torch.tensor([wrong, 0.0, 1.0])
        assert not math.isfinite(draw_one(broken_V, row(raw_logprobs=True, allowed_token_ids=[1])).logprobs[0])


# ---- draws: sampling masks


CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"allowed_token_ids": [0, 3, 4, 9, 17, 30]},
    {"top_k": 9, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"allowed_token_ids": range(0, 40, 3), "top_k": 7},
    {"allowed_token_ids": range(25), "top_p": 0.6, "min_p": 0.02},
    {"top_k": 1},
    {"top_p": 1e-9},
    {},
)


def renormalised(logp_V: Tensor, ids: tuple[int, ...] | None, token: int) -> float:
    """What a trainer computes: its own full log-softmax, normalised again over the ids."""
    kept = logp_V if ids is None else logp_V[list(ids)]
    return float(logp_V[token] - torch.logsumexp(kept, -1))


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 1.7])
@pytest.mark.parametrize("params", CUTS, ids=str)
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_trainer_gets_the_logprobs_from_the_mask(params: dict[str, Any], temperature: float, is_masked: bool) -> None:
    more = {"mask": bytes([0b10110111] * 5), "banned": (0, 9)} if is_masked else {}
    kept = {i for i in range(40) if not is_masked or (0b10110111 >> i % 8 & 1 and i not in (0, 9))}
    kept &= set(params.get("allowed_token_ids", kept))
    cut = (params.get("top_k", 0), params.get("top_p", 1), params.get("min_p", 0)) if temperature else (0, 1, 0)
    for seed in range(6):
        logits_V = randn(40, seed=seed)
        tempered_V = logits_V / (temperature or 1)
        one = row(seed, sampling_mask=True, temperature=temperature, more=more, **params)
        drawn = draw_one(logits_V, one)
        ids = drawn.extras[0].sampling_mask
        expected = naive_support([x if i in kept else -INF for i, x in enumerate(tempered_V.tolist())], *cut)
        assert ids == (tuple(sorted(expected)) if len(expected) < 40 else None)
        assert drawn.tokens[0] in expected and drawn.extras[0].raw_logprob is None
        trainer_V = torch.log_softmax(tempered_V, -1)
        assert drawn.logprobs[0] == pytest.approx(renormalised(trainer_V, ids, drawn.tokens[0]), abs=3e-6)


def test_each_row_gets_its_requested_extras() -> None:
    asks: list[dict[str, Any]] = [{}, {"raw_logprobs": True}, {"sampling_mask": True, "top_k": 3}, {"top_k": 3}]
    asks.append({"raw_logprobs": True, "sampling_mask": True, "top_p": 0.5, "temperature": 0.7})
    rows = [row(i, mode=mode, **ask) for i, (ask, mode) in enumerate((ask, mode) for ask in asks for mode in MODES)]
    logits_BV = randn(len(rows), 50)
    together = draw(logits_BV.clone(), rows)
    for i, one in enumerate(rows):
        alone = draw_one(logits_BV[i], one)
        assert together.extras[i] == (alone.extras or (DrawExtras(),))[0]
        assert (together.extras[i].raw_logprob is not None) == one.params.raw_logprobs
        assert (together.extras[i].sampling_mask is not None) == one.params.sampling_mask
        assert (together.tokens[i], together.logprobs[i]) == (alone.tokens[0], alone.logprobs[0])


# ---- finite always


@pytest.mark.parametrize("mode", MODES)
def test_reported_numbers_are_finite_for_extreme_logits(mode: LogprobsMode) -> None:
    hot, cold = dict.fromkeys(range(0, 50, 2), 1e6), dict.fromkeys(range(49), -1e6)
    extremes: tuple[dict[str, Any], ...] = (
        {"logit_bias": hot}, {"logit_bias": cold}, {"logit_bias": {3: 1e6, 4: -1e6}, "temperature": 1e-30},
        {"temperature": 1e-30}, {"temperature": 1e-300}, {"temperature": 100, "logit_bias": hot}, {"top_k": 1},
        {"allowed_token_ids": [7]}, {"allowed_token_ids": [7], "logit_bias": {7: -1e6}, "temperature": 1e-30},
        {"min_p": 1.0, "top_p": 1e-12}, {"repetition_penalty": 100, "temperature": 1e-30}, {"temperature": 0},
        {"temperature": 0, "logit_bias": cold},
    )  # fmt: skip
    for number, params in enumerate(extremes):
        for scale in (1.0, 1e4):
            more = {"history": tuple(range(20)), "num_prompt": 3, "mask": b"\xfe" * 7 if number % 2 else None}
            one = row(number, mode=mode, logprobs=50, raw_logprobs=True, sampling_mask=True, more=more, **params)
            drawn = draw_one(randn(50, seed=number, scale=scale), one)
            tops = drawn.top_logprobs[0]
            raw, ids = drawn.extras[0]
            assert raw is not None
            numbers = [drawn.logprobs[0], raw, *(top.logprob for top in tops)]
            assert all(-INF < x <= 0 for x in numbers), params
            assert ids is None or drawn.tokens[0] in ids
            json.dumps(numbers, allow_nan=False)
            if mode == "processed" and ids is not None and params.get("temperature") != 0:
                assert {top.token for top in tops} <= set(ids), "what cannot be drawn is left out"


# ---- scoring


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("tiny_training_sample")
    return directory, make_model("llama-ratio1-untied", directory)


@pytest.fixture
def ours(tiny: tuple[Path, Any]) -> Iterator[InferenceEngine]:
    config = EngineConfig(model_path=str(tiny[0]), device="cpu", block_size=4, kv_cache_bytes=16 << 20)
    with InferenceEngine(config) as engine:
        yield engine


def executor_of(engine: InferenceEngine) -> CpuExecutor:
    assert isinstance(engine.parts.executor, CpuExecutor)
    return engine.parts.executor


def test_packed_scores_equal_separate_ones(ours: InferenceEngine) -> None:
    executor = executor_of(ours)
    vocabulary = WholeVocabulary(kernel_normalise(executor.library))
    hidden_TE = randn(120, 48)
    rows, found, start = [], {}, 0
    for i, size in enumerate((3, 1, 40, 7, 2, 30, 1, 9)):
        params = {"temperature": (0, 0.4, 1, 1.9)[i % 4], "prompt_logprobs": (0, 4, 1)[i % 3]}
        rows.append(row(i, mode=MODES[i % 3], **params))
        found[i] = Scored(1, range(start, start + size), tuple((7 * j + i) % VOCAB_SIZE for j in range(size)))
        start += size + i % 2
    for width in (1, 2, 13, 64, 1000):
        calls: list[int] = []

        class Counted:
            """A forward pass whose head notes how many targets each call has."""

            program, device = executor.program, executor.device

            def logits(self, hidden_SE: Tensor, adapters: list[int], calls: list[int] = calls) -> Tensor:
                calls.append(hidden_SE.size(0))
                return executor.logits(hidden_SE, adapters)

        with torch.inference_mode():
            scores = score_rows(Counted(), rows, found, hidden_TE, vocabulary, width * VOCAB_SIZE)  # type: ignore[arg-type]
        assert list(scores) == list(range(8)) and max(calls) == min(width, sum(calls))
        assert sum(calls) == sum(len(known.targets) for known in found.values())
        for index, known in found.items():
            check_scored(scores[index], rows[index], known, executor, hidden_TE)
    assert score_rows(executor, rows, {}, hidden_TE, vocabulary) == {}


def check_scored(scores: RowResult, one: Any, known: Scored, executor: CpuExecutor, hidden_TE: Tensor) -> None:
    """Compare with the row's own log-softmax, written out."""
    temperature = 1.0 if one.logprobs_mode == "raw" else one.params.temperature or 1.0
    with torch.inference_mode():
        logits_SV = executor.logits(hidden_TE[known.indices.start : known.indices.stop])
    logp_SV = torch.log_softmax(logits_SV.double() / temperature, -1)
    expected = [float(logp_SV[i, target]) for i, target in enumerate(known.targets)]
    assert scores.scores == pytest.approx(expected, abs=1e-6 * max(1, 1 / temperature))
    for top, logp_V in zip(scores.score_tops, logp_SV, strict=True):
        best = logp_V.topk(one.params.prompt_logprobs)
        assert [x.token for x in top] == best.indices.tolist()
        assert [x.logprob for x in top] == pytest.approx(best.values.tolist(), abs=1e-6 * max(1, 1 / temperature))


def test_prompt_token_of_probability_zero_has_a_finite_logprob(ours: InferenceEngine, tiny: tuple[Path, Any]) -> None:
    weights = {name: tensor.clone() for name, tensor in tiny[1].state_dict().items()}
    weights["model.embed_tokens.weight"][:, 0] += 100.0  # every final hidden state has a positive first element
    weights["model.norm.weight"][0] = 1.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][[9, 44], 0] = -INF
    ours.update_weights(weights, blocking=True, allow_nonfinite=True)
    (one,) = ours.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=VOCAB_SIZE, temperature=1e-30))
    assert one.prompt_logprobs is not None and one.prompt_top_logprobs is not None
    assert [x == -9999.0 for x in one.prompt_logprobs] == [True, False, False, True]
    assert all(len(top) == VOCAB_SIZE - 2 for top in one.prompt_top_logprobs)
    assert through_json(one) == one


# ---- through the engine


def test_deltas_report_version_and_extras_of_every_token() -> None:
    engine = InferenceEngine(fake_config(), parts=fake_parts("radix", 200, 4, lookahead=3))
    asked = SamplingParams(max_tokens=30, seed=5, ignore_eos=True, raw_logprobs=True, sampling_mask=True)
    request = engine.add_request(PROMPT, asked, program=Calculator())
    found: dict[str, list[Any]] = {"versions": [], "raw_logprobs": [], "sampling_masks": []}
    done = None
    for _ in range(40):
        for delta in engine.tick().deltas:
            for name, values in found.items():
                values += getattr(delta, name)
                assert len(getattr(delta, name)) == len(delta.token_ids)
            done = delta.sample
    assert done is not None and done.request_id == request and 0 in done.mask
    assert found["versions"] == list(done.token_versions) == [0] * 30
    assert found["raw_logprobs"] == list(done.raw_logprobs or ()) == [-0.25 * drawn for drawn in done.mask]
    drawn = zip(done.completion_tokens, done.mask, strict=True)
    assert found["sampling_masks"] == list(done.sampling_masks or ()) == [(t,) if was else () for t, was in drawn]


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_names_the_mode_of_its_logprobs(mode: LogprobsMode) -> None:
    engine = InferenceEngine(dataclasses.replace(fake_config(), logprobs_mode=mode), parts=fake_parts("radix", 60, 4))
    other: LogprobsMode = "raw" if mode == "processed" else "processed"
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, logprobs_mode=other)]
    assert [one.logprobs_mode for one in engine.generate([PROMPT, PROMPT], params)] == [mode, other]
