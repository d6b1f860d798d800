"""`Dialect`: one HTTP interface as a record of its routes. The server's core serves a table of them.

An installed package adds a dialect by an entry point in the group `nano_inference.dialects`
(docs/adding-a-dialect.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nano_inference.config import ServerConfig
from nano_inference.server.call import JSON, Call
from nano_inference.server.errors import ErrorBody
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body

DIALECTS_GROUP = "nano_inference.dialects"
ToCall = Callable[[Any, ServedModel, ServerConfig, str], Call]
"""Body, model, configuration and cache salt to a call. Raises `ApiError`."""
Work = Callable[[Any, ServedModel], JSON]
"""Body and model to a reply for which no engine is needed. Raises `ApiError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How many samples the engine runs."""

    is_ready: bool
    """Whether requests are accepted."""
    num_running: int
    max_running: int
    """Samples that may run at once; 0 until the model is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generating:
    """A POST route whose reply comes from the engine."""

    path: str
    body: type[Body]
    to_call: ToCall
    summary: str
    streams: bool = True
    renders: bool = False
    """Whether messages go through the model's chat template, which may take seconds and has threads of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converting:
    """A POST route that converts between texts and tokens, without the engine."""

    path: str
    body: type[Body]
    work: Work
    summary: str
    renders: bool = False
    """As in `Generating`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Describing:
    """A GET route that describes the model or the load. It is refused while no model is ready."""

    path: str
    describe: Callable[[ServedModel, Occupancy], JSON]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """A GET route that makes a fixed request to the engine, to see that it answers in time."""

    path: str
    to_call: Callable[[ServedModel, ServerConfig], Call]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The routes of one HTTP interface, and what they have in common. Raises `ValueError` for a path without a /."""

    generating: tuple[Generating, ...] = ()
    converting: tuple[Converting, ...] = ()
    describing: tuple[Describing, ...] = ()
    probing: tuple[Probing, ...] = ()
    health: Callable[[Occupancy], JSON] | None = None
    """Fields added to the reply of GET /health."""
    error_body: ErrorBody | None = None
    """The body of an error on the dialect's POST paths; None for OpenAI's error object."""

    def __post_init__(self) -> None:
        paths = [route.path for route in self.generating]
        paths += [route.path for route in self.converting]
        paths += [route.path for route in self.describing]
        paths += [route.path for route in self.probing]
        for path in paths:
            if not path.startswith("/"):
                raise ValueError(f"path must begin with /, got {path!r}")


def posts(dialects: Mapping[str, Dialect]) -> Iterator[tuple[Dialect, Generating | Converting]]:
    """Yield every POST route with its dialect."""
    for dialect in dialects.values():
        yield from ((dialect, route) for route in dialect.generating)
        yield from ((dialect, route) for route in dialect.converting)


def gets(dialects: Mapping[str, Dialect]) -> Iterator[Describing | Probing]:
    """Yield every GET route."""
    for dialect in dialects.values():
        yield from dialect.describing
        yield from dialect.probing


def error_bodies(dialects: Mapping[str, Dialect]) -> dict[str, ErrorBody]:
    """Return the error bodies of the POST paths that do not answer with OpenAI's error object."""
    return {route.path: dialect.error_body for dialect, route in posts(dialects) if dialect.error_body is not None}


def health_fields(dialects: Mapping[str, Dialect], occupancy: Occupancy) -> JSON:
    """Return what the dialects add to GET /health; on a name used twice, the later dialect's value."""
    fields: JSON = {}
    for dialect in dialects.values():
        if dialect.health is not None:
            fields |= dialect.health(occupancy)
    return fields
