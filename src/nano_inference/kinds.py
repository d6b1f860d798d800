"""`ModelKinds`: the formats, families and tokenizers that a program chooses from.

Packages add rows by entry points (`nano_inference.formats`, `nano_inference.families`, `nano_inference.tokenizers`;
see docs/adding-a-model.md). A table holds what is installed when it is made; nothing is kept between two calls.
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
    """Three tables, each from a name to its row."""

    formats: Mapping[str, ModelFormat]
    families: Mapping[str, Family]
    tokenizers: Mapping[str, TokenizerKind]


def installed_kinds() -> ModelKinds:
    """Return the kinds of this package and of all installed ones. Raises `PluginError` for a row that is unusable."""
    return ModelKinds(formats=installed_formats(), families=installed_families(), tokenizers=installed_tokenizers())
