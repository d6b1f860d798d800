"""nanochat's calculator: recorded answers, comparison with Python's arithmetic, and attacks."""

from __future__ import annotations

import ast
import contextlib
import operator
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nanochat_attacks import ESCAPE, EXPRESSIONS

import nano_inference
from nano_inference.nanochat import calculator
from nano_inference.nanochat.calculator import MAX_BITS, Value, calculate, evaluate, result_text
from tests.effort import some

GOLDEN: dict[str, Value | None] = {
    **{"2+2": 4, "1,234*2": 2468, "2**3": None, "2* *3": None, "1/0": None, "10/2": 5.0, "10//3": 3, "7/2": 3.5},
    **{"0.1+0.2": 0.30000000000000004, "-5//2": -3, "--5": 5, "5-": None, "007": None, "1.": 1.0, "...": ...},
    **{" 3+4": 7, "(1)(2)": None, "()": (), "": None, "1 2": None, "1/3": 0.3333333333333333, "1e3": None},
    **{"100*(1+0.05)": 105.0, "1.5//1": 1.0, "8-3.": 5.0, ".5+.5": 1.0, "4%3": None, "1<2": None, "1_000+1": None},
    **{"0x10": None, "1+\t1": None, "'strawberry'.count('r')": 3, '"hello".count("l")': 2},
    **{"'a,b,c'.count(',')": 4, "'profile'.count('o')": None, "'direct'.count('d')": None, "'Open'.count('O')": None},
    **{"'x'.count('x') or 5": 1, "True and 'x'.count('x')": 1, "'abc'.upper().count('A')": 1},
    **{"'a'.count('a').bit_length()": 1, "'ab' .count('a')": 1, "'ab'.count ('a')": None, "'aa''a'.count('a')": 3},
    **{'"it\'s".count("s")': 1, "len('aaa')": None, "'a'.find('a')": None, "'a'+'b'.count('b')": None},
    **{"'été'.count('t')": None, "'x'.count(1)": None, "(" * 300 + "1" + ")" * 300: None},
    **{"9" * 400 + "/1": None, "9" * 5000: None, "'a'.expandtabs(999999999).count(' ')": 0},
    **{"'a'.count('a' 'b' or c)": 0, "'a'.count('a') if 1 else 2": 1, "'7'.zfill(5).count('0')": 4},
    **{
        "'x'.join('abc').count('x')": 2,
        "'ABBA'.casefold().count('b')": 2,
        "'unhappy'.removeprefix('un').count('p')": 2,
    },
    **{"'aXa'.strip('a').count('X')": 1, "'x'.count('x') is 1": True, "'ab' is 'ab' if 'a'.count('a') else 2": True},
    **{"'a'.count('a') is not True": True, "'a' in 'abc' and 'z'.count('z')": 1, "'b' not in 'b'.count('a')": None},
    **{"'''it's'''.count('s')": 1, "f'aa'.count('a')": 2, "'a b'.split().pop().count('b')": 1},
    **{"'aaa'.count('a').real": 3, "0x1F if 'a'.count('a') else x": 31, "x if 'a'.count('a') else 1": None},
}
"""Recorded answers of nanochat's function."""


@pytest.mark.parametrize("expression", GOLDEN)
def test_answers_equal_those_of_nanochat(expression: str) -> None:
    answer = calculate(expression)
    assert repr(answer) == repr(GOLDEN[expression]) and type(answer) is type(GOLDEN[expression])


def test_length_and_depth_limits() -> None:
    # nanochat itself computes 150 nested parentheses, which exceed the limits here.
    assert calculate("(" * 150 + "1" + ")" * 150) is None
    assert calculate("(" * 65 + "1" + ")" * 65) is None
    assert calculate("(" * 64 + "1" + ")" * 64) == 1
    assert calculate("1," * 128) == int("1" * 128) and calculate("1," * 129) is None
    assert calculate("-" * 254 + "1") == 1 and calculate("-" * 255 + "1") == -1 and calculate("-" * 256 + "1") is None


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_attacks_have_no_answer(expression: str) -> None:
    assert calculate(expression) is None
    assert evaluate(expression) is None


@pytest.mark.parametrize("expression", ["'a'.zfill(500000000).count('0')", ESCAPE, "9" * 5000, "'a'.center(10**9)"])
def test_attacks_have_no_result(expression: str) -> None:
    assert calculate(expression) is None and evaluate(expression) is None


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


@settings(max_examples=some(600), deadline=None)
@given(SUMS)
def test_arithmetic_equals_that_of_python(expression: str) -> None:
    expected = reference(expression) if len(expression) <= 256 else None
    assert repr(calculate(expression)) == repr(expected)
    assert repr(evaluate(expression)) == repr(expected)


@settings(max_examples=some(600), deadline=None)
@given(st.text("0123456789+-*/(). ", max_size=14))
@example("0*()")
@example("()+()")
@example("()*3.")
@example("()-1")
def test_any_arithmetic_text_equals_python_or_has_no_answer(expression: str) -> None:
    expected = None if "**" in expression else reference(expression)
    assert repr(calculate(expression)) == repr(expected)


TRUTHS = st.recursive(
    st.sampled_from(
        ["True", "False", "0", "1", "''", "'a'", "(1/0)", "'aXb'.count('a')", "'x'.count(1)", "()", "'x'.split('')"]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map("".join), inner.map("(not {})".format)
    ),
    max_leaves=8,
)


@settings(max_examples=some(300), deadline=None)
@given(TRUTHS)
def test_and_or_short_circuit_as_in_python(expression: str) -> None:
    assert repr(evaluate(expression)) == repr(reference(expression) if len(expression) <= 256 else None)


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


@settings(max_examples=some(300), deadline=None)
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


@settings(max_examples=some(500), deadline=None)
@given(st.text(max_size=300))
def test_no_text_raises_or_warns(expression: str) -> None:
    assert not warnings_of([expression])


def test_random_tokens_never_raise_or_warn() -> None:
    rng = random.Random(1)
    tokens = [
        "1",
        "2.5",
        "0x",
        "or",
        "and ",
        "not ",
        "'",
        '"',
        "'a'",
        ".count(",
        ")",
        "(",
        ".",
        " ",
        "if",
        "is",
        "in",
        "e",
        "+",
        "-",
        "*",
        "/",
        "for",
        "else",
        "lambda",
        "u",
        "f",
        "b",
    ]
    tokens += ["\\", "True", "None", "[", "]", "{", "}", ":"]
    assert not warnings_of("".join(rng.choices(tokens, k=rng.randint(1, 12))) for _ in range(5000))


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


def test_works_in_any_thread() -> None:
    answers: list[Value | None] = []
    threads = [threading.Thread(target=lambda: answers.append(calculate("6*7"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [42] * 8


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


@pytest.mark.parametrize("error", [SyntaxError, ValueError, MemoryError, RecursionError])
def test_parser_errors_give_no_answer(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str, mode: str) -> ast.AST:
        raise error

    monkeypatch.setattr(ast, "parse", parse)
    assert evaluate("1+1") is None


def test_result_text_is_limited() -> None:
    assert result_text(5.0) == "5.0" and result_text(()) == "()" and result_text(...) == "Ellipsis"
    assert result_text(0) == "0" and result_text("") == "" and result_text(None) is None
    assert result_text(10**255) == "1" + "0" * 255 and result_text(10**256) is None
    assert result_text(10**5000) is None and result_text("x" * 257) is None


def test_text_modules_neither_evaluate_code_nor_set_signals() -> None:
    for path in sorted((Path(nano_inference.__file__).parent / "text").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"eval", "exec", "compile", "__import__"}, path
        assert not imported & {"signal", "builtins", "importlib"}, path


def test_calculator_imports_no_torch() -> None:
    code = "import sys, nano_inference.nanochat.calculator; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
