"""Measure what the packaged nanochat model can do, on questions outside its training set.

    python benchmarks/calculator.py [--questions 200] [--model DIR]

Prints a Markdown table with a row for each skill, one with a row for each limit, and totals with the tool and without;
without it the model must write the result itself, for which it was not trained. Greedy. An answer is right if its last
number equals the calculator's; in chats, if there is no call and the reply is the fitting one. "no call": replies
without a call. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from harness import options

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.nanochat.builtin import CALCULATOR
from nano_inference.text.dialogue import load_dialogue, require
from nano_inference.text.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import calculator_data as data
import calculator_lines as lines


class Question(NamedTuple):
    """A prompt, and whether a reply to it (the text behind the last tool result, and if it had a call) is right."""

    prompt: list[int]
    right: Callable[[str, bool], bool]


def numeric(question: str, result: str, before: tuple[data.Turn, ...] = ()) -> Question:
    """Return a question with a number as its result, in a conversation after other turns."""
    prompt = [*data.render(list(before), data.CONTEXT)[0], *data.question_ids(question)]
    return Question(prompt, lambda reply, called: data.is_right(reply, result))


def spoken(line: str, begin: str) -> Question:
    """Return a line of a chat to which a reply without a call fits, if it begins with a text."""
    prompt = [data.BOS, *data.question_ids(line)]
    return Question(prompt, lambda reply, called: not called and reply.startswith(begin))


def tables(n: int, seed: int) -> Iterator[tuple[str, str, list[Question]]]:
    """Yield table, row and questions: n in each row, except for the chats written by hand."""
    for skill in data.SKILLS:
        asked = []
        for turn in data.held_out_turns(n, seed, skill):
            result = data.result_text(turn.expression) if turn.expression else None
            asked.append(spoken(turn.question, turn.reply) if result is None else numeric(turn.question, result))
        yield "held-out questions", skill, asked
    chains = data.held_out_chains(n, seed)
    asked = [numeric(second.question, data.result_text(second.expression) or "", (first,)) for first, second in chains]
    yield "held-out questions", "questions that refer to the last result", asked
    chats = [spoken(line, begin) for begin, line in (text.split(":", 1) for text in lines.CHATS)]
    yield "not generated in training", "chats in other words (by hand)", chats
    for name, texts in lines.PATTERNS.items():
        yield "not generated in training", name, [numeric(*asked) for asked in lines.asked(n, seed, texts)]


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(model=str(CALCULATOR.directory))
    parser.add_argument("--questions", type=int, default=200, help="questions in each row")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    engine = InferenceEngine(EngineConfig(model_path=given.model, num_threads=given.threads))
    assert engine.parts.checkpoint is not None
    source = engine.parts.checkpoint.tokenizer
    tokenizer = load_tokenizer(source)
    tool = require(load_dialogue(source, tokenizer)).tool

    def answered(questions: list[Question], *, with_tool: bool) -> tuple[int, int, int]:
        """Ask all questions at once; return the right answers, the replies without a call, and the forced tokens."""
        params = SamplingParams(temperature=0, max_tokens=160)
        samples = engine.generate([one.prompt for one in questions], params, program=tool if with_tool else None)
        right = uncalled = 0
        for question, sample in zip(questions, samples, strict=True):
            text = tokenizer.decode(sample.completion_tokens, skip_special=False)
            called = "<|python_start|>" in text
            uncalled += not called
            right += question.right(text.rpartition("<|output_end|>")[2].replace("<|assistant_end|>", ""), called)
        return right, uncalled, sum(mask == 0 for sample in samples for mask in sample.mask)

    rows, last = [], ""
    for table, name, questions in tables(given.questions, given.seed):
        if table != last:
            print(f"\n| {table} | right | no call |\n|---|---|---|")
        right, uncalled, _ = answered(questions, with_tool=True)
        print(f"| {name} | {right} of {len(questions)} | {uncalled} |", flush=True)
        rows.append({"name": name, "right": right, "uncalled": uncalled, "questions": len(questions)})
        last = table
    print()
    held_out = [numeric(*pair) for pair in data.held_out(500, given.seed)]
    totals = {}
    for name, with_tool in (("with the tool", True), ("without the tool", False)):
        totals[name], _, forced = answered(held_out, with_tool=with_tool)
        print(f"{name:18}{totals[name]:5} of {len(held_out)} right, {forced} tokens forced (mask 0)")
    print(json.dumps({"model": Path(given.model).name, "rows": rows, "totals": totals}))


if __name__ == "__main__":
    main()
