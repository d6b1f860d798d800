"""Anthropic's Messages API: translation to a chat, refusals, the fields that Claude Code sends, usage of the cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.body import parse
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialects.messages import arguments_of, ask_messages, chat_fields
from nano_inference.server.dialects.messages_body import MessagesBody
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from tests.cases import failures
from tests.server.scripted import make_scripted
from tests.server.tiny import Running, running, served_model

JSON = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]
CONFIG = ServerConfig()
WEATHER = {"name": "weather", "description": "Report it.", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich", "days": [1, 2]}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


@pytest.fixture(scope="module")
def model(tiny_directory: Path) -> ServedModel:
    return served_model(tiny_directory)


def body_of(**fields: Any) -> MessagesBody:
    given = {"messages": HELLO, "max_tokens": 8, **fields}
    return parse(json.dumps({name: value for name, value in given.items() if value is not ...}).encode(), MessagesBody)


def refusal(model: ServedModel, /, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask_messages(body_of(**fields), model, CONFIG, "")
    return caught.value


def rendered(model: ServedModel, /, **fields: Any) -> str:
    call = ask_messages(body_of(**fields), model, CONFIG, "")
    return model.tokenizer.decode(call.requests[0].prompt, skip_special=False)


def test_consecutive_messages_of_one_role_are_one_turn(model: ServedModel) -> None:
    cached = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}, "citations": None}
    blocks = [{"type": "text", "text": "a"}, cached]
    talk = [
        {"role": "user", "content": blocks},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, *blocks[:1]]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "system", "content": "now"},
        {"role": "user", "content": []},
    ]
    fields = chat_fields(body_of(messages=talk, system=blocks), model)
    assert fields["messages"] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "a"},
        {"role": "system", "content": "now"},
        {"role": "user", "content": ""},
    ]
    assert "continue_final_message" not in fields


def test_reasoning_between_the_calls_of_the_current_turn_is_kept(model: ServedModel) -> None:
    """As in Anthropic's API, where reasoning of earlier turns is not in the prompt."""

    def thought(text: str, *blocks: dict[str, Any]) -> dict[str, Any]:
        parts = [{"type": "thinking", "thinking": one, "signature": "s"} for one in (text, "so")]
        return {"role": "assistant", "content": [*parts, {"type": "redacted_thinking", "data": "x"}, *blocks]}

    talk = [
        {"role": "user", "content": "weather?"},
        thought("old", {"type": "text", "text": "fine"}),
        {"role": "user", "content": "and there?"},
        thought("first", USE),
        {"role": "user", "content": [RESULT]},
        thought("second", {**USE, "id": "toolu_2"}),
        {"role": "user", "content": [{**RESULT, "tool_use_id": "toolu_2"}]},
    ]
    fields = chat_fields(body_of(messages=talk), model)
    found = [one.get("reasoning_content") for one in fields["messages"]]
    assert found == [None, None, None, "first\nso", None, "second\nso", None]


def test_calls_and_results_become_messages_in_order(model: ServedModel) -> None:
    second = {**USE, "id": "toolu_2", "input": {}}
    parts = [{"type": "text", "text": "no"}, {"type": "text", "text": "net"}]
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": parts, "is_error": True}
    talk = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE, second]},
        {"role": "user", "content": [RESULT, failed, {"type": "text", "text": "so?"}]},
        {"role": "assistant", "content": [{**USE, "id": "toolu_3"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_3"}]},
    ]
    fields = chat_fields(body_of(messages=talk), model)
    function = {"name": "weather", "arguments": '{"city":"Zürich","days":[1,2]}'}
    call = {"id": "toolu_1", "type": "function", "function": function}
    empty = {"id": "toolu_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert fields["messages"] == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, empty]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "weather", "content": "Error: no\nnet"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "toolu_3"}]},
        {"role": "tool", "tool_call_id": "toolu_3", "name": "weather", "content": ""},
    ]


def test_last_assistant_message_is_continued(model: ServedModel) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "I am"}]
    assert rendered(model, messages=talk) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI am"
    assert rendered(model, messages=[*HELLO, {"role": "assistant", "content": ""}]) == rendered(model)
    refused = refusal(model, messages=[*HELLO, {"role": "assistant", "content": [USE]}])
    assert (refused.status, refused.param) == (400, "messages.1") and "tool_result" in refused.message


def content(*blocks: JSON, role: str = "user") -> JSON:
    return {"messages": [{"role": role, "content": list(blocks)}]}


REFUSED_FIELDS = [
    ({"max_tokens": ...}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    (content({"type": "image", "source": {"type": "url", "url": "x"}}), "messages.0.content.0.type"),
    (content({"type": "web_search_tool_result", "content": []}), "messages.0.content.0.type"),
    (content({"type": "text"}), "messages.0.content.0.text"),
    (content(USE), "messages.0.content.0.type"),
    (content(RESULT), "messages.0.content.0.tool_use_id"),
    (content(RESULT, role="assistant"), "messages.0.content.0.type"),
    (content(USE, USE, role="assistant"), "messages.0.content.1.id"),
    (content({"type": "thinking", "thinking": "x", "signature": "s"}), "messages.0.content.0.type"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"top_k": -1}, "top_k"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.1.type",
    ),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_format": {"type": "json_schema", "schema": {}}}
        | {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_format",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "calculator"}, {"type": "bash_20250124", "name": "bash"}]}, "tools.1.type"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"model": "claude"}, "model"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
]


def test_unsupported_or_invalid_field_is_named(model: ServedModel) -> None:
    def check(fields: JSON, param: str) -> None:
        error = refusal(model, **fields)
        assert error.param == param and error.status == (404 if param == "model" else 400)
        named = {"model": "claude"}.get(param, param.split(".")[-1])
        assert named in error.message or "the prompt has" in error.message

    assert failures(check, REFUSED_FIELDS) == []


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": 1e999}', "[1]", '{"a": }'])
def test_arguments_that_json_cannot_encode_stay_text(text: str) -> None:
    assert arguments_of(text) == {"raw_arguments": text}


@pytest.mark.slow
@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
def test_schema_that_does_not_compile_is_named_as_the_client_wrote_it(server: Running, field: str) -> None:
    bogus = {"type": "json_schema", "schema": {"type": "bogus"}}
    fields = {"output_format": bogus} if field == "output_format" else {"output_config": {"format": bogus}}
    response = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 12, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: ")


PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MARK: JSON = {"cache_control": {"type": "ephemeral"}}
TOOL: JSON = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}, **MARK}
BODY: JSON = {
    "max_tokens": 64,
    "system": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be short.", **MARK}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}],
    "tools": [TOOL],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27,effort-2025-11-24"}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(make_scripted(tmp_path_factory.mktemp("claude"), "look", {"at": 1}, "Seen.")) as one:
        yield one


def answer(server: Running, **fields: Any) -> JSON:
    reply = server.post(f"{PATH}?beta=true", {**BODY, **fields}, **HEADERS)
    assert reply.status_code == 200, reply.text
    body: JSON = reply.json()
    return body


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31999}, None])
def test_request_is_answered_with_a_call_and_continued(scripted: Running, thinking: JSON | None) -> None:
    reply = answer(scripted, thinking=thinking)
    (use,) = reply["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "look", {"at": 1})
    assert reply["stop_reason"] == "tool_use" and reply["context_management"] == {"applied_edits": []}
    past = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "a", **MARK}
    turns = [*BODY["messages"], {"role": "assistant", "content": [past, use]}, {"role": "user", "content": [result]}]
    after = answer(scripted, messages=turns, thinking=thinking)
    assert after["content"] == [{"type": "text", "text": "Seen."}] and after["stop_reason"] == "end_turn"


@pytest.mark.slow
def test_hints_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(make_scripted(tmp_path, "look", {}, "Seen.")) as server, caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer(server, thinking={"type": "enabled", "budget_tokens": 1024})
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    names = "'context_management', 'metadata', 'output_config.effort', 'thinking', 'thinking.budget_tokens'"
    assert lines == [f"fields without effect are ignored: {names}"]


def counts(usage: JSON) -> tuple[int, int, int]:
    """Return (neither read from the cache nor new in it, new in it, read from it)."""
    return usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]


@pytest.mark.slow
def test_usage_counts_tokens_written_to_the_cache(scripted: Running) -> None:
    other = [{"role": "user", "content": [{"type": "text", "text": "never sent before", **MARK}]}]
    asked = {"messages": other, "system": "A prompt of its own, which no other test has sent."}
    size = scripted.post(COUNT, {"messages": other, "system": asked["system"], "tools": [TOOL]}).json()["input_tokens"]
    first, second = (counts(answer(scripted, **asked)["usage"]) for _ in range(2))
    assert first[0] == 0 and first[1] + first[2] == size and first[1] > len(asked["system"])
    assert second[2] > first[2] and second == (0, size - second[2], second[2]), "the second reads what the first wrote"
    longer = [*other, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    assert counts(answer(scripted, **{**asked, "messages": longer})["usage"])[2] > second[2] - 20


@pytest.mark.slow
@pytest.mark.parametrize("place", ["body", "system", "tools", "messages", "tool_result", "inside", "nowhere"])
def test_mark_anywhere_counts_as_creation(scripted: Running, place: str) -> None:
    def mark(name: str) -> JSON:
        return MARK if name == place else {}

    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    inside = [{"type": "text", "text": "a", **mark("inside")}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": inside, **mark("tool_result")}
    body = {
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Be kind.", **mark("system")}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}, **mark("tools")}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **mark("messages")}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        **mark("body"),
    }
    plain, new, _ = counts(scripted.post(PATH, body).json()["usage"])
    assert (plain > 0, new > 0) == ((True, False) if place == "nowhere" else (False, True))
