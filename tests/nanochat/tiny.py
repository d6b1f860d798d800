"""Small random nanochat models of every generation, with the exact key set of each, and their files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

GENERATIONS = ("G0", "G1", "G2", "G2e", "G2s", "G3", "G4")
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIALS = (
    *("bos", "user_start", "user_end", "assistant_start", "assistant_end"),
    *("python_start", "python_end", "output_start", "output_end"),
)
VOCAB = 256 + len(SPECIALS)
SPECIAL_IDS = {name: 256 + i for i, name in enumerate(SPECIALS)}


def byte_encoding() -> tiktoken.Encoding:
    """A tokenizer of single bytes with nanochat's special tokens, as nanochat pickles it."""
    return tiktoken.Encoding(
        name="rustbpe",
        pat_str=PATTERN,
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={f"<|{name}|>": token for name, token in SPECIAL_IDS.items()},
    )


def model_config(generation: str, **changes: Any) -> dict[str, Any]:
    """`model_config` of a small model: four layers, windows shorter than the length, odd sizes, grouped heads."""
    config: dict[str, Any] = {
        "sequence_len": 256,
        "vocab_size": VOCAB,
        "n_layer": 4,
        "n_head": 4,
        "n_kv_head": 2,
        "n_embd": 64,
    }
    if generation != "G0":
        config["window_pattern"] = "SSSL"
    return config | changes


def state_dict(generation: str, config: dict[str, Any], *, seed: int = 0, pad: int = 64) -> dict[str, Tensor]:
    """Random weights under the generation's own names; the vocabulary is padded to a multiple of `pad`."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=random) * scale

    size, layers = config["n_embd"], config["n_layer"]
    kv = config["n_kv_head"] * (size // config["n_head"])
    rows = -(-config["vocab_size"] // pad) * pad
    state = {"transformer.wte.weight": normal(rows, size, scale=1.0)}
    for i in range(layers):
        block = f"transformer.h.{i}."
        state[f"{block}attn.c_q.weight"] = normal(size, size, scale=size**-0.5)
        state[f"{block}attn.c_k.weight"] = normal(kv, size, scale=size**-0.5)
        state[f"{block}attn.c_v.weight"] = normal(kv, size, scale=size**-0.5)
        state[f"{block}attn.c_proj.weight"] = normal(size, size, scale=size**-0.5)
        state[f"{block}mlp.c_fc.weight"] = normal(4 * size, size, scale=size**-0.5)
        state[f"{block}mlp.c_proj.weight"] = normal(size, 4 * size, scale=size**-0.5)
    state["lm_head.weight"] = normal(rows, size, scale=0.12)
    if generation != "G0":
        state["resid_lambdas"] = 1 + normal(layers, scale=0.1)
        state["x0_lambdas"] = normal(layers, scale=0.2)
    if generation not in ("G0", "G1"):
        columns = 12 if generation in ("G3", "G4") else 32
        for i in range(layers):
            if i % 2 == (layers - 1) % 2:
                state[f"value_embeds.{i}.weight"] = normal(rows, kv, scale=1.0)
                state[f"transformer.h.{i}.attn.ve_gate.weight"] = normal(config["n_kv_head"], columns, scale=0.5)
    if generation == "G2e":
        state["bigram_embed.embed.weight"] = normal(5 * config["vocab_size"], size, scale=1.0)
        state["bigram_lambdas"] = normal(layers, scale=0.2)
    if generation == "G4":
        state["smear_gate.weight"] = normal(1, 24, scale=0.5)
        state["smear_lambda"] = torch.tensor([0.7])
        state["backout_lambda"] = torch.tensor([0.2])
    return state


def base_meta(generation: str) -> dict[str, Any]:
    """Return further fields of a base run's meta file; they distinguish G2s from G2."""
    eval_tokens = 41_943_040 if generation in ("G2s", "G3", "G4") else 20_971_520
    settings = {"run": "dummy", "eval_tokens": eval_tokens}
    if generation not in ("G0", "G1"):
        settings["adam_beta1"] = 0.8
    return {"val_bpb": 0.8, "user_config": settings}


def write_checkpoint(
    directory: Path,
    generation: str,
    *,
    config: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
    step: int = 650,
    meta: dict[str, Any] | None = None,
) -> Path:
    """Write model_*.pt and meta_*.json as nanochat does; return the weights' path."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model_config(generation) if config is None else config
    state = state_dict(generation, config) if state is None else state
    path = directory / f"model_{step:06d}.pt"
    torch.save(state, path)
    text = json.dumps({"step": step, "model_config": config, **(meta or {})})
    (directory / f"meta_{step:06d}.json").write_text(text)
    return path


def write_tokenizer(directory: Path) -> Path:
    """Write tokenizer.pkl and token_bytes.pt as nanochat does."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.pkl").write_bytes(pickle.dumps(byte_encoding()))
    sizes = torch.tensor([1] * 256 + [0] * len(SPECIALS), dtype=torch.int32)
    torch.save(sizes, directory / "token_bytes.pt")
    return directory
