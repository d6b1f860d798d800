"""Invalid requests and failures: a one-line error naming field and limit; other requests are unaffected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    BadRequest,
    EngineConfig,
    EngineDead,
    EngineRequest,
    InferenceEngine,
    ModelError,
    SamplingParams,
)
from nano_inference.core.admission import Limits, checked
from nano_inference.types import TrainingSample
from tests.models.families import VOCAB_SIZE
from tests.sim.fakes import Failing, fake_config, fake_parts, is_idle, raising
from tests.sim.versioned import run_to_end

PROMPT = [5, 9, 30, 2, 44]
LONG = SamplingParams(max_tokens=25, seed=4, ignore_eos=True)
GREEDY = SamplingParams(temperature=0)


def fake(**changes: Any) -> InferenceEngine:
    """An engine with 60 blocks of 4 and a vocabulary of 50, that may read 100 tokens."""
    return InferenceEngine(
        fake_config(), parts=replace(fake_parts("radix", 60, 4), **({"max_model_len": 100} | changes))
    )


def tokens_of(samples: list[TrainingSample]) -> list[tuple[int, ...]]:
    return [sample.completion_tokens for sample in samples]


LIMITS = Limits(vocab_size=50, max_model_len=100, num_blocks=60, block_size=4, eos_token_ids=frozenset([7]))
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (r"prompt: token id 50 at position 1 .* vocabulary of 50", {"prompt": [1, 50]}, {}),
    (r"prompt.*>= 0.*-1", {"prompt": [1, -1]}, {}),
    (r"prompt.*vocabulary of 50", {"prompt": [2**70]}, {}),
    (r"prompt.*integer.*1\.5", {"prompt": [1.5]}, {}),
    (r"prompt.*integer.*True", {"prompt": [True]}, {}),
    (r"prompt.*token ids.*str", {"prompt": "hello"}, {}),
    (r"prompt must be a collection of token ids, got int", {"prompt": 2}, {}),
    (r"prompt must hold at least one token", {"prompt": []}, {}),
    (r"prompt has 100 tokens; max_model_len is 100, the answer included", {"prompt": [1] * 100}, {}),
    (r"prompt has 101 tokens; max_model_len is 100$", {"prompt": [1] * 101}, {"max_tokens": 0}),
    (r"stop_token_ids: token id 50 .* vocabulary of 50", {}, {"stop_token_ids": [50]}),
    (r"allowed_token_ids: token id 77 .* vocabulary of 50", {}, {"allowed_token_ids": [3, 77]}),
    (r"logit_bias: token id 50 .* vocabulary of 50", {}, {"logit_bias": {50: 1.0}}),
    (r"logprobs must be in \[0, 50\]", {}, {"logprobs": 51}),
    (r"prompt_logprobs must be in \[0, 50\]", {}, {"prompt_logprobs": 51}),
    (r"stop: .* without a tokenizer", {}, {"stop": ["\n"]}),
    ("stop: give stop strings or a matcher, not both", {"make_matcher": Failing}, {"stop": ["\n"]}),
    ("min_tokens: every one of allowed_token_ids", {}, {"min_tokens": 1, "allowed_token_ids": [7]}),
    ("min_tokens: every one", {}, {"min_tokens": 1, "allowed_token_ids": [3], "stop_token_ids": [3]}),
    ("sampling_params must be SamplingParams, got dict", {"params": {"max_tokens": 3}}, {}),
    ("num_samples must be >= 1, got 0", {"num_samples": 0}, {}),
    ("num_samples must be an integer, got 1.5", {"num_samples": 1.5}, {}),
    ("num_samples must be 1 with pooling, got 2", {"num_samples": 2}, {"pooling": "mean", "max_tokens": 0}),
    ("salt must be a string", {"salt": b"x"}, {}),
    ("score_start must be an integer, got 'x'", {"score_start": "x"}, {}),
    ("score_start must be >= 0, got -1", {"score_start": -1}, {}),
    ("beginning must be a Beginning, got NoneType", {"beginning": None}, {}),
]


@pytest.mark.parametrize(("message", "fields", "options"), CASES)
def test_invalid_field_is_named_in_one_line(message: str, fields: dict[str, Any], options: dict[str, Any]) -> None:
    params = SamplingParams(**({"max_tokens": 1} | options))
    with pytest.raises(BadRequest, match=message) as caught:
        checked(EngineRequest(**({"prompt": [1], "params": params} | fields)), LIMITS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_valid_edges_are_accepted() -> None:
    for options in ({"min_tokens": 1, "allowed_token_ids": [7], "ignore_eos": True}, {"logprobs": 50}):
        checked(EngineRequest(prompt=[1], params=SamplingParams(**options)), LIMITS)
    for num_prompt, max_tokens, room in ((99, 1, 1), (99, None, 1), (100, 0, 0), (1, 500, 99)):
        request = EngineRequest(prompt=[1] * num_prompt, params=SamplingParams(max_tokens=max_tokens))
        assert checked(request, LIMITS)[1] == room


def test_bad_request_leaves_others_unaffected() -> None:
    expected = tokens_of(fake().generate([PROMPT], LONG))
    ours = fake()
    good = ours.add_request(PROMPT, LONG)
    ours.step()
    for ask in (
        lambda: ours.add_request([50], LONG),
        lambda: ours.add([1, 2]),  # type: ignore[arg-type]
        lambda: ours.stream([50], LONG),
        lambda: ours.generate([PROMPT, [50]], LONG),
        lambda: ours.add_request(PROMPT, LONG, make_matcher=lambda: TextMask()),
    ):
        with pytest.raises(BadRequest, match=r"vocabulary of 50|must be an EngineRequest, got list|matcher's mask"):
            ask()
    assert run_to_end(ours)[good].completion_tokens == expected[0]
    assert tokens_of(ours.generate([PROMPT], LONG)) == expected
    assert is_idle(ours)


class TextMask(Failing):
    def mask(self) -> Any:
        return "text"


def test_request_larger_than_the_cache_is_rejected_at_admission() -> None:
    ours = fake(kv=fake_parts("radix", 5, 4).kv)
    message = r"prompt of 5 tokens and max_tokens of 16 need more than the whole KV cache, which holds 20 tokens"
    with pytest.raises(BadRequest, match=message):
        ours.add_request(PROMPT, SamplingParams(max_tokens=16))
    with pytest.raises(BadRequest, match="whole KV cache"):
        ours.generate([[1] * 20], SamplingParams(max_tokens=None))
    assert len(ours.generate([PROMPT], SamplingParams(max_tokens=15, ignore_eos=True))[0].completion_tokens) == 15
    smallest = fake(kv=fake_parts("radix", 1, 4).kv)
    assert len(smallest.generate([[1]], SamplingParams(max_tokens=3, ignore_eos=True))[0].completion_tokens) == 3


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("prompts must be a list of lists .* wrap it in a list", ([1, 2],)),
        ("prompts must be a list of lists .* str", ("hello",)),
        ("prompts must be a list of lists .* int", (5,)),
        ("sampling_params: 1 given for 2 prompts", ([[1], [2]], [GREEDY])),
        ("sampling_params must be SamplingParams, got NoneType", ([[1]], [None])),
        ("sampling_params must be SamplingParams, got str", ([[1]], {"temperature": 0})),
    ],
)
def test_invalid_generate_call_raises_one_line_error(message: str, arguments: tuple[Any, ...]) -> None:
    ours = fake()
    with pytest.raises(BadRequest, match=message) as caught:
        ours.generate(*arguments)
    assert "\n" not in str(caught.value)
    assert is_idle(ours)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("device must be auto, cpu, cuda, cuda:N or mps, got 'tpu'", {"device": "tpu"}),
        ("device must be auto, cpu, cuda, cuda:N or mps, got 'meta'", {"device": "meta"}),
        ("device 'mps': torch sees no Apple GPU", {"device": "mps"}),
        (
            r"device 'cuda(:9)?': torch sees \d+ CUDA devices",
            {"device": "cuda:9" if torch.cuda.is_available() else "cuda"},
        ),
        (r"kv_cache_bytes: 6143 bytes do not hold one block of \d+ bytes", {"kv_cache_bytes": 6143, "device": "cpu"}),
    ],
)
def test_engine_construction_error_names_the_reason(tiny_llama: Path, message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        InferenceEngine(EngineConfig(model_path=str(tiny_llama), **options))
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    (tmp_path / "notes.txt").write_text("no model here")
    for path, message in (
        (tmp_path / "nowhere", "nowhere"),
        (tmp_path, r"config\.json"),
        (foreign, r"config\.json.*(MambaForCausalLM|mamba)"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            InferenceEngine(EngineConfig(model_path=str(path), device="cpu"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", [1, 2, 6])
def test_ctrl_c_leaves_a_usable_engine(at: int) -> None:
    prompts = [PROMPT, [1, 2, 3, 4, 5, 6, 7]]
    expected = tokens_of(fake().generate(prompts, LONG))
    ours = fake()
    ours.generate([[1, 2, 3, 4, 5, 6, 8]], GREEDY)  # leaves a block behind of which a part will be copied
    ours.parts.runner.on_step = raising(KeyboardInterrupt(), ours.parts.runner.num_steps + at)
    pending = ours.add_request(prompts[1], LONG)
    with pytest.raises(KeyboardInterrupt):
        ours.generate([PROMPT], LONG)
    assert run_to_end(ours)[pending].completion_tokens == expected[1]
    assert tokens_of(ours.generate(prompts, LONG)) == expected and is_idle(ours)


def test_a_step_that_fails_raises_and_is_computed_again() -> None:
    expected = [tokens_of(fake().generate([prompt], LONG))[0] for prompt in ([1], PROMPT)]
    ours = fake()
    ours.parts.runner.on_step = raising(RuntimeError("boom"), 3)
    pending = ours.add_request([1], LONG)
    with pytest.raises(RuntimeError, match="boom"):
        ours.generate([PROMPT], LONG)
    assert ours.is_alive
    assert run_to_end(ours)[pending].completion_tokens == expected[0]
    assert tokens_of(ours.generate([PROMPT], LONG)) == [expected[1]] and is_idle(ours)


def test_closed_engine_rejects_calls_and_frees_memory() -> None:
    with fake() as ours:
        ours.add_request(PROMPT, LONG)
        ours.step()
    ours.shutdown()
    assert is_idle(ours)
    for call in (lambda: ours.generate([PROMPT]), lambda: ours.add_request(PROMPT), lambda: ours.score(PROMPT)):
        with pytest.raises(EngineDead, match="shut down"):
            call()


class NothingAllowed:
    """A matcher whose mask leaves no token."""

    def advance(self, token: int) -> None:
        return None

    def mask(self) -> bytes:
        return bytes(VOCAB_SIZE // 8)


@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_row_without_drawable_token_aborts_alone(tiny_llama: Path, mode: Any) -> None:
    ours = InferenceEngine(EngineConfig(model_path=str(tiny_llama), kv_cache_bytes=1 << 20, device="cpu"))
    alone = ours.generate([PROMPT], LONG)[0]
    blocked = SamplingParams(logprobs_mode=mode)
    ids = [ours.add_request(prompt, blocked, make_matcher=NothingAllowed) for prompt in (PROMPT, [1])]
    ids.insert(1, ours.add_request(PROMPT, LONG))
    done: dict[int, TrainingSample] = {}
    while ours.has_pending():
        done |= {sample.request_id: sample for sample in ours.step()}
    samples = [done[request_id] for request_id in ids]
    assert [sample.finish_reason for sample in samples] == ["abort", "length", "abort"]
    assert "no token can be drawn" in str(samples[0].stop_reason)
    assert tokens_of(samples) == [(), alone.completion_tokens, ()] and is_idle(ours)
