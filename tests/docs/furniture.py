"""What lies in the directory where a page's code runs, and the names that its Python finds: all of it, openly.

A page says `checkpoint` or `prompts.txt` where a reader has files of their own. Here are tiny ones under these names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.written import smollm2_config
from tests.nanochat.tiny import base_meta, write_checkpoint, write_tokenizer

NANOCHAT_HOME = "nanochat"
"""The directory that NANOCHAT_BASE_DIR names."""


def furnish(place: Path, tiny: Path) -> None:
    """Put the files there that pages name."""
    shutil.copytree(tiny, place / "checkpoint")  # a trainer's checkpoint: two layers, 260 tokens
    (place / "prompts.txt").write_text("What is the capital of France?\nWhat is the capital of Italy?\n")
    (place / "my.toml").write_text('model = "default"\n')
    (place / "typo.toml").write_text('model = "default"\n\n[serve]\nprot = 9000\n')
    home = place / NANOCHAT_HOME
    write_tokenizer(home / "tokenizer")
    for kind in ("base", "chatsft", "chatrl"):
        write_checkpoint(home / f"{kind}_checkpoints" / "d20", "G4", step=650, meta=base_meta("G4"))
    flat = place / "path" / "to" / "checkpoint"  # of the first generation, which Transformers knows
    write_checkpoint(flat, "G0", step=650, meta=base_meta("G0"))
    write_tokenizer(flat)


def a_policy() -> Mapping[str, Any]:
    """`model` of the README: what the trainer trains. Random weights in the default model's shape."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(smollm2_config())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    return {"model": model}


NAMES: Mapping[str, Callable[[], Mapping[str, Any]]] = {"README.md": a_policy}
"""Names that a page's Python finds: a function for each page that has any. Every other page begins with none."""

DEFAULT_MODEL = frozenset({"README.md", "docs/getting-started.md", "docs/index.md"})
"""Pages whose Python opens the default model."""

TRAINED = frozenset({"docs/rl.md"})
"""Pages whose server has the trainers' routes open (`--enable-rl`)."""
