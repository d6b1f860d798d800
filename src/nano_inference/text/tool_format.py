"""How models write the calls of functions: the three ways of the chat templates, and the grammar of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nano_inference.text.grammar_text import WHITESPACE, Grammar
from nano_inference.types import BadRequest

Tool = Mapping[str, Any]
"""A function as OpenAI describes it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing a call: {"name": …, "arguments": {…}} between markers, or alone."""

    name: str
    begin: str
    """The marker before a call. A reader must be shown it even where it is a special token."""
    end: str = ""
    """The marker behind, when there is one."""
    arguments: str = "arguments"
    """The arguments' key; readers take either."""
    is_list: bool = False
    """All calls are one list behind one marker."""
    is_whole: bool = False
    """Calls are the whole reply, separated by semicolons; the marker may be missing and stands only in front."""


HERMES = ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>")
"""Hermes 2 Pro, Qwen 2.5 and 3, SmolLM3; SmolLM2 puts a list between the markers, which is read as well."""
LLAMA = ToolFormat(name="llama", begin="<|python_tag|>", arguments="parameters", is_whole=True)
"""Llama 3.1 to 3.3."""
MISTRAL = ToolFormat(name="mistral", begin="[TOOL_CALLS]", is_list=True)
"""Mistral's models up to tokenizer version 3; later ones write no list."""

MAX_FORCED_CALLS = 4
"""Calls in one reply that must be calls: a small model that may go on does not stop."""

_PARAMETERS = re.compile(r"""["']parameters\\?["']\s*:[\s'"{}+~-]*[\w.]*\.arguments""")
"""A call's arguments written under that key; in a function's description it means their schema."""
_SPEAKS = re.compile(r"\btools\b")
_NO_SPECIAL: Mapping[str, int] = MappingProxyType({})
_OTHERS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "dependentSchemas"}
    | {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"}
)
"""Words of a schema that may have a say in properties it does not name."""
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates write JSON; free space is where a small model never stops writing."""


def speaks_of_tools(template_source: str | None) -> bool:
    """Whether a chat template does something with its variable `tools`."""
    return template_source is not None and _SPEAKS.search(template_source) is not None


def tool_format(template_source: str | None) -> ToolFormat:
    """Return how a chat template has calls written; Hermes's way for one that does not tell, or for none."""
    if not speaks_of_tools(template_source) or template_source is None:
        return HERMES
    if HERMES.begin in template_source:
        return HERMES
    if MISTRAL.begin in template_source:
        return MISTRAL
    is_llama = LLAMA.begin in template_source or _PARAMETERS.search(template_source) is not None
    return LLAMA if is_llama else HERMES


def calls_grammar(
    tools: Sequence[Tool],
    fmt: ToolFormat,
    *,
    name: str | None = None,
    parallel: bool = True,
    special: Mapping[str, int] = _NO_SPECIAL,
    answer: Mapping[str, Any] | None = None,
) -> Grammar:
    """Return the grammar, in llguidance's Lark, of a reply that is one call of one of the tools.

    With `name` of that tool alone, with `parallel` up to `MAX_FORCED_CALLS`. `special` are the special tokens' ids by
    their text (`tools.special_tokens`): a marker among them is that token, any other is text. Arguments fit the tool's
    schema; where that says nothing of further properties, there are none. With `answer`, JSON of that schema will do
    instead of a call, where calls have a marker. Raises `BadRequest` for an unknown `name`.
    """
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise BadRequest("tools: there is no function to call" if name is None else f"tools has no {name!r}")
    begin, end = _terminal(fmt.begin, special), _terminal(fmt.end, special) if fmt.end else ""
    start, more = "start" if answer is None else "calls", f"{{0,{MAX_FORCED_CALLS - 1}}}"
    if fmt.is_whole:
        rule = f"{start}: call" + (f' ("; " call){more}' if parallel else "")
    elif fmt.is_list:
        rule = f'{start}: {begin} " "? "[" call' + (f' (", " call){more}' if parallel else "") + ' "]"'
    else:
        one = f'{begin} "\\n" call "\\n" {end}'
        rule = f'{start}: one ("\\n" one){more}\none: {one}' if parallel else f"{start}: {one}"
    calls = " | ".join(f"call{index}" for index in range(len(chosen)))
    rules = [line for index, function in enumerate(chosen) for line in _call_rules(index, function, fmt)]
    if answer is not None:
        schema = json.dumps({**answer, "x-guidance": {"whitespace_pattern": WHITESPACE}})
        rules += ["start: calls | answer", f"answer: %json {schema}"]
    markers = frozenset(special[mark] for mark in (fmt.begin, fmt.end) if mark in special)
    return Grammar("calls", "\n".join([rule, f"call: {calls}", *rules]) + "\n", markers)


def _terminal(marker: str, special: Mapping[str, int]) -> str:
    return f"<[{special[marker]}]>" if marker in special else _quoted(marker)


def _quoted(text: str) -> str:
    """Return a text as Lark spells it: as JSON does."""
    return json.dumps(text)


def _call_rules(index: int, function: Mapping[str, Any], fmt: ToolFormat) -> tuple[str, str]:
    before = f'{{"name": {json.dumps(function["name"])}, "{fmt.arguments}": '
    schema = json.dumps(_closed_schema(function.get("parameters")))
    return f'call{index}: {_quoted(before)} args{index} "}}"', f"args{index}: %json {schema}"


def _closed_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a schema whose object has no properties but those it names, unless it speaks of others or names none."""
    schema: dict[str, Any] = {"properties": {}} if not parameters else dict(parameters)
    named = schema.get("properties")
    is_complete = isinstance(named, Mapping) and set(named).issuperset(schema.get("required") or ())
    if is_complete and _OTHERS.isdisjoint(schema):
        schema["additionalProperties"] = False
    return {**schema, "type": "object", "x-guidance": _LAYOUT}
