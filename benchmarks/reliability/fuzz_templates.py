"""Differential fuzz of chat templates: random chats, every text compared with Transformers' own rendering.

    python benchmarks/reliability/fuzz_templates.py [DIRECTORY ...] [--renderings 4000] [--seed N]

The templates are the *.jinja files of the directories, or those of public models that TRL's package ships. Each is
rendered with and without tools, one to four questions, calls and their results, reasoning in each spelling, a system
message, variables and a continued answer; arguments have integral, large and negative zero floats, texts have control
characters, marks and special tokens. A text that only one side refuses is a difference. The last line is one JSON
object; exit status 1 on any difference, or with fewer texts or templates than asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from nano_inference.text.chat import ChatTemplate, chat_template, render
from nano_inference.text.kinds import Rendering
from nano_inference.types import BadRequest

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
PIECES = (
    *("hello", "What is 2+2?", "\n", "\n\n", " ", "  ", "\t", "\x1c", "\x1f", "\x85", "\xa0", "é", "日本", "😀"),
    *("<b>&'\"", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</s>", "<|im_end|>"),
    *("[/THINK]", "/think", "{{ x }}", "{% if %}", "%s", "{0}", "<|channel|>", "final", "/no_think", "\\n", "```"),
    *("<answer>", "None", "1.0"),
)
NUMBERS = (0, 1, -3, 1.0, 2.5, -0.0, 1e16, 1e-7, 1e22, 123456789012345678, True, False, None)
MIN_TEMPLATES = 40


def text(draw: random.Random, most: int = 6) -> str:
    """Return a random text."""
    return "".join(draw.choices(PIECES, k=draw.randint(0, most)))


def value(draw: random.Random, depth: int = 2) -> Any:
    """Return a random JSON value."""
    kind = draw.randrange(5 if depth else 2)
    if kind == 0:
        return draw.choice(NUMBERS)
    if kind < 3:
        return text(draw)
    if kind == 3:
        return [value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return {f"k{n}": value(draw, depth - 1) for n in range(draw.randint(0, 3))}


def tools(draw: random.Random) -> list[dict[str, Any]]:
    """Return random functions."""
    kinds = ["string", "number", "integer", "boolean", "array", "object", "null"]
    found = []
    for number in range(draw.randint(1, 3)):
        fields: dict[str, Any] = {}
        for name in ("city", "count", "when")[: draw.randint(0, 3)]:
            fields[name] = {"type": draw.choice(kinds), "description": text(draw)}
            if draw.random() < 0.3:
                fields[name]["enum"] = [value(draw, 0) for _ in range(2)]
            if draw.random() < 0.3:
                fields[name]["default"] = value(draw, 1)
            if fields[name]["type"] == "array":
                fields[name]["items"] = {"type": draw.choice(kinds)}
        parameters = {"type": "object", "properties": fields, "required": list(fields)[:1]}
        function = {"name": f"tool_{number}", "description": text(draw), "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found


def turns(draw: random.Random, *, calls: bool) -> list[dict[str, Any]]:
    """Return a random chat whose roles alternate."""
    chat: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        chat.append({"role": "system", "content": text(draw)})
    for number in range(draw.randint(1, 4)):
        if number:
            chat.append(answer(draw))
        chat.append({"role": "user", "content": text(draw)})
        if calls and draw.random() < 0.5:
            names = [f"call{number:04}{index}" for index in range(draw.randint(1, 2))]
            made = []
            for name in names:
                arguments = {f"a{n}": value(draw) for n in range(draw.randint(0, 3))}
                made.append({"type": "function", "id": name, "function": {"name": "tool_0", "arguments": arguments}})
            chat.append({**answer(draw), "content": draw.choice(["", None, text(draw)]), "tool_calls": made})
            for name in names:
                content = draw.choice([text(draw), '{"a": 1.0}'])
                chat.append({"role": "tool", "tool_call_id": name, "name": "tool_0", "content": content})
            if draw.random() < 0.7:
                chat.append(answer(draw))
                chat.append({"role": "user", "content": text(draw)})
    if draw.random() < 0.2:
        chat.append(answer(draw))
    return chat


def answer(draw: random.Random) -> dict[str, Any]:
    """Return a random answer, perhaps with reasoning in one of its spellings."""
    said: dict[str, Any] = {"role": "assistant", "content": text(draw)}
    if draw.random() < 0.5:
        said[draw.choice(["reasoning_content", "reasoning", "thinking"])] = text(draw)
    elif draw.random() < 0.5:
        said["content"] = f"<think>{text(draw)}</think>{text(draw)}"
    return said


def variables(draw: random.Random) -> dict[str, Any]:
    """Return random template variables."""
    known: dict[str, list[Any]] = {
        **{name: [True, False] for name in ("enable_thinking", "thinking", "preserve_thinking", "clear_thinking")},
        **{"reasoning_effort": ["low", "high"], "date_string": ["01 Jan 2026"], "xml_tools": [value(draw, 0)]},
    }
    return {name: draw.choice(choices) for name, choices in known.items() if draw.random() < 0.3}


def theirs(source: str, chat: Sequence[Mapping[str, Any]], options: Rendering) -> str | None:
    """Return Transformers' text, None for a refusal."""
    named = {**NAMED, **options.extra, "add_generation_prompt": options.add_generation_prompt}
    try:
        rendered, _ = render_jinja_template([chat], tools=options.tools, chat_template=source, **named)
    except Exception:
        return None
    found: str = rendered[0]
    return found


def ours(template: ChatTemplate, chat: Sequence[Mapping[str, Any]], options: Rendering) -> str | None:
    """Return our text, None for a refusal."""
    try:
        return render(template, chat, options)
    except BadRequest:
        return None


def main() -> int:
    """Compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--renderings", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    spec = importlib.util.find_spec("trl")
    shipped = [] if spec is None or spec.origin is None else [Path(spec.origin).parent / "chat_templates"]
    sources: dict[str, str] = {}
    for directory in given.directories or shipped:
        for path in sorted(directory.rglob("*.jinja")):
            source = path.read_text(encoding="utf-8")
            if source not in sources.values():
                sources[str(path)] = source
    counts: Counter[str] = Counter()
    rendered: Counter[str] = Counter()
    differing: set[str] = set()
    templates = {name: chat_template(source, where=name, named=NAMED) for name, source in sources.items()}
    for turn in range(given.renderings):
        if counts["equal"] >= given.renderings or len(differing) > 9:
            break
        for name, template in templates.items():
            draw = random.Random(f"{given.seed} {turn} {Path(name).name}")
            used = tools(draw) if turn % 2 else None
            chat = turns(draw, calls=turn % 4 != 0)
            options = Rendering(add_generation_prompt=turn % 3 != 0, tools=used, extra=variables(draw))
            expected, got = theirs(sources[name], chat, options), ours(template, chat, options)
            if expected != got:
                differing.add(name)
                counts["unequal"] += 1
                print(json.dumps({"template": name, "chat": chat, "tools": used, "extra": dict(options.extra)}))
                print("theirs:", repr(expected), "ours:", repr(got), sep="\n")
            counts["refused by both" if expected is None else "equal"] += expected == got
            rendered[name] += expected is not None
    fewest = min(rendered.values(), default=0)
    versions = {name: version(name) for name in ("transformers", "jinja2")}
    print(json.dumps({"templates": len(templates), **counts, "fewest texts of a template": fewest, **versions}))
    is_full = len(templates) >= MIN_TEMPLATES and counts["equal"] >= given.renderings and fewest > 0
    return 0 if is_full and not counts["unequal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
