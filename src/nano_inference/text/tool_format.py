"""The four formats in which models write function calls, a grammar for each, and tools that the engine runs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.text.grammar_text import WHITESPACE, Grammar
from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, TokenProgram

Tool = Mapping[str, Any]
"""A function as OpenAI describes it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of calls: {"name": …, "arguments": {…}} between markers, or without markers."""

    name: str
    begin: str
    """The marker before a call. The text given to `tool_calls` must contain it even if it is a special token."""
    end: str = ""  # the marker after a call; empty for none
    arguments: str = "arguments"
    """The key of the arguments in written calls; the parser accepts "arguments" and "parameters"."""
    is_list: bool = False  # True if one list after one marker contains all calls
    is_whole: bool = False
    """True if calls are the whole reply, separated by semicolons, with at most one marker, at the start."""


HERMES = ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>")
"""Hermes 2 Pro, Qwen 2.5 and 3, SmolLM3; SmolLM2 writes a list between the markers, which is also parsed."""
LLAMA = ToolFormat(name="llama", begin="<|python_tag|>", arguments="parameters", is_whole=True)  # Llama 3.1 to 3.3
MISTRAL = ToolFormat(name="mistral", begin="[TOOL_CALLS]", is_list=True)
"""Mistral's models up to tokenizer version 3; later ones do not write a list."""

FIREFUNCTION = ToolFormat(name="firefunction", begin="functools", is_list=True)  # Fireworks' Firefunction 2

MAX_FORCED_CALLS = 4  # limit on the calls of a reply that must be calls, because small models do not stop by themselves

_PARAMETERS = re.compile(r"""["']parameters\\?["']\s*:[\s'"{}+~-]*[\w.]*\.arguments""")
"""A template's expression that writes a call's arguments as "parameters", which elsewhere is a function's schema."""
_SPEAKS = re.compile(r"\btools\b")
_TAKES_TEXT = re.compile(r"(?:\+|\{\{-?)\s*functions\b")
"""A template's expression that writes its variable `functions`, a text."""
_NO_SPECIAL: Mapping[str, int] = {}
_OTHERS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "dependentSchemas"}
    | {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"}
)
"""Keywords by which a schema may allow properties that `properties` does not list."""
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON layout of templates; where whitespace is free, small models write it without end."""


def speaks_of_tools(template_source: str | None) -> bool:
    """Return True if a chat template uses the variable `tools`, or `functions`."""
    return template_source is not None and (_SPEAKS.search(template_source) is not None or takes_text(template_source))


def takes_text(template_source: str) -> bool:
    """Return True if a chat template writes a variable `functions`: the functions as a JSON text (Firefunction 2)."""
    return _TAKES_TEXT.search(template_source) is not None


def tool_format(template_source: str | None) -> ToolFormat:
    """Return the call format that a chat template asks for; Hermes for one without a format, or without a template."""
    if not speaks_of_tools(template_source) or template_source is None:
        return HERMES
    if HERMES.begin in template_source:
        return HERMES
    if MISTRAL.begin in template_source:
        return MISTRAL
    if takes_text(template_source) and FIREFUNCTION.begin in template_source:
        return FIREFUNCTION
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
    """Return the grammar, in llguidance's Lark, of a reply that consists of calls.

    `name` allows only calls of that tool. `parallel` allows up to `MAX_FORCED_CALLS` calls instead of one. `special`
    maps the special tokens' texts to ids (`tools.special_tokens`); a marker in it is that token, any other is text.
    Arguments match the tool's schema, without further properties unless it mentions them. With `answer`, a JSON schema,
    the reply may be JSON of that schema instead (only for formats with a marker). Raises `BadRequest` for an unknown
    `name`.
    """
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise BadRequest("tools", "there is no function to call" if name is None else f"tools has no {name!r}")
    begin, end = _terminal(fmt.begin, special), _terminal(fmt.end, special) if fmt.end else ""
    start, more = "start" if answer is None else "calls", f"{{0,{MAX_FORCED_CALLS - 1}}}"
    if fmt.is_whole:
        rule = f"{start}: call" + (f' ("; " call){more}' if parallel else "")
    elif fmt.is_list:
        rule = f'{start}: {begin} " "? "[" call' + (f' (", " call){more}' if parallel else "") + ' "]"'
    else:
        one = f'{begin} "\\n" call "\\n" {end}'
        rule = f'{start}: one ("\\n" one){more}\none: {one}' if parallel else f"{start}: {one}"
    rules = [rule]
    if answer is not None:
        schema = json.dumps({**answer, "x-guidance": {"whitespace_pattern": WHITESPACE}})
        rules += ["start: calls | answer", f"answer: %json {schema}"]
    return _grammar(rules, chosen, fmt, special)


def calls_in_text_grammar(
    tools: Sequence[Tool], fmt: ToolFormat, strict: Collection[str], *, special: Mapping[str, int] = _NO_SPECIAL
) -> Grammar:
    """Return the grammar, in llguidance's Lark, of a reply of free text and any number of calls.

    Arguments of the functions `strict` match the schema, those of others are any object. `special` as for
    `calls_grammar`. In a format without markers, a reply that begins with a brace is a call.
    """
    functions = [tool["function"] for tool in tools]
    functions = [
        one if one["name"] in strict else {**one, "parameters": {"additionalProperties": True}} for one in functions
    ]
    begin, end = _terminal(fmt.begin, special), _terminal(fmt.end, special) if fmt.end else ""
    text = r"(.|\n)"
    if fmt.is_whole:
        first = "[^ \\t\\r\\n{]" if fmt.begin in special else f"[^ \\t\\r\\n{{{re.escape(fmt.begin[0])}]"
        rules = [f'start: {begin}? call ("; " call)* | PROSE?', rf"PROSE: /[ \t\r\n]*{first}{text}*/"]
    else:
        inner = '" "? "[" call (", " call)* "]"' if fmt.is_list else f'"\\n" call "\\n" {end}'
        is_token = fmt.begin in special
        lead = f"TEXT? {begin}" if is_token else "before"
        rules = [f"start: ({lead} {inner})* TEXT?", f"TEXT: /{text}+/"]
        rules += [] if is_token else [f"before[lazy]: /{text}*{re.escape(fmt.begin)}/"]
    return _grammar(rules, functions, fmt, special)


def _terminal(marker: str, special: Mapping[str, int]) -> str:
    return f"<[{special[marker]}]>" if marker in special else json.dumps(marker)  # Lark spells strings as JSON does


def _grammar(
    rules: Sequence[str], functions: Sequence[Mapping[str, Any]], fmt: ToolFormat, special: Mapping[str, int]
) -> Grammar:
    """Return the grammar of these rules and of the rule `call`: one call of any of the functions."""
    lines = [*rules, "call: " + " | ".join(f"call{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        # An object without further properties, unless its keywords or required names allow others.
        schema: dict[str, Any] = dict(function.get("parameters") or {"properties": {}})
        named = schema.get("properties")
        is_complete = isinstance(named, Mapping) and set(named).issuperset(schema.get("required") or ())
        if is_complete and _OTHERS.isdisjoint(schema):
            schema["additionalProperties"] = False
        schema |= {"type": "object", "x-guidance": _LAYOUT}
        before = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{fmt.arguments}": ')
        lines.append(f'call{index}: {before} args{index} "}}"')
        lines.append(f"args{index}: %json {json.dumps(schema)}")
    markers = frozenset(special[mark] for mark in (fmt.begin, fmt.end) if mark in special)
    return Grammar("calls", "\n".join(lines) + "\n", markers)


@dataclass(frozen=True, slots=True)
class ResumedProgram:
    """A `types.TokenProgram` that starts after the first tokens of an answer, which the request contains."""

    program: TokenProgram
    state: object

    def start(self) -> object:
        """Return the state after those tokens."""
        return self.state

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Add a sampled token; return the new state and the tokens to force."""
        return self.program.step(state, token)


def resume_program(program: TokenProgram, tokens: Sequence[int]) -> tuple[ResumedProgram, tuple[int, ...]]:
    """Return a program resumed after an answer's first tokens, and the forced tokens missing at their end.

    Raises `BadRequest` if `tokens` differ from those that the program forces.
    """
    state, at = program.start(), 0
    missing: tuple[int, ...] = ()
    while at < len(tokens):
        state, forced = program.step(state, tokens[at])
        given = tuple(tokens[at + 1 : at + 1 + len(forced)])
        if given != tuple(forced[: len(given)]):
            raise BadRequest("answer_token_ids", "other tokens stand where the calculator forces its result")
        missing, at = tuple(forced[len(given) :]), at + 1 + len(forced)
    return ResumedProgram(program, state), missing


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens' ids by text."""
    return {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
