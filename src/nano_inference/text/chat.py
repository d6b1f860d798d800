"""Messages to text and to ids, through a model's own chat template.

Templates are code from a model's files. They run in MiniJinja, which has no way to Python's objects, under a limit of
steps and of text (`template_guard`), with what transformers gives its templates: the special tokens' texts,
`raise_exception`, `strftime_now`, a `tojson` that escapes nothing, break and continue.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import minijinja

from nano_inference.text import template_guard
from nano_inference.text.hf import read_json
from nano_inference.text.json_view import unview, view
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import BadRequest, ModelError, TokenizerSource

Message = Mapping[str, Any]

FUEL = 5_000_000
"""MiniJinja's steps in one rendering: well under a second; a message takes some hundreds."""
MAX_STRING = 1 << 24
"""Characters that one `replace`, `join` or `indent` may make."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Names that `extra` cannot take."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A compiled chat template; safe to share between threads."""

    source: str
    """As it stands in the model's files."""
    where: str
    """The file it is from, for messages of errors."""
    named: Mapping[str, str]
    """Variables of every rendering: `bos_token`, `eos_token`, … as far as the tokenizer has them."""
    tool_source: str | None
    """The template named "tool_use", which takes over when there are tools."""
    compiled: minijinja.Environment = field(repr=False, compare=False)


def load_chat_template(source: TokenizerSource, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Find a model's chat template and compile it; None when the model has none.

    A directory's chat_template.jinja wins over chat_template.json and tokenizer_config.json, as in transformers;
    GGUF has `tokenizer.chat_template`. Raises `ModelError` for a template that does not compile or is not allowed.
    """
    if source.gguf is not None:
        found = source.gguf.get("tokenizer.chat_template")
        tools = source.gguf.get("tokenizer.chat_template.tool_use")
        templates = {"default": found, "tool_use": tools}
    else:
        templates = _templates_of(Path(source.path))
    chosen = {name: text for name, text in templates.items() if isinstance(text, str) and text}
    if "default" not in chosen:
        return None
    return chat_template(
        chosen["default"], where=source.path, named=tokenizer.named, tool_source=chosen.get("tool_use")
    )


def chat_template(
    source: str, *, where: str, named: Mapping[str, str] = _NOTHING, tool_source: str | None = None
) -> ChatTemplate:
    """Compile a chat template from its text. Raises `ModelError` naming `where` and the line that is wrong."""
    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: False,
        fuel=FUEL,
        filters={"tojson": to_json, "replace": _replace, "join": _join, "indent": _indent},
    )
    for hole in ("format", "attr", "pprint", "batch", "slice"):
        environment.remove_filter(hole)
    environment.remove_global("debug")
    for name, text in (("default", source), ("tool_use", tool_source)):
        if text is not None:
            _compile(environment, name, text, where)
    return ChatTemplate(
        source=source, where=where, named=MappingProxyType(dict(named)), tool_source=tool_source, compiled=environment
    )


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] = _NOTHING,
) -> str:
    """Return the text that a model reads for these messages.

    With `continue_final` it ends where the last message's content does, so that the model goes on with that message.
    `extra` are further variables of the template (`enable_thinking`). Raises `BadRequest` for messages of a wrong
    shape or that the template refuses, `ModelError` for a template that runs or writes without end.
    """
    check_messages(messages)
    if continue_final:
        return _render_open(template, messages, add_generation_prompt, tools, extra)
    taken = sorted((RESERVED | template_guard.OWN) & set(extra))
    if taken:
        raise BadRequest(f"chat template variable {taken[0]!r} is reserved")
    data = {
        **template.named,
        **view(extra, "extra"),
        "messages": view(messages, "messages"),
        "tools": view(tools, "tools"),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return _run(template, data, "tool_use" if tools and template.tool_source is not None else "default")


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] = _NOTHING,
) -> list[int]:
    """Return the ids of the rendered messages. BOS is there when the template writes it, never a second time.

    Special tokens spelled out in a message are plain text to the model: they cannot forge a turn. Raises as
    `render` does, and `BadRequest` for such a message when the tokenizer cannot spell the token out.
    """
    special = _special_pattern(tokenizer)
    hostile = special is not None and any(special.search(text) for text in _strings([messages, tools, extra]))
    if special is None or not hostile:
        text = render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            tools=tools,
            extra=extra,
        )
        return tokenizer.encode(text, add_special=False)
    mark = _unused_character([messages, tools, extra, template.source])

    def defused(value: Any) -> Any:
        return _map_strings(value, lambda text: special.sub(lambda m: m[0][0] + mark + m[0][1:], text))

    check_messages(messages)
    text = render(
        template,
        defused(messages),
        add_generation_prompt=add_generation_prompt,
        continue_final=continue_final,
        tools=defused(tools),
        extra=defused(extra),
    )
    return _encode_defused(tokenizer, text, special, mark)


def _render_open(
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
) -> str:
    """Render with a mark at the end of the last message, and cut there."""
    last = messages[-1]
    if add_generation_prompt:
        raise BadRequest("continue_final_message and add_generation_prompt exclude each other")
    if not isinstance(last.get("content"), str):
        raise BadRequest("continue_final_message needs a last message whose content is a text")
    mark = _unused_character([messages, tools, extra, template.source])
    marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
    text = render(template, marked, add_generation_prompt=False, tools=tools, extra=extra)
    if mark not in text:
        raise BadRequest("continue_final_message: the chat template does not show the last message as it is")
    return text[: text.rindex(mark)].replace(mark, "")  # a template may show it twice


def check_messages(messages: object) -> None:
    """Raise `BadRequest` naming the index unless every message has a role and a text (or tool calls)."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise BadRequest("messages must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadRequest(f"messages[{index}] must be an object, not {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise BadRequest(f"messages[{index}].role must be a non-empty string")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise BadRequest(f"messages[{index}].content must be a string, not {type(content).__name__}")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of transformers' templates: plain JSON, without the HTML escapes of Jinja's own."""
    pair = None if separators is None else (separators[0], separators[1])
    if indent is not None and not 0 <= indent <= 16:
        raise ModelError(f"the chat template asks for JSON with an indent of {indent}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys, default=unview
    )


def _templates_of(directory: Path) -> dict[str, Any]:
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            return {"default": jinja.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{jinja}: cannot be read: {error}") from None
    value: Any = None
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = value or read_json(directory / name).get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        return {str(entry.get("name")): entry.get("template") for entry in entries}
    return {"default": value}


def _compile(environment: minijinja.Environment, name: str, text: str, where: str) -> None:
    try:
        environment.add_template(name, template_guard.guarded(text, where))
    except minijinja.TemplateError as error:
        raise ModelError(f"{where}: the chat template does not compile: {error.message}") from None


def _run(template: ChatTemplate, data: dict[str, Any], name: str) -> str:
    turns = len(data["messages"])
    size = _size(data, 1 << 30)
    written = max(len(template.source), len(template.tool_source or ""))
    counter = _Counter((1 << 20) + 32 * size + 4 * turns * written)
    helpers = {
        "raise_exception": _Helper(_refuse),
        "strftime_now": _Helper(_now),
        template_guard.SPEND: _Helper(counter.spend),
        template_guard.TURN: _Helper(lambda value: counter.spend(value, written // 16)),
        template_guard.REPLACE: _Helper(_replace),
        template_guard.JOIN: _Helper(_join_method),
    }
    try:
        return template.compiled.render_template(name, **data, **helpers)
    except ModelError as error:
        raise ModelError(f"{template.where}: {error}") from None
    except minijinja.TemplateError as error:
        if error.kind == "OutOfFuel":
            raise ModelError(f"{template.where}: the chat template takes too many steps") from None
        raise BadRequest(f"the chat template cannot render these messages: {error.message}") from None
    except BadRequest:
        raise
    except Exception as error:  # of our helpers or of a view, with values they were not made for
        raise BadRequest(f"the chat template cannot render these messages: {error}") from None


class _Helper:
    """A function that a template may call; printed, it has no address in memory as a function has."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __repr__(self) -> str:
        return "helper"


class _Counter:
    """The text that one rendering may still write or keep."""

    def __init__(self, budget: int) -> None:
        self._left = budget

    def spend(self, value: Any, more: int = 0) -> bool:
        """Count a value; raise `ModelError` when the rendering has written too much."""
        self._left -= more + _size(value, self._left)
        if self._left < 0:
            raise ModelError("the chat template writes too much text")
        return False


def _size(value: Any, limit: int) -> int:
    """Return about how many characters a value would print; stop counting beyond `limit`."""
    total, rest = 0, [value]
    while rest and total <= limit:
        item = rest.pop()
        total += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence) and not isinstance(item, str):
            rest += item
    return total


def _refuse(message: object) -> None:
    raise BadRequest(f"the chat template refuses these messages: {message}")


def _now(pattern: str) -> str:
    if len(pattern) > 256:
        raise ModelError("the chat template asks for a date in a format of more than 256 characters")
    return datetime.datetime.now().strftime(pattern)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    times = min(str(text).count(old), len(str(text)) + 1 if count is None or count < 0 else count)
    _check_size(len(str(text)) + times * len(new))
    return str(text).replace(old, new, times)


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    items = [str(value if attribute is None else value[attribute]) for value in values]
    _check_size(sum(map(len, items)) + len(items) * len(separator))
    return separator.join(items)


def _join_method(separator: str, values: Iterable[Any]) -> str:
    return _join(values, separator)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent`: every line but the first, and not the empty ones, unless asked."""
    lines = (str(text) + "\n").splitlines()
    step = len(width) if isinstance(width, str) else width
    _check_size(len(str(text)) + len(lines) * step)
    space = width if isinstance(width, str) else " " * width
    rest = [space + line if line or blank else line for line in lines[1:]]
    return (space if first else "") + "\n".join([lines[0], *rest])


def _check_size(size: int) -> None:
    if size > MAX_STRING:
        raise ModelError(f"the chat template makes a string of {size} characters")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern for the texts of the special tokens, the longest first; None when there are none."""
    texts = sorted({tokenizer.token_text(token) for token in tokenizer.special_ids} - {""}, key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _unused_character(values: Any) -> str:
    """Return a private-use character that stands in none of the texts."""
    used = set().union(*map(set, _strings(values)))
    free = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used), None)
    if free is None:
        raise BadRequest("the messages use every private-use character of Unicode")
    return free


def _encode_defused(tokenizer: Tokenizer, text: str, special: re.Pattern[str], mark: str) -> list[int]:
    """Encode a rendering whose spelled-out special tokens carry a mark: what has none is the template's own.

    Encoding piece by piece must be what the tokenizer does by itself; that is checked on the same text with the
    marks made harmless, and a tokenizer that differs (one that eats spaces around its special tokens) is refused.
    """
    harmless = text.replace(mark, "x")
    if _encode_pieces(tokenizer, harmless, special) != tokenizer.encode(harmless, add_special=False):
        raise BadRequest("a message spells out a special token, which this model's tokenizer cannot take as text")
    return _encode_pieces(tokenizer, text, special, mark)


def _encode_pieces(tokenizer: Tokenizer, text: str, special: re.Pattern[str], mark: str = "") -> list[int]:
    ids: list[int] = []
    at = 0
    for match in special.finditer(text):
        ids += _encode_literal(tokenizer, text[at : match.start()], mark)
        ids += tokenizer.encode(match.group(), add_special=False)
        at = match.end()
    return ids + _encode_literal(tokenizer, text[at:], mark)


def _encode_literal(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    plain = text.replace(mark, "") if mark else text
    return tokenizer.encode(plain, add_special=False, parse_special=False) if plain else []
