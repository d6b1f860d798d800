"""OpenAI's Responses API: events, translation to a chat, refusals, and what OpenAI's client makes of an error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from nano_inference.server.body import parse
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialects.responses import CHAT_NAMES, LOGPROBS, chat_fields, earlier_items
from nano_inference.server.dialects.responses_body import ResponsesBody
from nano_inference.server.dialects.responses_reply import ResponsesOptions, ResponsesReply
from nano_inference.server.errors import ApiError, renamed
from nano_inference.server.generation import Generation
from nano_inference.server.schema import ChatBody
from nano_inference.server.transcript import Transcript, transcripts_of
from nano_inference.server.translated import as_body
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event
from tests.server.test_detokenizer import sample_of
from tests.server.test_replies import A, call_of, delta
from tests.server.tiny import Running

PATH = "/v1/responses"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Mapping[str, Any] = MappingProxyType(
    {"type": "function", "name": "weather", "description": "Reports it.", "parameters": WEATHER, "strict": True}
)
JSON = dict[str, Any]


def named_events(data: bytes) -> list[JSON]:
    """Return a stream's events after checking names, numbers and the client's types."""
    events = []
    for number, block in enumerate(data.decode().removesuffix("\n\n").split("\n\n")):
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        EVENT.validate_python(event)
        events.append(event)
    return events


def streamed(server: Running, **body: Any) -> list[JSON]:
    """POST for a stream and return its events."""
    reply = server.post(PATH, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return named_events(reply.content)


def script(*events: Event) -> tuple[Event, ...]:
    return events


CALL = script(CallStart(0, "weather"), CallArguments(0, '{"city": '), CallArguments(0, '"Rome"}'), CallEnd(0))
SECOND = script(CallStart(1, "weather"), CallArguments(1, '{"city": "Oslo"}'), CallEnd(1))
BROKEN = script(CallStart(0, "weather"), CallArguments(0, '{"ci'), Content("ty no"))
SCRIPTS: Mapping[str, tuple[Event, ...]] = MappingProxyType(
    {
        "text": script(Content("He"), Content("llo"), Content(" there")),
        "nothing": (),
        "call": CALL,
        "text and calls": script(Content("Well"), *CALL, *SECOND),
        "call and text": script(*CALL, Content("that"), Content(" was it")),
        "broken call": BROKEN,
        "unfinished call": BROKEN[:2],
    }
)


@dataclass
class ScriptedReply:
    """Builds the reply to a sample that consists of these events, one per delta."""

    events: Sequence[Event]
    reason: Any = "stop"
    shape: Mapping[str, Any] = field(default_factory=dict)

    def call(self) -> Generation:
        return call_of("chat", **self.shape)

    def reply(self, call: Generation, transcript: Transcript) -> ResponsesReply:
        echo = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": 1.0, "top_p": 1.0}
        options = ResponsesOptions(echo=echo, id_stem="0" * 32, clock=lambda: 9.5)
        return ResponsesReply(replace(call, created=7, options=options), [transcript])

    def ended(self, call: Generation) -> Transcript:
        """Return the finished transcript, with a token for each event and without log-probabilities."""
        (transcript,) = transcripts_of(call)
        tokens = [A] * max(len(self.events), 1)
        transcript.add_delta(delta(tokens, sample=sample_of(tokens, self.reason, None)), call)
        return replace(transcript, events=[*self.events], entries=[])

    def whole(self) -> JSON:
        call = self.call()
        return self.reply(call, self.ended(call)).whole()

    def stream(self, *, until_error: ApiError | None = None) -> bytes:
        call = self.call()
        transcript = self.ended(call)
        reply = self.reply(call, transcript)
        data = reply.start()
        for one in self.events:
            data += reply.part(transcript, DecodedDelta("", (A,), (), None, None, events=(one,)))
        return data + (reply.fail(until_error) if until_error else reply.end())


def names(events: Sequence[JSON]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def client_for(data: bytes, kind: str = "text/event-stream") -> openai.OpenAI:
    """Return the official client with a transport that always returns `data`."""
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=data, headers={"content-type": kind}))
    return openai.OpenAI(api_key="none", base_url="http://127.0.0.1/v1", http_client=httpx2.Client(transport=transport))


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_last_event_has_the_whole_reply(name: str, reason: str) -> None:
    scripted = ScriptedReply(SCRIPTS[name], reason)
    whole = scripted.whole()
    Response.model_validate(whole)
    events = named_events(scripted.stream())
    assert events[-1]["response"] == whole
    assert whole["status"] == {"stop": "completed", "length": "incomplete", "abort": "cancelled"}[reason]
    assert names(events)[-1] == ("completed" if reason == "stop" else "incomplete")
    dones = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert dones == whole["output"] and dones


def test_status_of_items() -> None:
    def statuses(name: str, reason: str) -> list[str]:
        return [item["status"] for item in ScriptedReply(SCRIPTS[name], reason).whole()["output"]]

    assert statuses("text and calls", "length") == ["completed"] * 3
    assert statuses("text", "length") == statuses("text", "abort") == ["incomplete"]
    assert statuses("nothing", "stop") == ["completed"]
    assert statuses("call and text", "length") == ["completed", "incomplete"]
    assert statuses("broken call", "stop") == ["incomplete", "completed"]
    assert statuses("unfinished call", "length") == ["incomplete"]


@pytest.mark.parametrize(("status", "code"), [(500, "server_error"), (503, "server_error"), (400, "invalid_prompt")])
@pytest.mark.parametrize("name", ["text", "call", "nothing"])
def test_failed_stream(name: str, status: int, code: str) -> None:
    data = ScriptedReply(SCRIPTS[name]).stream(until_error=ApiError(status, "it broke", param="seed"))
    *_, last = events = named_events(data)
    assert last["type"] == "response.failed" and "completed" not in names(events)
    response = last["response"]
    assert response["status"] == "failed"
    assert (response["error"]["code"], response["error"]["message"]) == (code, "it broke")
    assert response["error"]["param"] == "seed"
    assert len(response["output"]) == (0 if name == "nothing" else 1)
    with client_for(data) as client:
        *_, seen = client.responses.create(model="m", input="x", stream=True)
    assert seen.type == "response.failed" and seen.response.error is not None
    assert seen.response.error.message == "it broke"


def translated(given: JSON) -> JSON:
    body = parse(json.dumps(given).encode(), ResponsesBody)
    return chat_fields(body, earlier_items(body, None))


def chat_of(**body: Any) -> JSON:
    fields = translated({"input": "x", **body})
    return as_body(fields, ChatBody).model_dump(by_alias=True, exclude_none=True)


ITEM_CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
ITEM_RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
USER = {"role": "user", "content": "x"}


def test_conversation_becomes_messages() -> None:
    assert chat_of(instructions="Be kind.")["messages"] == [{"role": "system", "content": "Be kind."}, USER]
    items: list[JSON] = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", **USER},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "?"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}]},
        ITEM_CALL,
        {**ITEM_CALL, "call_id": "call_2"},
        ITEM_RESULT,
        {**ITEM_RESULT, "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
        ITEM_CALL,
        ITEM_RESULT,
    ]  # fmt: skip
    assert chat_of(input=items)["messages"] == [
        {"role": "developer", "content": "Be short."},
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "One moment."}],
         "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "call_2"}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "call_2"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
        {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]  # fmt: skip


def test_fields_are_translated_to_a_chat() -> None:
    function = {"name": "weather", "description": "Reports it.", "parameters": WEATHER, "strict": True}
    for given, chat in (
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"include": [LOGPROBS]}, {"logprobs": True}),
        ({"include": [LOGPROBS], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"reasoning": {"effort": "low", "summary": None}}, {"reasoning_effort": "low"}),
        ({"tools": [dict(TOOL)]}, {"tools": [{"type": "function", "function": function}]}),
        ({"tools": [{"type": "calculator"}]}, {"tools": [{"type": "calculator"}]}),
        ({"tools": [], "include": [], "top_logprobs": 0}, {}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "function", "name": "f"}},
         {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"response_format": {"type": "text"}}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": WEATHER, "strict": True}}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER, "strict": True}}}),
        ({"truncation": "disabled", "background": False, "previous_response_id": None, "max_tool_calls": None}, {}),
    ):  # fmt: skip
        expected = {"messages": [USER], **chat}
        assert chat_of(**given) == expected
    same = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["a"]}
    same |= {
        "logit_bias": {"5": 1.0},
        "return_token_ids": True,
        "stream": True,
        "request_id": "r1",
        "chat_template_kwargs": {"a": 1},
    }
    assert chat_of(**same, stream_options={"include_obfuscation": False}) == {
        "messages": [USER], **same, "stream_options": {"include_obfuscation": False}
    }  # fmt: skip


REFUSED: tuple[tuple[JSON, str], ...] = (
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"n": 2}, "n"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "text"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include.1"),
    ({"include": [LOGPROBS], "tools": [dict(TOOL)]}, "include"),
    ({"tools": [dict(TOOL), {"type": "web_search"}]}, "tools.1.type"),
    ({"tools": [{"type": "web_search", "external_web_access": True}]}, "tools.0.type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.type"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input.1.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
)


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_unsupported_field_is_refused_by_name(body: JSON, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        translated({"input": "x", **body})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported_field")
    assert param.split(".")[0] in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [ITEM_RESULT]}, "input.0.call_id"),
        ({"input": [ITEM_CALL, {**ITEM_RESULT, "output": None}]}, "input.1.output"),
        ({"input": [{**ITEM_CALL, "arguments": None}]}, "input.0.arguments"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ],
)
def test_invalid_field_is_named(body: JSON, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_of(**{"input": "x", **body})
    error = renamed(caught.value, CHAT_NAMES)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(param.split(".")[0])


@pytest.mark.parametrize(
    ("param", "message", "own_param", "own_message"),
    [
        ("messages[3].role", "messages[3].role must be user", "input", "input must be user"),
        ("max_tokens", "max_tokens of 9 are many", "max_output_tokens", "max_output_tokens of 9 are many"),
        ("top_logprobs", "top_logprobs must be at most 5", "top_logprobs", "top_logprobs must be at most 5"),
        (None, "no field", None, "no field"),
    ],
)
def test_chat_errors_have_this_apis_field_names(
    param: str | None, message: str, own_param: str | None, own_message: str
) -> None:
    """A chat's messages have other places than the body's: their errors name no index."""
    error = renamed(ApiError(400, message, param=param), CHAT_NAMES)
    assert (error.param, error.message) == (own_param, own_message)
