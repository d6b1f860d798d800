"""What a chat template gets, how a rendering fails, and the templates that have a name; does not import Jinja."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from nano_inference.types import BadRequest, ModelError


class TemplateLimit(ModelError):
    """A rendering exceeded a limit on depth, memory or output; `reason` is the message without the file's name."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.reason = reason


class TemplateRefusal(BadRequest):
    """The template raised an error for these messages."""


class Program(NamedTuple):
    """A compiled template."""

    run: Callable[[Mapping[str, Any]], str]
    """Renders JSON data, in any thread. Raises `TemplateRefusal` for an error of the template, and `TemplateLimit`."""
    reads: frozenset[str]
    """Names of attributes and texts in expressions: a field of a message that is not here is not read."""
    seeks: tuple[str, ...]  # texts that the template compares with others, or passes to methods and filters


def plain(value: object, name: str, depth: int = 64) -> Any:
    """Return a copy of JSON data as dicts and lists: templates reach no other object, and change nothing of ours.

    Raises `BadRequest` naming `name` for other types and for too deep nesting.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if depth == 0:
        raise BadRequest("", f"{name} is nested too deep")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str.__str__(key): plain(item, name, depth - 1) for key, item in value.items()}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, name, depth - 1) for item in value]
    raise BadRequest(name, f"must hold JSON values only, not {type(value).__name__}")


_CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_COMMAND_R = (
    "{{ bos_token }}{% for message in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if message.role == 'assistant' %}<|CHATBOT_TOKEN|>{% else %}<|{{ message.role | upper }}_TOKEN|>{% endif %}"
    "{{ message.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

TEMPLATES: Mapping[str, str] = MappingProxyType({"chatml": _CHATML, "command-r": _COMMAND_R, "llama3": _LLAMA3})
"""Name -> template."""
