"""Upstream's `nanochat.checkpoint_manager`: find a checkpoint by source, tag and step, load it, and save one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch
from torch import Tensor

from nano_inference.config import Dtype
from nano_inference.loading.fields import read_json
from nano_inference.loading.pt_file import read_pt
from nano_inference.nanochat.common import base_path
from nano_inference.nanochat.files import FILE_NAME, NanochatFiles, find_files, find_largest_model, find_last_step
from nano_inference.nanochat.format import open_nanochat
from nano_inference.nanochat.gpt import GPT
from nano_inference.nanochat.tokenizer import RustBPETokenizer, get_tokenizer
from nano_inference.types import MissingFile

__all__ = [
    "build_model",
    "find_largest_model",
    "find_last_step",
    "load_checkpoint",
    "load_model",
    "load_model_from_dir",
    "load_optimizer_state",
    "save_checkpoint",
]
Loaded = tuple[GPT, RustBPETokenizer, dict[str, Any]]  # model, tokenizer, contents of the meta file


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
) -> Loaded:
    """Return (model, tokenizer, meta) of a checkpoint: `source` is base, mid, sft or rl.

    Without a tag: the largest model; without a step: the last. `phase` must be "eval": this model does not train.
    `base_dir` is any directory with checkpoints; `overrides` set constants that the file does not contain. Prints the
    inferred constants to stderr. Raises `ModelError` for files that cannot be used.
    """
    return load_from(base_path(base_dir), device, phase, source, model_tag, step, dtype, overrides)


def load_from(
    root: Path,
    device: torch.device | str,
    phase: str = "eval",
    source: str | None = None,
    model_tag: str | None = None,
    step: int | None = None,
    dtype: Dtype = "auto",
    overrides: Iterable[str] = (),
    out: TextIO | None = None,
) -> Loaded:
    """Return what `load_model` does, from any path with checkpoints; print to `out`, default: stderr."""
    if phase != "eval":
        raise ValueError(f'phase must be "eval", got {phase!r}: this model does not train')
    files = _find(root, source, model_tag, step)
    shared = base_path(None) / "tokenizer"
    if files.tokenizer is None and (shared / FILE_NAME).is_file():
        files = replace(files, tokenizer=shared)  # where upstream reads it
    checkpoint = open_nanochat(files, overrides)
    if checkpoint.inferred is not None:
        lines = [f"{checkpoint.inferred.headline}: {checkpoint.path}", *checkpoint.inferred.notes]
        lines += [f"trained with nanochat's commit {files.git_commit}"] if files.git_commit else []
        lines += [f"warning: {warning}" for warning in checkpoint.inferred.warnings]
        print(*lines, sep="\n", file=out or sys.stderr)
    model = GPT.of(checkpoint, device=str(device), dtype=dtype)
    return model, get_tokenizer(checkpoint.tokenizer.path), dict(read_json(files.meta).values)


def load_model_from_dir(
    checkpoints_dir: str | Path,
    device: torch.device | str,
    phase: str,
    model_tag: str | None = None,
    step: int | None = None,
) -> Loaded:
    """Return what `load_model` does, from a directory of tags or of one checkpoint. Raises as `load_model`."""
    return load_from(Path(checkpoints_dir), device, phase, None, model_tag, step)


def build_model(checkpoint_dir: str | Path, step: int, device: torch.device | str, phase: str) -> Loaded:
    """Return what `load_model` does, from the directory of a checkpoint. Raises as `load_model`."""
    return load_from(Path(checkpoint_dir), device, phase, None, None, step)


def load_checkpoint(
    checkpoint_dir: str | Path, step: int, device: torch.device | str, load_optimizer: bool = False, rank: int = 0
) -> tuple[dict[str, Tensor], Any, dict[str, Any]]:
    """Return (weights, state of the optimizer or None, contents of the meta file); no file can run code.

    Raises `ModelError` naming a damaged file, and `OSError` for a missing state of the optimizer.
    """
    directory = Path(checkpoint_dir)
    weights = {name: tensor.to(device) for name, tensor in read_pt(directory / f"model_{step:06d}.pt").items()}
    state = None
    if load_optimizer:
        state = torch.load(directory / _optimizer_name(step, rank), map_location=device, weights_only=True)
    return weights, state, dict(read_json(directory / f"meta_{step:06d}.json").values)


def load_optimizer_state(
    source: str, device: torch.device | str, rank: int, model_tag: str | None = None, step: int | None = None
) -> Any:
    """Return a rank's state of the optimizer beside the checkpoint that `load_model` finds, None if it has none.

    No file can run code. Raises `ModelError` if there is no checkpoint.
    """
    files = _find(base_path(None), source, model_tag, step)
    path = files.weights.with_name(_optimizer_name(files.step, rank))
    return torch.load(path, map_location=device, weights_only=True) if path.exists() else None


def save_checkpoint(
    checkpoint_dir: str | Path,
    step: int,
    model_data: Mapping[str, Tensor],
    optimizer_data: object,
    meta_data: Mapping[str, Any],
    rank: int = 0,
) -> None:
    """Write weights and meta file (rank 0 only) and this rank's state of the optimizer, if it is not None.

    Each file is complete or absent, also after an interruption. The meta file is written after the weights.
    """
    directory = Path(checkpoint_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        # `torch.save` writes whole storages, and projections of a `GPT` share one.
        shares = {name: tensor.untyped_storage().nbytes() != tensor.nbytes for name, tensor in model_data.items()}
        weights = {name: one.detach().clone() if shares[name] else one.detach() for name, one in model_data.items()}
        _write(directory / f"model_{step:06d}.pt", lambda file: torch.save(weights, file))
        text = json.dumps(dict(meta_data), indent=2).encode()
        _write(directory / f"meta_{step:06d}.json", lambda file: file.write(text))
    if optimizer_data is not None:
        _write(directory / _optimizer_name(step, rank), lambda file: torch.save(optimizer_data, file))


def _find(root: Path, source: str | None, model_tag: str | None, step: int | None) -> NanochatFiles:
    files = find_files(root, source=source, model_tag=model_tag, step=step)
    if files is None:
        raise MissingFile(f"{root}: contains no nanochat checkpoints")
    return files


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name, and rename it when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _optimizer_name(step: int, rank: int) -> str:
    return f"optim_{step:06d}_rank{rank:d}.pt"
