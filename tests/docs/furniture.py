"""What lies in the directory where a page's code runs.

A page says `checkpoint` or `prompts.txt` where a reader has files of their own. Here are tiny ones under these names.
"""

from __future__ import annotations

import shutil
from pathlib import Path

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


DEFAULT_MODEL = frozenset({"README.md", "docs/run.md", "docs/index.md", "docs/architecture.md"})
"""Pages whose Python opens the default model."""

TRAINED = frozenset({"docs/rl.md"})
"""Pages whose server has the trainers' routes open (`--enable-rl`)."""
