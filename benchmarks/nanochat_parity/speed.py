"""Time this package's nanochat `Engine` beside upstream's own, on the same random weights, in one run.

Both use one thread; seconds are CPU time of the process, so other programs disturb little. The two runs of a pair have
the same prompt and seed, and each pair has a new prompt, so that no prefix is cached; the ratio is the median of the
pairs' ratios. In the rows `cached` each engine has answered the prompt once before the run that is measured: ours
then computes its last token only, upstream all of it. `equal` is the share of equal tokens up to the first difference
of a row: a rounding error can exchange two candidates of almost the same probability. Our cache has the size of
upstream's for the largest call, and its pages are allocated before anything is counted (`kv_cache_bytes`): otherwise
the first calls would pay for pages that all later ones use again. The last line is JSON.

Legend: d6 is a model of 6 layers and size 384; n = samples; ratio = upstream's seconds / ours; above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.nanochat_parity.cases import SPECIALS
from benchmarks.nanochat_parity.upstream import imported
from nano_inference.config import EngineConfig
from nano_inference.nanochat import GPT, Engine

VOCAB, HEAD, PROMPT, TOKENS = 32768, 64, 128, 16


class Ids:
    """A tokenizer of which only the special tokens matter."""

    def encode_special(self, text: str) -> int:
        return VOCAB - len(SPECIALS) + SPECIALS.index(text)

    def get_bos_token_id(self) -> int:
        return self.encode_special("<|bos|>")

    def encode(self, text: str) -> list[int]:
        return [ord(one) % 100 for one in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def engines(checkout: Path, depth: int, most_tokens: int) -> dict[str, Any]:
    """Return upstream's engine and ours on the same random model of `depth` layers; ours caches `most_tokens`."""
    gpt, engine = imported(checkout)
    size = HEAD * depth
    shape = {"n_layer": depth, "n_head": depth, "n_kv_head": depth, "n_embd": size}
    config = gpt.GPTConfig(sequence_len=1024, vocab_size=VOCAB, **shape)
    torch.manual_seed(0)
    theirs = gpt.GPT(config)
    theirs.init_weights()
    for weight in (*theirs.transformer.h.parameters(), theirs.lm_head.weight):
        if weight.dim() == 2:  # upstream starts with products of zeros and almost equal logits
            torch.nn.init.normal_(weight, std=2 * size**-0.5)
    theirs.eval()
    model = GPT.from_state_dict(dict(theirs.state_dict()), asdict(config))
    num_bytes = most_tokens * model.kv_bytes_per_token()
    own = EngineConfig(model_path="nanochat", max_model_len=2**31 - 1, num_threads=1, kv_cache_bytes=num_bytes)
    ours = Engine(model, Ids(), config=own)
    assert ours.core.parts.executor.store.wait_for_pages(600), "the pages of the cache were not allocated in 600 s"
    return {"upstream": engine.Engine(theirs, Ids()), "ours": ours}


def run(engine: Any, prompt: list[int], **arguments: Any) -> tuple[float, list[list[int]]]:
    """Return the CPU seconds of a call, and its columns."""
    gc.collect()
    start = time.process_time()
    columns = [column for column, _ in engine.generate(list(prompt), **arguments)]
    return time.process_time() - start, columns


def equal_share(a: list[list[int]], b: list[list[int]]) -> float:
    """Return the share of tokens before each row's first difference."""
    equal = total = 0
    for one, other in zip(zip(*a, strict=True), zip(*b, strict=True), strict=False):
        differs = [x != y for x, y in zip(one, other, strict=False)]
        equal += differs.index(True) if True in differs else len(differs)
        total += len(differs)
    return equal / total


def compared(sides: dict[str, Any], samples: int, top_k: int, repeat: int, cached: bool) -> dict[str, Any]:
    """Return the medians of so many pairs after one that is not counted.

    `cached`: both engines have answered each prompt once before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shares = []
    for seed in range(repeat + 1):
        random = torch.Generator().manual_seed(zlib.crc32(f"{samples} {top_k} {cached} {seed}".encode()))
        prompt = torch.randint(0, VOCAB - 100, (PROMPT,), generator=random).tolist()
        arguments = {"num_samples": samples, "max_tokens": TOKENS, "top_k": top_k or None, "seed": seed}
        if cached:
            for engine in sides.values():
                run(engine, prompt, max_tokens=1)
        found = {name: run(engine, prompt, **arguments) for name, engine in sides.items()}
        for name, (took, _) in found.items():
            seconds[name] += [took] if seed else []
        shares.append(equal_share(found["upstream"][1], found["ours"][1]))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    equal = statistics.mean(shares)
    return {"samples": samples, "top_k": top_k, "cached": cached, **middle, "ratio": ratio, "equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a working tree of karpathy/nanochat")
    parser.add_argument("--depths", type=int, nargs="*", default=[6, 12])
    parser.add_argument("--samples", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--repeat", type=int, default=5)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':>6}{'n':>5}{'top-k':>7}{'prompt':>8}{'upstream s':>12}{'ours s':>9}{'ratio':>8}{'equal':>8}")
    rows: list[dict[str, Any]] = []
    for depth in wish.depths:
        sides = engines(wish.checkout, depth, max(wish.samples) * (PROMPT + TOKENS))
        calls = [(samples, top_k, False) for top_k in (50, 0) for samples in wish.samples]
        for samples, top_k, cached in [*calls, (wish.samples[0], 50, True)]:
            row = {"depth": depth, **compared(sides, samples, top_k, wish.repeat, cached)}
            rows.append(row)
            head = f"{f'd{depth}':>6}{samples:>5}{top_k or '–':>7}{'cached' if cached else 'new':>8}"
            figures = f"{row['upstream']:>12.3f}{row['ours']:>9.3f}{row['ratio']:>7.2f}x{row['equal']:>8.1%}"
            print(head + figures, flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
