"""The tables of model formats, model families and tokenizers, with those of installed packages; `opened` uses them.

Packages add rows by entry points (`nano_inference.formats`, `nano_inference.families`, `nano_inference.tokenizers`;
see docs/models.md). The tables are built anew by each call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import resolve
from nano_inference.loading.checkpoint import Checkpoint, installed_formats, open_checkpoint
from nano_inference.loading.formats import ModelFormat
from nano_inference.models.families import Family, installed_families
from nano_inference.text.kinds import TokenizerKind
from nano_inference.text.tokenizer import installed_tokenizers

_log = logging.getLogger("nano_inference")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKinds:
    """Three tables, each of which maps names to rows."""

    formats: Mapping[str, ModelFormat]
    families: Mapping[str, Family]
    tokenizers: Mapping[str, TokenizerKind]


def installed_kinds() -> ModelKinds:
    """Return the tables of this package and all installed packages. Raises `PluginError` for an unusable row."""
    return ModelKinds(formats=installed_formats(), families=installed_families(), tokenizers=installed_tokenizers())


def opened(config: EngineConfig, kinds: ModelKinds, cache: Path) -> Checkpoint:
    """Open the configured checkpoint, fetched into `cache` if absent.

    With `allow_long_context`, its longest sequence is at least `max_model_len`.
    """
    checkpoint = open_checkpoint(resolve(config.model_path, cache), config.overrides, kinds.formats)
    trained = checkpoint.config.max_positions
    if not config.allow_long_context or config.max_model_len <= trained:
        return checkpoint
    _log.warning("max_model_len %d is more than the model was trained for, %d tokens", config.max_model_len, trained)
    return replace(checkpoint, config=replace(checkpoint.config, max_positions=config.max_model_len))
