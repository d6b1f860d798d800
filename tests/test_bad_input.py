"""Invalid requests and failures: a one-line error naming field and limit; other requests are unaffected."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    PagedKVCache,
    RadixKVCache,
    SamplingParams,
    sample_with_logprobs,
)
from nano_inference.core.step import BlockCopy, Row, RowResult
from nano_inference.types import TrainingSample
from tests.models.families import VOCAB_SIZE
from tests.sim.fakes import FakeRunner, fake_config, fake_parts

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


def run_to_end(running: InferenceEngine) -> dict[int, TrainingSample]:
    return {sample.request_id: sample for _ in iter(running.has_pending, False) for sample in running.step()}


def is_idle(running: InferenceEngine) -> bool:
    kv = running.parts.kv
    kv.check()
    return not running.has_pending() and kv.num_free_blocks() == kv.num_blocks


CASES: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("an id that the model does not have", r"prompt: token id 50 at position 1 .* vocabulary of 50", [1, 50], {}),
    ("a negative id", r"prompt.*>= 0.*-1", [1, -1], {}),
    ("a huge id", r"prompt.*vocabulary of 50", [2**70], {}),
    ("an id that is no integer", r"prompt.*integer.*1\.5", [1.5], {}),
    ("a boolean", r"prompt.*integer.*True", [True], {}),
    ("text", r"prompt.*token ids.*str", "hello", {}),
    ("no tokens", r"prompt must hold at least one token", [], {}),
    ("too long a prompt", r"prompt has 100 tokens; max_model_len is 100, the answer included", [1] * 100, {}),
    ("too long a prompt to score", r"prompt has 101 tokens; max_model_len is 100$", [1] * 101, {"max_tokens": 0}),
    ("a stop id", r"stop_token_ids: token id 50 .* vocabulary of 50", [1], {"stop_token_ids": [50]}),
    ("an allowed id", r"allowed_token_ids: token id 77 .* vocabulary of 50", [1], {"allowed_token_ids": [3, 77]}),
    ("a biased id", r"logit_bias: token id 50 .* vocabulary of 50", [1], {"logit_bias": {50: 1.0}}),
    ("more alternatives than tokens", r"logprobs must be in \[0, 50\]", [1], {"logprobs": 51}),
    ("more prompt alternatives than tokens", r"prompt_logprobs must be in \[0, 50\]", [1], {"prompt_logprobs": 51}),
    ("stop strings without a tokenizer", r"stop: .* without a tokenizer", [1], {"stop": ["\n"]}),
]


@pytest.mark.parametrize(("what", "message", "prompt", "options"), CASES, ids=[case[0] for case in CASES])
def test_bad_request_raises_one_line_error_and_leaves_others_unaffected(
    what: str, message: str, prompt: Any, options: dict[str, Any]
) -> None:
    expected = tokens_of(fake().generate([PROMPT], LONG))
    ours = fake()
    good = ours.add_request(PROMPT, LONG)
    ours.step()
    params = SamplingParams(**({"max_tokens": 1} | options))
    for ask in (
        lambda: ours.add_request(prompt, params),
        lambda: ours.stream(prompt, params),
        lambda: ours.generate([PROMPT, prompt], [LONG, params]),
    ):
        with pytest.raises(BadRequest, match=message) as caught:
            ask()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    assert run_to_end(ours)[good].completion_tokens == expected[0]
    assert tokens_of(ours.generate([PROMPT], LONG)) == expected
    assert is_idle(ours)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([1, 2], "request must be an EngineRequest, got list"),
        (EngineRequest(prompt=[1], params={"max_tokens": 3}), "sampling_params must be SamplingParams, got dict"),  # type: ignore[arg-type]
        (EngineRequest(prompt=[1], num_samples=0), "num_samples must be >= 1, got 0"),
        (EngineRequest(prompt=[1], salt=b"x"), "salt must be a string"),  # type: ignore[arg-type]
        (EngineRequest(prompt=[1], score_start="x"), "score_start must be an integer, got 'x'"),  # type: ignore[arg-type]
        (EngineRequest(prompt=[1], score_start=-1), "score_start must be >= 0, got -1"),
        (EngineRequest(prompt=[1], beginning=None), "beginning must be a Beginning, got NoneType"),  # type: ignore[arg-type]
    ],
)
def test_invalid_record_raises_one_line_error(request_: Any, message: str) -> None:
    engine = InferenceEngine(fake_config(), parts=fake_parts("radix", 200, 4))
    with pytest.raises(BadRequest, match=message) as caught:
        engine.add(request_)
    assert "\n" not in str(caught.value) and not engine.has_pending()


def test_request_larger_than_the_cache_is_rejected_at_admission() -> None:
    ours = fake(kv=fake_parts("radix", 5, 4).kv)
    message = r"prompt of 5 tokens and max_tokens of 16 need more than the whole KV cache, which holds 20 tokens"
    with pytest.raises(BadRequest, match=message):
        ours.add_request(PROMPT, SamplingParams(max_tokens=16))
    with pytest.raises(BadRequest, match="whole KV cache"):
        ours.generate([[1] * 20], SamplingParams(max_tokens=None))
    assert len(ours.generate([PROMPT], SamplingParams(max_tokens=15, ignore_eos=True))[0].completion_tokens) == 15


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("prompts must be a list of lists .* wrap it in a list", ([1, 2],)),
        ("prompts must be a list of lists .* str", ("hello",)),
        ("prompts must be a list of lists .* int", (5,)),
        ("prompt must be a collection of token ids, got int", ([[1], 2],)),
        ("sampling_params: 1 given for 2 prompts", ([[1], [2]], [GREEDY])),
        ("sampling_params must be SamplingParams, got NoneType", ([[1]], [None])),
        ("sampling_params must be SamplingParams, got str", ([[1]], {"temperature": 0})),
        ("num_samples must be >= 1, got 0", ([[1]], GREEDY, 0)),
        ("num_samples must be an integer, got 1.5", ([[1]], GREEDY, 1.5)),
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


class Failing(FakeRunner):
    """Computes, but at one step an error comes instead of the results."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__(60, 4)
        self.error, self.left = error, at

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:  # type: ignore[override]
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().run(rows, copies, fresh)


@pytest.mark.parametrize("at", [1, 2, 6])
def test_ctrl_c_leaves_a_usable_engine(at: int) -> None:
    prompts = [PROMPT, [1, 2, 3, 4, 5, 6, 7]]
    expected = tokens_of(fake().generate(prompts, LONG))
    ours = fake(runner=(runner := Failing(KeyboardInterrupt(), 0)))
    ours.generate([[1, 2, 3, 4, 5, 6, 8]], GREEDY)  # leaves a block behind of which a part will be copied
    runner.left = at
    pending = ours.add_request(prompts[1], LONG)
    with pytest.raises(KeyboardInterrupt):
        ours.generate([PROMPT], LONG)
    assert run_to_end(ours)[pending].completion_tokens == expected[1]
    assert tokens_of(ours.generate(prompts, LONG)) == expected and is_idle(ours)


def test_a_step_that_fails_raises_and_is_computed_again() -> None:
    expected = [tokens_of(fake().generate([prompt], LONG))[0] for prompt in ([1], PROMPT)]
    ours = fake(runner=Failing(RuntimeError("boom"), 3))
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


def test_allowed_tokens_that_are_all_stop_tokens_are_refused_with_min_tokens(tiny_llama: Path) -> None:
    ours = InferenceEngine(EngineConfig(model_path=str(tiny_llama), kv_cache_bytes=1 << 20, device="cpu"))
    with pytest.raises(BadRequest, match="min_tokens"):
        ours.add_request(PROMPT, SamplingParams(min_tokens=4, allowed_token_ids=[3], stop_token_ids=[3]))


@pytest.mark.parametrize("kind", [PagedKVCache, RadixKVCache])
def test_invalid_allocate_arguments_change_nothing(kind: Any) -> None:
    kv = kind(8, 4)
    blocks = kv.allocate(range(10)).block_ids
    for wrong in ((blocks, 11), (blocks, -1), (blocks[1:], None), ((*blocks, 7), None), ((), None)):
        with pytest.raises(ValueError, match=r"num_computed|block_ids"):
            kv.deallocate(*wrong)
        kv.check()
        assert kv.num_free_blocks() == 5
    kv.deallocate(blocks)
    assert kv.num_free_blocks() == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("min_ps", wrong) for wrong in (1.5, -0.1, float("nan"))],
        *[("top_ps", wrong) for wrong in (0.0, 1.5, float("nan"))],
        *[("uniforms_B", wrong) for wrong in (1.0, -0.1, float("nan"))],
        *[("temperatures", wrong) for wrong in (-1.0, -1e-40, float("inf"), float("nan"))],
        *[("logit", wrong) for wrong in (float("nan"), float("inf"))],
        ("top_ks", 1.5),
    ],
)
def test_sample_with_logprobs_rejects_values_outside_their_range(name: str, value: float) -> None:
    logits_BV, temperature_B = torch.zeros(2, 5), torch.ones(2)
    given: dict[str, Any] = {}
    if name == "logit":
        logits_BV[1, 2] = value
    elif name == "temperatures":
        temperature_B[1] = value
    else:
        given[name] = torch.tensor([0.5, value]) if name == "uniforms_B" else [1, value]
    with pytest.raises(ValueError, match=rf"{name}.*for row 1"):
        sample_with_logprobs(logits_BV, temperature_B, **given)


def test_sample_with_logprobs_rejects_a_row_without_a_token() -> None:
    with pytest.raises(ValueError, match="largest logit of each row must be finite, got -inf for row 0"):
        sample_with_logprobs(torch.full((1, 4), -torch.inf), torch.ones(1))


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-300])
def test_temperature_below_the_smallest_normal_number_is_greedy(temperature: float) -> None:
    logits_BV = torch.tensor([[3.0, 1.0, 3.0, 0.0]])
    temperature_B = torch.tensor([temperature], dtype=torch.float64)
    uniforms_B = torch.tensor([0.99])
    found = sample_with_logprobs(logits_BV, temperature_B, uniforms_B=uniforms_B)
    assert found == sample_with_logprobs(logits_BV, torch.zeros(1), uniforms_B=uniforms_B)
    assert found[0].tolist() == [0]
    assert SamplingParams(temperature=temperature) == SamplingParams(temperature=0)


def test_sample_with_logprobs_rejects_mismatched_shapes() -> None:
    logits_BV, ones_B = torch.zeros(3, 5), torch.ones(3)
    for logits, ones in ((torch.zeros(5), ones_B), (logits_BV, torch.ones(2)), (torch.zeros(()), ones_B)):
        with pytest.raises(ValueError, match=r"logits must be \[B, V\]"):
            sample_with_logprobs(logits, ones)
    for name, value in (("top_ks", [1, 2]), ("top_ps", [0.5] * 4), ("min_ps", [0.1]), ("uniforms_B", torch.rand(1))):
        with pytest.raises(ValueError, match=name):
            sample_with_logprobs(logits_BV, ones_B, **{name: value})
