"""Compile and render guarded templates with limits on steps and output.

Imports neither tokenizers nor torch: the worker processes of `template_process` run this code as well.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import minijinja

from nano_inference.text import template_guard
from nano_inference.text.json_view import unview, view
from nano_inference.text.templates import TemplateLimit, Templates, size_of
from nano_inference.types import BadRequest, ModelError

MAX_STRING = 1 << 24
"""Limit on the characters of one result of `replace`, `join` or `indent`."""


def compile_templates(templates: Templates) -> minijinja.Environment:
    """Guard and compile templates. Raises `ModelError` naming the file and the wrong line."""
    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: False,
        fuel=templates.fuel,
        filters={"tojson": to_json, "replace": _replace, "join": _join, "indent": _indent},
    )
    for unbounded in ("format", "attr", "pprint", "batch", "slice"):
        environment.remove_filter(unbounded)
    environment.remove_global("debug")
    for name, text in templates.sources.items():
        try:
            environment.add_template(name, template_guard.guarded(text, templates.where))
        except minijinja.TemplateError as error:
            message = f"{templates.where}: the chat template does not compile: {error.message}"
            raise ModelError(message) from None
    return environment


def run(environment: minijinja.Environment, templates: Templates, name: str, data: Mapping[str, Any]) -> str:
    """Render one template with JSON data.

    Raises `BadRequest` if the template refuses the messages, `TemplateLimit` for too many steps or too much output.
    """
    values = {key: view(value, key) for key, value in data.items()}
    counter = _counter_for(values, templates.sources)
    helpers = {
        "raise_exception": _Helper(_refuse),
        "strftime_now": _Helper(_now),
        template_guard.SPEND: _Helper(counter.spend),
        template_guard.TURN: _Helper(counter.turn),
        template_guard.REPLACE: _Helper(_replace),
        template_guard.JOIN: _Helper(_join_method),
    }
    try:
        return environment.render_template(name, **values, **helpers)
    except ModelError as error:
        raise TemplateLimit(templates.where, str(error)) from None
    except minijinja.TemplateError as error:
        if error.kind == "OutOfFuel":
            raise TemplateLimit(templates.where, "the chat template takes too many steps") from None
        raise BadRequest(f"the chat template cannot render these messages: {error.message}") from None
    except BadRequest:
        raise
    except MemoryError:
        raise
    except Exception as error:  # a helper or a view got arguments of unexpected types
        raise BadRequest(f"the chat template cannot render these messages: {error}") from None


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON: the `tojson` of transformers, without the HTML escapes of Jinja's `tojson`."""
    pair = None if separators is None else (separators[0], separators[1])
    if indent is not None and not 0 <= indent <= 16:
        raise ModelError(f"the chat template asks for JSON with an indent of {indent}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys, default=unview
    )


class _Helper:
    """A function that a template may call; unlike a function's, its repr reveals no memory address."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __repr__(self) -> str:
        return "helper"


class _Counter:
    """Counts down the characters that one rendering may still write or store."""

    def __init__(self, budget: int, per_turn: int) -> None:
        self._left = budget
        self._per_turn = per_turn

    def turn(self, value: Any) -> bool:
        """Count one iteration of a loop over `value`, and the template text that it may write."""
        return self.spend(value, self._per_turn)

    def spend(self, value: Any, more: int = 0) -> bool:
        """Count a value and `more` characters. Raises `ModelError` when the budget is exceeded."""
        self._left -= more + size_of(value, self._left)
        if self._left < 0:
            raise ModelError("the chat template writes too much text")
        return False


def _counter_for(values: Mapping[str, Any], sources: Mapping[str, str]) -> _Counter:
    """Return a counter with a budget proportional to the sizes of the messages and of the templates."""
    messages = values.get("messages")
    turns = len(messages) if isinstance(messages, Sequence) else 0
    written = max(map(len, sources.values()))
    return _Counter((1 << 20) + 32 * size_of(values, 1 << 30) + 4 * turns * written, written // 16)


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
    """Indent as Jinja does: neither the first line (`first`) nor empty ones (`blank`), unless asked to."""
    lines = (str(text) + "\n").splitlines()
    step = len(width) if isinstance(width, str) else width
    _check_size(len(str(text)) + len(lines) * step)
    space = width if isinstance(width, str) else " " * width
    rest = [space + line if line or blank else line for line in lines[1:]]
    return (space if first else "") + "\n".join([lines[0], *rest])


def _check_size(size: int) -> None:
    if size > MAX_STRING:
        raise ModelError(f"the chat template makes a string of {size} characters")
