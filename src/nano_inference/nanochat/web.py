"""nanochat's web chat (scripts/chat_web.py): POST /chat/completions, GET /stats, /health.

As it last was, in the parent of da32e1d. Its page sends the whole conversation each time and reads one event for each
piece of text. What is refused is refused with status 400 and {"detail": …}. An event of a stream that fails is
{"error": …}, where nanochat's just breaks off.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from nano_inference.config import ServerConfig
from nano_inference.server.call import JSON, Call, Transcript
from nano_inference.server.calls import chat_call
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Describing, Dialect, Generating, Occupancy
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.model import ServedModel
from nano_inference.server.replies import version_facts
from nano_inference.server.schema import Body, ChatBody, Temperature
from nano_inference.server.translating import as_body, given_fields
from nano_inference.server.unsupported import refuse_unsupported
from nano_inference.text.tokenizer import Tokenizer

MAX_MESSAGES = 500
MAX_CHARS = 8000
MAX_TOTAL_CHARS = 32000


class WebMessage(Body):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]


class WebBody(Body):
    """POST /chat/completions, with nanochat's defaults. The reply is always streamed."""

    messages: Annotated[list[WebMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    temperature: Temperature | None = 0.8
    max_tokens: Annotated[int, Field(ge=1, le=4096)] | None = 512
    top_k: Annotated[int, Field(ge=0, le=200)] | None = 50
    """0 is off."""


def web_call(body: WebBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of a request. Raises `ApiError` naming what is wrong."""
    if "model" in (body.model_extra or {}):  # nanochat's page names none; OpenAI's clients always do
        message = "this is nanochat's web chat; did you mean /v1/chat/completions? A client's base URL ends in /v1"
        raise ApiError(404, message, param="model")
    refuse_unsupported(body.model_extra or {})
    num_chars = sum(len(message.content) for message in body.messages)
    if num_chars > MAX_TOTAL_CHARS:
        message = f"messages must have at most {MAX_TOTAL_CHARS} characters together, got {num_chars}"
        raise ApiError(400, message, param="messages")
    fields = given_fields(body)
    fields["messages"] = [{"role": one.role, "content": one.content} for one in body.messages]
    fields["stream"] = True
    if model.calculates:
        fields["calculator"] = True
    call = chat_call(as_body(fields, ChatBody), model, config, salt)
    name = f"web-{uuid.uuid4().hex}"
    return replace(call, id=name, names=frozenset({name}), make_reply=WebReply)


def error_body(error: ApiError) -> JSON:
    """Return an error as FastAPI, and so nanochat, has it; and as OpenAI's clients, who come by mistake, know it."""
    return {"detail": shortened(error.message), **error.to_dict()}


def stats(running: int, capacity: int, device: str = "cpu") -> JSON:
    """Return what GET /stats says: how many answers may be under way at once, and how many are."""
    busy = min(running, capacity)
    return {
        "total_workers": capacity,
        "available_workers": capacity - busy,
        "busy_workers": busy,
        "workers": [{"gpu_id": 0, "device": device}],
    }


def health(is_ready: bool, running: int, capacity: int) -> JSON:
    """Return what nanochat says in GET /health besides the `status`."""
    return {
        "ready": is_ready,
        "num_gpus": 1,
        "available_workers": capacity - min(running, capacity) if is_ready else 0,
    }


class WebReply:
    """A stream of pieces of text."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int) -> None:
        self._call = call

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return what the events say together; a request cannot ask for it."""
        return {"token": transcripts[0].text, "gpu": 0}

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing: a stream begins with the first text."""
        return b""

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return an event with the new text; the token that ended the answer has none."""
        return _event({"token": decoded.text, "gpu": 0}) if decoded.text else b""

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the event that says that the answer is there."""
        return _event({"done": True, **version_facts(transcripts[0], self._call.shape)})

    def error_events(self, error: ApiError) -> bytes:
        """Return an event that says why there is no more."""
        return _event({"error": shortened(error.message)})


def _event(value: Any) -> bytes:
    """Return an event with the very bytes that nanochat sends, spaces included: people match them as text."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def _stats(model: ServedModel, occupancy: Occupancy) -> JSON:
    return stats(occupancy.num_running, occupancy.max_running)


def _health(occupancy: Occupancy) -> JSON:
    return health(occupancy.is_ready, occupancy.num_running, occupancy.max_running)


DIALECT = Dialect(
    generating=(
        Generating(
            path="/chat/completions",
            body=WebBody,
            to_call=web_call,
            summary="Answer messages in the events of nanochat's web chat.",
            renders=True,
        ),
    ),
    describing=(
        Describing(
            path="/stats",
            describe=_stats,
            summary="Count the answers that are under way, as nanochat's web chat does.",
        ),
    ),
    health=_health,
    error_body=error_body,
)
