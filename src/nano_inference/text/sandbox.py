"""Compile and render chat templates with Jinja's immutable sandbox, set up as in Transformers 5.

The texts equal those of `transformers.utils.chat_template_utils.render_jinja_template`. What a template of a model
could misuse is refused before it is compiled (`_check`), and a rendering has a budget of text and of CPU time: each
loop, macro, call and filter spends it, so that a template without end raises `TemplateLimit` by itself.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from types import BuiltinMethodType, FunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nano_inference.text.templates import Program, TemplateLimit, TemplateRefusal, size_of
from nano_inference.types import ModelError

SAFE_JINJA = (3, 1, 6)
"""The first version without a known escape (CVE-2025-27516)."""
MAX_SOURCE = 1 << 18
"""Limit on a template's characters; the longest known ones have 2¹⁵."""
MAX_CPU_S = 1.0
"""Limit on the CPU seconds of a short rendering; a chat of 10 KB takes 0.002."""
FREE_CPU_S = 0.25
"""CPU seconds of a short rendering from which it uses at most a fifth of a processor."""
CHARACTERS_PER_CPU_S = 512 << 10
"""Characters of a request that raise its limit by one CPU second."""
MAX_TEXT, TEXT_PER_CHARACTER = 1 << 24, 64
"""Limit on the characters that a rendering makes, intermediate texts included: a base, and per character of input."""
MAX_WIDTH = 1 << 16
"""Limit on numbers that widen a text, such as the width of `center`."""
MAX_BITS = 4096
"""Limit on the operands of arithmetic."""

_WIDE = re.compile(r"\d{6}")
_WIDENS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "wordwrap"}) | frozenset(
    {"batch", "slice", "tojson", "round", "format", "format_map"}
)
_KEEPS = frozenset(
    {"batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"}
) | {
    *("map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum"),
    "unique",
}
"""Filters that do not write a structure as text."""
_OURS = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that Jinja adds to calls."""


def compile_template(source: str, where: str) -> Program:
    """Compile a template.

    Raises `ModelError` naming `where` for one that does not compile or that uses what is refused.
    """
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < SAFE_JINJA:
        raise ModelError(f"{where}: the chat template needs jinja2>=3.1.6: older sandboxes can be left")
    if len(source) > MAX_SOURCE:
        raise ModelError(f"{where}: the chat template has {len(source)} characters, more than {MAX_SOURCE}")
    sandbox = _Sandbox(where)
    try:
        tree = sandbox.parse(source)
        _check(tree, where)
        reads, seeks = frozenset(_texts_in(tree)), tuple(_sought(tree))
        template = sandbox.from_string(_Counting().visit(tree))
    except TemplateSyntaxError as error:
        raise ModelError(
            f"{where}: the chat template does not compile: {error.message} (line {error.lineno})"
        ) from None
    except ModelError:
        raise
    except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"{where}: the chat template does not compile: {error}") from None
    return Program(functools.partial(sandbox.run, template), reads, seeks)


class _Budget(threading.local):
    """What one rendering, in one thread, may still use."""

    left = MAX_TEXT
    deadline = float("inf")
    rest_at = float("inf")
    """CPU time of the thread at which it sleeps for a moment."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Transformers' environment, which also counts what a rendering uses."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, where: str) -> None:
        self._where = where
        self._budget = _Budget()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._counted
        )
        self.filters["tojson"] = _to_json
        del self.filters["attr"], self.globals["lipsum"]
        for name, function in self.filters.items():
            self.filters[name] = self._bounded(name, function)
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def run(self, template: jinja2.Template, data: Mapping[str, Any]) -> str:
        """Render within a budget that grows with the data."""
        size = size_of(data, 1 << 40)
        self._budget.left = MAX_TEXT + TEXT_PER_CHARACTER * size
        self._budget.deadline = time.thread_time() + MAX_CPU_S + size / CHARACTERS_PER_CPU_S
        self._budget.rest_at = self._budget.deadline - MAX_CPU_S + FREE_CPU_S
        try:
            return template.render(data)
        except _Raised as error:
            raise TemplateRefusal(f"the chat template refuses these messages: {error.message}") from None
        except TemplateLimit:
            raise
        except (RecursionError, MemoryError) as error:
            text = "nests its calls too deep" if isinstance(error, RecursionError) else "takes too much memory"
            raise TemplateLimit(self._where, f"the chat template {text} to render these messages") from None
        except Exception as error:  # any error of the template's expressions
            raise TemplateRefusal(f"the chat template cannot render these messages: {error}") from None
        finally:
            self._budget.left = MAX_TEXT
            self._budget.deadline = self._budget.rest_at = float("inf")

    def spend(self, count: int) -> None:
        """Count characters. Raises `TemplateLimit` when the text or the CPU time is used up."""
        self._budget.left -= count
        if self._budget.left < 0:
            raise TemplateLimit(self._where, "the chat template writes too much text for these messages")
        now = time.thread_time()
        if now > self._budget.rest_at:  # so that loops in several threads leave the interpreter to others
            time.sleep(4e-3)
            self._budget.rest_at = now + 1e-3
        if now > self._budget.deadline:
            text = f"the chat template takes more than {MAX_CPU_S:g} s of CPU time to render these messages"
            raise TemplateLimit(self._where, text)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, without numbers or texts that take long to make."""
        numbers = [value for value in (left, right) if isinstance(value, int)]
        if any(number.bit_length() > MAX_BITS for number in numbers):
            raise SecurityError(f"a number has more than {MAX_BITS} bits")
        if operator == "**" and len(numbers) == 2 and left.bit_length() * abs(right) > MAX_BITS:
            raise SecurityError(f"a power has more than {MAX_BITS} bits")
        if operator == "*" and len(numbers) == 1:
            self.spend(max(0, numbers[0]) * size_of(left if numbers[0] is right else right, self._budget.left))
        if operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        return self._sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method, and count what it returns."""
        method = getattr(__obj, "__wrapped__", None) if isinstance(__obj, FunctionType) else __obj
        if isinstance(method, BuiltinMethodType):
            given = [*args, *(value for name, value in kwargs.items() if name not in _OURS)]
            if method.__name__ == "join" and given:
                args = ([*given[0]],)
                given = [*args]
            __self._check_growth(method.__name__, method.__self__, given)
        return __self._sized(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format`. Raises `SecurityError` for a format string that reads fields."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts what it is given and what it returns."""
        skipped = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = [*args[skipped:], *kwargs.values()]
            if name not in _KEEPS:
                self._counted(given)
            if name == "join" and len(given) > 1:
                self.spend(len(str(given[1])) * _length(given[0]))
            elif name == "format":
                self._check_percent(str(given[0]), given[1:])
            elif name == "wordwrap":
                self.spend(len(str(given[0])) * max(map(len, filter(_is_text, given[1:])), default=0))
            elif given:
                self._check_growth(name, given[0], given[1:])
            return self._sized(function(*args, **kwargs))

        return bounded

    def _check_growth(self, name: str, value: Any, given: list[Any]) -> None:
        """Count what a method or filter adds to a text beyond the texts that it is given."""
        widths = [abs(number) for number in given if isinstance(number, int)] if name in _WIDENS else []
        if max(widths, default=0) > MAX_WIDTH:
            raise SecurityError(f"{name} with a number above {MAX_WIDTH}")
        if not isinstance(value, str):
            return
        if name == "replace" and len(given) > 1:
            self.spend(value.count(str(given[0])) * len(str(given[1])))
        elif name in ("expandtabs", "indent"):
            longest = max([8, *widths, *map(len, filter(_is_text, given))])
            self.spend((value.count("\t") + len(value.splitlines())) * longest)
        elif name == "join":
            self.spend(len(value) * len(given[0]))
        elif name in ("format", "format_map"):
            self.spend(value.count("{") * size_of(given, self._budget.left))
        elif name == "translate":
            self.spend(len(value) * size_of(given, self._budget.left))

    def _check_percent(self, left: str, right: Any) -> None:
        """Refuse wide fields of `left % right`, and count the texts that it inserts."""
        values = right if isinstance(right, list | tuple) else [right]
        if _WIDE.search(left) or ("*" in left and any(isinstance(n, int) and abs(n) > MAX_WIDTH for n in values)):
            raise SecurityError(f"a width above {MAX_WIDTH} in a format")
        self.spend(len(left) + max(1, left.count("%(")) * size_of(right, self._budget.left))

    def _counted(self, value: Any) -> Any:
        """Count a value as text, and return it."""
        self.spend(size_of(value, self._budget.left))
        return value

    def _sized(self, value: Any) -> Any:
        """Count a value without what it contains, and return it."""
        self.spend(len(value) if isinstance(value, str) else 8 * _length(value))
        return value


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
    """Transformers' namespace: no names with an underscore. Prints without its values, which could share much text."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _Counting(NodeTransformer):
    """Adds calls that count: loops and macros spend the text that one turn writes, `~` what it joins."""

    def _ticking(self, node: Any) -> nodes.Node:
        weight = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        weight += sum(len(part.data) for part in node.body if isinstance(part, nodes.TemplateData))
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("spend"), [nodes.Const(weight)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _ticking

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = [nodes.Filter(part, "string", [], [], None, None).set_lineno(node.lineno) for part in node.nodes]
        return nodes.Concat(parts).set_lineno(node.lineno)


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
    """Raise `SecurityError` for fields such as `{0.name}` and `{0[name]}`, and for wide ones."""
    try:
        fields = [*string.Formatter().parse(str(text))]
    except ValueError:  # format() itself raises it
        return
    for _, name, spec, _ in fields:
        if re.search(r"[.\[]", name or ""):
            raise SecurityError("a chat template may not read fields in a format string")
        if spec:
            if _WIDE.search(spec):
                raise SecurityError(f"a width above {MAX_WIDTH} in a format")
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


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict | str) else 1


def _is_text(value: object) -> bool:
    return isinstance(value, str)
