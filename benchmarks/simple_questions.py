"""Measure the share of right answers to 50 simple questions for sampling settings.

    python benchmarks/simple_questions.py [--model default] [--half report] [--samples 8] [SETTING …]
    python benchmarks/simple_questions.py --half first [SETTING …]

A SETTING is a name of NAMED or a list of sampling parameters such as `temperature=0.3,top_p=0.9`; without any, `plain`
and `chat` are compared: `plain` is temperature 1 without truncation, `chat` the defaults of the terminal's chat and of
the page. Every question is asked `--samples` times, alone, with the seeds 0, 1, …; an answer of at most 64 tokens is
right if it contains an accepted word. `benchmarks/data/questions.tsv` has the questions and those words; the odd lines
are for tuning (`--half tune`), the even ones for reporting. `±` is the standard error over the questions. The last line
is JSON.

`--half first` asks the ten questions of `benchmarks/data/first_questions.tsv`, which most people ask first, 20 times
each, and compares `CANDIDATES`. It prints the right answers to each question. A setting is good enough if each question
that the greedy answer gets right has at least 19 right answers of 20.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.loading.catalog import catalog_sampling, default_cache, resolve
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.formats import sampling_defaults
from nano_inference.text.dialogue import load_dialogue, require
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data"
MAX_TOKENS = 64
NAMED = ("plain", "chat")
CANDIDATES = (
    "plain",
    "temperature=0.2,top_p=0.9",
    "temperature=0.1,top_p=0.9",
    "temperature=0.2,min_p=0.2",
    "temperature=0.2,top_p=0.6",
    "temperature=0.2,top_p=0.5",
    "temperature=0.4,top_p=0.5",
    "temperature=0.7,top_p=0.5",
    "temperature=0",
)
"""Defaults for chats that `--half first` compares. The first with top-p 0.9 are those of the model's page."""
SHARE_FIRST = 0.95
"""Share of right answers that a setting needs for each first question."""


class Question(NamedTuple):
    """A question, and the pattern that a right answer contains."""

    text: str
    accepted: re.Pattern[str]


class Score(NamedTuple):
    """How a setting did."""

    setting: str
    sampling: Mapping[str, Any]
    right: float
    """Share of the answers that are right."""
    error: float
    """Standard error of that over the questions."""
    always: float
    """Share of the questions whose answers are all right."""
    lowest: float
    """Share for the question with the fewest right answers among those that the greedy answer gets right."""


def read_questions(half: str) -> list[Question]:
    """Return the questions of a half ("tune", "report"), all, or those that people ask first."""
    file = DATA / ("first_questions.tsv" if half == "first" else "questions.tsv")
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    questions = [Question(text, re.compile(pattern, re.IGNORECASE)) for text, pattern in rows]
    return questions[{"tune": slice(0, None, 2), "report": slice(1, None, 2)}.get(half, slice(None))]


def parse(setting: str, chat: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sampling parameters that a setting names."""
    if setting in NAMED:
        return dict(chat) if setting == "chat" else {}
    pairs = (pair.partition("=") for pair in setting.split(","))
    return {name: json.loads(value) for name, _, value in pairs}


class Asker:
    """Asks an engine questions."""

    def __init__(self, name: str, threads: int | None) -> None:
        path = resolve(name, default_cache(os.environ))
        checkpoint = open_checkpoint(path)
        self._tokenizer = load_tokenizer(checkpoint.tokenizer)
        self._dialogue = require(load_dialogue(checkpoint.tokenizer, self._tokenizer))
        self._engine = InferenceEngine(EngineConfig(model_path=str(path), num_threads=threads))
        self.chat = chat_defaults(sampling_defaults(checkpoint), catalog_sampling(name)).sampling

    def ask(self, questions: Sequence[Question], params: SamplingParams, num_samples: int) -> list[list[str]]:
        """Return `num_samples` answers to each question."""
        prompts = [self._dialogue.encode([{"role": "user", "content": one.text}]) for one in questions]
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        seeded = [replace(params, seed=i % num_samples) for i in range(len(repeated))]
        texts = [self._tokenizer.decode(one.completion_tokens) for one in self._engine.generate(repeated, seeded)]
        return [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]


def shares_of(answers: Sequence[Sequence[str]], questions: Sequence[Question]) -> list[float]:
    """Return the share of right answers to each question."""
    pairs = zip(questions, answers, strict=True)
    return [statistics.fmean(bool(question.accepted.search(text)) for text in texts) for question, texts in pairs]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    parser.add_argument("--model", default="default")
    parser.add_argument("--half", choices=("tune", "report", "all", "first"), default="report")
    parser.add_argument("--samples", type=int, help="8, for the first questions 20")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--verbose", action="store_true", help="print each question's first answer and its share")
    given = parser.parse_args()
    is_first = given.half == "first"
    num_samples = given.samples or (20 if is_first else 8)
    asker, questions = Asker(given.model, given.threads), read_questions(given.half)
    greedy = shares_of(asker.ask(questions, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), 1), questions)
    print(f"greedy: {sum(greedy):.0f} of {len(greedy)} right", flush=True)
    scores = []
    for setting in given.settings or (CANDIDATES if is_first else NAMED):
        sampling = parse(setting, asker.chat)
        params = SamplingParams(**{**sampling, "max_tokens": MAX_TOKENS})
        answers = asker.ask(questions, params, num_samples)
        shares = shares_of(answers, questions)
        if given.verbose:
            for question, texts, share in zip(questions, answers, shares, strict=True):
                print(f"{share:.2f} {question.text}  {texts[0]!r}")
        error = statistics.stdev(shares) / math.sqrt(len(shares))
        always = statistics.fmean(share == 1 for share in shares)
        lowest = min((share for share, is_known in zip(shares, greedy, strict=True) if is_known), default=0.0)
        best = Score(setting, sampling, statistics.fmean(shares), error, always, lowest)
        scores.append(best)
        print(f"{setting:30} right {best.right:.1%} ± {best.error:.1%}, always right {best.always:.0%}", flush=True)
        if is_first:
            counts = " ".join(f"{share * num_samples:.0f}" for share in shares)
            verdict = "good enough" if lowest >= SHARE_FIRST else "too few"
            print(f"{'':30} of {num_samples}: {counts}; {verdict} where greedy is right", flush=True)
    print(json.dumps({"half": given.half, "samples": num_samples, "scores": [one._asdict() for one in scores]}))


if __name__ == "__main__":
    main()
