"""Compile and render chat templates with Jinja's immutable sandbox, set up as in Transformers 5.

The texts equal those of `transformers.utils.chat_template_utils.render_jinja_template`. What a template of a model
could misuse to leave the sandbox is refused before it is compiled (`_check`), and its text is bounded. Its CPU time and
memory are not: they are the operator's choice of model (SECURITY.md).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from nano_inference.text.templates import Program, TemplateLimit, TemplateRefusal
from nano_inference.types import ModelError

SAFE_JINJA = (3, 1, 6)  # the first version without a known escape (CVE-2025-27516)
MAX_SOURCE = 1 << 18  # limit on a template's characters; the longest known ones have 2¹⁵
MAX_TEXT = 1 << 26  # limit on the characters of a rendered text; a request's body has at most as many bytes by default
MAX_RESULT = 1 << 22  # limit on the bits of a product or power, and on the length of a repeated text or list


def compile_template(source: str, where: str) -> Program:
    """Compile a template.

    Raises `ModelError` naming `where` for one that does not compile or that uses what is refused.
    """
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < SAFE_JINJA:
        raise ModelError(f"{where}: the chat template needs jinja2>=3.1.6: older sandboxes can be left")
    if len(source) > MAX_SOURCE:
        raise ModelError(f"{where}: the chat template has {len(source)} characters, more than {MAX_SOURCE}")
    sandbox = _Sandbox()
    try:
        tree = sandbox.parse(source)
        _check(tree, where)
        reads, seeks = frozenset(_texts_in(tree)), tuple(_sought(tree))
        template = sandbox.from_string(tree)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"{where}: the chat template does not compile: {error.message} (line {error.lineno})"
        ) from None
    except ModelError:
        raise
    except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"{where}: the chat template does not compile: {error}") from None
    return Program(functools.partial(_run, template, where), reads, seeks)


def _run(template: jinja2.Template, where: str, data: Mapping[str, Any]) -> str:
    """Return the rendered text. Raises `TemplateRefusal` for an error of the template, and `TemplateLimit`."""
    parts: list[str] = []
    room = MAX_TEXT
    try:
        for part in template.generate(data):
            parts.append(part)
            room -= len(part)
            if room < 0:
                raise TemplateLimit(where, "the chat template writes too much text for these messages")
    except _Raised as error:
        raise TemplateRefusal("", f"the chat template refuses these messages: {error.message}") from None
    except TemplateLimit:
        raise
    except (RecursionError, MemoryError) as error:
        text = "nests its calls too deep" if isinstance(error, RecursionError) else "takes too much memory"
        raise TemplateLimit(where, f"the chat template {text} to render these messages") from None
    except Exception as error:  # any error of the template's expressions
        raise TemplateRefusal("", f"the chat template cannot render these messages: {error}") from None
    return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Transformers' environment, without `attr`, `lipsum` and format strings that read fields."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        del self.filters["attr"], self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply `*` or `**`; refuse a result that one instruction would take minutes or gigabytes to make."""
        size = 0
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            size = bits[0] * abs(right) if operator == "**" else sum(bits)
        elif isinstance(left, int) or isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            size = count * len(value) if isinstance(value, str | list | tuple) else 0
        if size > MAX_RESULT:
            raise SecurityError(f"{operator} would make more than {MAX_RESULT} bits, characters or items")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format`. Raises `SecurityError` for a format string that reads fields."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


class _Raised(TemplateError):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """The blocks `{% generation %}`, by which trainers mark an assistant's tokens."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a block that writes its body, in a scope of its own as in Transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Callable[[], str]) -> str:
        """Return the text of a block."""
        return caller()


class _Dict:
    """Transformers' `dict`: no class, so that nothing is reached from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Transformers' namespace: no names with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check(tree: nodes.Template, where: str) -> None:
    """Raise `ModelError` for names of Python's internals and for format strings that read fields."""
    for node in tree.find_all((nodes.Getattr, nodes.NSRef, nodes.Const)):
        name = node.value if isinstance(node, nodes.Const) else node.attr  # type: ignore[attr-defined]
        if isinstance(name, str) and name.startswith("__"):
            raise ModelError(f"{where}: line {node.lineno}: a chat template may not use {name[:64]!r}")
        if isinstance(node, nodes.Getattr) and name in ("format", "format_map") and isinstance(node.node, nodes.Const):
            try:
                _check_format(node.node.value)
            except SecurityError as error:
                raise ModelError(f"{where}: line {node.lineno}: {error.message}") from None


def _texts_in(tree: nodes.Node) -> Iterator[str]:
    """Yield the attributes and the constant texts of a tree's expressions."""
    yield from (node.attr for node in tree.find_all(nodes.Getattr))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    if isinstance(tree, nodes.Const) and isinstance(tree.value, str):
        yield tree.value


def _sought(tree: nodes.Template) -> Iterator[str]:
    """Yield the texts that are compared or passed to methods, filters and tests, as constants or by a name."""
    values: dict[str, list[str]] = {}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            values.setdefault(assign.target.name, []).extend(_texts_in(assign.node))
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        parts: Iterable[nodes.Node] = node.args if not isinstance(node, nodes.Compare) else [node]  # type: ignore[attr-defined]
        if isinstance(node, nodes.Call) and not isinstance(node.node, nodes.Getattr):
            continue  # a macro's arguments are mostly written
        for part in parts:
            yield from _texts_in(part)
            names = [part] if isinstance(part, nodes.Name) else part.find_all(nodes.Name)
            yield from (text for name in names for text in values.get(name.name, ()))


def _check_format(text: object) -> None:
    """Raise `SecurityError` for fields such as `{0.name}` and `{0[name]}`, also inside a width."""
    try:
        fields = [*string.Formatter().parse(str(text))]
    except ValueError:  # format() itself raises it
        return
    for _, name, spec, _ in fields:
        if re.search(r"[.\[]", name or ""):
            raise SecurityError("a chat template may not read fields in a format string")
        if spec:
            _check_format(spec)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template has no {name!r}: names may not begin with an underscore")


def _raise(message: object) -> None:
    raise _Raised(str(message))


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON, without the HTML escapes of Jinja's own `tojson`."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
