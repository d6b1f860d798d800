"""The decoders that there are: from a configuration to the program of its family. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from nano_inference.models import dense, gemma, nanochat
from nano_inference.models.config import Family, ModelConfig
from nano_inference.models.program import Program

FAMILIES: Mapping[Family, Callable[[ModelConfig], Program]] = MappingProxyType(
    {"dense": dense.program, "gemma": gemma.program, "nanochat": nanochat.program}
)
"""Family -> the function that writes its forward pass."""


def program_of(config: ModelConfig) -> Program:
    """Return the forward pass of a model."""
    return FAMILIES[config.family](config)
