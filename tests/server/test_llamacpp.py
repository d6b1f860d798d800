"""llama.cpp's /completion and /props: fields, refusals, whole replies and streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine
from nano_inference.server.dialect import Route
from nano_inference.server.dialects.llamacpp import LlamaBody, LlamaReply, ask_llama, selected
from tests.cases import failures
from tests.server.mounted import END_TOKEN, JSON, engine_sample, ids, mounted
from tests.server.tiny import Running

PATH = "/completion"
ROUTE = Route(path=PATH, body=LlamaBody, ask=ask_llama, reply=LlamaReply, summary="Complete as llama.cpp does.")
HOT: JSON = {"temperature": 1.5, "seed": 3, "n_predict": 40, "ignore_eos": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
GREEDY: JSON = {"temperature": 0, "n_predict": 12}


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with mounted(tiny_directory, ROUTE) as one:
        yield one


def complete(server: Running, **fields: Any) -> Any:
    """Return the JSON of a successful POST; greedy by default."""
    reply = server.post(PATH, {"prompt": "hello", **GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_probabilities_are_those_that_tokens_are_drawn_from(server: Running) -> None:
    fields = {**HOT, "top_k": 3, "n_predict": 4, "n_probs": 5, "return_tokens": True}
    rows = complete(server, **fields, post_sampling_probs=True)["completion_probabilities"]
    for row in rows:
        assert {*row} == {"id", "token", "bytes", "prob", "top_probs"} and 0 < row["prob"] <= 1
        kept = [one["prob"] for one in row["top_probs"]]
        assert sum(kept) == pytest.approx(1, abs=1e-4) and sum(prob > 0 for prob in kept) <= 3
    plain = complete(server, **fields)["completion_probabilities"]
    assert [row["id"] for row in plain] == [row["id"] for row in rows] and "logprob" in plain[0]
    for row in complete(server, n_probs=4, post_sampling_probs=True)["completion_probabilities"]:
        assert row["prob"] == 1 and sorted(one["prob"] for one in row["top_probs"]) == [0, 0, 0, 1]


def test_answer_fills_the_context_by_default(server: Running) -> None:
    for unlimited in ({}, {"n_predict": -1}, {"n_predict": -2}, {"n_predict": None}):
        body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, **unlimited}
        assert server.post(PATH, body).json()["tokens_predicted"] == 512 - 5
    assert complete(server, n_predict=0)["tokens_predicted"] == 0
    assert complete(server, n_predict=0)["content"] == ""
    assert complete(server, n_predict=None, max_tokens=3)["tokens_predicted"] == 3
    assert complete(server, n_predict=2, max_tokens=3)["tokens_predicted"] == 2


def test_response_fields(server: Running) -> None:
    reply = complete(server, response_fields=["content", "generation_settings/n_predict", "nothing", "timings/a/b"])
    assert reply == {"content": complete(server)["content"], "generation_settings/n_predict": 12}
    events = server.events(PATH, {"prompt": "hello", **GREEDY, "stream": True, "response_fields": ["stop"]})
    assert events[-1] == {"stop": True} and "content" in events[0]
    assert selected({"a": {"b": 0}}, ["a/b"]) == {"a/b": 0} and selected({"a": 1}, []) == {"a": 1}


SAMPLING: list[tuple[JSON, JSON]] = [
    ({"temperature": 1.7, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 1.7, "seed": 3}),
    ({"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "seed": 3, "top_k": 40, "top_p": 0.95, "min_p": 0.05}),
    ({"repeat_penalty": 3.0}, {"repetition_penalty": 3.0}),
    ({"repeat_penalty": 3.0, "repeat_last_n": -1}, {"repetition_penalty": 3.0}),
    ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
    ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
    ({"frequency_penalty": 2.0, "presence_penalty": 2.0, "repeat_penalty": 2.0, "repeat_last_n": 0}, {}),
    ({"logit_bias": [[65, 100]]}, {"logit_bias": {65: 100.0}}),
    ({"logit_bias": {"65": 100}}, {"logit_bias": {65: 100.0}}),
    ({"logit_bias": [["ab", 50], [*ids("b"), 1]]}, {"logit_bias": {ids("a")[0]: 50.0, ids("b")[0]: 51.0}}),
    ({"logit_bias": [["ab ", -100], ["b ", -100]]}, {"logit_bias": dict.fromkeys(ids("ab "), -100.0)}),
    ({"logit_bias": {"ab": 50}}, {"logit_bias": {ids("a")[0]: 50.0, ids("b")[0]: 50.0}}),
    ({"logit_bias": [[191, False], [191, 1.5]]}, {"logit_bias": {191: -98.5}}),
    ({"logit_bias": False}, {}),
    ({"ignore_eos": True, "n_predict": 60}, {"ignore_eos": True, "max_tokens": 60, "logit_bias": {END_TOKEN: -100.0}}),
]


@pytest.mark.parametrize(("fields", "params"), SAMPLING)
def test_tokens_and_logprobs_equal_the_engines(
    server: Running, engine: InferenceEngine, fields: JSON, params: JSON
) -> None:
    reply = complete(server, **fields, n_probs=1, return_tokens=True)
    sample = engine_sample(engine, ids("hello"), logprobs=1, **params)
    assert reply["tokens"] == list(sample.completion_tokens)
    logprobs = [one["logprob"] for one in reply["completion_probabilities"]]
    assert logprobs == pytest.approx(list(sample.logprobs), abs=1e-5)


REFUSED: list[tuple[JSON, str]] = [
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": 'root ::= "a"', "json_schema": {"type": "object"}}, "json_schema"),
    ({"samplers": ["top_k"]}, "samplers"),
    ({"mirostat": 2}, "mirostat"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"tfs_z": 0.5}, "tfs_z"),
    ({"dynatemp_range": 0.5}, "dynatemp_range"),
    ({"dry_multiplier": 0.5}, "dry_multiplier"),
    ({"xtc_probability": 0.5}, "xtc_probability"),
    ({"top_n_sigma": 1.0}, "top_n_sigma"),
    ({"adaptive_target": 0.5}, "adaptive_target"),
    ({"min_keep": 5}, "min_keep"),
    ({"image_data": [{"data": "a", "id": 1}]}, "image_data"),
    ({"multimodal_data": ["a"]}, "multimodal_data"),
    ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
    ({"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
    ({"repeat_last_n": 64}, "repeat_last_n"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"n_predict": -3}, "n_predict"),
    ({"n_cmpl": 17}, "n_cmpl"),
    ({"n_probs": 21}, "n_probs"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": -2}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"logit_bias": [[1]]}, "logit_bias.0"),
    ({"logit_bias": [[1, 2], [1.5, 2]]}, "logit_bias.1"),
    ({"logit_bias": [[1, "a"]]}, "logit_bias.0"),
    ({"logit_bias": {"1": True}}, "logit_bias.0"),
    ({"logit_bias": [[260, 1.0]]}, "logit_bias"),
    ({"logit_bias": [[1, 2], [1, 101]]}, "logit_bias.1"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": ["a", -1]}, "prompt"),
    ({"prompt": None}, "prompt"),
]


def test_unsupported_or_invalid_field_is_named(server: Running) -> None:
    def check(fields: JSON, param: str) -> None:
        reply = server.post(PATH, {"prompt": "hello", **GREEDY, **fields})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error"), error
        assert param in error["message"]

    assert failures(check, REFUSED) == []


def test_prompts_may_be_objects_with_a_text(server: Running) -> None:
    text = {"prompt_string": "hello"}
    plain = complete(server, prompt="hello", **GREEDY)["content"]
    assert complete(server, prompt=text, **GREEDY)["content"] == plain
    answers = complete(server, prompt=[text, ids("hello"), "hello"], **GREEDY)
    assert [one["content"] for one in answers] == [plain] * 3
    for prompt, field in (
        ({**text, "multimodal_data": ["aa"]}, "prompt.multimodal_data"),
        ([{**text, "multimodal_data": "aa"}], "prompt.0.multimodal_data"),
    ):
        refused = server.post(PATH, {"prompt": prompt})
        assert (refused.status_code, refused.json()["error"]["message"].split()[0]) == (400, field)
    assert server.post(PATH, {"prompt": {"multimodal_data": []}}).status_code == 400
