"""llama.cpp: /completion, options of a start (seed, continued answers, BOS, templates), reports beside an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from nano_inference import InferenceEngine
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialects.llamacpp import selected
from nano_inference.types import ModelError
from tests.cases import failures
from tests.server.mounted import END_TOKEN, JSON, engine_sample, ids
from tests.server.tiny import MAX_LEN, Running, make_tiny, opened, running

pytestmark = pytest.mark.slow

CHAT, COMPLETE, LLAMA, RENDER, RESPOND = (
    *("/v1/chat/completions", "/v1/completions", "/completion", "/apply-template", "/v1/responses"),
)
FREE: JSON = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
HELLO: JSON = {"role": "user", "content": "hello"}
OPEN: JSON = {"role": "assistant", "content": "Wh"}
BOS = 258
STEP = 16
"""Tokens of a step of `server`."""


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(port=0, log_requests=False, **fields)


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    """A server that continues answers, has a default seed and computes `STEP` tokens a step."""
    options = {"prefill_assistant": True, "default_seed": 7, "max_tokens_per_batch": STEP, "share_prefix_cache": True}
    with running(tiny_directory, config(**options)) as one:
        yield one


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose tokenizer begins each text with a BOS, with the template chatml."""
    directory = make_tiny(tmp_path_factory.mktemp("with_bos"))
    file = directory / "tokenizer.json"
    core = tokenizers.Tokenizer.from_file(str(file))
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    core.save(str(file))
    with running(directory, config(chat_template="chatml")) as one:
        yield one


def text_of(server: Running, path: str, **fields: Any) -> str:
    reply: JSON = server.post(path, {"prompt": "a", **FREE, **fields}).json()
    return str(reply["content"] if path == LLAMA else reply["choices"][0]["text"])


def test_default_seed_is_that_of_requests_without_one(server: Running) -> None:
    wanted = text_of(server, COMPLETE, max_tokens=30, seed=7)
    assert text_of(server, COMPLETE, max_tokens=30) == text_of(server, LLAMA, n_predict=30) == wanted
    assert text_of(server, COMPLETE, max_tokens=30, seed=8) != wanted
    settings = server.post(LLAMA, {"prompt": "a", "n_predict": 1}).json()["generation_settings"]
    assert settings["seed"] == 7
    assert server.client.get("/props").json()["default_generation_settings"]["params"]["seed"] == 7


def rendered(server: Running, *messages: JSON, **fields: Any) -> str:
    reply = server.post(RENDER, {"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["prompt"])


def test_last_answer_is_continued_unless_the_request_decides(server: Running) -> None:
    head = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(server, HELLO, OPEN) == f"{head}Wh"
    assert rendered(server, HELLO) == head
    closed = f"{head}Wh<|im_end|>\n"
    assert rendered(server, HELLO, OPEN, add_generation_prompt=False) == closed
    assert rendered(server, HELLO, OPEN, continue_final_message=False) == f"{closed}<|im_start|>assistant\n"
    fields = {"messages": [HELLO, OPEN], "max_tokens": 1, "return_token_ids": True}
    used = server.post(CHAT, fields).json()["prompt_token_ids"]
    assert used == server.post(CHAT, {**fields, "continue_final_message": True}).json()["prompt_token_ids"]
    count = {"messages": [HELLO, OPEN]}
    assert server.post("/tokenize", count).json()["tokens"] == used
    assert server.post("/v1/chat/completions/input_tokens", count).json()["input_tokens"] == len(used)


def test_two_answers_at_the_end_are_not_continued(server: Running) -> None:
    for path in (CHAT, RENDER):
        error = server.post(path, {"messages": [HELLO, OPEN, OPEN]}).json()["error"]
        assert (error["param"], "two answers" in error["message"]) == ("messages", True)


def test_named_template_begins_with_the_bos_of_the_tokenizer(with_bos: Running) -> None:
    fields = {"messages": [HELLO], "max_tokens": 1, "return_token_ids": True}
    prompt = with_bos.post(CHAT, fields).json()["prompt_token_ids"]
    assert prompt[:1] == [BOS] and prompt.count(BOS) == 1


@pytest.mark.parametrize(("limit", "is_truncated"), [(-1, True), (MAX_LEN, True), (3, False)])
def test_answer_is_truncated_if_the_context_ends_it(server: Running, limit: int, is_truncated: bool) -> None:
    body = {"prompt": "a" * (MAX_LEN - 9), "n_predict": limit, "ignore_eos": True}
    whole = server.post(LLAMA, body).json()
    *_, last = server.events(LLAMA, {**body, "stream": True})
    for reply in (whole, last):
        assert (reply["stop_type"], reply["truncated"]) == ("limit", is_truncated)
    exact = server.post(LLAMA, {**body, "n_predict": 9}).json()
    assert (exact["tokens_predicted"], exact["truncated"]) == (9, False)


def named_events(server: Running, body: JSON) -> list[JSON]:
    """Return the data of a stream whose events have names."""
    reply = server.post(RESPOND, {**body, "stream": True})
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]


def test_responses_report_progress_and_timings(server: Running) -> None:
    body = {"input": "ab" * 90, "max_output_tokens": 4, "timings_per_token": True, "return_progress": True}
    events = named_events(server, body)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    reports = [one for one in events if "prompt_progress" in one]
    assert {one["type"] for one in reports} == {"response.in_progress"}
    assert reports[-1]["prompt_progress"]["processed"] == reports[-1]["prompt_progress"]["total"] > 180
    kinds = {one["type"] for one in events if "timings" in one}
    assert kinds == {"response.output_text.delta", events[-1]["type"]}
    assert events[-1]["timings"]["predicted_n"] == events[-1]["response"]["usage"]["output_tokens"] == 4
    whole = server.post(RESPOND, body).json()
    assert whole["timings"]["predicted_n"] == 4 and "prompt_progress" not in whole
    plain = named_events(server, {"input": "a", "max_output_tokens": 2})
    assert plain and not {"timings", "prompt_progress"} & {name for one in plain for name in one}


FIRE = (
    "functools {{ bos_token }}F:{{ functions }}{% for one in messages %}<{{ one.role }}>{{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_functions_are_a_text_for_a_template_that_writes_it(tmp_path: Path) -> None:
    with running(make_tiny(tmp_path, template=FIRE), config()) as one:
        assert rendered(one, HELLO) == "functools <|bos|>F:<user>hello"
        text = rendered(one, HELLO, tools=[TOOL])
        assert json.loads(text[text.index("[") : text.rindex("]") + 1]) == [TOOL["function"]]
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
        said = rendered(one, HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, tools=[TOOL])
        assert said.endswith("<assistant>5") and "<tool_call>" not in said
        asked = {"messages": [HELLO], "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        message = one.post(CHAT, {**asked, "parallel_tool_calls": False}).json()["choices"][0]["message"]
        assert [one["function"]["name"] for one in message["tool_calls"]] == ["f"]


TEXT = "".join(chr(97 + index * 7 % 26) for index in range(100))


def progress_of(server: Running, path: str, asked: JSON) -> list[JSON]:
    """Return the reports of the prefill in a stream, which all precede the first token."""
    limit = {"n_predict": 2} if path == LLAMA else {"max_tokens": 2}
    body = {**asked, **limit, "ignore_eos": True, "stream": True, "return_progress": True}
    events = [event for event in server.events(path, body) if event != "[DONE]"]
    reports = [index for index, event in enumerate(events) if "prompt_progress" in event]
    texts = [index for index, event in enumerate(events) if event.get("tokens") or event.get("token_ids")]
    assert not texts or max(reports) < min(texts)
    return [events[index]["prompt_progress"] for index in reports]


@pytest.mark.parametrize(
    ("path", "asked", "total"),
    [
        (LLAMA, {"prompt": f"0{TEXT}"}, 101),
        (COMPLETE, {"prompt": f"1{TEXT}"}, 101),
        (CHAT, {"messages": [{"role": "user", "content": f"2{TEXT}"}], "cache_salt": "own"}, None),
    ],
)
def test_prefill_is_reported_after_each_step(server: Running, path: str, asked: JSON, total: int | None) -> None:
    reports = progress_of(server, path, asked)
    first, *later = reports
    assert first == {"total": first["total"], "cache": 0, "processed": 0, "time_ms": 0}
    assert total in (None, first["total"])
    assert {(one["total"], one["cache"]) for one in reports} == {(first["total"], 0)}
    counts = [one["processed"] for one in later]
    assert counts == [*range(STEP, first["total"], STEP), first["total"]]
    assert [one["time_ms"] for one in later] == sorted(one["time_ms"] for one in later)
    again = progress_of(server, path, asked)
    cached = again[0]["cache"]
    assert first["total"] - STEP <= cached < first["total"] and again[0]["processed"] == cached
    assert again[-1] == {**again[-1], "cache": cached, "processed": first["total"]}


@pytest.mark.parametrize(("path", "asked"), [(COMPLETE, {"prompt": "ab"}), (CHAT, {"messages": [HELLO]})])
def test_n_predict_is_the_length_of_an_answer(server: Running, path: str, asked: JSON) -> None:
    def length(**fields: Any) -> int:
        reply = server.post(path, {**asked, "ignore_eos": True, **fields})
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["completion_tokens"])

    assert length(n_predict=3) == 3 == length(n_predict=3, max_tokens=5)
    assert length(n_predict=None, max_tokens=5) == 5
    usage = server.post(path, {**asked, "ignore_eos": True, "n_predict": -1}).json()["usage"]
    assert usage["total_tokens"] == 512
    refused = server.post(path, {**asked, "n_predict": -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n_predict")


def test_usage_can_be_forced_into_every_chunk(tiny_directory: Path) -> None:
    with running(tiny_directory, config(enable_force_include_usage=True)) as server:
        for path, asked in ((COMPLETE, {"prompt": "ab"}), (CHAT, {"messages": [HELLO]})):
            body = {**asked, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
            whole = server.post(path, body).json()
            for options in (None, {"include_usage": False}):
                *events, last, done = server.events(path, {**body, "stream": True, "stream_options": options})
                assert done == "[DONE]" and last["choices"] == []
                counts = [one["usage"]["completion_tokens"] for one in [*events, last]]
                assert counts == sorted(counts) and counts[-1] == 6
                finished = [one for one in events if one["choices"][0]["finish_reason"]]
                assert finished == events[-1:] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_template_dates_are_todays(tmp_path: Path) -> None:
    template = "{{ date_string }}|{{ datetime }}|{% for one in messages %}{{ one.content }}{% endfor %}"
    directory = make_tiny(tmp_path, template=template)
    asked = {"messages": [HELLO]}
    with running(directory, config()) as server:
        assert server.post("/apply-template", asked).json()["prompt"] == "||hello"
    for fields in ({}, {"chat_template": template}):
        with running(directory, config(template_dates=True, **fields)) as server:
            before = datetime.now()
            prompt = server.post("/apply-template", asked).json()["prompt"]
            days = {before.strftime("%d %b %Y|%b %d %Y"), datetime.now().strftime("%d %b %Y|%b %d %Y")}
            assert prompt.removesuffix("|hello") in days
            given = {**asked, "chat_template_kwargs": {"date_string": "1 Jan 1970"}}
            assert server.post("/apply-template", given).json()["prompt"].startswith("1 Jan 1970|")
            reply = server.post(CHAT, {**asked, "max_tokens": 1, "return_token_ids": True})
            assert reply.json()["prompt_token_ids"] == ids(prompt)


def test_template_dates_need_a_template(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="--template-dates: the model has no chat template"):
        opened(directory, config(template_dates=True))


HOT: JSON = {**FREE, "seed": 3, "n_predict": 40, "ignore_eos": True}
GREEDY: JSON = {"temperature": 0, "n_predict": 12}


def complete(server: Running, **fields: Any) -> Any:
    """Return the JSON of a successful POST; greedy by default."""
    reply = server.post(LLAMA, {"prompt": "hello", **GREEDY, **fields})
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
        assert server.post(LLAMA, body).json()["tokens_predicted"] == 512 - 5
    assert complete(server, n_predict=0)["tokens_predicted"] == 0
    assert complete(server, n_predict=0)["content"] == ""
    assert complete(server, n_predict=None, max_tokens=3)["tokens_predicted"] == 3
    assert complete(server, n_predict=2, max_tokens=3)["tokens_predicted"] == 2


def test_response_fields(server: Running) -> None:
    reply = complete(server, response_fields=["content", "generation_settings/n_predict", "nothing", "timings/a/b"])
    assert reply == {"content": complete(server)["content"], "generation_settings/n_predict": 12}
    events = server.events(LLAMA, {"prompt": "hello", **GREEDY, "stream": True, "response_fields": ["stop"]})
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
    ({"repeat_last_n": 64}, "repeat_last_n"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"n_predict": -3}, "n_predict"),
    ({"n_cmpl": 17}, "n_cmpl"),
    ({"n_probs": 21}, "n_probs"),
    ({"seed": -2}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"logit_bias": [[1]]}, "logit_bias.0"),
    ({"logit_bias": [[1, "a"]]}, "logit_bias.0"),
    ({"logit_bias": [[260, 1.0]]}, "logit_bias"),
    ({"logit_bias": [[1, 2], [1, 101]]}, "logit_bias.1"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": None}, "prompt"),
]


def test_unsupported_or_invalid_field_is_named(server: Running) -> None:
    def check(fields: JSON, param: str) -> None:
        reply = server.post(LLAMA, {"prompt": "hello", **GREEDY, **fields})
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
        refused = server.post(LLAMA, {"prompt": prompt})
        assert (refused.status_code, refused.json()["error"]["message"].split()[0]) == (400, field)
    assert server.post(LLAMA, {"prompt": {"multimodal_data": []}}).status_code == 400
