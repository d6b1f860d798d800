"""nanochat's calculator without `eval`, and its tool: a token program.

The model writes an expression between <|python_start|> and <|python_end|>; the result is then forced between
<|output_start|> and <|output_end|> (nanochat's engine.py).

Accepts the expressions of nanochat's `use_calculator` and gives the same results. The text is matched against known
tokens before it is parsed, and the size of every value is bounded. So no code runs, time and memory are bounded, and
any thread can call it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import EllipsisType
from typing import Any

from nano_inference.text.kinds import Tokenizer
from nano_inference.text.tool_format import special_tokens

MAX_EXPRESSION = 256  # most characters of an expression
MAX_DEPTH = 64  # most nested parentheses: Python's parser recurses, and 80 end a thread with 128 KiB of stack
MAX_BITS = 4096  # most bits of an integer, checked before a product is computed
MAX_RESULT = 256  # most characters of a result's text

Value = int | float | str | bool | EllipsisType | tuple[int | str, ...] | list[str]
"""The value of an expression; nanochat inserts its `str` into the model's context."""

_ARITHMETIC = frozenset("0123456789*+-/.() ")
_COUNTING = re.compile(r"[A-Za-z0-9'\"()._ ]*")
_DENIED = (
    *("__", "import", "exec", "eval", "compile", "open", "file", "input", "raw_input", "globals", "locals", "vars"),
    *("dir", "getattr", "setattr", "delattr", "hasattr"),
)


def _quoted(q: str) -> str:
    """Return the pattern of string literals in one kind of quotes, single or triple; without braces after an f."""
    kinds = (("[uUrR]?", ""), ("[fF]", "{}"))
    return " | ".join(
        rf"{prefix}{q}{q}{q}(?:[^{q}\\\n{excluded}] | {q}{{1,2}}+(?!{q}))*+{q}{q}{q} |"
        rf"{prefix}{q}(?!{q}{q})[^{q}\\\n{excluded}]*+{q}"
        for prefix, excluded in kinds
    )


# Possessive quantifiers make matching linear, and keep "1or" from being split, for which Python's parser warns.
_TOKENS = re.compile(
    rf"""(?: [ \t\n]
    | (?>[0-9][0-9_]*+\.?+[0-9_]*+(?:[eE][+-]?+[0-9]++)?+)(?!\w)
    | 0(?>[xX][0-9A-Fa-f_]++ | [oO][0-7_]++ | [bB][01_]++)(?!\w)
    | {_quoted("'")} | {_quoted('"')}
    | (?>[A-Za-z_][A-Za-z0-9_]*+)(?!['"\w])
    | [-+*/().%&|^~<>=!]
    )*+""",
    re.VERBOSE,
)


def calculate(expression: str) -> Value | None:
    """Return the result of nanochat's calculator, or None if not allowed, invalid or too large. Never raises."""
    if len(expression) > MAX_EXPRESSION:
        return None
    text = expression.replace(",", "")
    if _ARITHMETIC.issuperset(text):
        return None if "**" in text else evaluate(text)
    is_denied = any(word in text.lower() for word in _DENIED)
    return evaluate(text) if _COUNTING.fullmatch(text) and not is_denied and ".count(" in text else None


def evaluate(expression: str) -> Value | None:
    """Return the value of a supported expression within the limits, else None. Never raises.

    Supported: numbers, strings, True, False, None, `()` and `...`; operators of numbers; comparisons; and, or, not, if;
    the methods of texts, lists and numbers in `_METHODS`, with at most one argument. "None" also returns None.
    """
    if len(expression) > MAX_EXPRESSION or not _TOKENS.fullmatch(expression):
        return None
    depths = accumulate({"(": 1, ")": -1}.get(character, 0) for character in expression)  # also of those in strings
    if max(depths, default=0) > MAX_DEPTH:
        return None
    try:
        tree = ast.parse(expression.lstrip(" \t"), mode="eval").body
        if not all(_is_supported(node) for node in ast.walk(tree)):
            return None
        value = _value(tree, {})
    except (Refused, ArithmeticError, LookupError, TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return None if result_text(value) is None else value


def result_text(value: Any) -> str | None:
    """Return the text of a result as nanochat writes it, or None if there is no result or it is too long."""
    if value is None or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        return None
    text = str(value)
    return text if len(text) <= MAX_RESULT else None


def _is_supported(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return value is None or isinstance(value, int | float | str | EllipsisType)
        case ast.JoinedStr(values=parts):
            return all(isinstance(part, ast.Constant) for part in parts)
        case ast.Tuple(elts=elements):
            return not elements
        case ast.Call(func=function, args=arguments, keywords=keywords):
            return not keywords and (len(arguments) < 2 or not isinstance(function, ast.Attribute))
        case ast.expr():
            return isinstance(
                node, ast.Name | ast.UnaryOp | ast.BinOp | ast.BoolOp | ast.IfExp | ast.Compare | ast.Attribute
            )
    return not isinstance(node, ast.MatMult)


def _value(node: ast.expr, constants: dict[tuple[type, Any], Any]) -> Any:
    """Return the value of a tree of supported nodes. Raises whatever its operations raise.

    `constants` are those found so far: equal ones are one object, as of Python's compiler, because `is` compares
    objects.
    """
    match node:
        case ast.Constant(value=value):
            return constants.setdefault((type(value), value), value)
        case ast.JoinedStr(values=parts):
            text = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            return constants.setdefault((str, text), text)
        case ast.Tuple():
            return ()
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, constants))
        case ast.BinOp(left=left, op=op, right=right):
            return arithmetic(_BINARY[type(op)], _value(left, constants), _value(right, constants))
        case ast.BoolOp(op=op, values=operands):
            value = None
            for operand in operands:
                value = _value(operand, constants)
                if bool(value) is isinstance(op, ast.Or):
                    break
            return value
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, constants) else orelse, constants)
        case ast.Compare(left=first, ops=ops, comparators=others):
            left = _value(first, constants)
            for comparison, other in zip(ops, others, strict=True):
                right = _value(other, constants)
                if not _COMPARISONS[type(comparison)](left, right):
                    return False
                left = right
            return True
        case ast.Attribute(value=subject, attr=name):
            return attribute(name, _value(subject, constants))
        case ast.Call(func=ast.Attribute(value=subject, attr=name), args=arguments):
            return call(name, _value(subject, constants), *[_value(one, constants) for one in arguments])
    raise Refused  # there are no names and no functions; the value may not be needed


def arithmetic(function: Callable[[Any, Any], Any], left: Any, right: Any) -> int | float | str | tuple[()]:
    """Compute with numbers, texts and `()`. Raises `Refused` beyond the limits, and for `%` of a text (a format)."""
    is_format = isinstance(left, str) and function is operator.mod
    if is_format or not all(isinstance(value, int | float | str) or value == () for value in (left, right)):
        raise Refused
    value: int | float | str | tuple[()] = function(left, right)
    if (isinstance(value, int) and value.bit_length() > MAX_BITS) or (isinstance(value, str) and len(value) > MAX_TEXT):
        raise Refused
    return value


def product(left: Any, right: Any) -> Any:
    """Return a product. Raises `Refused` before it computes more than `MAX_BITS` or `MAX_TEXT`."""
    for text, count in ((left, right), (right, left)):
        if isinstance(text, str) and isinstance(count, int) and len(text) * count > MAX_TEXT:
            raise Refused
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS + 1:
        raise Refused
    return left * right


def power(left: int | float, right: int | float) -> int | float:
    """Return a power. Raises `Refused` before it computes an integer of more than `MAX_BITS`, and for complex ones."""
    if isinstance(left, int) and isinstance(right, int) and (left.bit_length() - 1) * right >= MAX_BITS:
        raise Refused
    value: int | float | complex = left**right
    if isinstance(value, complex):
        raise Refused
    return value


def shifted(left: int, right: int) -> int:
    """Return left << right. Raises `Refused` before it computes more than `MAX_BITS`."""
    if operator.index(left).bit_length() + operator.index(right) > MAX_BITS:
        raise Refused
    return left << right


_UNARY: Mapping[type, Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: lambda value: -1 - operator.index(value),  # ~ of a bool warns
}
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: product,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
    ast.LShift: shifted,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}


MAX_TEXT = 8192  # most characters of a text: `rfind` of two such takes about 30 ms

_ANY_TEXT = (
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal"),
    *("isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower"),
    *("lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
    *("split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
)
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_FORMATTING = frozenset({"format", "format_map"})
_WHOLE = ("as_integer_ratio", "bit_count", "bit_length", "conjugate")
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({*_ANY_TEXT, *_PADDING, *_FORMATTING, "expandtabs", "join", "translate"}),
    list: frozenset({"append", "clear", "copy", "count", "extend", "index", "pop", "remove", "reverse", "sort"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(_WHOLE),
    bool: frozenset(_WHOLE),
    float: frozenset({"as_integer_ratio", "conjugate", "fromhex", "hex", "is_integer"}),
}
_ATTRIBUTES: Mapping[type, frozenset[str]] = {
    int: frozenset({"real", "imag", "numerator", "denominator"}),
    bool: frozenset({"real", "imag", "numerator", "denominator"}),
    float: frozenset({"real", "imag"}),
}


class Refused(Exception):
    """The expression is not supported, or a value is too large."""


def call(name: str, subject: Any, *arguments: Any) -> Any:
    """Call a method with at most one argument. Raises `Refused`, and whatever the method raises."""
    if name not in _METHODS.get(type(subject), frozenset()):
        raise Refused
    if isinstance(subject, str):
        _check_text(name, subject, *arguments)
    value = operator.methodcaller(name, *arguments)(subject)
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise Refused
    return value


def attribute(name: str, subject: Any) -> Any:
    """Return a number's attribute. Raises `Refused` for others: methods are no values here."""
    if name not in _ATTRIBUTES.get(type(subject), frozenset()):
        raise Refused
    return getattr(subject, name)


def _check_text(name: str, subject: str, argument: Any = None) -> None:
    """Raise `Refused` if a method of a text could take much memory or run a format."""
    if name in _PADDING and isinstance(argument, int):
        is_refused = argument > MAX_TEXT
    elif name == "expandtabs":
        size = argument if isinstance(argument, int) else 8
        is_refused = len(subject) + subject.count("\t") * max(size, 0) > MAX_TEXT
    elif name == "join" and isinstance(argument, str | list | tuple):
        is_refused = sum(len(part) + len(subject) for part in filter(_is_text, argument)) > 2 * MAX_TEXT
    elif name in _FORMATTING:
        is_refused = "{" in subject or "}" in subject
    else:
        longest = max(map(len, filter(_is_text, argument)), default=0) if isinstance(argument, list | tuple) else 1
        is_refused = name == "translate" and len(subject) * longest > MAX_TEXT
    if is_refused:
        raise Refused


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_COMPARISONS: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
OUTPUT_START, OUTPUT_END = "<|output_start|>", "<|output_end|>"

_MAX_TOKENS = 4 * MAX_EXPRESSION  # of an expression: a token has at least one byte, a character at most four


@dataclass(frozen=True, slots=True)
class PythonTool:
    """nanochat's calculator as a `types.TokenProgram`; one object can serve any number of samples.

    The state is None outside a python block, and the block's tokens inside.
    """

    python_start: int
    python_end: int
    output_start: int
    output_end: int
    decode: Callable[[Sequence[int]], str]  # tokens -> text, including that of special tokens
    encode: Callable[[str], Sequence[int]]  # text -> tokens, none of them special

    @property
    def call(self) -> tuple[int, int]:
        """The tokens that start and end an expression."""
        return self.python_start, self.python_end

    @property
    def result(self) -> tuple[int, int]:
        """The tokens that start and end a result."""
        return self.output_start, self.output_end

    def start(self) -> object:
        """Return the state before the first sampled token: outside a block."""
        return None

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Return the state after a sampled token and the tokens to force, if it ends an expression with a result.

        A start token inside a block restarts it; an end token outside a block has no effect. After an empty block or an
        expression without a result, no token is forced.
        """
        if token == self.python_start:
            return (), ()
        if not isinstance(state, tuple):
            return None, ()
        if token != self.python_end:
            return (state if len(state) > _MAX_TOKENS else (*state, token)), ()
        text = result_text(calculate(self.decode(state))) if len(state) <= _MAX_TOKENS else None
        return None, () if text is None else (self.output_start, *self.encode(text), self.output_end)


def python_tool(tokenizer: Tokenizer) -> PythonTool | None:
    """Return the calculator for a tokenizer with nanochat's four tool tokens, else None."""
    special = special_tokens(tokenizer)
    names = (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END)
    if not all(name in special for name in names):
        return None
    start, end, out, out_end = (special[name] for name in names)
    return PythonTool(
        python_start=start,
        python_end=end,
        output_start=out,
        output_end=out_end,
        decode=lambda tokens: tokenizer.decode(tokens, skip_special=False),
        encode=lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
    )
