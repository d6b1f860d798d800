"""Measure what the packaged nanochat model can do, on questions outside its training set.

    python benchmarks/calculator.py [--questions 200] [--model DIR]

Prints a Markdown table with a row for each skill, one with a row for each limit, and totals with the tool and without;
without it the model must write the result itself, for which it was not trained. Greedy. An answer is right if its last
number equals the calculator's; in chats, if there is no call and the reply is the fitting one. "no call": replies
without a call. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.text.dialogue import Dialogue, load_dialogue, require
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import calculator_data as data
import calculator_lines as lines


class Question(NamedTuple):
    """A prompt, and whether a reply to it (the text behind the last tool result, and if it had a call) is right."""

    prompt: list[int]
    right: Callable[[str, bool], bool]


class Row(NamedTuple):
    """A row of a table."""

    table: str
    name: str
    right: int
    uncalled: int
    questions: int


def numeric(question: str, result: str, before: tuple[data.Turn, ...] = ()) -> Question:
    """Return a question with a number as its result, in a conversation after other turns."""
    prompt = [*data.render(list(before), data.CONTEXT)[0], *data.question_ids(question)]
    return Question(prompt, lambda reply, called: data.is_right(reply, result))


def spoken(line: str, begin: str) -> Question:
    """Return a line of a chat to which a reply without a call fits, if it begins with a text."""
    prompt = [data.BOS, *data.question_ids(line)]
    return Question(prompt, lambda reply, called: not called and reply.startswith(begin))


def of_turn(turn: data.Turn) -> Question:
    """Return the question of a generated turn."""
    result = data.result_text(turn.expression) if turn.expression else None
    return spoken(turn.question, turn.reply) if result is None else numeric(turn.question, result)


def tables(n: int, seed: int) -> Iterator[tuple[str, str, list[Question]]]:
    """Yield table, row and questions: n in each row, except for the chats written by hand."""
    for skill in data.SKILLS:
        yield "skill", skill, [of_turn(turn) for turn in data.held_out_turns(n, seed, skill)]
    chains = data.held_out_chains(n, seed)
    follow_ups = [
        numeric(second.question, data.result_text(second.expression) or "", (first,)) for first, second in chains
    ]
    yield "skill", "questions that refer to the last result", follow_ups
    patterns = {"chats in other words (by hand)": lines.CHATS}
    for name, texts in patterns.items():
        yield "beyond", name, [spoken(line, begin) for begin, line in (text.split(":", 1) for text in texts)]
    wordings = {"questions in other words": lines.NEW_WORDING, "stories in other words": lines.NEW_STORIES}
    for name, texts in {**wordings, **lines.LIMITS}.items():
        yield "beyond", name, [numeric(*asked) for asked in lines.asked(n, seed, texts)]


class Model:
    """An engine with the model, and its tokenizer."""

    def __init__(self, engine: InferenceEngine) -> None:
        assert engine.parts.checkpoint is not None
        source = engine.parts.checkpoint.tokenizer
        self.engine = engine
        self.tokenizer: Tokenizer = load_tokenizer(source)
        self.dialogue: Dialogue = require(load_dialogue(source, self.tokenizer))

    def replies(self, prompts: list[list[int]], *, with_tool: bool) -> tuple[list[tuple[str, bool]], dict[str, float]]:
        """Answer all prompts at once; return the text behind the last result, if there was a call, and counts."""
        started = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=160)
        samples = self.engine.generate(prompts, params, program=self.dialogue.tool if with_tool else None)
        seconds = time.perf_counter() - started
        texts = [self.tokenizer.decode(sample.completion_tokens, skip_special=False) for sample in samples]
        found = [
            (text.rpartition("<|output_end|>")[2].replace("<|assistant_end|>", ""), "<|python_start|>" in text)
            for text in texts
        ]
        forced = sum(mask == 0 for sample in samples for mask in sample.mask)
        num_tokens = sum(len(sample.mask) for sample in samples)
        return found, {"forced_tokens": forced, "tokens": num_tokens, "seconds": round(seconds, 2)}


def measured(model: Model, n: int, seed: int) -> list[Row]:
    """Return the rows of both tables."""
    rows = []
    for table, name, questions in tables(n, seed):
        found, _ = model.replies([question.prompt for question in questions], with_tool=True)
        right = sum(question.right(*reply) for question, reply in zip(questions, found, strict=True))
        rows.append(Row(table, name, right, sum(not called for _, called in found), len(questions)))
    return rows


def compared(model: Model, n: int, seed: int) -> list[dict[str, float | bool]]:
    """Return what was right of n questions with numbers and letters, with the tool and without."""
    asked, rows = data.held_out(n, seed), []
    for with_tool in (True, False):
        questions = [numeric(*pair) for pair in asked]
        found, counted = model.replies([question.prompt for question in questions], with_tool=with_tool)
        right = sum(question.right(*reply) for question, reply in zip(questions, found, strict=True))
        rows.append({"tool": with_tool, "right": right, "questions": n, **counted})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200, help="questions in each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=str(CALCULATOR.directory))
    wish = parser.parse_args()
    with InferenceEngine(EngineConfig(model_path=wish.model)) as engine:
        model = Model(engine)
        rows = measured(model, wish.questions, wish.seed)
        totals = compared(model, 500, wish.seed)
    for table, head in (("skill", "held-out questions"), ("beyond", "not generated in training")):
        print(f"| {head} | right | no call |\n|---|---|---|")
        for row in rows:
            if row.table == table:
                print(f"| {row.name} | {row.right} of {row.questions} | {row.uncalled} |")
        print()
    for total in totals:
        name = "with the tool" if total["tool"] else "without the tool"
        print(
            f"{name:18}{total['right']:5} of {total['questions']} right, {total['tokens']} tokens, "
            f"{total['forced_tokens']} of them forced (mask 0), {total['seconds']} s"
        )
    print(json.dumps({"model": Path(wish.model).name, "rows": [row._asdict() for row in rows], "totals": totals}))


if __name__ == "__main__":
    main()
