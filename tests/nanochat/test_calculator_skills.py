"""What the packaged model can do, skill by skill, on questions and lines that training excludes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from nano_inference import EngineConfig, SamplingParams
from nano_inference.cli.local import Session, open_session
from nano_inference.cli.options import Common
from tests.nanochat.example_modules import load_example

data = load_example("calculator_data")
lines = load_example("calculator_lines")

GREEDY = SamplingParams(temperature=0.0, max_tokens=160)
COUNT = 40
LEAST = {
    **dict.fromkeys(data.SKILLS, 37),
    "in words, up to 999,999": 36,
    "in words, up to 9,999,999": 34,
    "formulas of four numbers": 35,
    "stories": 34,
    "two-step stories": 36,
    "letters of words": 36,
    "chats": 29,
    "declined": 35,
}
"""Right answers of 40. benchmarks/calculator.py measures more questions; docs/nanochat.md has its table."""


class Reply(NamedTuple):
    """An answer's expression ("" without a call), and the text behind its result."""

    call: str
    text: str


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    config = EngineConfig(model_path="calculator", device="cpu", num_threads=1)
    with open_session(config, Common(quiet=True)) as opened:
        yield opened


def answered(session: Session, prompts: list[list[int]]) -> list[Reply]:
    assert session.tool is not None
    found = []
    for sample in session.engine.generate(prompts, GREEDY, program=session.tool):
        text = session.tokenizer.decode(sample.completion_tokens, skip_special=False)
        call = text.partition("<|python_start|>")[2].partition("<|python_end|>")[0]
        found.append(Reply(call, text.rpartition("<|output_end|>")[2].removesuffix("<|assistant_end|>")))
    return found


def asked(session: Session, *questions: str) -> list[Reply]:
    return answered(session, [[data.BOS, *data.question_ids(question)] for question in questions])


@pytest.mark.parametrize("skill", list(data.SKILLS))
def test_held_out_questions_of_each_skill_are_answered(session: Session, skill: str) -> None:
    turns = data.held_out_turns(COUNT, 11, skill)
    right = []
    for turn, reply in zip(turns, asked(session, *(turn.question for turn in turns)), strict=True):
        if turn.expression:
            right.append(data.is_right(reply.text, data.result_text(turn.expression)))
        else:
            right.append(reply == Reply("", turn.reply))
            assert skill != "chats" or not reply.call, turn.question
    wrong = [turn.question for turn, found in zip(turns, right, strict=True) if not found]
    assert len(wrong) <= COUNT - LEAST[skill], wrong


def test_questions_refer_to_the_last_result(session: Session) -> None:
    pairs = data.held_out_chains(COUNT, 11)
    prompts = [[*data.render([first], data.CONTEXT)[0], *data.question_ids(second.question)] for first, second in pairs]
    replies = answered(session, prompts)
    results = [data.result_text(second.expression) for _, second in pairs]
    assert sum(data.is_right(reply.text, result) for reply, result in zip(replies, results, strict=True)) >= 38


@pytest.mark.parametrize(
    ("question", "call"),
    [
        ("What is 12 + 34?", "12+34"),
        ("(12 + 30) * 2", "(12+30)*2"),
        ("Add 12 and 30, then multiply by 2", "(12+30)*2"),
        ("What is 12 plus 30, times 2?", "(12+30)*2"),
        ("What is the sum of 12 and 30 times 2?", "(12+30)*2"),
        ("double the sum of 12 and 30", "(12+30)*2"),
        ("What is twelve plus thirty?", "12+30"),
        ("three million plus seven", "3000000+7"),
        ("What is one hundred twenty-three thousand four hundred and five times two?", "123405*2"),
        ("1,234,567 + 1", "1234567+1"),
        ("What is 7654321 minus 1234567?", "7654321-1234567"),
        ("2.5 million divided by 4", "2500000/4"),
        ("How many r are in strawberry?", "'strawberry'.count('r')"),
    ],
)
def test_typical_questions_become_this_call(session: Session, question: str, call: str) -> None:
    (reply,) = asked(session, question)
    assert reply.call == call and data.result_text(call) in reply.text


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("Hello", "Hello! What shall I calculate or count?"),
        ("Thanks", "You are welcome!"),
        ("Who are you?", "I am a very small nanochat model with a calculator."),
        ("What can you do?", data.HELP),
        ("What is the capital of France?", "I know nothing about France. I only calculate and count letters."),
        ("I am sad", "I am sorry to hear that. I hope it gets better soon."),
        ("My name is Anna", "Nice to meet you, Anna! What shall I calculate?"),
        ("What is the square root of 16?", data.NO_FUNCTIONS),
        ("Bye", "Goodbye!"),
    ],
)
def test_chats_need_no_call(session: Session, line: str, reply: str) -> None:
    assert asked(session, line) == [Reply("", reply)]


def test_chats_in_other_words_need_no_call(session: Session) -> None:
    pairs = [line.split(":", 1) for line in lines.CHATS]
    replies = asked(session, *(line for _, line in pairs))
    calls = [(line, reply.call) for (_, line), reply in zip(pairs, replies, strict=True) if reply.call]
    assert calls == []
    assert sum(reply.text.startswith(begin) for (begin, _), reply in zip(pairs, replies, strict=True)) >= 40


def test_a_conversation_of_chats_and_questions(session: Session) -> None:
    asked_turns = ["Hello", "What is twelve times 30?", "Thanks", "and plus 5?", "How many r are in strawberry?", "Bye"]
    assert session.tool is not None
    row, texts = [data.BOS], []
    for question in asked_turns:
        row += data.question_ids(question)
        (sample,) = session.engine.generate([row], GREEDY, program=session.tool)
        row += sample.completion_tokens
        text = session.tokenizer.decode(sample.completion_tokens, skip_special=False)
        texts.append(text.rpartition("<|output_end|>")[2].removesuffix("<|assistant_end|>"))
    assert texts[0] == "Hello! What shall I calculate or count?" and texts[2] == "You are welcome!"
    assert "360" in texts[1] and "365" in texts[3] and "3 r's" in texts[4] and texts[5] == "Goodbye!"
