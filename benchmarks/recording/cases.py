"""Which models are recorded with which settings, and what each of them is asked.

A request is a function of the vocabulary's size and the longest sequence alone: two trees are asked the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

ComputePath = Literal["c", "torch", "cuda"]
"""Of these "cuda" is that executor with plain kernels on CPU tensors."""
BITWISE = 0.0
RELATIVE = 1e-5
"""Largest difference of a float from the other tree's, relative to the largest of its list (at least 1)."""

C_DTYPES = ("float32", "bfloat16", "int8")
TORCH_DTYPES = ("float32", "bfloat16", "float16")
BLOCK_DTYPES = ("auto", "bfloat16", "int8")
"""Of quantised files: "auto" keeps the blocks."""


class Request(NamedTuple):
    """One request: token ids, fields of `SamplingParams`, number of samples."""

    prompt: list[int]
    params: dict[str, Any]
    num_samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How an engine is configured and asked."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`."""
    spare_blocks: int | None = None
    """Blocks of the KV cache beyond those of the longest request; None gives more than are used."""
    asks_all_rows: bool = False
    """Every request asks for the log-probabilities of its whole prompt, so that no row of any step is left out."""
    staggered: bool = False
    """One request arrives before each step, instead of all before the first."""
    num_repeated: int = 0
    """Requests that are asked again at the end, on cached prefixes."""


MAX_LEN = 330
"""Longest sequence, where the model has as many positions."""
NUM_REQUESTS, MAX_TOKENS = 24, 30

SCENARIOS: Mapping[str, Scenario] = {
    "mixed": Scenario(num_repeated=5),
    "chunks": Scenario(options={"max_tokens_per_batch": 37, "block_size": 4, "cache_type": "paged"}, staggered=True),
    "preempted": Scenario(options={"block_size": 4, "max_tokens_per_batch": 64}, spare_blocks=12),
    "ngram": Scenario(options={"speculation": "ngram", "max_draft_tokens": 4, "max_batch_size": 3}),
    "cache in bfloat16": Scenario(options={"kv_cache_dtype": "bfloat16"}),
    "all rows": Scenario(options={"max_tokens_per_batch": 64}, asks_all_rows=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine to record."""

    model: str
    dtype: str
    path: ComputePath
    scenario: str
    tolerance: float = BITWISE

    @property
    def name(self) -> str:
        """What identifies it in reports."""
        return f"{self.model} {self.dtype} {self.path} {self.scenario}"


def cases_of(model: str) -> list[Case]:
    """Return the cases of one model; its name says of which kind it is."""
    if model == "default":
        return [_case(model, dtype, "c", "mixed") for dtype in ("auto", "int8")]
    is_quantised = model.startswith("gguf-")
    first, *others = BLOCK_DTYPES if is_quantised else C_DTYPES
    found = [_case(model, first, "c", name) for name, one in SCENARIOS.items() if not one.asks_all_rows]
    found += [_case(model, dtype, "c", name) for dtype in others for name in ("mixed", "chunks")]
    found += [_case(model, dtype, "torch", "all rows") for dtype in TORCH_DTYPES[: 1 if is_quantised else None]]
    found += [_case(model, "float32", "torch", name, RELATIVE) for name in ("mixed", "chunks")]
    if not is_quantised:
        found += [_case(model, "float32", "cuda", name) for name in ("mixed", "chunks", "preempted")]
    return found


def _case(model: str, dtype: str, path: ComputePath, scenario: str, tolerance: float = BITWISE) -> Case:
    return Case(model=model, dtype=dtype, path=path, scenario=scenario, tolerance=tolerance)


_KINDS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, "raw_logprobs": True},
    {},
    {"temperature": 0.8, "top_k": 9, "sampling_mask": True},
    {"top_p": 0.7},
    {"min_p": 0.1, "logprobs_mode": "tempered", "temperature": 0.7},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0, "frequency_penalty": 0.4},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 1.4, "logprobs_mode": "raw"},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.9},
    {"allowed_token_ids": [3, 4], "temperature": 0.3},
)
_LENGTHS = (1, 2, 15, 90, 16, 17, 33, 5, 64, 47, 8, 80)
"""Of the prompts that neither share a prefix nor repeat themselves."""


def requests(vocab_size: int, max_len: int, *, ask_all_rows: bool = False) -> list[Request]:
    """Return ragged requests of every kind: prompts of 1 to 90 tokens, some on shared prefixes, some that repeat.

    The last prompt is longer than nanochat's short windows (129 keys), and, with `max_len` above 288, than the 256 keys
    that the kernels read at a time.
    """
    rng = random.Random(11)
    shared, lengths = _tokens(rng, 41, vocab_size), iter(_LENGTHS)
    made: list[Request] = []
    for i in range(NUM_REQUESTS):
        options: dict[str, Any] = {"seed": i, "max_tokens": rng.randrange(8, MAX_TOKENS), "ignore_eos": True}
        options |= _KINDS[i % len(_KINDS)]
        if i % 6 == 4:
            options["logit_bias"] = {token: rng.uniform(-3, 4) for token in _tokens(rng, 4, vocab_size)}
        if i % 9 == 5:
            options |= {"stop_token_ids": _tokens(rng, vocab_size // 8, vocab_size), "min_tokens": 3}
        if ask_all_rows:
            options["prompt_logprobs"] = i % 3
        num_samples = 2 if i % 7 == 3 and not ask_all_rows else 1
        if i % 3 == 1:
            prompt = shared[: rng.randrange(17, 42)] + _tokens(rng, rng.randrange(1, 30), vocab_size)
        elif i % 6 == 0:  # repeats itself, for ngram
            prompt = _tokens(rng, 1 + i // 2, vocab_size) * 4
        else:
            prompt = _tokens(rng, next(lengths), vocab_size)
        if i == NUM_REQUESTS - 1:
            prompt += _tokens(rng, max_len - MAX_TOKENS - len(prompt), vocab_size)
        made.append(Request(prompt, options, num_samples))
    return made


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
