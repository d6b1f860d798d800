"""What all trainer routes share: `RLContext`, reading of command bodies, replies and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from nano_inference.loading.listing import weight_files
from nano_inference.server.body import parse, read_json
from nano_inference.server.call import JSON
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy, read_body
from nano_inference.server.schema import Body
from nano_inference.server.trainers.control import Control
from nano_inference.server.trainers.feed import Source
from nano_inference.server.trainers.groups import Groups
from nano_inference.server.trainers.schema import GROUP, InitGroupBody, InitInfo
from nano_inference.server.trainers.threads import in_thread
from nano_inference.server.trainers.updates import HOW_TO_END, Updates, client_error
from nano_inference.support.files import path_of
from nano_inference.types import (
    BadRequest,
    EngineDead,
    EnginePaused,
    ModelError,
    UpdateBusy,
    WeightError,
    WeightInfo,
)

Endpoint = Callable[[Request], Awaitable[Response]]
Command = Callable[["RLContext", Request], Awaitable[JSON | list[JSON]]]
"""Executes a request and returns the reply's JSON."""
B = TypeVar("B", bound=Body)
_TRUE, _FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})
NO_WEIGHTS = "the weights were discarded: requests wait until an update has installed all of them"
_log = logging.getLogger("nano_inference.server")
_FILE_SYSTEM_TIMEOUT_S = 10.0  # limit for resolving a path, which may be on a network file system
_CLIENT_ERRORS = (WeightError, ModelError, BadRequest, UpdateBusy, EnginePaused, EngineDead, OSError)
"""Failures of a command that are not defects of the server."""


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

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """The process group backend for the engine's device."""
        return "nccl" if self.opened().model.facts["device"] == "cuda" else "gloo"

    async def read(self, request: Request, kind: type[B]) -> B:
        """Return the body merged with the query parameters, which take precedence; an empty body is allowed.

        Raises `ApiError` 400 naming an invalid or unknown field.
        """
        self.opened()
        data = await read_body(request.receive, self.policy.max_body_bytes, self.policy.body_timeout)
        data = data if data.strip() else b"{}"
        query = query_fields(request, kind)
        body = parse(to_json({**read_json(data), **query}) if query else data, kind)
        refuse_unknown(body)
        return body

    def read_query(self, request: Request, kind: type[B]) -> B:
        """Return the query parameters as a body. Raises `ApiError` 400 naming an invalid or unknown one."""
        self.opened()
        body = parse(to_json(query_fields(request, kind)), kind)
        refuse_unknown(body)
        return body

    async def facts(self, info: WeightInfo | None = None) -> JSON:
        """Return the fields of every reply: weight version, lineage, and whether the engine has weights.

        `info` is read from the engine if not given. After `/sleep?level=2` there are no weights until an update.
        """
        found, has_weights = await self.link.engine.call(
            lambda engine: (info or engine.weight_info(), engine.has_weights)
        )
        lineage = self.opened().model.limits.lineage
        return {"weights": "present" if has_weights else "discarded", **version_facts(found), "lineage": lineage}

    async def wake(self, what: Iterable[str] | None) -> JSON:
        """Wake the named parts, or all; return `facts`, with a hint if the weights are still discarded."""
        await self.control.wake(what)
        facts = await self.facts()
        if facts["weights"] == "present" or self.control.asleep:
            return facts
        _log.warning("awake, but %s", NO_WEIGHTS)
        return {**facts, "hint": NO_WEIGHTS}

    async def abort_update(self) -> JSON:
        """Abort the current update and leave the groups it receives from: their ranks are out of step."""
        names = tuple(self.updates.receiving)
        if not await self.updates.abort():
            return {"aborted": False, **await self.facts()}
        left = sorted(name for name in set(names) if self.groups.leave(name))
        return {"aborted": True, "closed_groups": left, **await self.facts()}

    async def join(self, info: InitInfo | InitGroupBody, bucket_bytes: int | None = None) -> None:
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

    async def weights_in(self, path: str, field: str) -> Source:
        """Return the weights of a directory below `root`. The path is resolved in a thread.

        Raises `ApiError` as `place_of` does, and 503 if the file system does not respond.
        """
        resolving = in_thread(lambda: place_of(self.root, path, field), lambda place: None, "weight-place")
        try:
            place = await asyncio.wait_for(resolving, _FILE_SYSTEM_TIMEOUT_S)
        except TimeoutError:
            text = f"{field}: the file system did not answer within {_FILE_SYSTEM_TIMEOUT_S:g} seconds"
            raise ApiError(503, text, param=field, code="no_answer") from None
        assert self.root is not None, "place_of raises without a root"
        return weights_below(self.root, place)


def make_context(
    link: EngineLink,
    config: ServerConfig,
    policy: GuardPolicy,
    opened: Callable[[], LoadedModel],
) -> RLContext:
    """Return a server's context. Raises `ValueError` if `config.weights_dir` is not a directory."""
    root = weights_root(config.weights_dir)
    return RLContext(
        config=config,
        policy=policy,
        link=link,
        opened=opened,
        root=root,
        control=Control(link),
        updates=Updates(link, config.weight_timeout, relative_paths(root)),
        groups=Groups(config.weight_timeout, lambda: opened().engine.weight_shapes()),
    )


def refuse_unknown(body: Body, prefix: str = "") -> None:
    """Raise `ApiError` 400 naming the first unknown field of a body or of an object in it."""
    for name in body.model_extra or {}:
        if name not in body.neutral_names:
            field = f"{prefix}{name[:64]}"
            raise ApiError(400, f"{field}: there is no such field", param=field, code="unknown_field")
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Body):
            refuse_unknown(value, f"{prefix}{name}.")


def query_fields(request: Request, kind: type[Body]) -> JSON:
    """Return the query parameters as a body's JSON. Raises `ApiError` 400 for a name that occurs twice."""
    found: JSON = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        field = kind.model_fields.get(name)
        types = frozenset[object]() if field is None else _types(field.annotation)
        if list in types and (str not in types or len(values) > 1):
            found[name] = values
        elif len(values) > 1:
            raise ApiError(400, f"{name[:64]}: given twice in the query", param=name[:64])
        elif bool in types and values[0].lower() in _TRUE | _FALSE:
            found[name] = values[0].lower() in _TRUE
        else:  # other text than a number is left for the schema to reject
            text = values[0]
            is_number = int in types and str not in types and text.isascii() and text.isdigit() and len(text) < 20
            found[name] = int(text) if is_number else text
    return found


def _types(annotation: object) -> frozenset[object]:
    """Return the types of an annotation's union, without constraints: bool, int, str, list and others."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _types(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return frozenset(one for part in get_args(annotation) for one in _types(part))
    return frozenset({origin or annotation})


def version_facts(info: WeightInfo) -> JSON:
    """Return the current weight version: the trainer's label (or else the number) as text, and the number."""
    return {"weight_version": str(info.version if info.label is None else info.label), "version": info.version}


def endpoint_of(command: Command, context: RLContext) -> Endpoint:
    """Return the endpoint that responds with a command's JSON."""

    async def endpoint(request: Request) -> Response:
        return json_response(await run_command(command, context, request))

    return endpoint


async def run_command(command: Command, context: RLContext, request: Request) -> JSON | list[JSON]:
    """Return a command's reply. Raises its expected failures as `ApiError`; other exceptions pass unchanged."""
    try:
        return await command(context, request)
    except _CLIENT_ERRORS as error:
        raise client_error(error) from None


def json_response(value: JSON | list[JSON], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers=headers, media_type="application/json")


def weights_root(weights_dir: str | None) -> Path | None:
    """Return the resolved `--weights-dir`. Raises `ValueError` if it is not a directory."""
    if weights_dir is None:
        return None
    root = path_of(weights_dir, "weights_dir").resolve()
    if not root.is_dir():
        raise ValueError(f"weights_dir is not a directory: {weights_dir}")
    return root


def place_of(root: Path | None, path: str, field: str) -> Path:
    """Return the resolved directory of a client's path, which is absolute or relative to `root`.

    Raises `ApiError` naming `field`: 403 for a path that leads outside `root`, 400 for one that is not a directory
    with weight files.
    """
    if root is None:
        text = f"{field}: this server does not load weights from files; start it with --weights-dir"
        raise ApiError(403, text, param=field)
    if "\0" in path or ".." in Path(path).parts:
        raise ApiError(400, f"{field}: a path must not contain .. or a zero byte", param=field)
    try:
        place = (root / path).resolve()
        _require_below(root, place, field)
        if not place.is_dir():
            text = f"{field}: there is no directory of that name below --weights-dir, to which names are relative"
            raise ApiError(400, text, param=field)
        files = weight_files(place)
        if not files:
            text = f"{field}: the directory has no safetensors files and no pytorch_model.bin"
            raise ApiError(400, text, param=field)
        for file in files:
            _require_below(root, file.resolve(), field)
        return place
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long, no permission
        why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise ApiError(400, f"{field}: the path cannot be followed{why}", param=field) from None


def relative_paths(root: Path | None) -> Callable[[str], str]:
    """Return a function that makes the paths in a message relative to `root`, so that clients do not see it."""

    def relative(message: str) -> str:
        if root is None or root == Path(root.anchor):
            return message
        return message.replace(f"{root}/", "").replace(f"{root}:", "--weights-dir:")

    return relative


def weights_below(root: Path, place: Path) -> Iterator[tuple[str, Any]]:
    """Yield a directory's weights; read on the gathering thread. Links are checked again at the end.

    Raises `WeightError` and `ModelError` as `weights_in` does, `ValueError` for a file that now leads outside `root`.
    """
    from nano_inference.weights.directory import weights_in  # imports torch: not on the event loop

    yield from weights_in(place, marker=None)
    if not all(file.resolve().is_relative_to(root) for file in weight_files(place)):
        raise ValueError("a file was replaced by a link outside --weights-dir while it was read")


def _require_below(root: Path, place: Path, field: str) -> None:
    if not place.is_relative_to(root):
        raise ApiError(403, f"{field}: leads outside --weights-dir", param=field)
