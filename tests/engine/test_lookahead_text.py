"""Lookahead with a tokenizer: stop strings that end in the middle of a window, and grammars of llguidance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.build import parts_with
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.kinds import installed_kinds
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.text.kinds import Tokenizer, TokenizerSource
from nano_inference.text.stops import both, stop_matcher
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import EngineRequest, MatcherFactory
from tests.cuda.engines import executor_of
from tests.engine.test_batch_invariance import ThreadsKept, open_engine
from tests.engine.test_lookahead import run_all
from tests.server.tiny import make_tiny

pytest.importorskip("llguidance")

STOPS = (("ab",), ("fed", "ca"), ("c",), ("\n\n", "dd"))
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["alpha", "beta"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
LETTERS = Grammar("regex", "[a-f]{9,30}")


@dataclass(frozen=True)
class World:
    """A model with a token for each byte, and requests for it."""

    path: Path
    tokenizer: Tokenizer
    requests: list[EngineRequest]

    def text(self, sample: TrainingSample) -> str:
        return self.tokenizer.decode(sample.completion_tokens)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = make_tiny(tmp_path_factory.mktemp("lookahead_text"))
    tokenizer = load_tokenizer(TokenizerSource(str(path)))
    grammars = Grammars(tokenizer, 260, [257])
    letters = list(tokenizer.encode("abcdef\n"))
    found: list[EngineRequest] = []

    def add(matcher: MatcherFactory | None = None, **options: Any) -> None:
        options = {"max_tokens": 40, "seed": len(found), **options}
        prompt = tokenizer.encode(f"Question {len(found) % 3}: ")
        params = SamplingParams(**options)
        found.append(EngineRequest(prompt=prompt, params=params, num_samples=2, make_matcher=matcher))

    for stop in STOPS:
        add(stop=stop, allowed_token_ids=letters)
    add(stop=("d",), allowed_token_ids=letters, min_tokens=7, logprobs=2)
    add(stop=("e",), allowed_token_ids=letters, presence_penalty=0.3, raw_logprobs=True)
    add(grammars.matcher(JSON))
    add(grammars.matcher(JSON), temperature=0, logprobs=1)
    add(grammars.matcher(LETTERS), sampling_mask=True)
    add(both(stop_matcher(tokenizer, ("bc", "d")), grammars.matcher(LETTERS)))
    add(ignore_eos=True)
    return World(path, tokenizer, found)


@pytest.fixture(scope="module")
def expected(world: World) -> list[TrainingSample]:
    with ThreadsKept(), open_engine(world.path) as engine:
        return run_all(engine, world.requests)[0]


def test_requests_end_as_their_stops_and_grammars_say(world: World, expected: list[TrainingSample]) -> None:
    """The reference, without lookahead, is right; the others are compared with it."""
    for index, stops in enumerate(STOPS):
        for sample in expected[2 * index : 2 * index + 2]:
            text = world.text(sample)
            assert sample.stop_reason is None or text.endswith(str(sample.stop_reason))
            assert not any(stop in text[:-1] for stop in stops)
    assert sum(sample.finish_reason == "stop" for sample in expected[: 2 * len(STOPS)]) > 4
    for sample in expected[12:16]:
        answer = json.loads(world.text(sample))
        assert answer["kind"] in ("alpha", "beta") and 0 <= answer["size"] < 100


def test_lookahead_changes_no_bit_of_text_requests(world: World, expected: list[TrainingSample]) -> None:
    with open_engine(world.path, lookahead=5) as engine:
        samples, stats = run_all(engine, world.requests)
    assert samples == expected
    assert sum(step.num_sampled > step.num_rows for step in stats) > 2, "steps looked ahead"
    ends = {len(sample.completion_tokens) % 5 for sample in samples if isinstance(sample.stop_reason, str)}
    assert len(ends) > 2, "samples ended at different places of a window"


def test_windows_of_the_cuda_executor_give_the_same_text(world: World, expected: list[TrainingSample]) -> None:
    config = EngineConfig(
        model_path=str(world.path), device="cpu", kv_cache_bytes=16 << 20, num_threads=1, lookahead=16
    )
    parts = parts_with(executor_of(world.path, config), config, open_checkpoint(world.path), installed_kinds())
    with InferenceEngine(config, parts=parts) as engine:
        samples, stats = run_all(engine, world.requests)
    assert [one.completion_tokens for one in samples] == [one.completion_tokens for one in expected]
    assert [(one.finish_reason, one.stop_reason) for one in samples] == [
        (one.finish_reason, one.stop_reason) for one in expected
    ]
    assert sum(step.num_sampled > step.num_rows for step in stats) > 2, "steps looked ahead"
