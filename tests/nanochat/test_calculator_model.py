"""The packaged model answers held-out questions by calling its calculator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from nano_inference import EngineConfig, SamplingParams
from nano_inference.cli.local import Session, open_session
from nano_inference.cli.options import Common
from nano_inference.nanochat import GPT, Engine, get_tokenizer
from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.nanochat.calculator import calculate, result_text
from nano_inference.types import TrainingSample
from tests.nanochat.example_modules import load_example
from tests.nanochat.tiny import SPECIAL_IDS

data = load_example("calculator_data")
lines = load_example("calculator_lines")

GREEDY = SamplingParams(temperature=0.0, max_tokens=160)
ENDS = (SPECIAL_IDS["assistant_end"], SPECIAL_IDS["bos"])
PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END = (
    SPECIAL_IDS[name] for name in ("python_start", "python_end", "output_start", "output_end")
)
ASKED: list[tuple[str, str]] = data.held_out(60, 7)
COUNT = 40
LEAST = {
    **dict.fromkeys(data.SKILLS, 37),
    **{"in words, up to 999,999": 36, "in words, up to 9,999,999": 34, "formulas of four numbers": 35, "stories": 34},
    **{"two-step stories": 36, "letters of words": 36, "chats": 29, "declined": 35},
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


def prompts_of(session: Session) -> list[list[int]]:
    assert session.dialogue is not None
    return [session.dialogue.encode([{"role": "user", "content": question}]) for question, _ in ASKED]


@pytest.fixture(scope="module")
def answers(session: Session) -> list[TrainingSample]:
    """One batch of all questions, with the tool."""
    return session.engine.generate(prompts_of(session), GREEDY, program=session.tool)


def num_right(session: Session, samples: list[TrainingSample]) -> int:
    texts = [session.tokenizer.decode(sample.completion_tokens) for sample in samples]
    return sum(data.is_right(text, result) for text, (_, result) in zip(texts, ASKED, strict=True))


def replies_to(session: Session, prompts: list[list[int]]) -> list[Reply]:
    found = []
    for sample in session.engine.generate(prompts, GREEDY, program=session.tool):
        text = session.tokenizer.decode(sample.completion_tokens, skip_special=False)
        call = text.partition("<|python_start|>")[2].partition("<|python_end|>")[0]
        found.append(Reply(call, text.rpartition("<|output_end|>")[2].removesuffix("<|assistant_end|>")))
    return found


def asked(session: Session, *questions: str) -> list[Reply]:
    return replies_to(session, [[data.BOS, *data.question_ids(question)] for question in questions])


@pytest.mark.slow
def test_held_out_questions_are_answered_with_tool_and_only_with_it(
    session: Session, answers: list[TrainingSample]
) -> None:
    assert prompts_of(session) == [[data.BOS, *data.question_ids(question)] for question, _ in ASKED]
    assert num_right(session, answers) >= 57
    assert sum(sample.finish_reason == "stop" for sample in answers) >= 57
    without = session.engine.generate(prompts_of(session), GREEDY)
    assert num_right(session, without) < 15 and all(all(sample.mask) for sample in without)


def test_mask_is_0_exactly_on_forced_tokens(answers: list[TrainingSample]) -> None:
    num_calls = 0
    for sample in answers:
        tokens, begin = sample.completion_tokens, None
        mask = [1] * len(tokens)
        for place, token in enumerate(tokens):  # what the calculator must force after what the model wrote
            if token == PYTHON_START:
                begin = place + 1
            elif token == PYTHON_END and begin is not None:
                text = result_text(calculate(bytes(tokens[begin:place]).decode()))
                forced = () if text is None else (OUTPUT_START, *text.encode(), OUTPUT_END)
                assert tokens[place + 1 : place + 1 + len(forced)] == forced[: len(tokens) - place - 1]
                mask[place + 1 : place + 1 + len(forced)] = [0] * min(len(forced), len(tokens) - place - 1)
                num_calls, begin = num_calls + bool(forced), None
        assert list(sample.mask) == mask
        assert all(sample.logprobs[place] == 0.0 for place, is_drawn in enumerate(mask) if not is_drawn)
    assert num_calls >= 57


@pytest.mark.slow
def test_nanochats_engine_gives_the_same_rows(answers: list[TrainingSample]) -> None:
    engine = Engine(GPT.from_checkpoint(CALCULATOR.directory, device="cpu"), get_tokenizer(CALCULATOR.directory))
    prompts = [list(sample.prompt_tokens) for sample in answers]
    for (rows, masks), sample in zip(
        engine.generate_batches(prompts, max_tokens=GREEDY.max_tokens, temperature=0.0), answers, strict=True
    ):
        end = len(sample.mask) - (sample.completion_tokens[-1] in ENDS)
        assert rows == [[*sample.prompt_tokens, *sample.completion_tokens[:end]]]
        assert masks == [[*[0] * len(sample.prompt_tokens), *sample.mask[:end]]]


@pytest.mark.nightly
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


@pytest.mark.slow
def test_questions_refer_to_the_last_result(session: Session) -> None:
    pairs = data.held_out_chains(COUNT, 11)
    prompts = [[*data.render([first], data.CONTEXT)[0], *data.question_ids(second.question)] for first, second in pairs]
    results = [data.result_text(second.expression) for _, second in pairs]
    replies = replies_to(session, prompts)
    assert sum(data.is_right(reply.text, result) for reply, result in zip(replies, results, strict=True)) >= 38


def test_typical_questions_become_these_calls(session: Session) -> None:
    calls = {
        "What is 12 + 34?": "12+34",
        "(12 + 30) * 2": "(12+30)*2",
        "Add 12 and 30, then multiply by 2": "(12+30)*2",
        "What is the sum of 12 and 30 times 2?": "(12+30)*2",
        "three million plus seven": "3000000+7",
        "What is one hundred twenty-three thousand four hundred and five times two?": "123405*2",
        "1,234,567 + 1": "1234567+1",
        "2.5 million divided by 4": "2500000/4",
        "How many r are in strawberry?": "'strawberry'.count('r')",
    }
    for reply, call in zip(asked(session, *calls), calls.values(), strict=True):
        assert reply.call == call and data.result_text(call) in reply.text


@pytest.mark.slow
def test_chats_need_no_call(session: Session) -> None:
    said = {
        "Hello": "Hello! What shall I calculate or count?",
        "Who are you?": "I am a very small nanochat model with a calculator.",
        "What can you do?": data.HELP,
        "What is the capital of France?": "I know nothing about France. I only calculate and count letters.",
        "My name is Anna": "Nice to meet you, Anna! What shall I calculate?",
        "What is the square root of 16?": data.NO_FUNCTIONS,
    }
    assert asked(session, *said) == [Reply("", reply) for reply in said.values()]
    pairs = [line.split(":", 1) for line in lines.CHATS]  # written by hand, in other words
    replies = asked(session, *(line for _, line in pairs))
    assert [reply.call for reply in replies if reply.call] == []
    assert sum(reply.text.startswith(begin) for (begin, _), reply in zip(pairs, replies, strict=True)) >= 40
