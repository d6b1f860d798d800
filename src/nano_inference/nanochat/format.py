"""nanochat's checkpoint format: the entry point `nanochat` of `nano_inference.formats`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nano_inference.loading.fields import read_json
from nano_inference.loading.formats import ModelFormat
from nano_inference.loading.opened import Checkpoint
from nano_inference.nanochat.configs import OWN_TYPE, is_exported
from nano_inference.nanochat.files import find_files
from nano_inference.nanochat.opening import open_hf_nanochat, open_nanochat, open_own
from nano_inference.nanochat.rules import parse_overrides
from nano_inference.support.files import is_present
from nano_inference.types import BadRequest, ModelError

_TITLE = "a nanochat checkpoint"


def open_path(path: Path, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open nanochat's own files in any layout, a directory written by `models export`, or one of Transformers' port.

    Maps a .pt file into memory. Raises `ModelError` for a damaged path or one with none of these, and `BadRequest`
    for overrides of the port, whose config.json has every constant.
    """
    by_hand = parse_overrides(overrides)
    if not is_exported(path):
        files = find_files(path)
        if files is None:
            raise ModelError(f"{path}: is not {_TITLE}")
        return open_nanochat(files, by_hand)
    config = read_json(path / "config.json")
    if config.text("model_type", "").startswith(OWN_TYPE):
        return open_own(path, config, by_hand)
    if by_hand:
        raise BadRequest("overrides", f"{path} is not {_TITLE}; only its constants can be overridden")
    generation_path = path / "generation_config.json"
    return open_hf_nanochat(path, config, read_json(generation_path) if is_present(generation_path) else None)


def _recognises(path: Path) -> bool:
    if path.is_dir() and is_present(path / "config.json"):
        return is_exported(path)
    return find_files(path) is not None


FORMAT = ModelFormat(title=_TITLE, recognises=_recognises, open=open_path, takes_overrides=True)
