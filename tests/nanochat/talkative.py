"""A random model that calls the calculator now and then, and a tokenizer of two dozen tokens for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nano_inference.nanochat import GPT
from nano_inference.nanochat.cache import KVCache
from tests.nanochat.tiny import SPECIALS, model_config, state_dict

CHARACTERS = "0123456789+-*/.() x"
"""Ids 0 to 18; nanochat's nine special tokens follow."""
VOCAB = len(CHARACTERS) + len(SPECIALS)
_LIKELY = {"python_start": 1.1, "python_end": 2.3, "assistant_end": 0.7, "bos": -2.0}


class CharacterTokenizer:
    """What the loop needs of a tokenizer, a character a token; results' other characters become "x"."""

    def encode_special(self, text: str) -> int:
        return len(CHARACTERS) + SPECIALS.index(text.strip("<|>"))

    def get_bos_token_id(self) -> int:
        return self.encode_special("<|bos|>")

    def encode(self, text: str) -> list[int]:
        return [CHARACTERS.find(c) if c in CHARACTERS else CHARACTERS.index("x") for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(CHARACTERS[i] if i < len(CHARACTERS) else f"<|{SPECIALS[i - len(CHARACTERS)]}|>" for i in ids)


def talkative(generation: str, *, seed: int = 0) -> GPT:
    """A model with one direction that every hidden state has, through which the head makes tokens likely."""
    config = model_config(generation, vocab_size=VOCAB)
    state = state_dict(generation, config, seed=seed)
    state["transformer.wte.weight"][:, 0] += 12.0
    head: Tensor = state["lm_head.weight"]
    head *= 0.3
    head[:, 0] = 0.0
    head[:10, 0] = 1.0  # digits
    for name, value in _LIKELY.items():
        head[len(CHARACTERS) + SPECIALS.index(name), 0] = value
    return GPT.from_state_dict(state, config)


class Foreign:
    """A model as nanochat's own loop sees it; `GPT` is not to be recognised."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.config = model.config

    def get_device(self) -> str:
        return "cpu"

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        return self.model.forward(ids, kv_cache=kv_cache)


class Uniform:
    """A model that finds every token equally likely, with nanochat's tiny configuration."""

    def __init__(self, vocab_size: int = VOCAB, sequence_len: int = 64) -> None:
        self.vocab_size = vocab_size
        self.num_calls = 0
        names: dict[str, Any] = {"n_kv_head": 1, "n_head": 1, "n_embd": 4, "n_layer": 1, "sequence_len": sequence_len}
        self.config = type("Config", (), names)()

    def get_device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        self.num_calls += 1
        if kv_cache is not None:
            kv_cache.grow(ids.size(1))
            kv_cache.advance(ids.size(1))
        return torch.zeros(ids.size(0), ids.size(1), self.vocab_size)
