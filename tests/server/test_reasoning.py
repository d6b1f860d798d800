"""Reasoning apart from the answer, in the form of each dialect, whole and streamed, with its token counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialects.responses_reply import text_in
from tests.server.reasoner import ANSWER, PLAIN, THOUGHT, make_reasoner
from tests.server.tiny import Running, events_in, running

pytestmark = pytest.mark.slow

JSON = dict[str, Any]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HELLO: list[JSON] = [{"role": "user", "content": "2+2?"}]
ASKED: JSON = {"messages": HELLO, "temperature": 0}
WHOLE_TEXT = f"<think>{THOUGHT}</think>\n\n{ANSWER}"
FUNCTION: JSON = {"name": "look", "parameters": {"type": "object"}}
TOOLS: list[JSON] = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that reasons, whose marks are ordinary or special tokens."""
    with running(make_reasoner(tmp_path_factory.mktemp("reasoner"), special_marks=request.param)) as one:
        yield one


def good(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(server: Running, **fields: Any) -> tuple[JSON, JSON]:
    """Return the message and the usage of a chat, after its stream has given the same."""
    reply = good(server.post(CHAT, {**ASKED, **fields}))
    message: JSON = reply["choices"][0]["message"]
    *chunks, last, _ = server.events(
        CHAT, {**ASKED, **fields, "stream": True, "stream_options": {"include_usage": True}}
    )
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    usage: JSON = reply["usage"]
    assert usage.get("completion_tokens_details") == last["usage"].get("completion_tokens_details")
    return message, usage


def test_chat_has_reasoning_apart(server: Running) -> None:
    message, usage = chat(server)
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == (ANSWER, THOUGHT, THOUGHT)
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (5, {"reasoning_tokens": 3})


def test_reasoning_that_the_prompt_opens_is_apart_too(server: Running) -> None:
    message, usage = chat(server, chat_template_kwargs={"is_opened": True})
    assert (message["content"], message["reasoning"]) == (ANSWER, THOUGHT)
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


def test_reasoning_before_a_call(server: Running) -> None:
    message, usage = chat(server, tools=TOOLS)
    assert (message["content"], message["reasoning_content"]) == (None, "Look it up.")
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["look"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_operator_and_trainers_keep_reasoning_in_the_content(server: Running, tmp_path_factory: Any) -> None:
    path = make_reasoner(tmp_path_factory.mktemp("kept"))
    for config in (
        ServerConfig(port=0, log_requests=False, reasoning_format="none"),
        ServerConfig(port=0, log_requests=False, enable_rl=True),
    ):
        with running(path, config) as kept:
            assert chat(kept)[0]["content"] == WHOLE_TEXT
            assert chat(kept, reasoning_format="auto")[0]["reasoning"] == THOUGHT
            assert chat(kept, separate_reasoning=True)[0]["reasoning"] == THOUGHT
            (block,) = good(kept.post(MESSAGES, {**ASKED, "max_tokens": 9}))["content"]
            assert block == {"type": "text", "text": WHOLE_TEXT}


def message_blocks(server: Running, **fields: Any) -> tuple[list[JSON], JSON]:
    """Return the content of a message and its usage, after its stream has given the same."""
    body = {**ASKED, "max_tokens": 16, **fields}
    reply = good(server.post(MESSAGES, body))
    events = events_in_named(server.post(MESSAGES, {**body, "stream": True}).text)
    blocks: list[JSON] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta.pop("type")
            ((name, text),) = delta.items()
            assert kind == {"partial_json": "input_json_delta"}.get(name, f"{name}_delta")
            blocks[-1][name] = blocks[-1].get(name, "") + text
    for one, two in zip(reply["content"], blocks, strict=True):
        same = {"signature", "id", "input", "partial_json"}
        assert {k: v for k, v in one.items() if k not in same} == {k: v for k, v in two.items() if k not in same}
        assert one["type"] != "thinking" or (one["signature"] and two["signature"])
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert last["usage"].get("output_tokens_details") == reply["usage"].get("output_tokens_details")
    return reply["content"], reply["usage"]


def events_in_named(text: str) -> list[JSON]:
    return events_in("\n\n".join(block.partition("\n")[2] for block in text.split("\n\n")))


def test_messages_have_thinking_blocks(server: Running) -> None:
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, None):
        (thought, text), usage = message_blocks(server, thinking=thinking)
        assert (thought["type"], thought["thinking"]) == ("thinking", THOUGHT)
        assert text == {"type": "text", "text": ANSWER}
        assert (usage["output_tokens"], usage["output_tokens_details"]) == (5, {"thinking_tokens": 3})
    (text,), usage = message_blocks(server, thinking={"type": "disabled"})
    assert text == {"type": "text", "text": PLAIN} and "output_tokens_details" not in usage


def test_thinking_before_a_tool_use_can_be_sent_back(server: Running) -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    blocks, _ = message_blocks(server, tools=tools)
    assert [one["type"] for one in blocks] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "sun"}
    turns = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    (thought, text), usage = message_blocks(server, tools=tools, messages=turns)
    without = [*HELLO, {"role": "assistant", "content": blocks[1:]}, {"role": "user", "content": [result]}]
    _, fewer = message_blocks(server, tools=tools, messages=without)
    assert (thought["thinking"], text["text"]) == (THOUGHT, ANSWER)
    assert num_input(usage) > num_input(fewer)


def num_input(usage: JSON) -> int:
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def response(server: Running, **fields: Any) -> JSON:
    """Return a response, after its stream has given the same."""
    body: JSON = {"input": "2+2?", "temperature": 0, **fields}
    reply: JSON = good(server.post(RESPONSES, body))
    events = events_in_named(server.post(RESPONSES, {**body, "stream": True}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last: JSON = events[-1]["response"]
    for one, two in zip(reply["output"], last["output"], strict=True):
        ignored = ("id", "call_id")
        assert {k: v for k, v in one.items() if k not in ignored} == {k: v for k, v in two.items() if k not in ignored}
    assert reply["usage"]["output_tokens_details"] == last["usage"]["output_tokens_details"]
    check_items(events)
    return reply


def check_items(events: Sequence[JSON]) -> None:
    """Assert that each item starts, gets its text and ends in order."""
    items = {event["output_index"]: event["item"] for event in events if event["type"].endswith("output_item.done")}
    for index, item in items.items():
        own = [event for event in events if event.get("output_index") == index]
        if item["type"] != "reasoning":
            continue
        kinds = [event["type"].removeprefix("response.") for event in own]
        assert kinds[:2] == ["output_item.added", "content_part.added"]
        assert kinds[-3:] == ["reasoning_text.done", "content_part.done", "output_item.done"]
        deltas = [event["delta"] for event in own if event["type"].endswith("reasoning_text.delta")]
        (content,) = item["content"]
        assert "".join(deltas) == content["text"] and {event.get("item_id", item["id"]) for event in own} == {
            item["id"]
        }


def test_responses_have_reasoning_items(server: Running) -> None:
    reply = response(server)
    thought, message = reply["output"]
    assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "completed")
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}] and "encrypted_content" not in thought
    assert message["content"][0]["text"] == ANSWER
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    (message,) = response(server, reasoning={"effort": "none"})["output"]
    assert message["content"][0]["text"] == PLAIN


def test_reasoning_is_sent_back_between_calls(server: Running) -> None:
    tools = [{"type": "function", **FUNCTION}]
    reply = response(server, tools=tools, include=["reasoning.encrypted_content"])
    thought, call = reply["output"]
    assert (thought["type"], call["type"]) == ("reasoning", "function_call")
    assert text_in(thought["encrypted_content"]) == "Look it up."
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    asked = {"role": "user", "content": "2+2?"}

    def num_prompt(*items: JSON) -> int:
        body = {"input": [asked, *items], "tools": tools, "max_output_tokens": 1}
        return int(good(server.post(RESPONSES, body))["usage"]["input_tokens"])

    plain = num_prompt(call, output)
    own = {key: value for key, value in thought.items() if key != "encrypted_content"}
    agents = {key: value for key, value in thought.items() if key != "content"}
    assert num_prompt(own, call, output) == num_prompt(agents, call, output) > plain
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    assert num_prompt(foreign, call, output) == plain
    assert num_prompt(thought, call, output, asked) == num_prompt(call, output, asked), "the turn is over"
    more = {"previous_response_id": reply["id"], "input": [output], "tools": tools, "max_output_tokens": 1}
    assert good(server.post(RESPONSES, more))["usage"]["input_tokens"] == num_prompt(thought, call, output)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_has_thinking(server: Running, path: str) -> None:
    body: JSON = {"messages": HELLO} if path == "/api/chat" else {"prompt": "2+2?"}
    text, place = ("content", "message") if path == "/api/chat" else ("response", None)
    expected = {None: (ANSWER, THOUGHT), True: (ANSWER, THOUGHT), False: (PLAIN, "")}
    for think, (content, thinking) in expected.items():
        asked = {**body, "think": think, "options": {"temperature": 0}}
        reply = good(server.post(path, {**asked, "stream": False}))
        whole = reply[place] if place else reply
        assert (whole[text], whole.get("thinking", "")) == (content, thinking)
        lines = server.lines(path, asked)
        parts = [line.get(place, {}) if place else line for line in lines]
        assert "".join(part.get(text, "") for part in parts) == content
        assert "".join(part.get("thinking", "") for part in parts) == thinking
