"""Sampling defaults: which fields a model's files may set, and those of chats in the terminal and on the web page.

These clients send the defaults of chats explicitly; the HTTP API and the Python API do not apply them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from nano_inference.types import SamplingParams

ChatSource = Literal["the model's generation_config.json", "measured for this model", "default for chats"]

MODELS_OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling fields whose default may come from the model's `generation_config.json`, as in vLLM."""
CHAT_SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
CHAT_MAX_TOKENS = 1024  # default limit on an answer's tokens, unless the catalog has another
CHAT_FIELDS = (*MODELS_OWN, "max_tokens")  # sampling fields with a default for chats
_TRUNCATION = ("top_p", "top_k", "min_p")
_SHAPING = ("temperature", *_TRUNCATION)
_NEUTRAL = SamplingParams()


class ChatDefaults(NamedTuple):
    """The defaults of a chat's sampling fields."""

    sampling: Mapping[str, Any]  # a value for each of `CHAT_FIELDS`
    source: ChatSource  # the source of temperature, top-p, top-k and min-p


def chat_defaults(generation: Mapping[str, Any], catalog: Mapping[str, Any]) -> ChatDefaults:
    """Return the defaults of a chat with a model.

    `generation` has the fields of the model's generation_config.json, `catalog` those of its catalog entry.
    Temperature, top-p, top-k and min-p all come from the first of `generation`, `catalog` and `CHAT_SAMPLING` that
    has one of them, because a truncation is chosen for a temperature.
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
    """Return the fields among `names` that differ from `SamplingParams()`, as `name value, …`."""
    inert = _TRUNCATION if sampling.get("temperature") == 0 else ()
    shown = [name for name in CHAT_FIELDS if name in names and name in sampling and name not in inert]
    return ", ".join(f"{name} {sampling[name]}" for name in shown if sampling[name] != getattr(_NEUTRAL, name))


def described(sampling: Mapping[str, Any], source: str, names: Collection[str] = CHAT_FIELDS) -> str:
    """Return the fields among `names` as text. `source` is not the source of `max_tokens`."""
    shape = differing(sampling, set(names) - {"max_tokens"}) or ("temperature 1.0" if "temperature" in names else "")
    parts = [f"{shape} ({source})"] if shape else []
    if "max_tokens" in names and sampling.get("max_tokens") is not None:
        parts.append(f"at most {sampling['max_tokens']} tokens")
    return ", ".join(parts) or "none"
