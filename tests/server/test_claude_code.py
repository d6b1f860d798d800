"""POST /v1/messages with the fields that Claude Code sends, and how its replies count the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import make_scripted
from tests.server.tiny import Running, running

JSON = dict[str, Any]
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


def test_usage_counts_tokens_written_to_the_cache(scripted: Running) -> None:
    other = [{"role": "user", "content": [{"type": "text", "text": "never sent before", **MARK}]}]
    asked = {"messages": other, "system": "A prompt of its own, which no other test has sent."}
    size = scripted.post(COUNT, {"messages": other, "system": asked["system"], "tools": [TOOL]}).json()["input_tokens"]
    first, second = (counts(answer(scripted, **asked)["usage"]) for _ in range(2))
    assert first[0] == 0 and first[1] + first[2] == size and first[1] > len(asked["system"])
    assert second[2] > first[2] and second == (0, size - second[2], second[2]), "the second reads what the first wrote"
    longer = [*other, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    assert counts(answer(scripted, **{**asked, "messages": longer})["usage"])[2] > second[2] - 20


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
