"""The packaged model answers held-out questions by calling its calculator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nano_inference import EngineConfig, SamplingParams
from nano_inference.cli.local import Session, open_session
from nano_inference.cli.options import Common
from nano_inference.nanochat import GPT, Engine, get_tokenizer
from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.nanochat.calculator import calculate, result_text
from nano_inference.nanochat.files import find_files
from nano_inference.types import TrainingSample
from tests.nanochat.example_modules import load_example
from tests.nanochat.tiny import SPECIAL_IDS

BUILTIN = CALCULATOR
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)
ENDS = (SPECIAL_IDS["assistant_end"], SPECIAL_IDS["bos"])
PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END = (
    SPECIAL_IDS[name] for name in ("python_start", "python_end", "output_start", "output_end")
)
COUNT = 60


data = load_example("calculator_data")
ASKED: list[tuple[str, str]] = data.held_out(COUNT, 7)


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
    assert session.tool is not None
    return session.engine.generate(prompts_of(session), GREEDY, program=session.tool)


def num_right(session: Session, samples: list[TrainingSample]) -> int:
    texts = [session.tokenizer.decode(sample.completion_tokens) for sample in samples]
    return sum(data.is_right(text, result) for text, (_, result) in zip(texts, ASKED, strict=True))


def forced(tokens: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """What the calculator must force, by where: computed here from what the model wrote, without the tool."""
    found, begin = {}, None
    for place, token in enumerate(tokens):
        if token == PYTHON_START:
            begin = place + 1
        elif token == PYTHON_END and begin is not None:
            text = result_text(calculate(bytes(tokens[begin:place]).decode()))
            if text is not None:
                found[place + 1] = (OUTPUT_START, *text.encode(), OUTPUT_END)
            begin = None
    return found


def test_prompts_have_training_format(session: Session) -> None:
    assert prompts_of(session) == [[data.BOS, *data.question_ids(question)] for question, _ in ASKED]
    assert len({question for question, _ in ASKED}) == COUNT
    assert sum(".count(" not in question and any(c.isdigit() for c in question) for question, _ in ASKED) >= COUNT // 3


def test_held_out_questions_are_answered_with_tool(session: Session, answers: list[TrainingSample]) -> None:
    assert num_right(session, answers) >= 57
    assert sum(sample.finish_reason == "stop" for sample in answers) >= 57
    assert sum(OUTPUT_START in sample.completion_tokens for sample in answers) >= 57


def test_answers_without_tool_are_wrong(session: Session) -> None:
    samples = session.engine.generate(prompts_of(session), GREEDY, program=None)
    assert num_right(session, samples) < 15
    assert all(all(sample.mask) for sample in samples)


def test_mask_is_0_exactly_on_forced_tokens(answers: list[TrainingSample]) -> None:
    for sample in answers:
        tokens = sample.completion_tokens
        places = forced(tokens)
        zeros = [0] * len(tokens)
        for begin, words in places.items():
            assert tokens[begin : begin + len(words)] == words[: len(tokens) - begin]
            zeros[begin : begin + len(words)] = [1] * len(words[: len(tokens) - begin])
        assert [1 - mask for mask in sample.mask] == zeros
        assert all(sample.logprobs[place] == 0.0 for place, zero in enumerate(zeros) if zero)
    assert sum(len(forced(sample.completion_tokens)) for sample in answers) >= 57


def test_nanochats_engine_gives_the_same_rows(answers: list[TrainingSample]) -> None:
    model = GPT.from_checkpoint(BUILTIN.directory, device="cpu")
    engine = Engine(model, get_tokenizer(BUILTIN.directory))
    rows = []
    for sample in answers:
        has_end = sample.completion_tokens[-1] in ENDS
        tokens = sample.completion_tokens[:-1] if has_end else sample.completion_tokens
        masks = sample.mask[: len(tokens)]
        rows.append(([*sample.prompt_tokens, *tokens], [*[0] * len(sample.prompt_tokens), *masks]))
    for row, sample in list(zip(rows, answers, strict=True))[:3]:
        results, masks = engine.generate_batch(list(sample.prompt_tokens), 2, max_tokens=120, temperature=0.0)
        assert results == [row[0]] * 2 and masks == [row[1]] * 2
    batches = engine.generate_batches(
        [list(sample.prompt_tokens) for sample in answers], max_tokens=120, temperature=0.0
    )
    assert [(results[0], masks[0]) for results, masks in batches] == rows


def test_model_is_small_and_g4(session: Session) -> None:
    checkpoint = session.engine.parts.checkpoint
    assert checkpoint is not None and checkpoint.inferred is not None
    assert checkpoint.inferred.constants.generation == "G4" and checkpoint.inferred.warnings == ()
    files = [path for path in BUILTIN.directory.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    found = find_files(BUILTIN.directory)
    assert found is not None and found.tokenizer == BUILTIN.directory
