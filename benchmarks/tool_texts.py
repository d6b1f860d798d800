"""Fuzz the parser of function calls: random texts of models, well and ill formed, in all formats.

    python benchmarks/tool_texts.py --texts 1000

For each text: its stream in random pieces has the same events as the whole; well-formed calls are found as written; and
nothing is lost: calls and text together cover the reply. Prints the figures, and exits 1 if one of them is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from nano_inference.text.tool_calls import finish, push, start
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event, merged, settled
from nano_inference.text.tool_format import FIREFUNCTION, HERMES, LLAMA, MISTRAL, ToolFormat

FORMATS = (HERMES, LLAMA, MISTRAL, FIREFUNCTION)
NAMES = ("f", "get_weather", "search-web")
WORDS = (
    *(
        "I look",
        "it up:",
        "é",
        "{x}",
        "a < b",
        "[1]",
        "\n\n",
        "```json\n",
        "Done.",
        "<tool",
        "{",
        '"name"',
        "; ",
        "日本",
    ),
)
FRAGMENTS = (
    *("{", "}", "[", "]", '"', ",", ":", "\\", "\n", "null", "nope", "\\u00", "</tool_call>", "[ARGS]", "<tool_call>"),
)
VALUES = (
    *(1, -2.5, None, True, "Bern", "}]</tool_call>", 'a "b"\n', "é\u2028", [], [1, {"a": "{"}], {}, {"b": {"c": []}}),
)
BETWEEN = re.compile(r"(?:[\s\],;}]|</tool_call>)*")
"""What a reply has between calls and texts: separators and markers."""


def spelled(draw: random.Random, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as JSON in one of many spellings."""
    given: Any = (
        draw.choice([arguments, arguments, json.dumps(arguments)]) if arguments else draw.choice([{}, None, ""])
    )
    fields = [("name", name), (draw.choice(["arguments", "parameters"]), given)]
    if draw.random() < 0.2:
        fields.append(("id", "a1"))
    fields = fields[::-1] if draw.random() < 0.2 and len(fields) == 2 else fields
    return json.dumps(dict(fields), ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 2]))


def reply(draw: random.Random, fmt: ToolFormat) -> tuple[str, list[tuple[str, Any]]]:
    """Return a well-formed reply and its calls."""
    calls = [
        (draw.choice(NAMES), {f"k{index}": draw.choice(VALUES) for index in range(draw.randrange(3))})
        for _ in range(draw.randrange(1, 4))
    ]
    if fmt is MISTRAL and draw.random() < 0.5:
        infix = draw.choice(["", "[ARGS]", "[CALL_ID]a1[ARGS]"])
        text = "".join(f"{fmt.begin}{name}{infix}{json.dumps(arguments)}" for name, arguments in calls)
    elif fmt.is_list:
        text = fmt.begin + draw.choice(["", " "]) + "[" + ", ".join(spelled(draw, *one) for one in calls) + "]"
    elif fmt.is_whole:
        text = draw.choice(["", fmt.begin]) + draw.choice(["; ", "\n", ";"]).join(spelled(draw, *one) for one in calls)
    else:
        space = draw.choice(["", "\n"])
        text = draw.choice(["", "\n", "\nand\n"]).join(
            f"{fmt.begin}{space}{spelled(draw, *one)}{space}{fmt.end}" for one in calls
        )
    before, after = (draw.choice(["", "I look.\n", "So: ", "Well,"]), draw.choice(["", "\nDone.", " Done", "!"]))
    return before + text + after, calls


def damaged(draw: random.Random, text: str) -> str:
    """Return a text with a few random changes."""
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(text) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            text = text[:at] + text[at + draw.randrange(1, 4) :]
        elif kind == 1:
            text = text[:at] + draw.choice(FRAGMENTS + WORDS) + text[at:]
        elif kind == 2:
            text = text[: max(1, at)]
        else:
            end = draw.randrange(at, min(len(text), at + 30) + 1)
            text = text[:end] + text[at:end] + text[end:]
    return text


def parsed(fmt: ToolFormat, pieces: Iterable[str]) -> list[Event]:
    """Return the events of a reply that comes in pieces."""
    state, events = start(fmt, NAMES), []
    for piece in pieces:
        state, new = push(state, piece)
        events += new
    return merged([*events, *finish(state)])


def pieces_of(draw: random.Random, text: str) -> list[str]:
    """Return a text in random pieces."""
    longest, pieces, at = draw.choice([1, 3, 10, 100]), [], 0
    while at < len(text):
        size = draw.randrange(1, longest + 1)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def calls_of(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls of a whole reply."""
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] = texts.get(event.index, "") + event.text
    return [(event.name, json.loads(texts[event.index])) for event in events if isinstance(event, CallStart)]


def after_call(text: str, at: int, end: str, *, is_closed: bool) -> int:
    """Return the place after a call's end marker; its arguments end at `at`, or, if `is_closed`, all of its JSON."""
    head = '{"": 0'
    with suppress(ValueError):  # if the reply ends before the call does
        at += 0 if is_closed else json.JSONDecoder(strict=False).raw_decode(head + text[at:])[1] - len(head)
    marker = re.compile(rf"\s*{re.escape(end)}").match(text, at)
    return at if marker is None else marker.end()


def is_covered(text: str, events: Sequence[Event], end: str) -> bool:
    """Return True if calls and content cover a reply, in its order."""
    at, last, is_named = 0, "", False
    for event in events:
        if isinstance(event, CallEnd) and not is_named:
            at = after_call(text, at, end, is_closed=last.endswith("}"))
        if isinstance(event, CallStart):
            last, is_named = event.source, '"' not in event.source
        elif isinstance(event, CallArguments) and event.source:
            last = ""
        source = event.text if isinstance(event, Content) else getattr(event, "source", "")
        for word in source.split():
            found = text.find(word, at)
            while found >= 0 and not BETWEEN.fullmatch(text, at, found):
                found = text.find(word, found + 1)
            if found < 0:
                return False
            at = found + len(word)
    return BETWEEN.fullmatch(re.sub(r"</?[tool_ca]*$", "", text[at:])) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=1000, help="texts a format")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = Counter[str]()
    failures = dict.fromkeys(("with a stream unlike the whole", "with text lost", "with calls not found"), 0)
    for fmt in FORMATS:
        draw = random.Random(f"{options.seed} {fmt.name}")
        for number in range(options.texts):
            text, wanted = reply(draw, fmt)
            is_well_formed = number % 2 == 0
            text = text if is_well_formed else damaged(draw, text)
            events = parsed(fmt, [text])
            whole = settled(events)
            calls = calls_of(whole)
            counts.update(["texts", "well formed" if is_well_formed else "ill formed"])
            counts["calls"] += len(calls)
            checks = {
                "with a stream unlike the whole": repr(parsed(fmt, pieces_of(draw, text))) == repr(events),
                "with text lost": is_covered(text, whole, fmt.end),
                "with calls not found": not is_well_formed or calls == wanted,
            }
            for name, is_right in checks.items():
                failures[name] += not is_right
                if not is_right:
                    print(f"{name}: {fmt.name} {text!r}\n  {whole}")
    print(", ".join(f"{count} {name}" for name, count in {**counts, **failures}.items()))
    return 1 if any(failures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
