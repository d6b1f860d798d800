"""Upstream's `nanochat.checkpoint_manager`: find a checkpoint by source, tag and step, and load it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nano_inference.config import Dtype
from nano_inference.loader.fields import read_json
from nano_inference.loader.opened import Checkpoint
from nano_inference.nanochat.common import base_path
from nano_inference.nanochat.files import NanochatFiles, find_files
from nano_inference.nanochat.gpt import GPT
from nano_inference.nanochat.opening import open_nanochat
from nano_inference.nanochat.tokenizer import RustBPETokenizer, get_tokenizer
from nano_inference.types import ModelError


def load_model(
    source: str,
    device: torch.device | str,
    phase: str,
    model_tag: str | None = None,
    step: int | None = None,
    *,
    base_dir: str | Path | None = None,
    dtype: Dtype = "auto",
    overrides: Iterable[str] = (),
) -> tuple[GPT, RustBPETokenizer, dict[str, Any]]:
    """Return (model, tokenizer, meta) of a checkpoint: `source` is base, mid, sft or rl.

    Without a tag: the largest model; without a step: the last. `phase` must be "eval": this model does not train.
    `base_dir` is any directory with checkpoints; `overrides` set constants that the file does not contain. Prints the
    inferred constants to stderr. Raises `ModelError` for files that cannot be used.
    """
    if phase != "eval":
        raise ValueError(f'phase must be "eval", got {phase!r}: this model does not train')
    root = base_path(base_dir)
    files = find_files(root, source=source, model_tag=model_tag, step=step)
    if files is None:
        raise ModelError(f"{root}: contains no nanochat checkpoints")
    checkpoint = open_nanochat(files, overrides)
    for line in describe(checkpoint, files):
        print(line, file=sys.stderr)
    model = GPT.of(checkpoint, device=str(device), dtype=dtype)
    return model, get_tokenizer(checkpoint.tokenizer.path), dict(read_json(files.meta).values)


def describe(checkpoint: Checkpoint, files: NanochatFiles | None = None) -> list[str]:
    """Return lines with the inferred generation, notes and warnings of a checkpoint."""
    if checkpoint.inferred is None:
        return []
    lines = [f"{checkpoint.inferred.headline}: {checkpoint.path}"]
    lines += checkpoint.inferred.notes
    if files is not None and files.git_commit:
        lines.append(f"trained with nanochat's commit {files.git_commit}")
    return lines + [f"warning: {warning}" for warning in checkpoint.inferred.warnings]
