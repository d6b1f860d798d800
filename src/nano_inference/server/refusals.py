"""Turns errors of the engine's admission and of `text` into `ApiError`s that name the client's field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from nano_inference.server.errors import ApiError
from nano_inference.server.schema import ChatBody, CompletionBody
from nano_inference.text.templates import TemplateLimit
from nano_inference.types import BadRequest, ModelError

_FIELDS = frozenset(CompletionBody.model_fields) | frozenset(ChatBody.model_fields)


@contextmanager
def api_errors(param: str | None = None) -> Iterator[None]:
    """Raise `BadRequest` and `ModelError` of the block as `ApiError`; `param` is the field if the error names none.

    Any other `ValueError` is a fault of the server and passes unchanged.
    """
    try:
        yield
    except (BadRequest, ModelError) as error:
        raise to_api_error(error, param) from None


def to_api_error(error: ValueError, param: str | None = None) -> ApiError:
    """Return the 400 for an error: its message, and its field if a body has it, else `param`."""
    if isinstance(error, TemplateLimit):
        return ApiError(400, f"messages: {error.reason}", param="messages")
    if isinstance(error, ModelError):  # its message names a file of the server
        return ApiError(400, "the model's chat template cannot render these messages", param="messages")
    field = error.field if isinstance(error, BadRequest) else ""
    return ApiError(400, str(error), param=field if re.split(r"[.\[]", field)[0] in _FIELDS else param)
