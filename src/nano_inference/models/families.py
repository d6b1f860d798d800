"""The table of model families: `program_of` returns the program of a configuration. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nano_inference.models import dense, gemma, qwen35
from nano_inference.models.config import ModelConfig
from nano_inference.models.program import Program
from nano_inference.support.plugins import table
from nano_inference.types import ModelError

FAMILIES_GROUP = "nano_inference.families"  # entry point group for families of other packages


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family, as registered in the table of `installed_families`."""

    program: Callable[[ModelConfig], Program]
    """Returns a model's forward pass. Raises `ModelError` for unsupported `ModelConfig.terms`."""


OWN_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "dense": Family(program=dense.program),
        "gemma": Family(program=gemma.program),
        "qwen35": Family(program=qwen35.program),
    }
)
"""The families of this package."""


def installed_families() -> Mapping[str, Family]:
    """Return the families of this package and of installed plugins, by name. Raises `PluginError`."""
    return table(FAMILIES_GROUP, OWN_FAMILIES, Family)


def program_of(config: ModelConfig, families: Mapping[str, Family] | None = None) -> Program:
    """Return a model's forward pass; `families` defaults to the installed ones.

    Raises `ModelError` if the configuration's family is unknown.
    """
    families = installed_families() if families is None else families
    family = families.get(config.family)
    if family is None:
        names = ", ".join(sorted(families))
        raise ModelError(f"{config.architecture}: no installed package has the family {config.family}, only {names}")
    return family.program(config)
