"""nanochat's calculator: recorded answers, comparison with Python's arithmetic, and attacks."""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.calculator_answers import ANSWERS, answer_of
from nano_inference.core.appending import advance
from nano_inference.core.sequence import start_sequences
from nano_inference.nanochat import calculator
from nano_inference.nanochat.calculator import MAX_BITS, PythonTool, calculate, evaluate, python_tool, result_text
from nano_inference.text.fast import fast_tokenizer
from nano_inference.text.tool_format import special_tokens
from nano_inference.types import EngineRequest, SamplingParams, TokenProgram
from tests.nanochat.samples import SPECIAL, tokenizer
from tests.text.tokenizer_samples import byte_level


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


ROWS: list[tuple[str, str | None, str | None]] = json.loads(ANSWERS.read_text(encoding="utf-8"))


def test_every_answer_equals_upstreams_or_a_bound_explains_it() -> None:
    assert len(ROWS) > 3000
    wrong = [text for text, theirs, bound in ROWS if answer_of(calculate(text)) != (None if bound else theirs)]
    assert wrong == []


def test_attacks_take_little_memory() -> None:
    tracemalloc.start()
    try:
        for text, _, _ in ROWS[-150:]:
            tracemalloc.reset_peak()
            calculate(text)
            evaluate(text)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20, text[:80]
    finally:
        tracemalloc.stop()


ID = {text.strip("<|>"): tokenizer().encode(text, add_special=False)[0] for text in SPECIAL}
START, END = ID["python_start"], ID["python_end"]
OUT, DONE = ID["output_start"], ID["output_end"]


def tool() -> PythonTool:
    found = python_tool(tokenizer())
    assert found is not None
    return found


def spell(text: str) -> list[int]:
    """Return the tokens of a text, with special tokens."""
    return tokenizer().encode(text, add_special=False)


def plain(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False, parse_special=False)


def run(tokens: list[int]) -> list[tuple[int, ...]]:
    """Return the tokens forced after each token."""
    program: TokenProgram = tool()
    state, forced = program.start(), []
    for token in tokens:
        state, more = program.step(state, token)
        forced.append(more)
    return forced


def all_forced(text: str) -> list[int]:
    return [token for forced in run(spell(text)) for token in forced]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("<|python_start|>6*7<|python_end|>", "42"),
        ("text 1+1 <|python_start|>10/4<|python_end|> after", "2.5"),
        ("<|python_start|>'strawberry'.count('r')<|python_end|>", "3"),
        ("<|python_start|>1-1<|python_end|>", "0"),
        ("<|python_start|>0.0*1<|python_end|>", "0.0"),
        ("<|python_start|>()<|python_end|>", "()"),
        ("<|python_start|>2+<|python_start|>3+4<|python_end|>", "7"),
        ("<|python_start|>1/3<|python_end|>", "0.3333333333333333"),
    ],
)
def test_result_is_forced_after_the_block(text: str, result: str) -> None:
    assert all_forced(text) == [OUT, *plain(result), DONE]


@pytest.mark.parametrize(
    "text",
    [
        "<|python_start|><|python_end|>",
        "<|python_start|>nonsense<|python_end|>",
        "<|python_start|>1/0<|python_end|>",
        "6*7<|python_end|>",
        "<|python_start|>6*7",
        "<|python_start|>6*7<|assistant_end|>",
        "<|python_start|>6<|output_start|>*7<|python_end|>",
        "<|python_start|>6*7<|user_start|><|python_end|>",
        "<|python_start|>" + "1+" * 3000 + "1<|python_end|>",
    ],
)
def test_nothing_is_forced_without_a_result(text: str) -> None:
    assert all_forced(text) == []


def test_state_of_an_unclosed_block_is_limited() -> None:
    program = tool()
    state, _ = program.step(program.start(), START)
    for _ in range(5000):
        state, _ = program.step(state, plain("1")[0])
    assert program.step(state, plain("1")[0])[0] == state, "it grows no more"
    assert program.step(state, END) == (None, ())


PIECES = st.sampled_from([*SPECIAL, "1", "+", "2*3", "'a'.count('a')", "x", " ", "()", "é"])


@settings(max_examples=130, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join))
def test_state_machine_equals_that_of_nanochat(text: str) -> None:
    tokens = spell(text)
    inside, buffer, expected = False, [], []
    for token in tokens:  # nanochat's state machine
        forced: tuple[int, ...] = ()
        if token == START:
            inside, buffer = True, []
        elif token == END and inside:
            inside = False
            result = calculate(tokenizer().decode(buffer, skip_special=False)) if buffer else None
            if result is not None:
                forced = (OUT, *plain(str(result)), DONE)
            buffer = []
        elif inside:
            buffer.append(token)
        expected.append(forced)
    assert run(tokens) == expected


def test_forced_tokens_are_truncated_at_max_tokens() -> None:
    sampled = spell("<|python_start|>6*7<|python_end|>")
    room = len(sampled) + 2
    params = SamplingParams(max_tokens=room)
    request = EngineRequest(prompt=(ID["bos"],), params=params, program=tool())
    (seq,) = start_sequences(request, request_id=0, first_id=0, seed=0, max_new_tokens=room)
    for token in sampled:
        advance(seq, token, -1.0, (), 0)
    assert seq.tokens[1:] == [*sampled, OUT, plain("42")[0]]
    assert seq.mask == [1] * len(sampled) + [0, 0] and seq.finish_reason == "length"


def test_tokenizer_without_the_special_tokens_has_no_tool() -> None:
    other = fast_tokenizer(byte_level(), where="x", spelling="byte_level", drops_space=False, named={}, eos_ids=())
    assert python_tool(other) is None
    assert set(special_tokens(tokenizer())) == set(SPECIAL)
