"""Sampling defaults of chats in the terminal and on the page.

The clients send them explicitly: HTTP and the Python API do not use them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from nano_inference.types import MODELS_OWN, SamplingParams

ChatSource = Literal["the model's generation_config.json", "measured for this model", "default for chats"]

CHAT_SAMPLING: Mapping[str, Any] = MappingProxyType({"temperature": 0.7, "top_p": 0.95, "min_p": 0.05})
CHAT_MAX_TOKENS = 1024
"""Tokens of an answer if neither the user nor the catalog names a limit."""
CHAT_FIELDS = (*MODELS_OWN, "max_tokens")
"""Sampling fields that have a default of their own in a chat."""
_TRUNCATION = ("top_p", "top_k", "min_p")
_SHAPING = ("temperature", *_TRUNCATION)
_NEUTRAL = SamplingParams()


class ChatDefaults(NamedTuple):
    """Sampling fields of a chat for which the user named no value."""

    sampling: Mapping[str, Any]
    """A value for each of `CHAT_FIELDS`."""
    source: ChatSource
    """Origin of temperature and truncation."""


def chat_defaults(generation: Mapping[str, Any], catalog: Mapping[str, Any]) -> ChatDefaults:
    """Return the defaults of a chat with a model.

    `generation` has the fields that the model's generation_config.json names, `catalog` those of its catalog entry.
    Temperature and truncation come from the first of generation, catalog and `CHAT_SAMPLING` that names one of them;
    they are never mixed, because a truncation is chosen for a temperature.
    """
    source: ChatSource
    if any(name in generation for name in _SHAPING):
        shape, source = generation, "the model's generation_config.json"
    elif any(name in catalog for name in _SHAPING):
        shape, source = catalog, "measured for this model"
    else:
        shape, source = CHAT_SAMPLING, "default for chats"
    sampling = {name: shape.get(name, getattr(_NEUTRAL, name)) for name in _SHAPING}
    penalty = generation.get("repetition_penalty", catalog.get("repetition_penalty", _NEUTRAL.repetition_penalty))
    sampling |= {"repetition_penalty": penalty, "max_tokens": catalog.get("max_tokens", CHAT_MAX_TOKENS)}
    return ChatDefaults(MappingProxyType(sampling), source)


def differing(sampling: Mapping[str, Any], names: Collection[str] = CHAT_FIELDS) -> str:
    """Return those of the named fields that differ from plain sampling, as `name value, …`."""
    inert = _TRUNCATION if sampling.get("temperature") == 0 else ()
    shown = [name for name in CHAT_FIELDS if name in names and name in sampling and name not in inert]
    return ", ".join(f"{name} {sampling[name]}" for name in shown if sampling[name] != getattr(_NEUTRAL, name))


def described(sampling: Mapping[str, Any], source: str, names: Collection[str] = CHAT_FIELDS) -> str:
    """Return the named fields in words. The source is that of temperature and truncation, not of the limit."""
    drawn = differing(sampling, set(names) - {"max_tokens"}) or ("temperature 1.0" if "temperature" in names else "")
    parts = [f"{drawn} ({source})"] if drawn else []
    if "max_tokens" in names and sampling.get("max_tokens") is not None:
        parts.append(f"at most {sampling['max_tokens']} tokens")
    return ", ".join(parts) or "none"
