"""nanochat's calculator without `eval`: arithmetic and a few string methods, evaluated on the syntax tree.

Accepts the expressions of nanochat's `use_calculator` and gives the same results. The text is matched against known
tokens before it is parsed, the tree is evaluated without recursion, and the size of every value is bounded. So no code
runs, time and memory are bounded, and any thread can call it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from types import EllipsisType
from typing import Any

MAX_EXPRESSION = 256
"""Most characters of an expression."""
MAX_DEPTH = 64
"""Most nested parentheses. Python's parser recurses: 80 end the process in a thread with 128 KiB of stack, and Python
3.12 needs 256 KiB for 64."""
MAX_BITS = 4096
"""Most bits of an integer, checked before a product is computed."""
MAX_RESULT = 256
"""Most characters of a result's text."""

Value = int | float | str | bool | EllipsisType | tuple[()] | list[str]
"""The value of an expression; nanochat inserts its `str` into the model's context."""

_ARITHMETIC = frozenset("0123456789*+-/.() ")
_COUNTING = re.compile(r"[A-Za-z0-9'\"()._ ]*")
_DENIED = (
    *("__", "import", "exec", "eval", "compile", "open", "file", "input", "raw_input", "globals", "locals", "vars"),
    *("dir", "getattr", "setattr", "delattr", "hasattr"),
)
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        {"count", "upper", "lower", "strip", "lstrip", "rstrip", "title", "capitalize", "swapcase", "split"}
    ),
    list: frozenset({"count"}),
    int: frozenset({"bit_length"}),
    bool: frozenset({"bit_length"}),
}
_WORDS = "|".join({"and", "or", "not", "True", "False", "None"}.union(*_METHODS.values()))
# Possessive quantifiers make matching linear, and keep "1or" from being split, for which Python's parser warns.
_TOKENS = re.compile(
    rf"""(?: [ \t\n]
    | (?>[0-9][0-9_]*+\.?+[0-9_]*+(?:[eE][+-]?+[0-9]++)?+)(?!\w)
    | (?:{_WORDS})(?!\w)
    | [uUrR]?'(?!'')[^'\\\n]*+' | [uUrR]?"(?!"")[^"\\\n]*+"
    | [-+*/().]
    )*+""",
    re.VERBOSE,
)
_FAILED = object()
"""The value of a subexpression for which Python raises; it propagates unless `and` or `or` skips it."""

_Operation = Callable[[list[Any]], Any]


class _Refused(Exception):
    """The expression is not supported."""


def calculate(expression: str) -> Value | None:
    """Return the result of nanochat's calculator, or None if not allowed, invalid or too large. Never raises."""
    if len(expression) > MAX_EXPRESSION:
        return None
    text = expression.replace(",", "")
    return evaluate(text) if _is_allowed(text) else None


def evaluate(expression: str) -> Value | None:
    """Return the value of a supported expression within the limits, else None. Never raises.

    Supported: numbers, strings, True, False, None, `()` and `...`; + - * / // and signs; and, or, not; the methods
    count, upper, lower, strip, lstrip, rstrip, title, capitalize, swapcase, split (and count on its list) and int's
    bit_length, with at most one argument. The expression "None" also returns None.
    """
    if len(expression) > MAX_EXPRESSION or not _TOKENS.fullmatch(expression) or _depth(expression) > MAX_DEPTH:
        return None
    try:
        value = _walk(ast.parse(expression.lstrip(" \t"), mode="eval").body)
    except (_Refused, SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return None if result_text(value) is None else value


def _depth(expression: str) -> int:
    """Return the nesting depth of parentheses, including those in strings."""
    steps = ({"(": 1, ")": -1}.get(character, 0) for character in expression)
    return max(accumulate(steps), default=0)


def result_text(value: Any) -> str | None:
    """Return the text of a result as nanochat writes it, or None if there is no result or it is too long."""
    if value is None or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        return None
    text = str(value)
    return text if len(text) <= MAX_RESULT else None


def _is_allowed(text: str) -> bool:
    """Apply nanochat's filters to an expression without commas."""
    if _ARITHMETIC.issuperset(text):
        return "**" not in text
    lowered = text.lower()
    denied = any(word in lowered for word in _DENIED)
    return _COUNTING.fullmatch(text) is not None and not denied and ".count(" in text


def _walk(root: ast.expr) -> Any:
    """Return the value of a tree. Raises `_Refused` if it is not supported or if Python raises."""
    waiting: list[ast.expr] = [root]
    steps: list[tuple[int, _Operation]] = []
    while waiting:
        operands, operation = _plan(waiting.pop())
        steps.append((len(operands), operation))
        waiting += operands
    values: list[Any] = []
    for count, operation in reversed(steps):  # operands before their operation, in order
        first = len(values) - count
        values[first:] = [operation(values[first:])]
    if values[0] is _FAILED:
        raise _Refused
    return values[0]


def _plan(node: ast.expr) -> tuple[list[ast.expr], _Operation]:
    """Return a node's operands and the operation on their values."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, int | float | str | EllipsisType):
            return [], lambda _: value
        case ast.Tuple(elts=[]):
            return [], lambda _: ()
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return [operand], _strict(_UNARY[type(op)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return [left, right], _strict(partial(_arithmetic, _BINARY[type(op)]))
        case ast.BoolOp(op=op, values=operands):
            return operands, partial(_choice, isinstance(op, ast.Or))
        case ast.Call(func=ast.Attribute(value=subject, attr=name), args=arguments, keywords=[]) if len(arguments) < 2:
            return [subject, *arguments], _strict(partial(_call, name))
    raise _Refused


def _strict(function: Callable[..., Any]) -> _Operation:
    """Return an operation whose value is `_FAILED` if an operand's is or if `function` raises."""

    def run(values: list[Any]) -> Any:
        if any(value is _FAILED for value in values):
            return _FAILED
        try:
            return function(*values)
        except (ArithmeticError, TypeError, ValueError):
            return _FAILED

    return run


def _choice(wanted: bool, values: list[Any]) -> Any:
    """Return the first true value for `or`, the first false one for `and`, else the last; skip the rest."""
    found = (value for value in values[:-1] if value is _FAILED or bool(value) is wanted)
    return next(found, values[-1])


def _arithmetic(function: Callable[[Any, Any], Any], left: Any, right: Any) -> int | float | tuple[()]:
    """Compute with numbers, and with `()`, which can be repeated and added."""
    if not all(isinstance(value, int | float) or value == () for value in (left, right)):
        raise _Refused
    value: int | float | tuple[()] = function(left, right)
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _Refused
    return value


def _product(left: int | float, right: int | float) -> int | float:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS + 1:
        raise _Refused
    return left * right


def _call(name: str, subject: Any, *arguments: Any) -> Any:
    if name not in _METHODS.get(type(subject), frozenset()):
        raise _Refused
    return operator.methodcaller(name, *arguments)(subject)


_UNARY: Mapping[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_}
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _product,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
