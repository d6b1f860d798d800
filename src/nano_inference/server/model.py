"""The model that is served, as the routes know it: its names, its text side and its limits. No engine in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nano_inference.admission import Limits
from nano_inference.chat_defaults import ChatDefaults
from nano_inference.server.errors import ApiError
from nano_inference.text.dialogue import Dialogue
from nano_inference.text.grammar import Grammars
from nano_inference.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a request is read and answered with."""

    names: tuple[str, ...]
    """What clients may call it; the first is its own name."""
    any_name: bool
    """Answer to other names as well."""
    created: int
    """When it was loaded, seconds since 1970."""
    tokenizer: Tokenizer
    dialogue: Dialogue | None
    """How it is talked with; None for a model that only continues texts."""
    grammars: Grammars
    """What holds answers to a structure."""
    limits: Limits
    generation: Mapping[str, Any]
    """Sampling fields for requests that name none: those of the model's generation_config.json, or nothing."""
    chat_defaults: ChatDefaults
    """Fields that the page sends if its user names none."""
    max_positions: int
    """The longest context that the model was made for."""
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What it is made of and computed with, for people: architecture, precision, kernels."""
    longest_token: int
    """Bytes of the longest token: a text has at least its length divided by this of them."""

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]

    @property
    def calculates(self) -> bool:
        """Whether the model calls a calculator where a request lets it."""
        return self.dialogue is not None and self.dialogue.tool is not None

    def name_for(self, asked: str | None) -> str:
        """Return the name to answer under. Raises `ApiError` 404 for a name that it does not have."""
        if asked is None or asked == "":
            return self.name
        if asked in self.names or self.any_name:
            return asked
        known = ", ".join(self.names)
        raise ApiError(
            404, f"the model {asked[:200]!r} does not exist; served: {known}", param="model", code="model_not_found"
        )

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry of /v1/models for one of the names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "nano-inference",
            "root": self.name,
            "parent": None if name == self.name else self.name,
            "max_model_len": self.limits.max_model_len,
            "permission": [],
            "calculator": self.calculates,
            "chat_defaults": dict(self.chat_defaults.sampling),
        }
