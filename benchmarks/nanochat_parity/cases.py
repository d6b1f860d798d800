"""The cases: a small model of each generation, made from numbers alone, and calls of nanochat's `Engine`.

Needs only the standard library and torch, because it also runs beside upstream's code. Token ids: 17 characters, then
nanochat's nine special tokens, so that random models often call the calculator.

Shapes: L layers, V vocabulary (Vp padded), D hidden size.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHARACTERS = "0123456789+-*/()."
SPECIALS = (
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
VOCAB = len(CHARACTERS) + len(SPECIALS)
BOS, ASSISTANT_START, ASSISTANT_END = (len(CHARACTERS) + place for place in (0, 3, 4))
CONFIG: Mapping[str, Any] = {
    "sequence_len": 512,
    "vocab_size": VOCAB,
    "n_layer": 4,
    "n_head": 2,
    "n_kv_head": 2,
    "n_embd": 128,
}
WINDOWS = "SSSL"
"""`window_pattern`, where the generation has one: 128 to 256 keys in the short layers."""
PYTHON_START, PYTHON_END = BOS + 5, BOS + 6
LIKELY, UNLIKELY = (*range(10), PYTHON_START, PYTHON_END), (BOS, ASSISTANT_END)
"""Tokens that the models prefer, digits in calls of the tool, and those that they avoid, the ends of a row."""
STEADY = 7.0
"""First component of all embeddings, from which the head makes these preferences."""
CALLS_OFTEN = 8.0
"""Factor of the preferences in the cases of the kind `tools`."""
LAST = 8
"""Positions whose logits are compared."""
Row = tuple[list[int], list[int]]
"""Tokens of a sample up to its first terminal, and their masks."""


class Tokenizer:
    """Characters and special tokens, with the methods that nanochat's engine calls."""

    def encode_special(self, text: str) -> int:
        return len(CHARACTERS) + SPECIALS.index(text)

    def get_bos_token_id(self) -> int:
        return BOS

    def encode(self, text: str) -> list[int]:
        return [CHARACTERS.index(one) if one in CHARACTERS else 0 for one in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join((*CHARACTERS, *SPECIALS)[one] for one in ids)


KINDS = ("greedy", "seeded", "rows", "tools", "naive")
MIN_CALLS = 5
"""Results that the calculator inserts at least in the cases of the kind `tools`, at every commit."""


class Case(NamedTuple):
    """Arguments of one `Engine.generate`, or of one `GPT.generate` for the kind `naive`."""

    kind: str
    """The column of the table."""
    prompt: list[int]
    arguments: dict[str, Any]

    @property
    def draws_several_first_tokens(self) -> bool:
        """True if samples can differ in their first token."""
        return self.arguments.get("num_samples", 1) > 1 and self.arguments["temperature"] > 0


def prompt_of(length: int, seed: int) -> list[int]:
    """Return <|bos|>, characters, <|assistant_start|>: `length` ids."""
    random = torch.Generator().manual_seed(seed)
    return [BOS, *torch.randint(0, len(CHARACTERS), (length - 2,), generator=random).tolist(), ASSISTANT_START]


def cases() -> Iterator[Case]:
    """Yield all calls: short and long prompts, greedy and seeded, one sample and many; `naive` is without a cache.

    The kind `tools` is last, because it has other weights.
    """
    for seed in range(6):
        yield Case("greedy", prompt_of(12 + seed, seed), {"num_samples": 1, "max_tokens": 40, "temperature": 0.0})
    yield Case("greedy", prompt_of(300, 6), {"num_samples": 1, "max_tokens": 40, "temperature": 0.0})
    for seed, (temperature, top_k) in enumerate([(1.0, None), (0.7, 5), (1.3, 50)]):
        wish = {"max_tokens": 48, "temperature": temperature, "top_k": top_k, "seed": 100 + seed}
        yield Case("seeded", prompt_of(10, 10 + seed), {"num_samples": 1, **wish})
        yield Case("rows", prompt_of(10, 20 + seed), {"num_samples": 5, **wish})
    wish = {"num_samples": 4, "max_tokens": 48, "temperature": 1.0, "seed": 7}
    yield Case("rows", prompt_of(300, 30), wish)
    yield Case("rows", prompt_of(16, 4), {"num_samples": 5, "max_tokens": 40, "temperature": 0.0})
    yield Case("naive", prompt_of(20, 60), {"max_tokens": 30, "temperature": 0.0})
    yield Case("naive", prompt_of(20, 61), {"max_tokens": 30, "temperature": 1.0, "seed": 3})
    yield Case("naive", prompt_of(300, 62), {"max_tokens": 8, "temperature": 0.8, "seed": 4})
    for seed, (temperature, top_k) in enumerate([(1.0, 20), (2.0, None), (4.0, None)]):
        wish = {"max_tokens": 64, "temperature": temperature, "top_k": top_k, "seed": 50 + seed}
        yield Case("tools", prompt_of(9, 40 + seed), {"num_samples": 12, **wish})
    for seed in range(3):
        wish = {"num_samples": 1, "max_tokens": 80, "temperature": 4.0, "top_k": 12, "seed": 60 + seed}
        yield Case("tools", prompt_of(9, 50 + seed), wish)


def has_bigrams(names: Mapping[str, object]) -> bool:
    """Return whether weights are those of a model with bigram embeddings (G2e).

    Upstream's cache did not keep the previous token for them, so its engine is run without a cache.
    """
    return "bigram_embed.embed.weight" in names


def scored() -> list[int]:
    """Return the ids whose last logits are compared: longer than the short windows."""
    return prompt_of(400, 99)


def weights(names: Mapping[str, Sequence[int]], *, calls_often: bool = False) -> dict[str, Tensor]:
    """Return float32 weights of the given shapes, each a function of its name alone.

    `calls_often`: the preferences for digits and calls outweigh what the layers compute, and ends are not avoided.
    """
    found = {name: _weight(name, tuple(shape)) for name, shape in names.items()}
    if calls_often:
        for name, value in found.items():
            if name.endswith("c_proj.weight"):
                value[0] = 0.0  # no layer changes the component of the preferences
        found["lm_head.weight"][torch.tensor(LIKELY), 0] *= CALLS_OFTEN
        found["lm_head.weight"][torch.tensor(UNLIKELY), 0] = 0.0
    return found


def _weight(name: str, shape: tuple[int, ...]) -> Tensor:
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=random)
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last in ("resid_lambdas", "x0_lambdas", "bigram_lambdas", "smear_lambda", "backout_lambda"):
        return (1.0 if last == "resid_lambdas" else 0.2) + 0.05 * values
    if last == "wte":
        values[:, 0] = STEADY
    if last == "wte" or name.startswith(("value_embeds", "bigram_embed")):
        return values
    if last == "lm_head":
        values *= 2.0
        values[:, 0] = torch.zeros(shape[0]).index_fill(0, torch.tensor(LIKELY), 8.0)
        values[torch.tensor(UNLIKELY), 0] = -6.0
    return values / math.sqrt(shape[-1])


def rows_of(columns: Iterator[tuple[list[int], list[int]]], num_samples: int) -> list[Row]:
    """Return each row of the columns up to and with its first terminal: later ones have no meaning."""
    rows: list[Row] = [([], []) for _ in range(num_samples)]
    ended = [False] * num_samples
    for tokens, masks in columns:
        for row, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
            if not ended[row]:
                rows[row][0].append(int(token))
                rows[row][1].append(int(mask))
                ended[row] = token in (BOS, ASSISTANT_END)
    return rows


def cases_of(*, is_first_shared: bool) -> list[Case]:
    """Return the cases that are recorded: with `is_first_shared` only those whose samples cannot differ at first."""
    return [case for case in cases() if not (is_first_shared and case.draws_several_first_tokens)]


def results(
    model: Any, engine: Any, names: Mapping[str, Sequence[int]], chosen: Sequence[Case]
) -> list[dict[str, Any]]:
    """Run cases, in their order, on a model's `generate` and on its engine; return the rows of each.

    A result of an engine also has a digest of what `generate_batch` returns. `names` has the shapes of the weights, of
    which the model has the first ones of `weights`.
    """
    found: list[dict[str, Any]] = []
    calls_often = False
    for case in chosen:
        if case.kind == "tools" and not calls_often:
            calls_often = True
            model.load_state_dict(weights(names, calls_often=True), strict=True, assign=True)
        if case.kind == "naive":
            tokens = [int(token) for token in model.generate(list(case.prompt), **case.arguments)]
            found.append({"kind": case.kind, "rows": [[tokens, [1] * len(tokens)]]})
            continue
        rows = rows_of(engine.generate(list(case.prompt), **case.arguments), case.arguments["num_samples"])
        batch = json.dumps(engine.generate_batch(list(case.prompt), **case.arguments)).encode()
        found.append({"kind": case.kind, "rows": rows, "batch": hashlib.sha256(batch).hexdigest()})
    return found
