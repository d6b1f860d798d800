"""Variables that a request or the operator passes to the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nano_inference.server.config import ServerConfig
from nano_inference.text.chat import RESERVED
from nano_inference.types import ModelError

_MAX_BYTES = 4096
_RESERVED = frozenset(
    {"tokenize", "return_dict", "return_tensors", "conversation", "chat_template", "padding", "truncation"}
    | {"max_length", "continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs"}
    | RESERVED
)
"""Names that template variables must not have: arguments of Transformers' `apply_chat_template`, built-in variables."""


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise `ValueError` that begins with `chat_template_kwargs` for variables too large, nested or reserved."""
    if len(json.dumps(variables)) > _MAX_BYTES:
        raise ValueError(f"chat_template_kwargs must be at most {_MAX_BYTES} bytes")
    for name, value in variables.items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name in _RESERVED:
            raise ValueError(f"{where} is reserved")
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            raise ValueError(f"{where} must be a number, a string, a boolean or a list of those")


def default_variables(config: ServerConfig) -> Mapping[str, Any]:
    """Return the operator's variables. Raises `ModelError` as `check_variables` raises `ValueError`."""
    variables: Mapping[str, Any] = json.loads(config.chat_template_kwargs or "{}")
    try:
        check_variables(variables)
    except ValueError as error:
        raise ModelError(str(error).replace("chat_template_kwargs", "--chat-template-kwargs", 1)) from None
    return variables
