"""Compare nanochat's own algorithm with the core engine on one model, in one run.

nanochat's algorithm is in `nanochat/loop.py`: a dense cache, the whole history recomputed at every turn, every row
computed until the last one ends, logits of all prompt positions. Both sides use the same random numbers; `equal_rows`
is the share of rollouts with the same tokens (a random model's 50 best logits are so close that rounding can exchange
two of them). The naive forward pass without a cache shows how its cost grows with the length.

Legend: s seconds; ratio = nanochat's seconds / the core engine's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_inference.nanochat import GPT, Engine
from nano_inference.nanochat.cache import KVCache
from nano_inference.types import SamplingParams

SPECIALS = ("bos", "user_start", "user_end", "assistant_start", "assistant_end")
TOOL = ("python_start", "python_end", "output_start", "output_end")
BOS, USER_START, USER_END, ASSISTANT_START, ASSISTANT_END = range(5)
TEXT = 9
"""The first id that is no special token."""


class Ids:
    """A tokenizer of which only the special tokens matter."""

    def encode_special(self, text: str) -> int:
        return (*SPECIALS, *TOOL).index(text.strip("<|>"))

    def get_bos_token_id(self) -> int:
        return BOS

    def encode(self, text: str) -> list[int]:
        return [TEXT + ord(c) % 100 for c in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Plain:
    """The same model as one that is not ours: `Engine` runs nanochat's loop on it."""

    def __init__(self, model: GPT) -> None:
        self.model, self.config = model, model.config

    def get_device(self) -> torch.device:
        return self.model.get_device()

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        return self.model.forward(ids, kv_cache=kv_cache)


def random_model(num_layers: int, size: int, vocab_size: int, sequence_len: int) -> GPT:
    """A G4 model of random weights, with one direction that all its states have."""
    random = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * columns**-0.5

    state = {"transformer.wte.weight": normal(vocab_size, size), "lm_head.weight": 0.5 * normal(vocab_size, size)}
    state["transformer.wte.weight"][:, 0] += 1.0
    state["lm_head.weight"][:, 0] = 0.0
    for i in range(num_layers):
        block = f"transformer.h.{i}."
        state |= {f"{block}attn.{part}.weight": normal(size, size) for part in ("c_q", "c_k", "c_v", "c_proj")}
        state |= {
            f"{block}mlp.c_fc.weight": normal(4 * size, size),
            f"{block}mlp.c_proj.weight": normal(size, 4 * size),
        }
        if i % 2 == (num_layers - 1) % 2:
            state[f"value_embeds.{i}.weight"] = normal(vocab_size, size)
            state[f"{block}attn.ve_gate.weight"] = normal(size // 64, 12)
    state |= {"resid_lambdas": torch.ones(num_layers), "x0_lambdas": torch.full((num_layers,), 0.1)}
    state |= {"smear_gate.weight": normal(1, 24), "smear_lambda": torch.ones(1), "backout_lambda": torch.ones(1) * 0.1}
    heads = size // 64
    config = {"sequence_len": sequence_len, "vocab_size": vocab_size, "n_layer": num_layers, "n_head": heads}
    return GPT.from_state_dict(state, {**config, "n_kv_head": heads, "n_embd": size, "window_pattern": "SSSL"})


def words(count: int, seed: int, vocab_size: int) -> list[int]:
    """Random tokens of text."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(TEXT, vocab_size, (count,), generator=random).tolist()


def end_about_every(num_tokens: int, model: GPT) -> None:
    """Set the one weight that makes the end likely, so that answers end after so many tokens on average (top-k 50)."""
    head_VE = model.weights["lm_head.weight"]
    ids = torch.tensor([words(200, 1, model.config.vocab_size)])
    low, high = 0.0, 10.0
    for _ in range(30):
        head_VE[ASSISTANT_END, 0] = (low + high) / 2
        best_TK, id_TK = model.forward(ids)[0].topk(50)
        chance = float((best_TK.softmax(-1) * (id_TK == ASSISTANT_END)).sum(-1).mean())
        low, high = (low, (low + high) / 2) if chance > 1 / num_tokens else ((low + high) / 2, high)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


def rollouts(model: GPT, repeat: int, num_prompts: int) -> dict[str, Any]:
    """n=16 of prompts of 128 tokens, top-k 50 as nanochat's RL has it, at most 256 new tokens, rows ending by chance.

    nanochat's loop takes one prompt after the other; ours takes them together.
    """
    sides = {"ours": Engine(model, Ids()), "nanochat": Engine(Plain(model), Ids())}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    lengths: list[int] = []
    equal: list[bool] = []
    for seed in range(repeat + 1):
        texts = [words(126, 100 * seed + i, model.config.vocab_size) for i in range(num_prompts)]
        prompts = [[BOS, USER_START, *text, USER_END, ASSISTANT_START] for text in texts]
        found = {}
        for name, engine in sides.items():
            wish: dict[str, Any] = {"max_tokens": 256, "top_k": 50, "seeds": range(seed, seed + num_prompts)}
            took, found[name] = timed(partial(engine.generate_batches, prompts, 16, **wish))
            seconds[name] += [took] if seed else []
        rows = {name: [row for results, _ in batches for row in results] for name, batches in found.items()}
        equal += [a == b for a, b in zip(rows["ours"], rows["nanochat"], strict=True)]
        lengths += [len(row) - 130 for row in rows["ours"]] if seed else []
    facts = {"mean_tokens": sum(lengths) / len(lengths), "longest": max(lengths), "equal_rows": sum(equal) / len(equal)}
    return summary(f"rollouts, {num_prompts} x n=16", seconds, facts)


def chat(model: GPT, repeat: int) -> list[dict[str, Any]]:
    """The fifth turn of a conversation: 192 tokens of the user, up to 64 of the assistant, behind four such turns."""
    sides = {"ours": Engine(model, Ids()), "nanochat": Engine(Plain(model), Ids())}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    firsts: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(repeat + 1):
        for name, engine in sides.items():
            history = [BOS]
            for turn in range(5):
                user = words(192, 100 * seed + turn, model.config.vocab_size)
                history += [USER_START, *user, USER_END, ASSISTANT_START]
                columns = engine.generate(history, max_tokens=64, temperature=0.0)
                first, column = timed(partial(next, columns))
                took, rest = timed(partial(list, columns))
                answer = [column, *rest]
                tokens = [column[0] for column, _ in answer]
                history += tokens if tokens[-1] == ASSISTANT_END else [*tokens, ASSISTANT_END]
            seconds[name] += [first + took] if seed else []
            firsts[name] += [first] if seed else []
    facts = {"history": len(history)}
    return [summary("chat, turn 5, first token", firsts, facts), summary("chat, turn 5, all tokens", seconds, facts)]


def naive(model: GPT, lengths: list[int]) -> list[dict[str, Any]]:
    """Greedy tokens without a cache against the engine, for one prompt of 8 tokens."""
    core = Engine(model, Ids()).core
    core.generate([[BOS, TEXT]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    prompt = [BOS, *words(7, 0, model.config.vocab_size)]
    rows = []
    for length in lengths:
        slow, expected = timed(partial(list, model.generate(prompt, length, temperature=0.0)))
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        core.flush_cache()
        fast, samples = timed(partial(core.generate, [prompt], params))
        assert list(samples[0].completion_tokens) == expected, "the two sides differ"
        rows.append(summary(f"naive forward, {length} tokens", {"ours": [fast], "nanochat": [slow]}, {}))
    return rows


def summary(name: str, seconds: dict[str, list[float]], more: dict[str, Any]) -> dict[str, Any]:
    """Medians and their ratio."""
    middle = {side: sorted(values)[len(values) // 2] for side, values in seconds.items()}
    return {"name": name, **middle, "ratio": middle["nanochat"] / middle["ours"], **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--size", type=int, default=384, help="embedding size; 384 with 6 layers is nanochat's d6")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[1, 8], help="how many at once, a line for each")
    parser.add_argument("--lengths", type=int, nargs="*", default=[30, 100, 300])
    wish = parser.parse_args()
    model = random_model(wish.layers, wish.size, wish.vocab, 2048)
    end_about_every(80, model)
    rows = [
        *(rollouts(model, wish.repeat if count == 1 else 1, count) for count in wish.prompts),
        *chat(model, wish.repeat),
        *naive(model, wish.lengths),
    ]
    print(f"{'workload':32}{'nanochat s':>12}{'ours s':>10}{'ratio':>8}")
    for row in rows:
        print(f"{row['name']:32}{row['nanochat']:12.3f}{row['ours']:10.3f}{row['ratio']:8.2f}")
    print(json.dumps({"layers": wish.layers, "size": wish.size, "vocab": wish.vocab, "rows": rows}))


if __name__ == "__main__":
    main()
