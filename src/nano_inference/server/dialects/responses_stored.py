"""Stored responses: what is stored of each, and the routes that return, list and delete it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from nano_inference.server.call import JSON
from nano_inference.server.dialects.responses_body import InputItem
from nano_inference.server.errors import ApiError
from nano_inference.server.reply_store import ClientReplies, StoredReply
from nano_inference.server.translating import unsupported_field

_MISSING = "response_not_found"
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def keep(replies: ClientReplies, name: str, items: bytes, response: JSON) -> bool:
    """Store a response; return False if it does not fit."""
    return replies.put(StoredReply(id=name, reply=to_json(response), items=items))


def listed_items(given: str | Sequence[InputItem], stem: str) -> list[JSON]:
    """Return items of `input` as OpenAI's API lists them: with type, id and status, and contents as parts.

    `stem` is the common part of new ids.
    """
    if isinstance(given, str):
        given = [InputItem(type="message", role="user", content=given)]
    return [_listed(item, f"{stem}in{index:02x}") for index, item in enumerate(given)]


def retrieve(replies: ClientReplies, name: str, query: Mapping[str, str]) -> bytes:
    """Return a stored response. Raises `ApiError` 404."""
    if query.get("stream", "false") != "false":
        raise unsupported_field("stream", "stream: a stored response is not streamed again")
    return replies.get(name, "id", _MISSING).reply


def delete(replies: ClientReplies, name: str, query: Mapping[str, str]) -> JSON:
    """Delete a stored response. Raises `ApiError` 404."""
    replies.remove(name, "id", _MISSING)
    return {"id": name, "object": "response", "deleted": True}


def input_items(replies: ClientReplies, name: str, query: Mapping[str, str]) -> JSON:
    """Return one page of the items that a response answers, the latest first. Raises `ApiError`."""
    items: list[JSON] = from_json(replies.get(name, "id", _MISSING).items)
    order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order[:64]!r}", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_LIMIT):
        raise ApiError(400, f"limit must be 1 to {_MAX_LIMIT}, got {limit[:64]!r}", param="limit")
    if order == "desc":
        items.reverse()
    start = _position_after(items, query.get("after"))
    page = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }


def _position_after(items: Sequence[JSON], after: str | None) -> int:
    if after is None:
        return 0
    for index, item in enumerate(items):
        if item["id"] == after:
            return index + 1
    raise ApiError(400, f"after: the response has no input item {after[:200]!r}", param="after")


def _listed(item: InputItem, stem: str) -> JSON:
    fields: dict[str, Any] = item.model_dump(by_alias=True, exclude_none=True)
    kind = fields.setdefault("type", "message")
    fields.setdefault("id", f"{_PREFIXES.get(kind, 'item')}_{stem}")
    if kind == "message" and isinstance(fields.get("content"), str):
        part = {"type": "input_text", "text": fields["content"]}
        if fields.get("role") == "assistant":
            part = {"type": "output_text", "text": fields["content"], "annotations": []}
        fields["content"] = [part]
    if kind in _PREFIXES:
        fields.setdefault("status", "completed")
    return fields
