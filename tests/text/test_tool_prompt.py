"""Functions, calls and results in prompts, for chat templates with and without support for tools."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from nano_inference.text.chat import chat_template, render
from nano_inference.text.kinds import Rendering
from nano_inference.text.tool_calls import finish, push, start
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Event
from nano_inference.text.tool_format import HERMES, ToolFormat, tool_format
from nano_inference.text.tool_prompt import MAX_CALLS, explained, plain_calls, with_tools
from nano_inference.types import BadRequest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für {city}",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


ASK = {"role": "user", "content": "Weather?"}
TALK: list[dict[str, Any]] = [
    ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("weather", '{"city": "Zürich"}'), call("now", "{}")],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "assistant", "content": "Rain at noon."},
    {"role": "user", "content": "And now?"},
]


# ---- templates with support for tools


def test_arguments_become_objects() -> None:
    before = copy.deepcopy(TALK)
    plain = plain_calls(TALK)
    assert before == TALK
    assert [one["function"]["arguments"] for one in plain[1]["tool_calls"]] == [{"city": "Zürich"}, {}]
    assert plain[1]["content"] == "" and plain[1]["tool_calls"][0]["id"] == "call_1"
    assert plain[0] == TALK[0] and plain[2:] == TALK[2:]


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_not_an_object_are_unchanged(arguments: str) -> None:
    assert one_call({"name": "f", "arguments": arguments})["arguments"] == arguments


@pytest.mark.parametrize("arguments", [None, " \n", "{}", {}])
def test_missing_arguments_become_an_empty_object(arguments: Any) -> None:
    assert one_call({"name": "f", "arguments": arguments})["arguments"] == {}
    assert one_call({"name": "f"})["arguments"] == {}


def one_call(function: dict[str, Any]) -> Any:
    plain = plain_calls([{"role": "assistant", "content": "x", "tool_calls": [{"function": function}]}])
    assert plain[0]["content"] == "x" and plain[0]["tool_calls"][0]["type"] == "function"
    return plain[0]["tool_calls"][0]["function"]


def test_template_that_compares_content_with_none_gets_none() -> None:
    for source in ("{% if message['content'] is none %}", "{% if message.content is  none %}"):
        assert plain_calls(TALK, source)[1]["content"] is None
    assert plain_calls(TALK, "{% if content is string %}")[1]["content"] == ""


@pytest.mark.parametrize("calls", [[], None])
def test_empty_list_of_calls_is_removed(calls: Any) -> None:
    assert plain_calls([{"role": "assistant", "content": "x", "tool_calls": calls}]) == [
        {"role": "assistant", "content": "x"}
    ]


def test_deprecated_fields_are_converted() -> None:
    plain = plain_calls(
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "f", "content": "2"},
        ]
    )
    assert plain == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "name": "f", "content": "2"},
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_calls": "x"}, r"^messages\.1\.tool_calls must be a list of at most"),
        ({"tool_calls": [call("f", "{}")] * (MAX_CALLS + 1)}, r"^messages\.1\.tool_calls must be a list"),
        ({"tool_calls": [call("f", "{}"), 1]}, r"^messages\.1\.tool_calls\.1 must be an object"),
        ({"tool_calls": [{"type": "custom"}]}, r"^messages\.1\.tool_calls\.0\.type must be 'function'"),
        ({"tool_calls": [call("", "{}")]}, r"\.0\.function\.name must be a non-empty string"),
        ({"tool_calls": [call("f", [1])]}, r"\.0\.function\.arguments must be a string of JSON"),
        ({"function_call": "f"}, r"^messages\.1\.function_call\.0\.function must be an object"),
    ],
)
def test_malformed_calls_are_refused(fields: dict[str, Any], message: str) -> None:
    messages = [ASK, {"role": "assistant", "content": None, **fields}]
    for prepare in (plain_calls, lambda them: with_tools(them, TOOLS, CHATML)):
        with pytest.raises(BadRequest, match=message):
            prepare(messages)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "llama3_2"])
def test_calls_written_by_real_templates_are_parsed(name: str) -> None:
    source = real_template(name)
    fmt = tool_format(source)
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"city": "Zürich"}')]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    template = chat_template(source, where="m", named={"bos_token": "<s>", "eos_token": "</s>"})
    text = render(template, with_tools(messages, TOOLS, source), Rendering(tools=TOOLS))
    assert "Wetter für {city}" in text and "rain" in text
    if "qwen3_5" not in name:  # Qwen 3.5 writes XML
        assert calls_in(fmt, text[text.rindex('{"name": "weather"') :]) == [("weather", {"city": "Zürich"})]


def real_template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs the templates of TRL")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def calls_in(fmt: ToolFormat, text: str) -> list[tuple[str, Any]]:
    """Return the calls in a text, after adding the first marker if the format has one."""
    state, events = push(start(fmt, ("weather", "now")), text if fmt.is_whole else f"{fmt.begin}{text}")
    both: list[Event] = [*events, *finish(state)]
    names = {event.index: event.name for event in both if isinstance(event, CallStart)}
    ended = {event.index for event in both if isinstance(event, CallEnd)}
    assert ended == set(names)
    texts = {event.index: event.text for event in both if isinstance(event, CallArguments)}
    return [(name, json.loads(texts[index])) for index, name in names.items()]


# ---- templates without


def test_messages_for_a_template_with_tools() -> None:
    assert with_tools(TALK, TOOLS, "{{ tools }}") == plain_calls(TALK)


def test_functions_are_described_before_the_system_message() -> None:
    text = explained(TOOLS)
    assert with_tools([ASK], TOOLS, CHATML) == [{"role": "system", "content": text}, ASK]
    kind = {"role": "system", "content": "Be kind.\n"}
    assert with_tools([kind, ASK], TOOLS, CHATML) == [{"role": "system", "content": f"{text}\n\nBe kind.\n"}, ASK]
    empty = {"role": "system", "content": ""}
    assert with_tools([empty, ASK], TOOLS, CHATML)[0]["content"] == text


@pytest.mark.parametrize("source", [NO_SYSTEM, TURNS])
def test_functions_are_described_in_the_first_message_without_system_support(source: str) -> None:
    messages = with_tools(TALK, TOOLS, source)
    assert messages[0] == {"role": "user", "content": f"{explained(TOOLS)}\n\nWeather?"}
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    assert "Wetter für {city}" in render(chat_template(source, where="m"), messages)


def test_calls_and_results_become_text() -> None:
    messages = with_tools(TALK, [], CHATML)
    assert messages == [
        ASK,
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>",
        },
        *TALK[4:],
    ]
    state, events = push(start(HERMES, ("weather", "now")), messages[1]["content"])
    assert [event.name for event in events if isinstance(event, CallStart)] == ["weather", "now"]
    assert not finish(state)
