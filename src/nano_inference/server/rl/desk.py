"""What the trainers' routes share: how a command is read, who carries it out, and how it is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from nano_inference.config import ServerConfig
from nano_inference.server.body import parse
from nano_inference.server.bridge import Bridge
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy, read_body
from nano_inference.server.rl.control import Control
from nano_inference.server.rl.groups import Groups
from nano_inference.server.rl.places import place_of, weights_below, weights_root
from nano_inference.server.rl.schema import GROUP, InitGroupBody, InitInfo
from nano_inference.server.rl.updates import Updates
from nano_inference.server.schema import Body
from nano_inference.server.served import Opened, ServedEngine
from nano_inference.types import OnRunning, WeightInfo, WeightLabel

JSON = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]
Do = Callable[[Request], Awaitable[JSON]]
B = TypeVar("B", bound=Body)
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_LISTS = ("tags",)
"""Names that may stand in a query more than once."""
_NUMBERS = ("level",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Everything that a route needs."""

    config: ServerConfig
    policy: GuardPolicy
    bridge: Bridge
    opened: Callable[[], Opened]
    note_unknown: Callable[[Body], None]
    root: Path | None
    control: Control
    updates: Updates
    groups: Groups

    @property
    def engine(self) -> ServedEngine:
        """The engine. Raises `ApiError` while a model is loaded."""
        return self.opened().engine

    async def read(self, request: Request, kind: type[B]) -> B:
        """Return the body, with what stands in the query; a command may come without a body.

        Raises `ApiError` 400 naming the field that is wrong.
        """
        self.bridge.require_ready()
        data = await read_body(request.receive, self.policy.max_body_bytes, self.policy.body_timeout)
        body = parse(data if data.strip() else b"{}", kind)
        asked = queried(request)
        if asked:
            body = parse(to_json({**body.model_dump(exclude_unset=True), **asked}), kind)
        self.note_unknown(body)
        return body

    async def facts(self, info: WeightInfo | None = None) -> JSON:
        """Return the version in force, as every reply has it; asked of the engine unless given."""
        if info is None:
            info = await self.bridge.call(self.engine.weight_info)
        return version_facts(info)

    async def join(self, info: InitInfo | InitGroupBody) -> None:
        """Join a trainer's group. Raises `ApiError` as `Groups.join` does, and 409 while an update is open."""
        if self.updates.is_open:
            raise ApiError(409, "busy: an update is open; finish it first", code="busy")
        await self.groups.join(
            info.group_name or GROUP,
            info.master_address,
            info.master_port,
            rank=info.rank_offset,
            world_size=info.world_size,
            backend=info.backend or ("nccl" if self.engine.is_on_cuda else "gloo"),
        )

    async def install_directory(
        self, asked: str, field: str, *, label: WeightLabel | None, on_running: OnRunning = "keep"
    ) -> WeightInfo:
        """Install the weights of a directory below the root. Raises `ApiError` as `place_of` and `Updates` do."""
        place = place_of(self.root, asked, field)
        assert self.root is not None, "place_of needs it"
        return await self.updates.install(weights_below(self.root, place), label=label, on_running=on_running)


def make_desk(
    bridge: Bridge,
    config: ServerConfig,
    policy: GuardPolicy,
    opened: Callable[[], Opened],
    note_unknown: Callable[[Body], None],
) -> Desk:
    """Return the desk of a server. Raises `ValueError` for a directory of weights that is none."""

    def engine() -> ServedEngine:
        return opened().engine

    return Desk(
        config=config,
        policy=policy,
        bridge=bridge,
        opened=opened,
        note_unknown=note_unknown,
        root=weights_root(config.weights_dir),
        control=Control(bridge, engine),
        updates=Updates(bridge, engine, config.weight_timeout),
        groups=Groups(config.weight_timeout),
    )


def queried(request: Request) -> JSON:
    """Return the query as JSON would have it. Raises `ApiError` 400 for a name that is there twice."""
    found: JSON = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        if name in _LISTS:
            found[name] = values
        elif len(values) > 1:
            raise ApiError(400, f"{name[:64]}: is there twice", param=name[:64])
        else:
            found[name] = _value(name, values[0])
    return found


def _value(name: str, text: str) -> str | bool | int:
    if name in _NUMBERS and text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    if text.lower() in _TRUE and name not in _NUMBERS:
        return True
    return False if text.lower() in _FALSE and name not in _NUMBERS else text


def version_facts(info: WeightInfo) -> JSON:
    """Return the weights in force: the trainer's name for them, as text, or else their number; and the number."""
    return {"weight_version": str(info.version if info.label is None else info.label), "version": info.version}


def answered(do: Do) -> Endpoint:
    """Return the endpoint that answers with what a coroutine returns."""

    async def endpoint(request: Request) -> Response:
        return json_response(await do(request))

    return endpoint


def json_response(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(to_json(dict(value)), status, headers=headers, media_type="application/json")
