"""Measure n-gram speculation on repetitive and other text, off and on, in turns.

    python benchmarks/speculation.py [--rounds 5] [--dtype auto] [--threads N] [--draft 5]

The default model runs in two engines in one process, one of them with drafts: a text to copy with corrections and a
table to write (greedy, batch 1), random tokens (temperature 1, batch 1 and 8), and a rollout of 8
samples of one prompt (temperature 1). Every round runs each case on both, the order changing; figures are medians.
Tokens and log-probabilities of the two are compared, bit for bit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, replace

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.text.dialogue import load_dialogue
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import StepStats

COPY = (
    "Correct the spelling and give the whole text again: The quikc brown fox jumps over the lazi dog. The dog sleaps "
    "in the sun, and the fox runs away to the forest where the crow sits on a tree. In the evenning the crow flies "
    "home, and the dog barks at the moon until the farmer comes out of the house with a lantern in his hand."
)
TABLE = "List the multiplication table of 7 from 7 x 1 to 7 x 20."
STORY = "Tell me a short story about a fox and a crow."


@dataclass(frozen=True)
class Case:
    """Prompts and what is asked of each."""

    name: str
    prompts: list[list[int]]
    params: SamplingParams
    num_samples: int = 1


@dataclass(frozen=True)
class Run:
    """What one engine gave for a case."""

    seconds: float
    samples: list[TrainingSample]
    stats: list[StepStats]

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens over the whole time, prompts included."""
        return sum(len(sample.completion_tokens) for sample in self.samples) / self.seconds

    @property
    def num_drafted(self) -> int:
        """Guessed tokens that were computed."""
        return sum(one.num_drafted for one in self.stats)

    @property
    def num_accepted(self) -> int:
        """Those that were right."""
        return sum(one.num_accepted for one in self.stats)


def cases(engine: InferenceEngine, length: int) -> list[Case]:
    """Everything that is measured; `length` tokens are drawn where the text does not end by itself."""
    assert engine.parts.checkpoint is not None
    source = engine.parts.checkpoint.tokenizer
    tokenizer = load_tokenizer(source)
    dialogue = load_dialogue(source, tokenizer)
    copy, table, story = (dialogue.encode([{"role": "user", "content": text}]) for text in (COPY, TABLE, STORY))
    rng = random.Random(1)
    noise = [[rng.randrange(1000, 40_000) for _ in range(64)] for _ in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=length)
    drawn = SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, seed=1)
    return [
        Case("copy, greedy", [copy], greedy),
        Case("table, greedy", [table], greedy),
        Case("random, 1 row", noise[:1], drawn),
        Case("random, 8 rows", noise, drawn),
        Case("rollout, 8 samples", [story], SamplingParams(temperature=1, max_tokens=length, seed=1), 8),
    ]


def run(engine: InferenceEngine, case: Case) -> Run:
    """Run a case on an empty cache."""
    engine.flush_cache()
    stats: list[StepStats] = []
    started = time.perf_counter()
    samples = engine.generate(
        case.prompts, case.params, case.num_samples, progress=lambda result: stats.append(result.stats)
    )
    return Run(time.perf_counter() - started, samples, stats)


def are_equal(one: Run, other: Run) -> bool:
    """Whether two engines drew the same tokens with the same log-probabilities."""
    return [(s.completion_tokens, s.logprobs) for s in one.samples] == [
        (s.completion_tokens, s.logprobs) for s in other.samples
    ]


def compare(case: Case, off: list[Run], on: list[Run]) -> dict[str, str | float]:
    """Put the rounds of one case together."""
    return {
        "case": case.name,
        "off_tokens_per_s": statistics.median(one.tokens_per_second for one in off),
        "on_tokens_per_s": statistics.median(one.tokens_per_second for one in on),
        "speedup": statistics.median(a.seconds / b.seconds for a, b in zip(off, on, strict=True)),
        "off_steps": len(off[0].stats),
        "on_steps": len(on[0].stats),
        "drafted": on[0].num_drafted,
        "accepted": on[0].num_accepted,
        "is_same": all(are_equal(a, b) for a, b in zip(off, on, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--draft", type=int, default=5)
    arguments = parser.parse_args()
    plain = EngineConfig(
        model_path=arguments.model,
        device="cpu",
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        kv_cache_bytes=1 << 28,
    )
    guessing = replace(plain, speculation="ngram", max_draft_tokens=arguments.draft)
    with InferenceEngine(plain) as off, InferenceEngine(guessing) as on:
        found: list[tuple[Case, list[Run], list[Run]]] = [(case, [], []) for case in cases(off, arguments.length)]
        for number in range(arguments.rounds):
            for case, without, with_guesses in found:
                pairs = [(off, without), (on, with_guesses)]
                for engine, runs in pairs if number % 2 == 0 else reversed(pairs):
                    runs.append(run(engine, case))
    results = [compare(case, without, with_guesses) for case, without, with_guesses in found]
    print(f"{'tokens/s':20s} {'off':>7s} {'on':>7s} {'ratio':>6s} {'steps':>11s} {'accepted':>10s}  same bits")
    for one in results:
        steps, accepted = f"{one['off_steps']} > {one['on_steps']}", f"{one['accepted']} / {one['drafted']}"
        figures = f"{one['off_tokens_per_s']:7.1f} {one['on_tokens_per_s']:7.1f} {one['speedup']:5.2f}x"
        print(f"{one['case']:20s} {figures} {steps:>11s} {accepted:>10s}  {'yes' if one['is_same'] else 'NO'}")
    print(json.dumps({"dtype": arguments.dtype, "max_draft_tokens": arguments.draft, "cases": results}))


if __name__ == "__main__":
    main()
