"""`EngineRequest.reports_prefill`: deltas about the tokens of the prompt that each step computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nano_inference import EngineRequest, InferenceEngine, SamplingParams
from nano_inference.types import Delta, Prefill
from tests.sim.fakes import fake_engine

PROMPT = [(7 * index) % 40 + 5 for index in range(70)]
REQUEST = EngineRequest(prompt=PROMPT, params=SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
REPORTING = replace(REQUEST, reports_prefill=True)


def deltas_of(running: InferenceEngine, *requests: EngineRequest) -> list[list[Delta]]:
    """Return the deltas of each request; all run together."""
    ids = [running.add(request, claim=True) for request in requests]
    found: dict[int, list[Delta]] = {one: [] for one in ids}
    while running.has_pending():
        for delta in running.tick().deltas:
            found[delta.request_id].append(delta)
    return list(found.values())


def bare(delta: Delta) -> Delta:
    return replace(delta, request_id=0, sample=None, prefill=None)


def test_each_step_of_a_prefill_is_reported() -> None:
    (plain,) = deltas_of(fake_engine(max_tokens_per_batch=16), REQUEST)
    running = fake_engine(max_tokens_per_batch=16)
    (found,) = deltas_of(running, REPORTING)
    assert [delta.prefill for delta in found] == [Prefill(0, n) for n in (16, 32, 48, 64, 70)] + [None] * 3
    assert [len(delta.token_ids) for delta in found] == [0] * 4 + [1] * 4
    assert list(map(bare, found[4:])) == list(map(bare, plain)), "the tokens are those of a request without reports"
    (again,) = deltas_of(running, REPORTING)
    cached = 68  # whole blocks of 4 tokens; the last position is always computed
    assert again[0].prefill is not None and again[0].prefill.num_cached >= cached - 4
    assert again[0].prefill.num_computed == 70 and len(again) == 4


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_a_prompt_of_one_step_is_reported_with_its_first_token(length: int) -> None:
    (found,) = deltas_of(fake_engine(max_tokens_per_batch=16), replace(REPORTING, prompt=PROMPT[:length]))
    steps = [min(16, length), *([length] if length > 16 else [])]
    assert [one.prefill for one in found if one.prefill] == [Prefill(0, n) for n in steps]
    assert found[len(steps) - 1].token_ids and len(found) == len(steps) + 3


def test_a_sample_preempted_after_its_first_token_is_not_reported_again() -> None:
    running = fake_engine(max_tokens_per_batch=16)
    running.add(REPORTING, claim=True)
    found: list[Delta] = []
    while len(found) < 6:  # four reports and two tokens
        found += running.tick().deltas
    running.pause("keep", clear_cache=True)
    running.resume()
    while running.has_pending():
        found += running.tick().deltas
    assert found[-1].sample is not None and found[-1].sample.num_preemptions == 1
    assert [bool(one.prefill) for one in found] == [True] * 5 + [False] * 3
