"""Open Responses (openresponses.org): the requests of its compliance tests, replies checked by its generated types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.clients.process import NEEDED, PATIENCE, Served, serving
from tests.server.scripted import make_scripted

types = pytest.importorskip("openresponses_types.types", reason=f"openresponses-types: {NEEDED}")

JSON = dict[str, Any]
PLACE: JSON = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
WEATHER: JSON = {"type": "function", "name": "get_weather", "description": "Reports the weather.", "parameters": PLACE}
ANSWER = "It is sunny."
EVENTS: dict[str, str] = {
    "response.created": "ResponseCreatedStreamingEvent",
    "response.in_progress": "ResponseInProgressStreamingEvent",
    "response.completed": "ResponseCompletedStreamingEvent",
    "response.incomplete": "ResponseIncompleteStreamingEvent",
    "response.failed": "ResponseFailedStreamingEvent",
    "response.output_item.added": "ResponseOutputItemAddedStreamingEvent",
    "response.output_item.done": "ResponseOutputItemDoneStreamingEvent",
    "response.content_part.added": "ResponseContentPartAddedStreamingEvent",
    "response.content_part.done": "ResponseContentPartDoneStreamingEvent",
    "response.output_text.delta": "ResponseOutputTextDeltaStreamingEvent",
    "response.output_text.done": "ResponseOutputTextDoneStreamingEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaStreamingEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneStreamingEvent",
}
"""Name of an event -> its class."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model calls get_weather once, and else writes `ANSWER`."""
    directory = make_scripted(tmp_path_factory.mktemp("open"), "get_weather", {"location": "Rome"}, ANSWER)
    with serving(directory, "--served-model-name", "scripted", "--num-threads", "1", "--device", "cpu") as one:
        yield one


def message(role: str, content: Any, **more: str) -> JSON:
    return {"type": "message", "role": role, "content": content, **more}


def answered(server: Served, **fields: Any) -> JSON:
    """POST for a whole response; return it after checking it."""
    reply: JSON = server.ask("/v1/responses", {"model": "scripted", "stream": False, **fields})
    types.ResponseResource.model_validate(reply)
    return reply


def streamed(server: Served, **fields: Any) -> list[JSON]:
    """POST for a stream; return its events after checking them."""
    body = {"model": "scripted", "stream": True, **fields}
    response = httpx2.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    for event in events:
        getattr(types, EVENTS[event["type"]]).model_validate(event)
    return events


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_stream_ends_with_the_whole_response(server: Served, tools: list[JSON]) -> None:
    events = streamed(server, input=[message("user", "Count to five.")], tools=tools)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and last["status"] == "completed"
    types.ResponseResource.model_validate(last)
    kind = "response.function_call_arguments" if tools else "response.output_text"
    assert {f"{kind}.delta", f"{kind}.done"} <= {event["type"] for event in events}
    items = [event["item"]["type"] for event in events if event["type"].startswith("response.output_item.")]
    assert items == (["function_call"] * 2 if tools else ["message"] * 2)


def test_tool_is_called_and_its_result_answered(server: Served) -> None:
    ask = [message("user", "What is the weather in Rome?")]
    called = answered(server, input=ask, tools=[WEATHER])
    (call,) = called["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "get_weather",
        {"location": "Rome"},
    )
    assert called["tools"] == [{**WEATHER, "strict": False}]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    for more in ({"input": [*ask, call, output]}, {"input": [output], "previous_response_id": called["id"]}):
        after = answered(server, tools=[WEATHER], **more)
        assert [item["type"] for item in after["output"]] == ["message"]
    assert after["previous_response_id"] == called["id"]


def test_named_tool_is_echoed(server: Served) -> None:
    choice = {"type": "function", "name": "get_weather"}
    assert answered(server, input="Go.", tools=[WEATHER], tool_choice=choice)["tool_choice"] == choice
    shape = {"type": "json_schema", "name": "n", "schema": {"enum": ["a"]}}
    reply = server.ask("/v1/responses", {"input": "Go.", "text": {"format": shape}})
    assert reply["text"]["format"] == {**shape, "description": None, "strict": False}
