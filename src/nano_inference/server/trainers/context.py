"""What all trainer routes share: `RLContext`, the reading of bodies, replies and errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nano_inference.server.body import parse, read_json
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError, reworded
from nano_inference.server.generation import JSON
from nano_inference.server.guard import GuardPolicy, read_body
from nano_inference.server.schema import Body
from nano_inference.server.trainers.control import Control
from nano_inference.server.trainers.groups import Groups
from nano_inference.server.trainers.places import relative_to
from nano_inference.server.trainers.schema import (
    GROUP,
    UPDATE_FORMS,
    InitInfo,
    Rendezvous,
    UpdateInfo,
    UpdateWeightsBody,
)
from nano_inference.server.trainers.updates import HOW_TO_END, Updates
from nano_inference.types import (
    BadRequest,
    EngineDead,
    EnginePaused,
    ModelError,
    UpdateBusy,
    UpdateCancelled,
    WeightError,
    WeightInfo,
)
from nano_inference.weights.updates import WeightUpdate

B = TypeVar("B", bound=Body)
Reply = JSON | WeightInfo | None
"""What a command's call returns: fields of the reply, the version that it installed, or neither."""
NO_WEIGHTS = "the weights were discarded: requests wait until an update has installed all of them"
_log = logging.getLogger("nano_inference.server")
CLIENT_ERRORS = (ApiError, WeightError, ModelError, BadRequest, UpdateBusy, EnginePaused, EngineDead, OSError)
"""Failures that are not defects of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLContext:
    """What the trainer routes operate on. Accessed on the event loop."""

    config: ServerConfig
    policy: GuardPolicy
    link: EngineLink
    opened: Callable[[], LoadedModel]
    root: Path | None
    control: Control
    updates: Updates
    groups: Groups
    serve_adapters: Callable[[], Awaitable[None]]
    """Makes the loaded adapters those that requests may name."""

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """The process group backend for the engine's device."""
        return "nccl" if self.opened().model.facts["device"] == "cuda" else "gloo"

    async def facts(self, info: WeightInfo | None = None) -> JSON:
        """Return the fields of every reply: weight version, lineage, and whether the engine has weights.

        `info` is read from the engine if not given. After `/sleep?level=2` there are no weights until an update.
        """
        found, has_weights = await self.link.engine.call(
            lambda engine: (info or engine.weight_info(), engine.has_weights)
        )
        return {
            "weights": "present" if has_weights else "discarded",
            # The trainer's label, or else the number, as text.
            "weight_version": str(found.version if found.label is None else found.label),
            "version": found.version,
            "lineage": self.opened().model.limits.lineage,
        }

    async def wake(self, what: Iterable[str] | None) -> JSON:
        """Wake the named parts, or all; return a hint for the reply if the weights are still discarded."""
        await self.control.wake(what)
        has_weights = await self.link.engine.call(lambda engine: engine.has_weights)
        if self.control.asleep or has_weights:
            return {}
        _log.warning("awake, but %s", NO_WEIGHTS)
        return {"hint": NO_WEIGHTS}

    async def join(self, info: Rendezvous, bucket_bytes: int | None = None) -> None:
        """Join a trainer's group, whose broadcasts are packed with `bucket_bytes`.

        Raises `ApiError` as `Groups.join` does, and 409 while an update is open.
        """
        if self.updates.is_open:
            raise ApiError(409, f"busy: an update is open: {HOW_TO_END}", code="busy")
        await self.groups.join(
            info.group_name or GROUP,
            info.master_address,
            info.master_port,
            rank=info.rank_offset,
            world_size=info.world_size,
            backend=info.backend or self.backend,
            bucket_bytes=bucket_bytes,
            is_vllm=isinstance(info, InitInfo),
        )

    async def install(self, update: WeightUpdate) -> Reply:
        """Install an update, see `Updates.install`; with its `hold`, return the version that it gets at the commit."""
        info = await self.updates.install(update)
        return {"message": "Weights held", "held_version": info.version + 1} if update.hold else info

    async def checksum(self) -> str:
        """Return the checksum of the weights. Blocks steps while the engine thread reads all of them."""
        return await self.link.engine.call(lambda engine: engine.weights_checksum())


@dataclass(frozen=True, slots=True)
class Command:
    """A route that changes state."""

    path: str
    body: type[Body]
    call: Callable[[RLContext, Any, Request], Awaitable[Reply]]
    reply: Mapping[str, Any]
    """Fields of every reply; those that `call` returns and `RLContext.facts` follow."""
    methods: tuple[str, ...] = ("POST",)
    takes_stream: bool = False
    """The request's body is bytes; the fields are in the query."""
    is_text: bool = False  # the reply is its `message`

    async def run(self, context: RLContext, request: Request) -> Response:
        """Answer a request. Raises `ApiError` for what is not a defect of the server."""
        policy, data = context.policy, b""
        try:
            context.opened()
            if not self.takes_stream:
                data = await read_body(request.receive, policy.max_body_bytes, policy.body_timeout)
            found = await self.call(context, fields_of(self, request, data), request)
            info, fields = (found, {}) if isinstance(found, WeightInfo) else (None, found or {})
            if self.is_text:
                return PlainTextResponse(str(fields["message"]))
            return json_response({**self.reply, **fields, **await context.facts(info)})
        except CLIENT_ERRORS as error:
            raise client_error(error, context.root) from None


def fields_of(command: Command, request: Request, data: bytes) -> Body:
    """Return a command's body merged with the query parameters, which take precedence; it may be empty.

    Raises `ApiError` 400 naming an invalid or unknown field.
    """
    data, query = data.strip() or b"{}", query_fields(request, command.body)
    body = parse(to_json({**read_json(data), **query}) if query else data, command.body)
    _refuse_unknown(body)
    return body


def _refuse_unknown(body: Body, prefix: str = "") -> None:
    """Raise `ApiError` 400 naming the first unknown field of a body or of an object in it."""
    named = UPDATE_FORMS if isinstance(body, UpdateInfo | UpdateWeightsBody) else ()  # refused later, with the reason
    for name in body.model_extra or {}:
        if name not in named:
            field = f"{prefix}{name[:64]}"
            raise ApiError(400, f"{field}: there is no such field", param=field, code="unknown_field")
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Body):
            _refuse_unknown(value, f"{prefix}{name}.")


def query_fields(request: Request, kind: type[Body]) -> JSON:
    """Return the query parameters as a body's JSON; text that fits no type is left for the schema to reject.

    Raises `ApiError` 400 for a name that occurs twice, unless the field takes a list.
    """
    found: JSON = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        found[name] = values[0]
        hint: Any = kind.model_fields[name].annotation if name in kind.model_fields else str
        for reading in (values,) if len(values) > 1 else (values[0], values):
            with suppress(ValidationError):
                found[name] = TypeAdapter(hint).validate_python(reading)
                break
        else:
            if len(values) > 1:
                raise ApiError(400, f"{name[:64]}: given twice in the query", param=name[:64])
    return found


def client_error(error: Exception, root: Path | None = None) -> ApiError:
    """Return the reply to a command that failed, without the path of `root`."""
    if isinstance(error, ApiError):
        found = error
    elif isinstance(error, UpdateBusy):
        found = ApiError(409, f"busy: {error}", code="busy")
    elif isinstance(error, UpdateCancelled):
        found = ApiError(409, "the update was aborted", code="aborted")
    elif isinstance(error, EnginePaused):
        found = ApiError(409, str(error), code="asleep")
    elif isinstance(error, EngineDead):
        found = ApiError(503, "the engine has failed", code="engine_dead", headers={"x-should-retry": "false"})
    elif isinstance(error, OSError):
        text = f"the operating system reports: {error.strerror or type(error).__name__}"
        found = ApiError(400, text, code="os_error")
    else:  # WeightError, ModelError, BadRequest
        found = ApiError(400, str(error), code="bad_weights")
    return reworded(found, lambda text: relative_to(root, text))


def json_response(value: JSON | list[JSON], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers=headers, media_type="application/json")
