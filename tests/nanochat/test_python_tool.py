"""The calculator as a token program, compared with nanochat's state machine, and inside a sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.core.appending import advance
from nano_inference.core.sequence import start_sequences
from nano_inference.nanochat.calculator import PythonTool, calculate, python_tool
from nano_inference.text.fast import fast_tokenizer
from nano_inference.text.tool_format import special_tokens
from nano_inference.types import EngineRequest, SamplingParams, TokenProgram
from tests.nanochat.samples import SPECIAL, tokenizer
from tests.text.tokenizer_samples import byte_level

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
