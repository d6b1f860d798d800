"""Anthropic's Python client on POST /v1/messages: whole, streamed and asynchronous replies, tools, errors, counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, serving

anthropic = pytest.importorskip("anthropic", reason=f"anthropic: {NEEDED}")

pytest_plugins = ["tests.clients.servers"]

REQUEST: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "hello"}],
    "extra_body": {"temperature": 0},
}
"""The client has no parameter `temperature`."""


def client_of(server: Served, **options: Any) -> Any:
    return anthropic.Anthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0, **options})


def direct_reply(server: Served, **fields: Any) -> dict[str, Any]:
    """Return the server's reply to the same request, without the client."""
    body = {name: value for name, value in REQUEST.items() if name != "extra_body"}
    reply: dict[str, Any] = server.ask("/v1/messages", body | {"temperature": 0} | fields)
    return reply


def shown(message: Any) -> dict[str, Any]:
    """Return a message's JSON without ids and usage."""
    fields: dict[str, Any] = message.to_dict() if hasattr(message, "to_dict") else dict(message)
    return {name: fields[name] for name in ("type", "role", "model", "content", "stop_reason", "stop_sequence")}


def num_prompt_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def test_whole_and_streamed_messages_equal_the_servers_reply(tiny_server: Served) -> None:
    expected = direct_reply(tiny_server)
    client = client_of(tiny_server)
    message = client.messages.create(**REQUEST)
    assert shown(message) == shown(expected) and message.id.startswith("msg_")
    with client.messages.stream(**REQUEST) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert shown(final) == shown(expected) and "".join(texts) == expected["content"][0]["text"]
    assert final.usage.output_tokens == message.usage.output_tokens == expected["usage"]["output_tokens"]
    kinds = [event.type for event in client.messages.create(**REQUEST, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"]) and len(kinds) > 6


def test_asynchronous_client_returns_the_same(tiny_server: Served) -> None:
    async def both() -> tuple[Any, Any]:
        async with anthropic.AsyncAnthropic(base_url=tiny_server.url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(**REQUEST)
            async with client.messages.stream(**REQUEST) as stream:
                return whole, await stream.get_final_message()

    whole, streamed = asyncio.run(both())
    assert shown(whole) == shown(streamed) == shown(direct_reply(tiny_server))


def test_refusals_raise_the_clients_errors(tiny_server: Served) -> None:
    client = client_of(tiny_server)
    with pytest.raises(anthropic.BadRequestError, match="container") as bad:
        client.messages.create(**{**REQUEST, "extra_body": {"container": "c"}})
    assert bad.value.type == "invalid_request_error" and "container" in bad.value.api_message
    assert bad.value.error_code == "unsupported_field"
    with pytest.raises(anthropic.NotFoundError, match="claude") as lost:
        client.messages.create(**(REQUEST | {"model": "claude"}))
    assert lost.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="available context size"):
        client.messages.create(**(REQUEST | {"messages": [{"role": "user", "content": "a" * 4000}], "stream": True}))
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        client.messages.create(**REQUEST, tools=[{"type": "web_search_20250305", "name": "web_search"}])


def test_api_key_of_the_client_is_checked(tiny_directory: Path) -> None:
    options = ("--served-model-name", "tiny", "--kv-cache-bytes", "67108864", "--num-threads", "1", "--device", "cpu")
    with serving(tiny_directory, *options, "--api-key", "the-right-one-of-16") as server:
        with pytest.raises(anthropic.AuthenticationError):
            client_of(server).messages.create(**REQUEST)
        assert client_of(server, api_key="the-right-one-of-16").messages.create(**REQUEST).content


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "day": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}, "required": ["zone"]}
TOOLS = [
    {"name": "weather", "description": "Report it.", "input_schema": WEATHER},
    {"name": "clock", "input_schema": CLOCK},
]


def forced(kind: str, seed: int = 1, **choice: Any) -> dict[str, Any]:
    """Return a request for exactly one call."""
    tool_choice = {"type": kind, "disable_parallel_tool_use": True, **choice}
    return REQUEST | {"max_tokens": 200, "tools": TOOLS, "tool_choice": tool_choice, "extra_body": {"seed": seed}}


def check_use(block: Any) -> None:
    """Check a call's function name and its arguments against the schema."""
    assert block.type == "tool_use" and block.id.startswith("toolu_")
    if block.name == "clock":
        assert set(block.input) == {"zone"} and block.input["zone"] in ("utc", "local")
    else:
        assert block.name == "weather" and set(block.input) == {"city", "day"}
        assert len(block.input["city"]) <= 8 and 1 <= block.input["day"] <= 7


@pytest.mark.parametrize("name", ["weather", "clock"])
def test_named_function_call_is_streamed_as_partial_json(roomy_server: Served, name: str) -> None:
    request = forced("tool", name=name)
    client = client_of(roomy_server)
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (block,) = final.content
    check_use(block)
    assert block.name == name and len(deltas) > 3 and json.loads("".join(deltas)) == block.input
    assert [(one.name, one.input) for one in whole.content] == [(name, block.input)]
    assert whole.stop_reason == final.stop_reason == "tool_use"


def test_call_and_result_are_sent_back(roomy_server: Served) -> None:
    client = client_of(roomy_server)
    with_call = client.messages.create(**forced("tool", name="weather"))
    result = {"type": "tool_result", "tool_use_id": with_call.content[0].id, "content": "heavy rain", "is_error": False}
    answer = {"role": "assistant", "content": with_call.content}
    talk = [*REQUEST["messages"], answer, {"role": "user", "content": [result]}]
    request = forced("none") | {"messages": talk, "max_tokens": 12, "tool_choice": {"type": "none"}}
    reply = client.messages.create(**request)
    assert [block.type for block in reply.content] == ["text"]
    assert (
        num_prompt_tokens(reply.usage)
        == client.messages.count_tokens(model="tiny", messages=talk, tools=TOOLS).input_tokens
    )
    assert num_prompt_tokens(reply.usage) > num_prompt_tokens(with_call.usage)


@pytest.mark.model
def test_default_model_calls_a_function(default_server: Served) -> None:
    request = forced("tool", name="weather") | {"model": "default", "max_tokens": 60}
    with client_of(default_server).messages.stream(**request) as stream:
        message = stream.get_final_message()
    (block,) = message.content
    check_use(block)
    assert block.name == "weather" and message.stop_reason == "tool_use"
