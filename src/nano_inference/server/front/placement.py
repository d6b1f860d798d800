"""What the router needs to know of a request: its prompt as numbers, its cost, its session. Pure.

The proxy has no tokenizer. Token ids are used as they are; text and messages as bytes, whose common prefixes are those
of the tokens. Nothing here refuses a request: the replica does, and its error is the client's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from nano_inference.server.security import Headers, single

SESSION_HEADER = b"x-session-id"  # requests with the same value go to the same replica
BYTES_PER_TOKEN = 4  # estimate for text
DEFAULT_OUTPUT = 256  # output tokens assumed for a request that names no limit
MAX_COST = 1 << 24
MAX_SESSION = 256  # characters of a session's name that are compared

_PROMPTS = ("prompt_token_ids", "token_ids", "input_ids", "prompt", "text", "input", "messages")
"""Fields with the prompt in the dialects' bodies; the first one found counts."""
_BEFORE = ("system", "instructions", "tools")  # fields that a chat template renders before the messages
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict")
_NESTED = ("sampling_params", "stop_conditions")  # objects in which dialects keep their parameters


@dataclass(frozen=True, slots=True)
class Placement:
    """A request for `PrefixRouter.place`."""

    tokens: Sequence[int]
    cost: int = 1
    session: str | None = None


ANYWHERE = Placement(())  # a request without a prompt


def placement_of(headers: Headers, body: bytes) -> Placement:
    """Return how to route a request with this body; a body that is not a JSON object counts as text."""
    named = (single(headers, SESSION_HEADER) or "")[:MAX_SESSION] or None
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return Placement(body, 1 + len(body) // BYTES_PER_TOKEN, named)
    prompt = next((data[name] for name in _PROMPTS if data.get(name)), "")
    tokens = tokens_of(prompt, [data[name] for name in _BEFORE if data.get(name)])
    size = len(tokens) // (BYTES_PER_TOKEN if isinstance(tokens, bytes) else 1)
    cost = min(MAX_COST, 1 + size + output_tokens(data))
    key = data.get("prompt_cache_key")
    session = key[:MAX_SESSION] if isinstance(key, str) and key else conversation(prompt)
    return Placement(tokens, cost, named or session)


def tokens_of(prompt: Any, before: Sequence[Any] = ()) -> Sequence[int]:
    """Return the token ids of a prompt, or the bytes of its text; of several prompts, the first one's."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(token, int) and 0 <= token < 1 << 62 for token in prompt):
        return prompt
    if isinstance(prompt, list):
        # Without the names of the fields, which all messages share.
        prompt = [[*one.values()] if isinstance(one, dict) else one for one in prompt]
    text = prompt if isinstance(prompt, str) and not before else json.dumps([*before, prompt])
    return text.encode("utf-8", "surrogatepass")


def output_tokens(data: Mapping[str, Any]) -> int:
    """Return the output tokens that a request may ask for: the product of its limit and its number of samples."""
    nested = [data[name] for name in _NESTED if isinstance(data.get(name), dict)]
    limits = (part.get(name) for part in (data, *nested) for name in _LIMITS)
    limit = next((value for value in limits if is_count(value)), DEFAULT_OUTPUT)
    counts = (part.get("n") for part in (data, *nested))
    return min(MAX_COST, limit) * min(MAX_COST, next((value for value in counts if is_count(value)), 1))


def is_count(value: object) -> bool:
    """True if a JSON value is an integer of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def conversation(messages: object) -> str | None:
    """Return a name that all turns of a conversation share: a digest of its messages up to the first user's.

    Prefixes alone may not separate conversations with one long system message.
    """
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return None
    first = next((index for index, one in enumerate(messages) if one.get("role") == "user"), None)
    if first is None:
        return None
    text = json.dumps(messages[: first + 1])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
