"""The tables of model formats, model families and tokenizers, including those of installed packages.

Packages add rows by entry points (`nano_inference.formats`, `nano_inference.families`, `nano_inference.tokenizers`;
see docs/adding-a-model.md). The tables are built anew by each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nano_inference.loader.checkpoint import installed_formats
from nano_inference.loader.formats import ModelFormat
from nano_inference.models.families import Family, installed_families
from nano_inference.text.kinds import TokenizerKind
from nano_inference.text.tokenizer import installed_tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKinds:
    """Three tables, each of which maps names to rows."""

    formats: Mapping[str, ModelFormat]
    families: Mapping[str, Family]
    tokenizers: Mapping[str, TokenizerKind]


def installed_kinds() -> ModelKinds:
    """Return the tables of this package and all installed packages. Raises `PluginError` for an unusable row."""
    return ModelKinds(formats=installed_formats(), families=installed_families(), tokenizers=installed_tokenizers())
