"""The HTTP API of nanochat's web chat (scripts/chat_web.py): POST /chat/completions, GET /stats, /health.

Follows upstream's last version, in the parent of da32e1d. The client sends the whole conversation each time and reads
one event per piece of text. User and assistant messages can have any order, and numbers can be text. Values beyond
limits have status 400 and {"detail": text}; a body that is no JSON or has a wrong type has 422 and {"detail": [error]}.
A stream that fails ends with the event {"error": …}; nanochat's stops without one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, WithJsonSchema

from nano_inference.nanochat.dialogue import NanochatDialogue
from nano_inference.server.ask import ask_chat
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Describing, Dialect, Occupancy, Route
from nano_inference.server.errors import ApiError, refused, shortened
from nano_inference.server.events import one_line
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.replies import Reply, version_facts
from nano_inference.server.schema import Body, ChatBody
from nano_inference.server.transcript import Transcript
from nano_inference.server.translated import as_body, given_fields

MAX_MESSAGES = 500
MAX_CHARS = 8000
MAX_TOTAL_CHARS = 32000


def _lax(kind: str, low: float, high: float) -> WithJsonSchema:
    """Return the schema of a number that can be text, a boolean or null."""
    number = {"type": kind, "minimum": low, "maximum": high}
    others = ({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}, {"type": "boolean"}, {"type": "null"})
    return WithJsonSchema({"anyOf": [number, *others]})


class WebMessage(Body):
    """One message. An assistant's content can be empty: that of an answer that failed."""

    role: Annotated[str, Field(pattern="^(user|assistant)$")]
    content: Annotated[str, Field(max_length=MAX_CHARS)]


class WebBody(Body):
    """Body of POST /chat/completions, with nanochat's defaults. Numbers can be text. The reply is always a stream."""

    model_config = ConfigDict(strict=False)
    malformed_status: ClassVar[int] = 422

    messages: Annotated[list[WebMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    temperature: Annotated[Annotated[float, Field(ge=0, le=2)] | None, _lax("number", 0, 2)] = 0.8
    max_tokens: Annotated[Annotated[int, Field(ge=1, le=4096)] | None, _lax("integer", 1, 4096)] = 512
    top_k: Annotated[Annotated[int, Field(ge=0, le=200)] | None, _lax("integer", 0, 200)] = 50  # 0 is off


# ---- body -> generation


def ask_web(body: WebBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body asks for. Raises `ApiError` naming the wrong field."""
    for index, message in enumerate(body.messages):
        if message.role == "user" and not message.content:
            place = f"messages.{index}.content"
            raise refused(place, "must not be empty")
    num_chars = sum(len(message.content) for message in body.messages)
    if num_chars > MAX_TOTAL_CHARS:
        text = f"messages must have at most {MAX_TOTAL_CHARS} characters together, got {num_chars}"
        raise ApiError(400, text, param="messages")
    fields = given_fields(body) | {
        "messages": [{"role": one.role, "content": one.content} for one in body.messages],
        "stream": True,
        "skip_special_tokens": False,
        "calculator": model.calculates or None,
    }
    if isinstance(model.dialogue, NanochatDialogue):
        model = replace(model, dialogue=replace(model.dialogue, any_order=True))
    generation = ask_chat(as_body(fields, ChatBody), model, config, salt)
    name = f"web-{uuid.uuid4().hex}"
    # Without its tool: the tool's tokens are text, as upstream's page shows them.
    return replace(generation, id=name, names=frozenset({name}), tool=None)


# ---- reply


@dataclass
class WebReply(Reply[None]):
    _withheld: str = field(init=False, default="")
    """U+FFFD at the end of the text so far; as upstream, not sent unless text follows."""

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        text = self._withheld + decoded.text
        shown = text.rstrip("\ufffd")
        self._withheld = text[len(shown) :]
        return _event({"token": shown, "gpu": 0}) if shown else b""

    def end(self) -> bytes:
        return _event({"done": True, **version_facts(self.transcripts[0], self.generation)})

    @staticmethod
    def broken(error: ApiError, first: bytes = b"", number: int = 0) -> bytes:
        return _event({"error": shortened(error.message)})


def error_body(error: ApiError) -> JSON:
    """Return an error in FastAPI's form (nanochat's) and in OpenAI's, for clients with a base URL without /v1.

    llama.cpp's server has the path, too: a prompt that is too long has its type of error.
    """
    body, text = error.to_dict(), shortened(error.message)
    if error.code == "context_length_exceeded":
        body["error"]["type"] = "exceed_context_size_error"
    if error.status != 422:
        return {"detail": text, **body}
    place = [int(part) if part.isdigit() else part for part in (error.param or "").split(".") if part]
    kind = "json_invalid" if error.code == "invalid_json" else "value_error"
    return {"detail": [{"type": kind, "loc": ["body", *place], "msg": text}], **body}


def _event(value: Any) -> bytes:
    """Return an event, byte for byte as nanochat's but for line separators in texts: clients compare text."""
    return b"data: " + one_line(json.dumps(value, ensure_ascii=False).encode()) + b"\n\n"


# ---- descriptions


def stats(model: ServedModel, occupancy: Occupancy) -> JSON:
    """Return the reply of GET /stats: capacity and running answers, as workers."""
    busy = min(occupancy.num_running, occupancy.max_running)
    return {
        "total_workers": occupancy.max_running,
        "available_workers": occupancy.max_running - busy,
        "busy_workers": busy,
        "workers": [{"gpu_id": 0, "device": "cpu"}],
    }


def health(occupancy: Occupancy) -> JSON:
    """Return nanochat's fields of GET /health, in addition to `status`."""
    free = max(0, occupancy.max_running - occupancy.num_running)
    return {"ready": occupancy.is_ready, "num_gpus": 1, "available_workers": free if occupancy.is_ready else 0}


# ---- routes

_OPENAI = Route(
    path="/chat/completions",
    body=ChatBody,
    ask=ask_chat,
    summary="Answer messages, as /v1/chat/completions does.",
    renders=True,
)


def choose(body: Mapping[str, Any], model: ServedModel) -> Route | None:
    """Return OpenAI's route unless the model is nanochat's and the body names no model, as its page sends it."""
    is_nanochats = "nanochat" in str(model.facts.get("architecture", "")).lower()
    return None if is_nanochats and body.get("model") is None else _OPENAI


_WEB, _STATS = (
    "Answer messages with the events of nanochat's web chat.",
    "Count running answers, in the form of nanochat's web chat.",
)
DIALECT = Dialect(
    generating=(replace(_OPENAI, body=WebBody, ask=ask_web, reply=WebReply, summary=_WEB, choose=choose),),
    describing=(Describing(path="/stats", describe=stats, summary=_STATS),),
    health=health,
    error_body=error_body,
)
