"""The calculator model's training data: numbers in words, two steps, chats, and what is held out."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.nanochat.dialogue import render_conversation
from nano_inference.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
MODULES = ("calculator_data", "calculator_numbers", "calculator_steps", "calculator_talk")


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return {name: importlib.import_module(name) for name in MODULES}


@pytest.fixture
def data(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["calculator_data"]


@given(value=st.integers(0, 9_999_999), hyphen=st.sampled_from("- "), conjunction=st.sampled_from(["", "and "]))
def test_words_and_digits_are_inverse(
    modules: dict[str, ModuleType], value: int, hyphen: str, conjunction: str
) -> None:
    numbers = modules["calculator_numbers"]
    assert numbers.in_words(123_405, "-", "and ") == "one hundred and twenty-three thousand four hundred and five"
    text = numbers.in_words(value, hyphen, conjunction)
    assert numbers.from_words(text) == value
    assert not any(character.isdigit() for character in text) and "  " not in text
    assert numbers.from_words(text.upper().replace("-", " ")) == value


@pytest.mark.parametrize("first", "+-*/")
@pytest.mark.parametrize("second", "+-*/")
def test_two_operations_are_computed_in_their_order(
    data: ModuleType, modules: dict[str, ModuleType], first: str, second: str
) -> None:
    compute = {"+": float.__add__, "-": float.__sub__, "*": float.__mul__, "/": float.__truediv__}
    written = modules["calculator_steps"].chained("12", first, "30", second, "7")
    assert float(data.result_text(written)) == pytest.approx(compute[second](compute[first](12.0, 30.0), 7.0))
    assert ("(" in written) == (first in "+-" and second in "*/")


def test_no_training_turn_is_held_out(data: ModuleType) -> None:
    rng = random.Random(0)
    turns = [turn for _ in range(1500) for turn in data.conversation(rng)]
    assert all(data.trainable(turn) for turn in turns)
    assert {bool(turn.expression) for turn in turns} == {True, False}
    lines = [turn.question for turn in turns if not turn.expression]
    assert len({line.lower() for line in lines}) > 400


def test_every_skill_has_held_out_questions(data: ModuleType) -> None:
    for name in data.SKILLS:
        turns = data.held_out_turns(20, 0, name)
        assert turns == data.held_out_turns(20, 0, name) != data.held_out_turns(20, 1, name)
        assert not any(data.trainable(turn) for turn in turns)
        assert all(data.result_text(turn.expression) for turn in turns if turn.expression)
    assert all(not data.trainable(second) for _, second in data.held_out_chains(20, 0))
    assert data.is_right("The answer is 12.", "12") and not data.is_right("The answer is 13.", "12")


def test_conversations_are_rendered_as_nanochat_renders(data: ModuleType) -> None:
    tokenizer = load_tokenizer(open_checkpoint(ROOT / "src/nano_inference/nanochat/data/calculator").tokenizer)
    rng = random.Random(5)
    for _ in range(10):
        turns, messages = data.conversation(rng)[:2], []
        for turn in turns:
            result = data.result_text(turn.expression) if turn.expression else None
            reply = data.NO_RESULT if turn.expression and result is None else turn.reply.format(result)
            parts = [{"type": "python", "text": turn.expression}] * bool(turn.expression)
            parts += [{"type": "python_output", "text": result}] * (result is not None)
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": [*parts, {"type": "text", "text": reply}]})
        assert data.render(turns, 2048) == render_conversation(tokenizer, messages)
