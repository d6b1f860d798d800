"""Measure the share of right answers to 50 simple questions for sampling settings.

    python benchmarks/simple_questions.py [--model default] [--half report] [--samples 8] [SETTING …]
    python benchmarks/simple_questions.py --half first [SETTING …]

A SETTING is `plain` (temperature 1 without truncation), `chat` (the defaults of the terminal's chat and of the page) or
a list of sampling parameters such as `temperature=0.3,top_p=0.9`. Every question is asked `--samples` times, alone,
with the seeds 0, 1, …; an answer of at most 64 tokens is right if it contains an accepted word.
`benchmarks/data/questions.tsv` has the questions and those words; the odd lines are for tuning (`--half tune`), the
even ones for reporting. `±` is the standard error over the questions. The last line is JSON.

`--half first` asks the ten questions of `benchmarks/data/first_questions.tsv`, which most people ask first, 20 times
each, and prints the right answers to each. A setting is good enough if each question that the greedy answer gets right
has at least 19 right answers of 20.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import options

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.loading.catalog import catalog_sampling, default_cache, resolve
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.formats import sampling_defaults
from nano_inference.text.dialogue import load_dialogue, require
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data"
MAX_TOKENS = 64
HALVES = {"tune": slice(0, None, 2), "report": slice(1, None, 2), "all": slice(None), "first": slice(None)}
LEAST_FIRST = 0.95
"""Share of right answers that a setting needs for each first question."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("settings", nargs="*", metavar="SETTING", default=["plain", "chat"])
    parser.add_argument("--half", choices=list(HALVES), default="report")
    parser.add_argument("--samples", type=int, help="8, for the first questions 20")
    given = parser.parse_args()
    is_first = given.half == "first"
    num_samples = given.samples or (20 if is_first else 8)
    text = (DATA / ("first_questions.tsv" if is_first else "questions.tsv")).read_text(encoding="utf-8")
    questions = dict(line.split("\t") for line in text.splitlines()[HALVES[given.half]])
    path = resolve(given.model, default_cache(os.environ))
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    dialogue = require(load_dialogue(checkpoint.tokenizer, tokenizer))
    chat = chat_defaults(sampling_defaults(checkpoint), catalog_sampling(given.model)).sampling
    engine = InferenceEngine(EngineConfig(model_path=str(path), num_threads=given.threads))

    def shares(sampling: Mapping[str, Any], count: int) -> list[float]:
        """Return the share of right answers to each question, asked so many times."""
        params = SamplingParams(**{**sampling, "max_tokens": MAX_TOKENS})
        prompts = [dialogue.encode([{"role": "user", "content": question}]) for question in questions]
        seeded = [replace(params, seed=seed) for _ in prompts for seed in range(count)]
        samples = engine.generate([prompt for prompt in prompts for _ in range(count)], seeded)
        texts = iter([tokenizer.decode(sample.completion_tokens) for sample in samples])
        found = []
        for accepted in questions.values():
            answers = [next(texts) for _ in range(count)]
            found.append(statistics.fmean(bool(re.search(accepted, answer, re.IGNORECASE)) for answer in answers))
        return found

    greedy = shares({"temperature": 0}, 1)
    print(f"greedy: {sum(greedy):.0f} of {len(greedy)} right", flush=True)
    scores = {}
    for setting in given.settings:
        pairs = (pair.partition("=") for pair in setting.split(","))
        listed = {name: json.loads(value) for name, _, value in pairs if value}
        right = shares(dict(chat) if setting == "chat" else listed, num_samples)
        mean, error = statistics.fmean(right), statistics.stdev(right) / math.sqrt(len(right))
        lowest = min((share for share, is_known in zip(right, greedy, strict=True) if is_known), default=0.0)
        scores[setting] = {"right": mean, "error": error, "lowest": lowest}
        print(f"{setting:30} right {mean:.1%} ± {error:.1%}", flush=True)
        if is_first:
            counts = " ".join(f"{share * num_samples:.0f}" for share in right)
            verdict = "good enough" if lowest >= LEAST_FIRST else "too few"
            print(f"{'':30} of {num_samples}: {counts}; {verdict} where greedy is right", flush=True)
    print(json.dumps({"half": given.half, "samples": num_samples, "scores": scores}))


if __name__ == "__main__":
    main()
