"""Texts in the `encrypted_content` of items: the summary of a compaction, and reasoning.

The content is not secret from the client, whose conversation it is: it is the text as JSON in base64. It needs no
state or key of the server, so another server, or this one after a restart, reads it.
"""

from __future__ import annotations

import base64
import binascii

from pydantic_core import from_json, to_json

from nano_inference.server.errors import ApiError

SUMMARY_HEAD = "Summary of the conversation so far:\n"
"""Begins the message that a compaction becomes in the prompt."""
_PREFIX = "nano1."


def encoded(text: str) -> str:
    """Return the `encrypted_content` of a text."""
    return _PREFIX + base64.urlsafe_b64encode(to_json({"summary": text})).decode()


def text_in(content: str) -> str | None:
    """Return the text in `encrypted_content`; None if no such server made it."""
    try:
        if not content.startswith(_PREFIX):
            raise ValueError("another server's form")
        value = from_json(base64.urlsafe_b64decode(content.removeprefix(_PREFIX).encode()))
    except (ValueError, binascii.Error):
        value = None
    text = value.get("summary") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def decoded(content: str, param: str) -> str:
    """Return the summary in `encrypted_content`. Raises `ApiError` naming `param` if no such server made it."""
    summary = text_in(content)
    if summary is None:
        raise ApiError(400, f"{param}: must be as POST /v1/responses/compact of this server returned it", param=param)
    return summary
