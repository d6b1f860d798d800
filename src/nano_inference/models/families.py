"""The decoders that there are: from a configuration to the program of its family. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nano_inference.models import dense, gemma
from nano_inference.models.config import ModelConfig
from nano_inference.models.program import Program
from nano_inference.registry import table
from nano_inference.types import ModelError

FAMILIES_GROUP = "nano_inference.families"
"""The group of entry points by which a package adds a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of decoders: a row of the table that `installed_families` returns."""

    program: Callable[[ModelConfig], Program]
    """Write the forward pass of a model. Raises `ModelError` for `ModelConfig.terms` that it cannot use."""


OWN_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"dense": Family(program=dense.program), "gemma": Family(program=gemma.program)}
)
"""The families of this package."""


def installed_families() -> Mapping[str, Family]:
    """Return the families of this package and of all installed ones, by name. Raises `PluginError`."""
    return table(FAMILIES_GROUP, OWN_FAMILIES, Family)


def program_of(config: ModelConfig, families: Mapping[str, Family] | None = None) -> Program:
    """Return the forward pass of a model, by its family among `families`: by default the installed ones.

    Raises `ModelError` for a family that is not among them.
    """
    families = installed_families() if families is None else families
    family = families.get(config.family)
    if family is None:
        names = ", ".join(sorted(families))
        raise ModelError(f"{config.architecture}: no installed package has the family {config.family}, only {names}")
    return family.program(config)
