"""nanochat's calculator: recorded answers, comparison with Python's arithmetic, and attacks."""

from __future__ import annotations

import ast
import contextlib
import operator
import subprocess
import sys
import warnings
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.nanochat import calculator
from nano_inference.nanochat.calculator import MAX_BITS, calculate, evaluate, result_text


def test_length_and_depth_limits() -> None:
    # nanochat itself computes 150 nested parentheses, which exceed the limits here.
    assert calculate("(" * 150 + "1" + ")" * 150) is None
    assert calculate("(" * 65 + "1" + ")" * 65) is None
    assert calculate("(" * 64 + "1" + ")" * 64) == 1
    assert calculate("1," * 128) == int("1" * 128) and calculate("1," * 129) is None
    assert calculate("-" * 254 + "1") == 1 and calculate("-" * 255 + "1") == -1 and calculate("-" * 256 + "1") is None


def test_deepest_expression_fits_into_a_small_stack() -> None:
    code = "import threading; from nano_inference.nanochat.calculator import calculate; out = []"
    kibibytes = 256 if sys.version_info[:2] == (3, 12) else 128  # its parser takes more of the stack for each level
    code += f"\nthreading.stack_size({kibibytes} << 10)"
    code += "\nthread = threading.Thread(target=lambda: out.append(calculate('-(' * 64 + '5' + ')' * 64)))"
    code += "\nthread.start(); thread.join(); assert out == [5], out"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.integers(0, 10**30).map(str),
    st.floats(0, 1e6, allow_nan=False).map(lambda value: format(value, "f")),
    st.sampled_from(["0", "1", "1.", ".5", "0.1", "0.", "00"]),
)
SUMS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", " + ", " - ", " // "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        inner.map("+ {}".format),
    ),
    max_leaves=12,
)


def reference(expression: str) -> object:
    """Return Python's result, None if it raises an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return eval(expression, {"__builtins__": {}}, {})
        except Exception:
            return None


@settings(max_examples=200, deadline=None)
@given(SUMS)
def test_arithmetic_equals_that_of_python(expression: str) -> None:
    expected = reference(expression) if len(expression) <= 256 else None
    assert repr(calculate(expression)) == repr(expected)
    assert repr(evaluate(expression)) == repr(expected)


METHODS = st.tuples(
    st.sampled_from(["'Hello World'", '"strawberry"', "''", "' a b '", "'aa' 'b'", "u'x'"]),
    st.lists(
        st.sampled_from(
            (
                *(".upper()", ".lower()", ".strip()", ".strip('a')", ".lstrip()", ".rstrip(' b')", ".title()"),
                *(".swapcase()", ".capitalize()", ".split()", ".split('l')", ".count('l')", ".count('')"),
                *(".bit_length()", ".count(1)"),
            )
        ),
        max_size=4,
    ).map("".join),
    st.sampled_from(["", ".count('a')", ".split().count('a')"]),
).map("".join)


@settings(max_examples=100, deadline=None)
@given(METHODS)
def test_methods_equal_those_of_python(expression: str) -> None:
    assert repr(evaluate(expression)) == repr(reference(expression))


def warnings_of(expressions: Iterable[str]) -> list[warnings.WarningMessage]:
    """Return the warnings of evaluating expressions (as errors, they would become syntax errors in the parser)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for expression in expressions:
            calculate(expression)
            evaluate(expression)
    return caught


@settings(max_examples=170, deadline=None)
@given(st.text(max_size=300))
def test_no_text_raises_or_warns(expression: str) -> None:
    assert not warnings_of([expression])


RUNS = (
    "1or 2",
    "0xfor 1",
    "1.or 2",
    "1if 1else 2",
    "'''+'1'''1or 2'",
    '"""+"1"""1or 2"',
    "1_0or 1",
    "1e5or 1",
    "5and 6",
)


@pytest.mark.parametrize("expression", RUNS)
def test_number_followed_by_a_word_is_refused_without_warning(expression: str) -> None:
    assert not warnings_of([expression]) and evaluate(expression) is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(SyntaxError):
            ast.parse(expression, mode="eval")
    assert caught


def test_large_products_are_refused_before_computation() -> None:
    half = 1 << (MAX_BITS // 2)
    assert calculator.product(half, half - 1) == half * (half - 1)

    class Spy(int):
        def __mul__(self, other: int) -> int:
            raise AssertionError("computed")

    with pytest.raises(calculator.Refused):
        calculator.product(Spy(half * 2), half * half)
    with pytest.raises(calculator.Refused):
        calculator.arithmetic(calculator.product, half - 1, 2 * half - 1)
    with pytest.raises(calculator.Refused):
        calculator.arithmetic(operator.add, half * half - 1, 1)
    assert calculator.arithmetic(operator.add, half * half - 2, 1) == half * half - 1


def test_result_text_is_limited() -> None:
    assert result_text(5.0) == "5.0" and result_text(()) == "()" and result_text(...) == "Ellipsis"
    assert result_text(0) == "0" and result_text("") == "" and result_text(None) is None
    assert result_text(10**255) == "1" + "0" * 255 and result_text(10**256) is None
    assert result_text(10**5000) is None and result_text("x" * 257) is None
