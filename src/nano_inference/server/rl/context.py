"""What the trainers' routes share: how a command is read, who carries it out, and how it is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from nano_inference.config import ServerConfig
from nano_inference.control import Control as EngineControl
from nano_inference.server.body import parse, read_json
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy, read_body
from nano_inference.server.rl.control import Control
from nano_inference.server.rl.feed import Source
from nano_inference.server.rl.groups import Groups
from nano_inference.server.rl.places import place_of, shown_below, weights_below, weights_root
from nano_inference.server.rl.schema import GROUP, InitGroupBody, InitInfo
from nano_inference.server.rl.threads import in_thread
from nano_inference.server.rl.updates import WAY_OUT, Updates, refusal
from nano_inference.server.schema import Body
from nano_inference.server.served import LoadedModel
from nano_inference.types import (
    BadRequest,
    EngineDead,
    EnginePaused,
    ModelError,
    OnRunning,
    UpdateBusy,
    WeightError,
    WeightInfo,
    WeightLabel,
)

JSON = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]
Do = Callable[[Request], Awaitable[JSON]]
B = TypeVar("B", bound=Body)
_TRUE, _FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})
NO_WEIGHTS = "the weights were discarded: requests wait until all of them have come in an update"
_log = logging.getLogger("nano_inference.server")
_PLACE_S = 10.0
"""How long a trainer waits for a file system that may be at the other end of a network."""
_KNOWN = (WeightError, ModelError, BadRequest, UpdateBusy, EnginePaused, EngineDead, OSError)
"""What a command may fail of without anything being wrong here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLContext:
    """Everything that a route needs."""

    config: ServerConfig
    policy: GuardPolicy
    link: EngineLink
    opened: Callable[[], LoadedModel]
    root: Path | None
    control: Control
    updates: Updates
    groups: Groups

    @property
    def engine(self) -> EngineControl:
        """The engine's control. Raises `ApiError` while a model is loaded."""
        return self.opened().engine.control

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """What a group transfers weights with on this engine's device."""
        return "nccl" if self.opened().model.facts["device"] == "cuda" else "gloo"

    async def read(self, request: Request, kind: type[B]) -> B:
        """Return the body, with what stands in the query; a command may come without a body.

        Raises `ApiError` 400 naming the field that is wrong, or that no command has: what a trainer means by it would
        not be done.
        """
        self.link.require_ready()
        data = await read_body(request.receive, self.policy.max_body_bytes, self.policy.body_timeout)
        data = data if data.strip() else b"{}"
        asked = queried(request, kind)
        body = parse(to_json({**read_json(data), **asked}) if asked else data, kind)
        refuse_unknown(body)
        return body

    async def facts(self, info: WeightInfo | None = None) -> JSON:
        """Return the version in force, as every reply has it, asked of the engine unless given; and if it has weights.

        Without weights (`/sleep?level=2`) requests wait until all of them were brought anew.
        """
        engine = self.engine
        found, has_weights = await self.link.call(lambda: (info or engine.weight_info(), engine.has_weights))
        lineage = self.opened().model.limits.lineage
        return {"weights": "present" if has_weights else "discarded", **version_facts(found), "lineage": lineage}

    async def wake(self, what: Iterable[str] | None) -> JSON:
        """Wake what is named, or all; return what `facts` does, with a hint for who forgot the weights."""
        await self.control.wake(what)
        facts = await self.facts()
        if facts["weights"] == "present" or self.control.asleep:
            return facts
        _log.warning("awake, but %s", NO_WEIGHTS)
        return {**facts, "hint": NO_WEIGHTS}

    async def abort_update(self) -> JSON:
        """Give up the update under way; a group that is received from meanwhile is left: it has lost its step."""
        names = tuple(self.updates.receiving)
        if not await self.updates.abort():
            return {"aborted": False, **await self.facts()}
        left = sorted(name for name in set(names) if self.groups.leave(name))
        return {"aborted": True, "closed_groups": left, **await self.facts()}

    async def join(self, info: InitInfo | InitGroupBody) -> None:
        """Join a trainer's group. Raises `ApiError` as `Groups.join` does, and 409 while an update is open."""
        if self.updates.is_open:
            raise ApiError(409, f"busy: an update is open: {WAY_OUT}", code="busy")
        await self.groups.join(
            info.group_name or GROUP,
            info.master_address,
            info.master_port,
            rank=info.rank_offset,
            world_size=info.world_size,
            backend=info.backend or self.backend,
        )

    async def install_directory(
        self,
        asked: str,
        field: str,
        *,
        label: WeightLabel | None,
        checksum: str | None,
        on_running: OnRunning = "keep",
    ) -> WeightInfo:
        """Install the weights of a directory below the root. Raises `ApiError` as `weights_in` and `Updates` do."""
        source = await self.weights_in(asked, field)
        return await self.updates.install(source, label=label, checksum=checksum, on_running=on_running)

    async def weights_in(self, asked: str, field: str) -> Source:
        """Return the weights of a directory below the root.

        Raises `ApiError` as `place_of` does, and 503 when the file system does not answer; nobody else waits for it.
        """
        look = in_thread(lambda: place_of(self.root, asked, field), lambda place: None, "weight-place")
        try:
            place = await asyncio.wait_for(look, _PLACE_S)
        except TimeoutError:
            text = f"{field}: the file system did not answer within {_PLACE_S:g} seconds"
            raise ApiError(503, text, param=field, code="no_answer") from None
        assert self.root is not None, "place_of needs it"
        return weights_below(self.root, place)


def make_context(
    link: EngineLink,
    config: ServerConfig,
    policy: GuardPolicy,
    opened: Callable[[], LoadedModel],
) -> RLContext:
    """Return the desk of a server. Raises `ValueError` for a directory of weights that is none."""

    def engine() -> EngineControl:
        return opened().engine.control

    root = weights_root(config.weights_dir)
    return RLContext(
        config=config,
        policy=policy,
        link=link,
        opened=opened,
        root=root,
        control=Control(link, engine),
        updates=Updates(link, engine, config.weight_timeout, shown_below(root)),
        groups=Groups(config.weight_timeout, lambda: engine().weight_shapes()),
    )


def refuse_unknown(body: Body, place: str = "") -> None:
    """Raise `ApiError` 400 naming the first field that a command, or an object in it, does not have."""
    for name in body.model_extra or {}:
        if name not in body.neutral_names:
            shown = f"{place}{name[:64]}"
            raise ApiError(400, f"{shown}: there is no such field", param=shown, code="unknown_field")
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Body):
            refuse_unknown(value, f"{place}{name}.")


def queried(request: Request, kind: type[Body]) -> JSON:
    """Return the query as JSON would have it in a body. Raises `ApiError` 400 for a name that is there twice."""
    found: JSON = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        field = kind.model_fields.get(name)
        types = frozenset[object]() if field is None else _types(field.annotation)
        if list in types and (str not in types or len(values) > 1):
            found[name] = values
        elif len(values) > 1:
            raise ApiError(400, f"{name[:64]}: is there twice", param=name[:64])
        else:
            found[name] = _value(values[0], types)
    return found


def _types(annotation: object) -> frozenset[object]:
    """Return the types that a field may have, without their limits: bool, int, str, list, and others."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _types(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return frozenset(one for part in get_args(annotation) for one in _types(part))
    return frozenset({origin or annotation})


def _value(text: str, types: frozenset[object]) -> str | bool | int:
    """Return what a text means in a field of these types; the schema refuses a text that means nothing there."""
    if bool in types and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    is_number = int in types and str not in types and text.isascii() and text.isdigit() and len(text) < 20
    return int(text) if is_number else text


def version_facts(info: WeightInfo) -> JSON:
    """Return the weights in force: the trainer's name for them, as text, or else their number; and the number."""
    return {"weight_version": str(info.version if info.label is None else info.label), "version": info.version}


def answered(do: Do) -> Endpoint:
    """Return the endpoint that answers with what a coroutine returns."""

    async def endpoint(request: Request) -> Response:
        return json_response(await obeyed(do, request))

    return endpoint


async def obeyed(do: Do, request: Request) -> JSON:
    """Return what a command answers. Raises what it fails of as `ApiError`; a fault of ours passes as it is."""
    try:
        return await do(request)
    except _KNOWN as error:
        raise refusal(error) from None


def json_response(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(to_json(dict(value)), status, headers=headers, media_type="application/json")
