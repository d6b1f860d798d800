"""llama.cpp's options of a start: seed, continued answers, BOS, templates; and its reports beside an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from nano_inference.server.config import ServerConfig
from nano_inference.types import ModelError
from tests.server.mounted import ids
from tests.server.tiny import MAX_LEN, Running, make_tiny, opened, running

JSON = dict[str, Any]
CHAT, COMPLETE, LLAMA, RENDER, RESPOND = (
    *("/v1/chat/completions", "/v1/completions", "/completion", "/apply-template", "/v1/responses"),
)
HOT = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
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
    reply: JSON = server.post(path, {"prompt": "a", **HOT, **fields}).json()
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


CHAT, COMPLETE, LLAMA = "/v1/chat/completions", "/v1/completions", "/completion"
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
