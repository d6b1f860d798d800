"""`Dialect`: one HTTP interface as a record of its routes; the server has a table of dialects.

An installed package adds a dialect by an entry point in the group `nano_inference.dialects`
(docs/extending.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, ErrorBody
from nano_inference.server.events import SERVER_SENT_EVENTS, StreamForm
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.replies import OpenAIReply, Reply
from nano_inference.server.reply_store import ClientReplies
from nano_inference.server.schema import Body

DIALECTS_GROUP = "nano_inference.dialects"
Ask = Callable[..., Generation]
"""Returns what (body, model, configuration, cache salt) ask for. Raises `ApiError`.

With `stores`, a fifth argument is the client's stored replies, which the generation may continue and add to.
"""
Work = Callable[..., JSON]
"""Returns the reply of (body, model) without the engine. With `stores`, also takes the client's stored replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Number of samples that the engine runs."""

    is_ready: bool
    """True if requests are accepted."""
    num_running: int
    max_running: int
    """Limit of `num_running`; 0 until the model is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadedModel:
    """One of several models of a server, which is not loaded."""

    names: tuple[str, ...]
    file_bytes: int
    created: int
    """Time of the server's start, seconds since 1970."""


StreamError = Callable[[ApiError, bytes, int], bytes]
"""Returns what ends a stream whose server died: `Reply.broken`."""
openai_stream_error: StreamError = OpenAIReply.broken
OfModels = Callable[[Sequence[JSON], Sequence[UnloadedModel]], JSON]
"""Returns one reply of (the replies of the loaded models, the other models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A POST route whose reply comes from the engine."""

    path: str
    body: type[Body]
    ask: Ask
    """Returns what a body asks for; runs in a thread."""
    reply: type[Reply[Any]] = OpenAIReply
    """Makes the reply, whole or in parts."""
    summary: str
    streams: bool = True
    form: StreamForm = SERVER_SENT_EVENTS
    """Form of its streams."""
    renders: bool = False
    """True if messages are rendered with the chat template, which may take seconds and has a separate thread pool."""
    stores: bool = False
    """True if `ask` also takes the client's stored replies."""
    choose: Callable[[Mapping[str, Any], ServedModel], Route | None] | None = None
    """Returns another route that answers a body, or None; several interfaces share the path. Raises `ApiError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converting:
    """A POST route that converts between text and tokens, without the engine."""

    path: str
    body: type[Body]
    work: Work
    summary: str
    renders: bool = False
    """See `Route.renders`."""
    stores: bool = False
    """True if `work` also takes the client's stored replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Describing:
    """A GET route that describes the model or the load; answers 503 until the model is ready."""

    path: str
    describe: Callable[[ServedModel, Occupancy], JSON | list[JSON]]
    summary: str
    of_models: OfModels | None = None
    """Returns the reply of a server with several models; None: the reply is about one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """A GET route that sends a fixed request to the engine, as a health check."""

    path: str
    ask: Callable[[ServedModel, ServerConfig], Generation]
    reply: type[Reply[Any]] = OpenAIReply
    form: StreamForm = SERVER_SENT_EVENTS
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalling:
    """A route about one stored reply, whose id is in the path as `{id}`."""

    path: str
    method: Literal["GET", "DELETE"] = "GET"
    work: Callable[[ClientReplies, str, Mapping[str, str]], JSON | bytes]
    """Returns the reply's JSON of (stored replies, id, query). Raises `ApiError`."""
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The routes of one HTTP interface. Raises `ValueError` for a path that does not start with /."""

    generating: tuple[Route, ...] = ()
    converting: tuple[Converting, ...] = ()
    describing: tuple[Describing, ...] = ()
    probing: tuple[Probing, ...] = ()
    recalling: tuple[Recalling, ...] = ()
    health: Callable[[Occupancy], JSON] | None = None
    """Returns fields for the reply of GET /health."""
    error_body: ErrorBody | None = None
    """The body of an error on the dialect's POST paths; None for OpenAI's error object."""

    def __post_init__(self) -> None:
        routes: tuple[Route | Converting | Describing | Probing | Recalling, ...]
        routes = (*self.generating, *self.converting, *self.describing, *self.probing, *self.recalling)
        for route in routes:
            if not route.path.startswith("/"):
                raise ValueError(f"path must begin with /, got {route.path!r}")


def posts(dialects: Mapping[str, Dialect]) -> Iterator[tuple[Dialect, Route | Converting]]:
    """Yield every POST route with its dialect."""
    for dialect in dialects.values():
        yield from ((dialect, route) for route in dialect.generating)
        yield from ((dialect, route) for route in dialect.converting)


def gets(dialects: Mapping[str, Dialect]) -> Iterator[Describing | Probing]:
    for dialect in dialects.values():
        yield from dialect.describing
        yield from dialect.probing


def listings(dialects: Mapping[str, Dialect]) -> dict[str, OfModels]:
    """Return path -> `of_models` of the GET routes that list models."""
    routes = (route for dialect in dialects.values() for route in dialect.describing)
    return {route.path: route.of_models for route in routes if route.of_models is not None}


def stored_paths(dialects: Mapping[str, Dialect]) -> tuple[re.Pattern[str], ...]:
    """Return expressions that match the paths of stored replies."""
    paths = {route.path for dialect in dialects.values() for route in dialect.recalling}
    return tuple(re.compile(re.escape(path).replace(r"\{id\}", "[^/]+")) for path in sorted(paths))


def error_bodies(dialects: Mapping[str, Dialect]) -> dict[str, ErrorBody]:
    """Return path -> error body, for POST paths that do not use OpenAI's error object."""
    return {route.path: dialect.error_body for dialect, route in posts(dialects) if dialect.error_body is not None}


def stream_errors(dialects: Mapping[str, Dialect]) -> dict[str, StreamError]:
    """Return path -> `Reply.broken` of the routes that generate."""
    return {route.path: route.reply.broken for one in dialects.values() for route in one.generating}


def health_fields(dialects: Mapping[str, Dialect], occupancy: Occupancy) -> JSON:
    """Return the dialects' fields of GET /health; a later dialect overwrites an earlier one."""
    fields: JSON = {}
    for dialect in dialects.values():
        if dialect.health is not None:
            fields |= dialect.health(occupancy)
    return fields
