"""Anthropic's Messages API: translation to a chat, refusals, whole replies and streams, the routes over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from nano_inference.core.admission import Limits
from nano_inference.server.body import parse
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialects.messages import (
    ANTHROPIC_NAMES,
    MessagesOptions,
    MessagesReply,
    arguments_of,
    ask_messages,
    chat_fields,
    count_tokens,
    error_body,
)
from nano_inference.server.dialects.messages_body import CountTokensBody, MessagesBody
from nano_inference.server.errors import ApiError, renamed
from nano_inference.server.model import ServedModel
from nano_inference.server.transcript import transcripts_of
from nano_inference.text.chat import chat_template
from nano_inference.text.dialogue import TemplateDialogue, load_dialogue
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.grammar import Grammars
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event
from nano_inference.types import FinishReason
from tests.cases import failures
from tests.server.mounted import END_TOKEN
from tests.server.test_detokenizer import sample_of
from tests.server.test_replies import call_of, delta
from tests.server.tiny import TEMPLATE, Running, running

JSON = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]
CONFIG = ServerConfig()
WEATHER = {"name": "weather", "description": "Report it.", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich", "days": [1, 2]}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


@pytest.fixture(scope="module")
def model(tiny_directory: Path) -> ServedModel:
    tokenizer = load_tokenizer(TokenizerSource(str(tiny_directory)))
    return ServedModel(
        names=("tiny",),
        any_name=False,
        created=1,
        tokenizer=tokenizer,
        dialogue=load_dialogue(TokenizerSource(str(tiny_directory)), tokenizer),
        grammars=Grammars(tokenizer, 260, (257,)),
        limits=Limits(vocab_size=260, max_model_len=512, num_blocks=100, block_size=16),
        generation=MappingProxyType({}),
        chat_defaults=chat_defaults({}, {}),
        longest_token=12,
        max_positions=512,
    )


def body_of(**fields: Any) -> MessagesBody:
    given = {"messages": HELLO, "max_tokens": 8, **fields}
    return parse(json.dumps({name: value for name, value in given.items() if value is not ...}).encode(), MessagesBody)


def fields_of(model: ServedModel, /, **fields: Any) -> JSON:
    return chat_fields(body_of(**fields), model)


def refusal(model: ServedModel, /, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask_messages(body_of(**fields), model, CONFIG, "")
    return caught.value


def rendered(model: ServedModel, /, **fields: Any) -> str:
    """Return the rendered prompt."""
    call = ask_messages(body_of(**fields), model, CONFIG, "")
    return model.tokenizer.decode(call.requests[0].prompt, skip_special=False)


# ---- bodies


def test_body_becomes_a_chat_call(model: ServedModel) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["x", "yz"], "stream": True}
    informational = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "speed": "standard",
        "mcp_servers": [],
    }
    call = ask_messages(body_of(model="tiny", system="be brief", **sampling, **informational), model, CONFIG, "salt")
    (request,) = call.requests
    assert model.tokenizer.decode(request.prompt, skip_special=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (8, 0.5, 0.9, 4)
    assert (call.stops, call.stream, request.salt, call.num_samples) == (("x", "yz"), True, "salt", 1)
    assert call.id.startswith("msg_") and len(call.id) == 4 + 32


def test_max_tokens_beyond_the_context_is_accepted(model: ServedModel) -> None:
    call = ask_messages(body_of(max_tokens=64_000), model, CONFIG, "")
    assert call.num_tokens == model.limits.max_model_len, "max_tokens is a required field"


def test_chat_fields_without_effect_are_accepted(model: ServedModel) -> None:
    assert "user" not in fields_of(model, user="u", stop=None, container=None, new_field=1)


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


def test_tools_become_functions(model: ServedModel) -> None:
    custom = {**WEATHER, "type": "custom", "strict": True, "cache_control": None, "allowed_callers": ["direct"]}
    tools = [custom, {"type": "calculator"}, {"name": "now", "input_schema": {"type": "object"}}]
    assert fields_of(model, tools=tools)["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": WEATHER["input_schema"],
                "description": "Report it.",
                "strict": True,
            },
        },
        {"type": "calculator"},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto", "parallel_tool_calls": True}),
    ],
)
def test_tool_choices(model: ServedModel, given: JSON, expected: JSON) -> None:
    fields = fields_of(model, tools=[WEATHER], tool_choice=given)
    assert {name: fields[name] for name in ("tool_choice", "parallel_tool_calls") if name in fields} == expected


def test_output_format_becomes_response_format(model: ServedModel) -> None:
    output_format = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }
    assert fields_of(model, output_config={"format": output_format})["response_format"] == expected
    assert fields_of(model, output_format=output_format)["response_format"] == expected
    assert fields_of(model, output_format=output_format, output_config={"effort": None})["response_format"] == expected
    assert "response_format" not in fields_of(model, output_config={})


def test_thinking_sets_enable_thinking(model: ServedModel) -> None:
    off = {"type": "disabled"}
    assert "chat_template_kwargs" not in fields_of(model, thinking=off), "the template does not use it"
    source = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<no-think>{% endif %}"
    template = chat_template(source, where="template")
    other = replace(model, dialogue=TemplateDialogue(template, model.tokenizer))
    assert rendered(other, thinking=off).endswith("<no-think>") and not rendered(other).endswith("<no-think>")
    for kind, variables in (("enabled", {"enable_thinking": True}), ("adaptive", None)):
        thinking = {"type": kind, "budget_tokens": 1024}
        assert fields_of(other, thinking=thinking).get("chat_template_kwargs") == variables
        assert "chat_template_kwargs" not in fields_of(model, thinking=thinking)
    mine = {"enable_thinking": True}
    assert fields_of(other, thinking=off, chat_template_kwargs=mine)["chat_template_kwargs"] == mine


# ---- refusals


def content(*blocks: JSON, role: str = "user") -> JSON:
    return {"messages": [{"role": role, "content": list(blocks)}]}


REFUSED_FIELDS = [
    ({"max_tokens": ...}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (content({"type": "image", "source": {"type": "url", "url": "x"}}), "messages.0.content.0.type"),
    (content({"type": "text", "text": "a"}, {"type": "document"}), "messages.0.content.1.type"),
    (content({"type": "web_search_tool_result", "content": []}), "messages.0.content.0.type"),
    (content({"type": "text"}), "messages.0.content.0.text"),
    (content({"text": "x"}), "messages.0.content.0.type"),
    (content(USE), "messages.0.content.0.type"),
    (content(RESULT), "messages.0.content.0.tool_use_id"),
    (content(RESULT, role="assistant"), "messages.0.content.0.type"),
    (content(USE, USE, role="assistant"), "messages.0.content.1.id"),
    (content(USE, role="system"), "messages.0.content.0.type"),
    (content({"type": "thinking", "thinking": "x", "signature": "s"}), "messages.0.content.0.type"),
    ({"system": [{"type": "image"}]}, "system.0.type"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
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
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"model": "claude"}, "model"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
]


def test_unsupported_or_invalid_field_is_named(model: ServedModel) -> None:
    def check(fields: JSON, param: str) -> None:
        error = refusal(model, **fields)
        assert error.param == param and error.status == (404 if param == "model" else 400)
        named = {"model": "claude"}.get(param, param.split(".")[-1])
        assert named in error.message or "the prompt has" in error.message

    assert failures(check, REFUSED_FIELDS) == []


def test_unsupported_block_type_is_named(model: ServedModel) -> None:
    error = refusal(model, **content({"type": "image", "source": {}}))
    assert error.code == "unsupported_field" and "'image'" in error.message


@pytest.mark.parametrize(
    ("param", "message", "own_param", "own_message"),
    [
        ("stop", "stop[1] is long", "stop_sequences", "stop_sequences[1] is long"),
        ("messages.2", "messages[2].content must", "messages", "messages must"),
        ("messages", "cannot render these messages", "messages", "cannot render these messages"),
        (None, "the model 'stop' is gone", None, "the model 'stop' is gone"),
    ],
)
def test_chat_errors_have_this_apis_field_names(
    param: str | None, message: str, own_param: str | None, own_message: str
) -> None:
    """A chat's messages have other places than the body's: their errors name no index."""
    error = ApiError(503, message, param=param, code="c", headers={"retry-after": "1"}, extra={"n_ctx": 1})
    translated = renamed(error, ANTHROPIC_NAMES)
    assert (translated.param, translated.message) == (own_param, own_message)
    others = translated.status, translated.code, translated.headers, translated.extra
    assert others == (503, "c", {"retry-after": "1"}, {"n_ctx": 1})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error")),
        *((404, "not_found_error"), (405, "invalid_request_error"), (408, "timeout_error")),
        *((413, "request_too_large"), (415, "invalid_request_error"), (429, "rate_limit_error")),
        *((500, "api_error"), (501, "api_error"), (503, "overloaded_error")),
    ],
)
def test_error_types(status: int, kind: str) -> None:
    assert error_body(ApiError(status, "no")) == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
        "request_id": None,
    }


def test_error_details() -> None:
    body = error_body(ApiError(400, "x", param="top_k", code="c", extra={"n_ctx": 3}), "req-1")
    assert body["error"]["details"] == {"error_code": "c", "param": "top_k", "n_ctx": 3}
    assert body["request_id"] == "req-1"


# ---- replies


ARGUMENTS = '{"city": "Zürich \\n", "days": [1, 2.5, true]}'
CALLS: tuple[Event, ...] = (
    Content("I look"),
    Content(" it up."),
    CallStart(0, "weather"),
    *(CallArguments(0, char) for char in ARGUMENTS),
    CallEnd(0),
    CallStart(1, "now"),
    CallArguments(1, "{}"),
    CallEnd(1),
    Content("Done."),
)
CUT_OFF: tuple[Event, ...] = (CallStart(0, "weather"), CallArguments(0, '{"city": "Zürich", "days": [1, 2'))
WRONG: tuple[Event, ...] = (*CUT_OFF, Content("oops"))
NOTHING: tuple[Event, ...] = ()


def replies(
    events: Sequence[Event], size: int, reason: FinishReason = "stop", stop: Any = None, **fields: Any
) -> tuple[JSON, bytes]:
    """Return the whole reply to these events, and its stream with `size` events per delta."""
    options = MessagesOptions(creates_cache=False, edits_context=False, omits_thinking=False)
    call = replace(call_of("chat", **fields), id="msg_1", options=options)
    (transcript,) = transcripts_of(call)
    stream = MessagesReply(call, [transcript])
    data = stream.start()
    for at in range(0, len(events), size):
        written = DecodedDelta("", (), (), None, None, events=tuple(events[at : at + size]))
        data += stream.part(transcript, written)
    transcript.events += events
    transcript.token_ids, transcript.finish_reason, transcript.stop_reason = [1, 2, 3], reason, stop
    data += stream.end()
    return MessagesReply(call, [transcript]).whole(), data


def named_events(data: bytes) -> list[JSON]:
    """Return a stream's events after checking their names."""
    events: list[JSON] = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        head, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert head == f"event: {events[-1]['type']}"
    return events


def assembled(events: Sequence[JSON]) -> JSON:
    """Return the message that a client assembles from a stream, after checking the order of events."""
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    message: JSON = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    texts: list[str] = []
    is_open = False
    for event in events[1:-2]:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        assert is_open == (event["type"] != "content_block_start"), "one block at a time"
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            texts[-1] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
    assert not is_open
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = arguments_of(text)
    ending = {name: value for name, value in events[-2].items() if name not in ("type", "delta")}
    return message | events[-2]["delta"] | ending


@pytest.mark.parametrize("events", [CALLS, CUT_OFF, WRONG, NOTHING, (Content("hi"),)])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("shown", [False, True])
def test_stream_adds_up_to_the_whole_reply(events: Sequence[Event], size: int, shown: bool) -> None:
    whole, data = replies(events, size, token_ids=shown)
    assert assembled(named_events(data)) == whole
    assert ("token_ids" in whole, "prompt_token_ids" in whole) == (shown, shown)


def test_whole_reply() -> None:
    whole, _ = replies(CALLS, 1)
    city = {"city": "Zürich \n", "days": [1, 2.5, True]}
    assert whole == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "text", "text": "I look it up."},
            {"type": "tool_use", "id": "toolu_1_0", "name": "weather", "input": city},
            {"type": "tool_use", "id": "toolu_1_1", "name": "now", "input": {}},
            {"type": "text", "text": "Done."},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }


@pytest.mark.parametrize(("forbidden", "expected"), [(None, 2), (False, 2), (True, 1)])
def test_disable_parallel_tool_use_shows_only_one_call(
    model: ServedModel, forbidden: bool | None, expected: int
) -> None:
    large = replace(model, limits=replace(model.limits, max_model_len=4096))
    choice = {"type": "auto", "disable_parallel_tool_use": forbidden}
    call = ask_messages(body_of(tools=[WEATHER], tool_choice=choice), large, CONFIG, "")
    one = '<tool_call>\n{"name": "weather", "arguments": {"n": 1}}\n</tool_call>'
    tokens = [*model.tokenizer.encode(f"I look {one}\n{one}"), END_TOKEN]
    (transcript,) = transcripts_of(call)
    stream = MessagesReply(call, [transcript])
    data = stream.start()
    for at, token in enumerate(tokens, 1):
        sample = sample_of(tokens, "stop", None) if at == len(tokens) else None
        data += stream.part(transcript, transcript.add_delta(delta([token], sample=sample), call))
    data += stream.end()
    whole = MessagesReply(call, [transcript]).whole()
    uses = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    assert uses == [{"n": 1}] * expected and whole["content"][0] == {"type": "text", "text": "I look"}
    assert whole["stop_reason"] == "tool_use" and assembled(named_events(data)) == whole


@pytest.mark.parametrize(
    ("events", "reason", "stop", "expected"),
    [
        (CALLS, "stop", None, ("tool_use", None)),
        (CALLS, "stop", 7, ("tool_use", None)),
        (CALLS, "length", None, ("max_tokens", None)),
        (CUT_OFF, "length", None, ("max_tokens", None)),
        (WRONG, "stop", None, ("end_turn", None)),
        (NOTHING, "stop", "no", ("stop_sequence", "no")),
        (CALLS, "stop", "no", ("stop_sequence", "no")),
        (NOTHING, "stop", "</tool_call>", ("end_turn", None)),
        (NOTHING, "length", "timeout", ("max_tokens", None)),
        (NOTHING, "abort", None, ("max_tokens", None)),
    ],
)
def test_stop_reasons(events: Sequence[Event], reason: FinishReason, stop: Any, expected: Any) -> None:
    whole, data = replies(events, 1, reason, stop, stops=("no",))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert assembled(named_events(data)) == whole


@pytest.mark.parametrize("size", range(1, len(ARGUMENTS)))
def test_cut_off_arguments_are_parsed_partially(size: int) -> None:
    value = arguments_of(ARGUMENTS[:size])
    assert "raw_arguments" not in value and set(value) <= {"city", "days"}


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": 1e999}', "[1]", '{"a": }'])
def test_arguments_that_json_cannot_encode_stay_text(text: str) -> None:
    assert arguments_of(text) == {"raw_arguments": text}


def test_failed_stream_ends_with_an_error(model: ServedModel) -> None:
    reply = MessagesReply(call_of("chat"), [])
    assert named_events(reply.fail(ApiError(500, "broken"))) == [error_body(ApiError(500, "broken"))]


# ---- counting


TALKS: tuple[JSON, ...] = (
    {},
    {"system": "be brief", "messages": [*HELLO, {"role": "assistant", "content": "I am"}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT]},
        ]
    },
)


@pytest.mark.parametrize("talk", TALKS)
def test_count_tokens_equals_the_prompt_length(model: ServedModel, talk: JSON) -> None:
    body = body_of(**talk)
    call = ask_messages(body, model, CONFIG, "")
    bare = CountTokensBody(**json.loads(json.dumps({"messages": HELLO, **talk})))
    assert count_tokens(bare, model) == {"input_tokens": len(call.requests[0].prompt)} == count_tokens(body, model)


def test_count_tokens_beyond_the_context(model: ServedModel) -> None:
    long = CountTokensBody.model_validate({"messages": [{"role": "user", "content": "x" * 50_000}]})
    short = CountTokensBody.model_validate({"messages": [{"role": "user", "content": ""}]})
    assert count_tokens(long, model)["input_tokens"] == 50_000 + count_tokens(short, model)["input_tokens"]
    with pytest.raises(ApiError) as caught:
        count_tokens(CountTokensBody.model_validate({"messages": HELLO, "model": "claude"}), model)
    assert caught.value.status == 404


# ---- over HTTP


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory) as one:
        yield one


def request(server: Running, **fields: Any) -> JSON:
    response = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 12, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    reply: JSON = response.json()
    return reply


def stream(server: Running, **fields: Any) -> list[JSON]:
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "stream": True, **fields}
    response = server.post("/v1/messages", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    return named_events(response.content)


def total(usage: JSON) -> int:
    """Return the number of prompt tokens, cached or not."""
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"])


@pytest.mark.parametrize("talk", TALKS)
def test_message_stream_count_and_chat_agree(server: Running, talk: JSON) -> None:
    request(server, **talk)  # puts the prompt into the cache
    whole, events = request(server, **talk), stream(server, **talk)
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    streamed = assembled(events)
    assert streamed | {"id": whole["id"]} == whole
    count = server.post("/v1/messages/count_tokens", {"messages": HELLO, **talk}).json()["input_tokens"]
    assert count == total(whole["usage"]) == total(events[0]["message"]["usage"])
    assert whole["usage"]["output_tokens"] == 12 and whole["stop_reason"] == "max_tokens"
    if not talk:
        chat = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 12, "temperature": 0}).json()
        assert whole["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]


def test_cached_tokens_are_counted_separately(server: Running) -> None:
    text = "a text that is longer than a block of the cache and not cached yet. " * 2
    first, second = (request(server, messages=[{"role": "user", "content": text}])["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] + 100 < second["cache_read_input_tokens"]
    assert total(first) == total(second)


def test_last_assistant_message_is_continued_over_http(server: Running) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "I am"}]
    continuation = {"continue_final_message": True, "add_generation_prompt": False}
    chat = {"messages": talk, "max_tokens": 12, "temperature": 0, **continuation}
    expected = server.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    assert (
        request(server, messages=talk)["content"] == [{"type": "text", "text": expected}] != request(server)["content"]
    )


def test_stop_sequence_ends_the_message(server: Running) -> None:
    whole = request(server, max_tokens=40)["content"][0]["text"]
    stop = next(char for char in whole[2:] if char.isascii() and char.isprintable())
    ended = request(server, max_tokens=40, stop_sequences=["never there", stop])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in ended["content"]) == whole[: whole.index(stop)]
    streamed = assembled(stream(server, max_tokens=40, stop_sequences=["never there", stop]))
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == ("stop_sequence", stop)


def test_return_token_ids(server: Running) -> None:
    whole = request(server, return_token_ids=True)
    assert len(whole["token_ids"]) == whole["usage"]["output_tokens"] and set(whole["mask"]) == {1}
    assert len(whole["prompt_token_ids"]) == total(whole["usage"]) and whole["weight_versions"][0]["number"] == 0
    assert not {"token_ids", "weight_versions"} & request(server).keys()


def test_weight_versions_are_shown_with_enable_rl(tiny_directory: Path) -> None:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, enable_rl=True)) as one:
        versions = [{"version": "0", "start": 0, "end": 12, "number": 0}]
        assert request(one)["weight_versions"] == versions
        assert stream(one)[-2]["weight_versions"] == versions


def test_errors_have_anthropics_form(server: Running) -> None:
    bad = server.post("/v1/messages", {"messages": HELLO})
    assert bad.status_code == 400 and bad.json()["error"]["message"].startswith("max_tokens: field required")
    lost = server.post("/v1/messages/count_tokens", {"messages": HELLO, "model": "claude"})
    assert lost.status_code == 404 and lost.json()["error"]["type"] == "not_found_error"
    assert server.post("/v1/messages", [1]).json()["type"] == "error"


@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
def test_schema_that_does_not_compile_is_named_as_the_client_wrote_it(server: Running, field: str) -> None:
    bogus = {"type": "json_schema", "schema": {"type": "bogus"}}
    fields = {"output_format": bogus} if field == "output_format" else {"output_config": {"format": bogus}}
    response = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 12, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: ")


def test_invalid_stream_request_is_refused_with_400(server: Running) -> None:
    refused = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 4, "stream": True, "top_k": -3})
    assert refused.status_code == 400 and refused.json()["error"]["details"]["param"] == "top_k"
