"""Parsing replies into content and calls, for every split of the text; call formats and their grammars."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nano_inference.text.grammar_text import Grammar
from nano_inference.text.tool_calls import MAX_HELD, MAX_SPACES, finish, push, start
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event, merged, settled
from nano_inference.text.tool_format import (
    FIREFUNCTION,
    HERMES,
    LLAMA,
    MISTRAL,
    Tool,
    ToolFormat,
    calls_grammar,
    calls_in_text_grammar,
    tool_format,
)
from nano_inference.text.tool_json import MAX_DEPTH, JsonState, as_object, step
from nano_inference.types import BadRequest
from tests.lines import counted_lines

pytestmark = pytest.mark.slow

FORMATS = [HERMES, LLAMA, MISTRAL, FIREFUNCTION]
NAMES = ("f", "get_weather", "g.h-1")
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "get_weather", "arguments": {"city": "Bern }] </tool_call>"}}'
CITY = '{"city": "Bern }] </tool_call>"}'


def run(fmt: ToolFormat, pieces: Iterable[str]) -> list[Event]:
    """Push all pieces and return all events, with adjacent pieces joined."""
    state, events = start(fmt, NAMES), []
    for piece in pieces:
        state, new = push(state, piece)
        events += new
    return merged([*events, *finish(state)])


def split(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(marks)]


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index)]


def summarize(events: Iterable[Event]) -> tuple[str, list[tuple[str, str, bool]]]:
    """Return the content, and each call's name, arguments, and True if it has an end."""
    content, calls = "", {}
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            calls[event.index] = (event.name, "", False)
        else:
            name, text, _ = calls[event.index]
            is_end = isinstance(event, CallEnd)
            calls[event.index] = (name, text if is_end else text + event.text, is_end)
    assert list(calls) == list(range(len(calls)))
    return content, list(calls.values())


EXAMPLES: list[tuple[ToolFormat, str, list[Event]]] = [
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", call(0, "f", '{"a": 1}')),
    (HERMES, f"<tool_call>{F}", call(0, "f", '{"a": 1}')),
    (HERMES, f"<tool_call>{F}\n</tool_", call(0, "f", '{"a": 1}')),
    (
        HERMES,
        f"I look.\n\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\n",
        [Content("I look."), *call(0, "f", '{"a": 1}'), *call(1, "get_weather", CITY)],
    ),
    (HERMES, f"<tool_call>[{F}, {G}]</tool_call>", [*call(0, "f", '{"a": 1}'), *call(1, "get_weather", CITY)]),
    (HERMES, f"<tool_call>[{F}\n,{G}", [*call(0, "f", '{"a": 1}'), *call(1, "get_weather", CITY)]),
    (HERMES, f" \n<tool_call>{F}</tool_call> \nDone. \n", [*call(0, "f", '{"a": 1}'), Content("Done. \n")]),
    (LLAMA, F, call(0, "f", '{"a": 1}')),
    (LLAMA, f"\n<|python_tag|>{F} ", call(0, "f", '{"a": 1}')),
    (LLAMA, f"<|python_tag|>\n {F}; {G};\n", [*call(0, "f", '{"a": 1}'), *call(1, "get_weather", CITY)]),
    (LLAMA, '{"type": "function", "id": 7, "name": "f", "parameters": {}}', call(0, "f", "{}")),
    (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", [*call(0, "f", '{"a": 1}'), *call(1, "get_weather", CITY)]),
    (
        MISTRAL,
        f'So: [TOOL_CALLS][{F[:-1]}, "id": "a1"}}] Ok',
        [Content("So:"), *call(0, "f", '{"a": 1}'), Content(" Ok")],
    ),
    (FIREFUNCTION, f"functools[{F}, {G}]", [*call(0, "f", '{"a": 1}'), *call(1, "get_weather", CITY)]),
    (FIREFUNCTION, "functools[0] is no call", [Content("functools[0] is no call")]),
    (MISTRAL, f"[TOOL_CALLS]{F}", call(0, "f", '{"a": 1}')),
    # words around calls keep the space between them
    (HERMES, f"A:\n<tool_call>{F}</tool_call> \n B", [Content("A:"), *call(0, "f", '{"a": 1}'), Content("\nB")]),
    (HERMES, f"A<tool_call>{F}</tool_call>B", [Content("A"), *call(0, "f", '{"a": 1}'), Content("\nB")]),
    # Llama's calls after text and on lines of their own, as vLLM parses them
    (LLAMA, f"I look.\n\n{F}", [Content("I look."), *call(0, "f", '{"a": 1}')]),
    (LLAMA, f"So {{x}} <|python_tag|>{F}", [Content("So {x}"), *call(0, "f", '{"a": 1}')]),
    (LLAMA, f"{F}\n{G}", [*call(0, "f", '{"a": 1}'), *call(1, "get_weather", CITY)]),
    (LLAMA, '{"a": [1]} ' + F, [Content('{"a": [1]}'), *call(0, "f", '{"a": 1}')]),
    # the calls of Mistral's later tokenizers
    (MISTRAL, '[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
    (MISTRAL, 'So [TOOL_CALLS]f[ARGS]{"a": {}} ok', [Content("So"), *call(0, "f", '{"a": {}}'), Content(" ok")]),
    (
        MISTRAL,
        '[TOOL_CALLS]f[CALL_ID]a1B2[ARGS]{}[TOOL_CALLS]g.h-1 {"x": "}"}',
        [*call(0, "f", "{}"), *call(1, "g.h-1", '{"x": "}"}')],
    ),
    # no arguments
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', call(0, "f", "{}")),
    # keys in another order, missing arguments, arguments as a string, unescaped line breaks
    (HERMES, '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', call(0, "f", '{"a": [1, {}]}')),
    (HERMES, '<tool_call>{"id": [1], "x": {"name": 2}, "name": "f"}</tool_call>', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": " {\\"a\\": \\"\\u00e9\\"} "}', call(0, "f", '{"a": "é"}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\n\\"}"}', call(0, "f", '{"a": "\\n"}')),
    (HERMES, '<tool_call>{"parameters": "{}", "name": "\\u0066"}</tool_call>', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a\t":\n"1\n2\x01"}}', call(0, "f", '{"a\\t":\n"1\\n2\\u0001"}')),
    # incomplete calls after their start
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', [CallStart(0, "f"), CallArguments(0, '{"a": "b')]),
    # incomplete calls before their start are content, without the text between calls
    (HERMES, f'<tool_call>[{F}, {{"na', [*call(0, "f", '{"a": 1}'), Content('{"na')]),
    # calls that become invalid after their start: the rest is content
    (
        HERMES,
        f'<tool_call>{{"name": "f", "arguments": {{"a": nope}} }}\n</tool_call>\n<tool_call>{F}',
        [CallStart(0, "f"), CallArguments(0, '{"a": nope'), Content("} }\n</tool_call>"), *call(1, "f", '{"a": 1}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": no } }',
        [CallStart(0, "f"), CallArguments(0, '{"a": no'), Content(" } }")],
    ),
    (LLAMA, f"{F} and so", [*call(0, "f", '{"a": 1}'), Content("and so")]),
    (HERMES, f"<tool_call>{F} and </tool_call>", [*call(0, "f", '{"a": 1}'), Content("and </tool_call>")]),
]


@pytest.mark.parametrize(("fmt", "text", "expected"), EXAMPLES)
def test_calls_are_parsed_at_once_and_character_by_character(fmt: ToolFormat, text: str, expected: list[Event]) -> None:
    assert run(fmt, [text]) == expected
    assert run(fmt, text) == expected


NO_CALLS = [
    (HERMES, ""),
    (HERMES, " \n a <b> <tool_cal <tool_call "),
    (HERMES, F),
    (HERMES, "see <tool_call>\n<function=f>\n</function>\n</tool_call> x"),
    (HERMES, '<tool_call>{"name": "rm", "arguments": {"a": 1}}\n</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "nothing"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    (HERMES, '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}, "parameters": {}, "name": "f"}</tool_call>'),
    (HERMES, "<tool_call>[[" + F + "]]</tool_call>"),
    (HERMES, '<tool_call>{"name": "f", } </tool_call>'),
    (HERMES, '<tool_call>{"name": "f" "arguments": {}} </tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}'),
    (LLAMA, "Hello { there"),
    (HERMES, '<tool_call>{"name": "f", "arguments": 0}</tool_call>'),
    (LLAMA, '[1, {"a": ' + F + "}]"),
    (LLAMA, '{"answer": {"name": "f"}, "name": "f"}'),
    (LLAMA, '{"name": "Ann", "parameters": {}}'),
    (LLAMA, "<|python_tag|>print(1)"),
    (MISTRAL, "[TOOL_CALLS]g[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]x{}"),
    (MISTRAL, "[TOOL_CALLS]f is {}"),
    (MISTRAL, "[TOOL_CALLS]f" + " " * 200 + "{}"),
]


@pytest.mark.parametrize(("fmt", "text"), NO_CALLS)
def test_text_without_calls_is_returned_unchanged(fmt: ToolFormat, text: str) -> None:
    expected = [Content(text)] if text else []
    assert run(fmt, [text]) == expected and run(fmt, text) == expected


BROKEN = [
    (HERMES, 'a\n<tool_call>{"name": "f", "arguments": {"a": nope} }\n</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b\nc'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "x": no}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"\u00e9": 1}, "name": "f", "name": "f"}</tool_call>'),
    (LLAMA, 'Hm {"name": "f", "parameters": {'),
    (LLAMA, '{"name": "f", "parameters": {"a": {"b": 1} oh'),
    (MISTRAL, 'x [TOOL_CALLS]f[ARGS]{"a": 1'),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 01}}]'),
]


@pytest.mark.parametrize(("fmt", "text"), BROKEN)
def test_whole_reply_has_all_of_a_broken_call_as_text(fmt: ToolFormat, text: str) -> None:
    for pieces in ([text], text):
        events = run(fmt, pieces)
        assert any(isinstance(event, CallStart) for event in events), "a stream has started it"
        assert not any(isinstance(event, CallEnd) for event in events)
        assert settled(events) == [Content(text)]


def test_calls_without_a_marker_stay_at_the_start_if_a_grammar_says_so() -> None:
    text = f"I look. {F}"
    state, events = push(start(LLAMA, NAMES, is_free=False), text)
    assert [*events, *finish(state)] == [Content(text)]


def test_text_and_arguments_are_streamed() -> None:
    state, out = start(HERMES, NAMES), []
    for piece in ("Hi", " you", " <to", "ol_call>", '{"name": "f", "argu', 'ments": {"a', '": "x', "y", '"}', "}"):
        state, events = push(state, piece)
        out.append(events)
    assert out == [
        [Content("Hi")],
        [Content(" you")],
        [],
        [],
        [],
        [CallStart(0, "f"), CallArguments(0, '{"a')],
        [CallArguments(0, '": "x')],
        [CallArguments(0, "y")],
        [CallArguments(0, '"}')],
        [CallEnd(0)],
    ]


# ---- any split

fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", "{", "}", ",", ";", " ", "\n"),
        *('"name"', ": ", '"f"', '"get_weather"', '"arguments"', '"parameters"', '"x"', "{}", "tru", "true", "-1.5e3"),
        *("1.", '"', "\\", '\\"', "\\u00e9", "é", "<", "word ", '"{\\"a\\": 1}"', F, G, "\x01", '{"name": "f", '),
        *('"arguments": ', "<tool_call>[", "/", f"<tool_call>{F}</tool_call>"),
    ]
)
texts = st.lists(fragments, max_size=14).map("".join)
places = st.lists(st.integers(0, 10**6), max_size=10)


@settings(max_examples=500, deadline=None)
@given(fmt=st.sampled_from(FORMATS), text=texts, places=places)
def test_result_does_not_depend_on_the_split(fmt: ToolFormat, text: str, places: list[int]) -> None:
    expected = run(fmt, [text])
    assert run(fmt, split(text, places)) == expected
    assert run(fmt, text) == expected
    content, calls = summarize(expected)
    if not calls:
        assert content == text
    assert all(is_whole for _, _, is_whole in summarize(settled(expected))[1])
    for name, arguments, is_whole in calls:
        assert name in NAMES and arguments.startswith("{")
        if is_whole:
            assert isinstance(json.loads(arguments), dict)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments_of_calls = st.dictionaries(st.text(max_size=5), values, max_size=3)
wanted_calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments_of_calls), min_size=1, max_size=3)


def spelled(fmt: ToolFormat, name: str, arguments: Any, style: int) -> str:
    """Return a call in one of 16 spellings."""
    fields = {"name": name, fmt.arguments: json.dumps(arguments) if style & 8 else arguments}
    ordered = dict(reversed(fields.items())) if style & 1 else fields
    return json.dumps(ordered, ensure_ascii=bool(style & 2), indent=2 if style & 4 else None)


def reply(fmt: ToolFormat, calls: Sequence[str]) -> str:
    if fmt.is_whole:
        return "; ".join(calls)
    if fmt.is_list:
        return f"{fmt.begin} [{', '.join(calls)}]"
    return "\n".join(f"{fmt.begin}\n{call}\n{fmt.end}" for call in calls)


@settings(max_examples=170, deadline=None)
@given(fmt=st.sampled_from(FORMATS), calls=wanted_calls, style=st.integers(0, 15), places=places)
def test_calls_are_parsed_in_every_spelling(
    fmt: ToolFormat, calls: list[tuple[str, Any]], style: int, places: list[int]
) -> None:
    text = reply(fmt, [spelled(fmt, name, arguments, style) for name, arguments in calls])
    content, found = summarize(run(fmt, split(text, places)))
    assert content == ""
    assert [(name, json.loads(arguments), True) for name, arguments, _ in found] == [(n, a, True) for n, a in calls]
    assert all(is_whole for _, _, is_whole in found)


# ---- limits


def test_too_long_beginning_is_content() -> None:
    before = '<tool_call>{"arguments": "'
    fits = before + "x" * (MAX_HELD - len(before))
    assert push(start(HERMES, NAMES), fits)[1] == []
    assert run(HERMES, [fits, "yz"]) == run(HERMES, [fits + "yz"]) == [Content(fits + "yz")]
    state, events = push(start(HERMES, NAMES), fits + "y")
    assert merged(events) == [Content(fits + "y")] and not state.held


@pytest.mark.parametrize("fmt", [HERMES, LLAMA])
def test_withheld_whitespace_is_limited(fmt: ToolFormat) -> None:
    text = "a" + " " * 1000
    events = run(HERMES, text + f"<tool_call>{F}</tool_call>")
    assert events == [Content("a" + " " * (1000 - MAX_SPACES)), *call(0, "f", '{"a": 1}')]
    assert run(fmt, text) == [Content(text)]
    after = run(HERMES, f"a<tool_call>{F}</tool_call>" + " " * 1000 + "b")
    assert after == [Content("a"), *call(0, "f", '{"a": 1}'), Content(" " * MAX_SPACES + "b")]


def test_too_deep_nesting_is_invalid() -> None:
    def nested(depth: int) -> str:
        return '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"

    assert summarize(run(HERMES, [nested(MAX_DEPTH - 2)]))[1][0][2]
    assert not summarize(run(HERMES, [nested(MAX_DEPTH - 1)]))[1][0][2]


LONG = [
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', "xy"),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [', "1,"),
    (HERMES, '<tool_call>{"arguments": {"a": "', "xy"),
    (HERMES, "", "a "),
    (HERMES, "", "<tool_call>"),
    (HERMES, "", f"<tool_call>{F}</tool_call>"),
    (HERMES, f"<tool_call>{F}", "  "),
    (LLAMA, "", f"{F};"),
    (LLAMA, "no ", "{}"),
    (MISTRAL, "[TOOL_CALLS] [", f"{F},"),
]


def num_lines_run(fmt: ToolFormat, pieces: list[str]) -> int:
    """Return the number of lines of the package that are executed for a reply in these pieces."""
    state = start(fmt, NAMES)
    with counted_lines("tool_") as lines:
        for piece in pieces:
            state, _ = push(state, piece)
        finish(state)
    return lines.count


@pytest.mark.parametrize(("fmt", "before", "more"), LONG)
@pytest.mark.parametrize("by_character", [True, False])
def test_work_is_linear_in_the_text(fmt: ToolFormat, before: str, more: str, by_character: bool) -> None:
    short, long = before + more * (1500 // len(more)), before + more * (6000 // len(more))
    counts = [num_lines_run(fmt, list(text) if by_character else [text]) for text in (short, long)]
    assert counts[1] < 5 * counts[0] + 1000


# ---- JSON

json_text = st.lists(st.sampled_from(list('{}[]:,"\\ \nutrefalsn0123.-+eE\x01é')), max_size=10).map("".join)


def accepts(text: str) -> bool:
    """Return True if the steps accept a text as one value."""
    state, at = JsonState(), 0
    text += " "
    while at < len(text):
        found = step(state, text, at, len(text))
        if found is None:
            return False
        state, at = found
    return state.due == "done"


def is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@settings(max_examples=1000, deadline=None)
@given(text=json_text | values.map(json.dumps) | st.tuples(values.map(json.dumps), json_text).map("".join))
@example(text="01")
@example(text="-")
@example(text="1.e3")
@example(text="[1,]")
@example(text='{"a":1,}')
@example(text='"\\x"')
@example(text='"\\u12g4"')
@example(text='"\\u123g"')
@example(text="[}")
@example(text="nul")
@example(text="")
def test_steps_accept_exactly_json(text: str) -> None:
    assert accepts(text) == is_json(text)
    assert (as_object(text) is not None) == (is_json(text) and text.strip(" \t\r\n").startswith("{"))


# ---- formats and grammars

CHATS = {
    "qwen2_5": HERMES,
    "qwen3": HERMES,
    "qwen3_5_think": HERMES,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "llama3": HERMES,
    "phi3_5": HERMES,
    "muse_glimmer": HERMES,
    "gemma3": HERMES,
}


@pytest.mark.parametrize("name", CHATS)
def test_format_of_real_templates(name: str) -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs the templates of TRL")
    source = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
    assert tool_format(source.read_text()) == CHATS[name]


def test_format_follows_from_the_markers_of_a_template() -> None:
    assert tool_format(None) == HERMES
    assert tool_format("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [") == MISTRAL
    assert tool_format("{% if tools %}<|python_tag|>{% endif %}") == LLAMA
    assert tool_format("""{{ tools }}{{ '", "parameters": ' + call.arguments }}""") == LLAMA
    assert tool_format("""{{ tools }}{{ '", "parameters": ' + f.parameters }}""") == HERMES
    assert tool_format("functools{% set text = text + functions %}") == FIREFUNCTION
    assert tool_format("functools of a template whose functions are not written") == HERMES
    assert tool_format("[TOOL_CALLS] of a template without them") == HERMES


WEATHER: Tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "$defs": {"city": {"enum": ["Bern", "Genf"]}},
        },
    },
}
NOW: Tool = {"type": "function", "function": {"name": "now"}}
FREE: Tool = {"type": "function", "function": {"name": "log", "parameters": {"type": "object"}}}
TOOLS = [WEATHER, NOW, FREE]
BERN = ("get_weather", '{"city": "Bern", "days": 2}')
NOTHING = ("now", "{}")

SPECIAL = {"<tool_call>": 257, "</tool_call>": 258, "[TOOL_CALLS]": 259, "<|python_tag|>": 260}


class ByteTokenizer:
    """A tokenizer for llguidance: a token for every byte, and some special tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>", *(text.encode() for text in SPECIAL))
    special_token_ids = (256, *SPECIAL.values())

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def allows(grammar: Grammar, text: str, special: bool = False) -> bool:
    """Return True if a text matches a grammar; with `special`, markers in the text are special tokens."""
    llguidance = pytest.importorskip("llguidance")
    assert grammar.kind == "calls" and grammar.special <= set(SPECIAL.values())
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokenizer()))
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    while text:
        marker = next((one for one in SPECIAL if special and text.startswith(one)), None)
        tokens += [SPECIAL[marker]] if marker else list(text[0].encode())
        text = text[len(marker or text[0]) :]
    taken: int = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and bool(matcher.is_accepting())


def written(fmt: ToolFormat, *calls: tuple[str, str]) -> str:
    return reply(fmt, [f'{{"name": "{name}", "{fmt.arguments}": {arguments}}}' for name, arguments in calls])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("special", [True, False])
def test_grammar_allows_only_calls(fmt: ToolFormat, special: bool) -> None:
    tokens = SPECIAL if special else {}
    grammar = calls_grammar(TOOLS, fmt, special=tokens)
    for calls in ([BERN], [NOTHING], [BERN, NOTHING, BERN], [("log", '{"any": ["thing"]}')]):
        assert allows(grammar, written(fmt, *calls), special)
    for name, arguments in [
        ("rm", "{}"),
        ("now", '{"a": 1}'),
        ("get_weather", "{}"),
        ("get_weather", '{"city": "Rom"}'),
        ("get_weather", '{"city": "Bern", "other": 1}'),
        ("get_weather", '{"city":   "Bern"}'),
        ("log", "[]"),
    ]:
        assert not allows(grammar, written(fmt, (name, arguments)), special)
    assert not allows(grammar, "Hello", special) and not allows(grammar, "", special)
    if not fmt.is_whole and fmt != FIREFUNCTION:  # its marker is no special token
        assert not allows(grammar, written(fmt, BERN), not special)


@pytest.mark.parametrize("fmt", FORMATS)
def test_grammar_of_one_call(fmt: ToolFormat) -> None:
    one = calls_grammar(TOOLS, fmt, parallel=False)
    assert allows(one, written(fmt, BERN)) and not allows(one, written(fmt, BERN, BERN))
    named = calls_grammar(TOOLS, fmt, name="now", parallel=False)
    assert allows(named, written(fmt, NOTHING)) and not allows(named, written(fmt, BERN))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("special", [True, False])
def test_strict_grammar_allows_text_and_calls_that_fit(fmt: ToolFormat, special: bool) -> None:
    tokens = SPECIAL if special else {}
    grammar = calls_in_text_grammar(TOOLS, fmt, {"get_weather"}, special=tokens)
    for text in ("", "Hello\n", "a < b, [1] and {2}", "first\n\n second"):
        assert allows(grammar, text, special)
    for calls in ([BERN], [BERN, NOTHING, BERN], [("now", '{"a": [1]}')], [("log", "{}"), BERN]):
        assert allows(grammar, written(fmt, *calls), special)
        if not fmt.is_whole:
            assert allows(grammar, f"I ask.\n{written(fmt, *calls)}", special)
            assert allows(grammar, f"{written(fmt, *calls)}\nand {written(fmt, BERN)} done", special)
    for name, arguments in [
        ("rm", "{}"),
        ("get_weather", "{}"),
        ("get_weather", '{"city": "Rom"}'),
        ("get_weather", '{"city": "Bern", "other": 1}'),
        ("log", "[]"),
    ]:
        assert not allows(grammar, written(fmt, (name, arguments)), special)
        if not fmt.is_whole:
            assert not allows(grammar, f"I ask.{written(fmt, BERN)} {written(fmt, (name, arguments))}", special)


def test_grammar_without_a_matching_function_is_refused() -> None:
    with pytest.raises(BadRequest, match="tools has no 'rm'"):
        calls_grammar(TOOLS, HERMES, name="rm")
    with pytest.raises(BadRequest, match="no function to call"):
        calls_grammar([], HERMES)
