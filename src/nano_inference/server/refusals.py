"""What the engine's door and the text room refuse, as the client is told it: the field, and the limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from nano_inference.server.errors import ApiError
from nano_inference.server.schema import ChatBody, CompletionBody
from nano_inference.text.templates import TemplateLimit
from nano_inference.types import BadRequest, ModelError

_FIELD = re.compile(r"(?P<name>[a-z_]+)(?:\[\d+\])?(?:\.[a-z_]+)*(?=[ :]|$)")
_FIELDS = frozenset(CompletionBody.model_fields) | frozenset(ChatBody.model_fields)


@contextmanager
def api_errors(param: str | None = None) -> Iterator[None]:
    """Raise the `ApiError` of whatever is refused in the block; `param` is the field when the refusal names none.

    Any other `ValueError` is a mistake of ours, not the client's.
    """
    try:
        yield
    except (BadRequest, ModelError) as error:
        raise to_api_error(error, param) from None


def to_api_error(error: ValueError, param: str | None = None) -> ApiError:
    """Return what a client is told of a refusal: its text, and the field that it begins with or else `param`."""
    if isinstance(error, TemplateLimit):
        return ApiError(400, f"messages: {error.reason}", param="messages")
    if isinstance(error, ModelError):  # names a file: of the server, not of the client
        return ApiError(400, "the model's chat template cannot render these messages", param="messages")
    found = _FIELD.match(str(error))
    is_field = found is not None and found["name"] in _FIELDS
    return ApiError(400, str(error), param=found.group() if found is not None and is_field else param)
