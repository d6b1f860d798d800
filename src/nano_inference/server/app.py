"""The routes. Each reads a body, asks a pure function what it means, and answers; nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import nano_inference
from nano_inference.config import ServerConfig
from nano_inference.registry import PluginError
from nano_inference.server.answering import Timing
from nano_inference.server.body import parse
from nano_inference.server.call import Call
from nano_inference.server.compiling import Compilers
from nano_inference.server.dialect import (
    Converting,
    Describing,
    Dialect,
    Generating,
    Occupancy,
    Probing,
    ToCall,
    Work,
    error_bodies,
    health_fields,
)
from nano_inference.server.dispatch import Capacity, Dispatcher
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import Guard, GuardPolicy, read_body
from nano_inference.server.info import info
from nano_inference.server.log import AccessRecord, log_access
from nano_inference.server.metrics import CONTENT_TYPE, not_loaded
from nano_inference.server.openapi import openapi
from nano_inference.server.pages import LATER, Page, load_page, page_response
from nano_inference.server.queue_limits import QueueLimits
from nano_inference.server.schema import Body
from nano_inference.server.served import LoadedModel
from nano_inference.server.serving import CallResponse, OpenCalls, Serving
from nano_inference.server.unsupported import unknown_fields
from nano_inference.server.worker_pool import BodyWorkers

_MAX_NOTED_FIELDS = 1000
_PROBE_SECONDS = 20.0
"""In which a probing route must have its answer: SGLang's figure for /health_generate."""
_REJECTIONS = {
    "queue_full": "max_num_queued_reqs",
    "too_many_tokens": "max_num_queued_tokens",
    "quota_exceeded": "client_quota",
    "shutting_down": "draining",
    "engine_dead": "dead",
}
"""An error's code -> what vLLM's dashboards call that reason."""

_log = logging.getLogger("nano_inference.server")
_B = TypeVar("_B", bound=Body)
Endpoint = Callable[[Request], Awaitable[Response]]
FurtherRoutes = Callable[[Callable[[], LoadedModel]], Sequence[Route]]
"""Makes routes from a function that returns the loaded model, or raises an `ApiError` while there is none."""


class App:
    """Owns the routes and what they share: the bridge to the engine, the queue's places, threads for large bodies.

    `further` makes routes that belong to no dialect. Raises `PluginError` for a route that is there twice.
    """

    def __init__(
        self,
        config: ServerConfig,
        policy: GuardPolicy,
        link: EngineLink,
        dialects: Mapping[str, Dialect],
        further: FurtherRoutes,
    ) -> None:
        self.config = config
        self.link = link
        self.serving: Serving | None = None
        self._dialects = dialects
        self._further = further
        self._policy = policy
        self._readers = BodyWorkers()
        self._compilers = Compilers()
        self._noted: set[str] = set()
        """Unknown fields that were told of already."""
        self._open_calls = OpenCalls()
        self._max_running = 0
        """Samples that may run at once."""
        self._document: asyncio.Task[bytes] | None = None
        """The OpenAPI document, once somebody has asked for it."""
        self._pages: dict[str, Page] = {}
        self._router = Router(self._routes(), redirect_slashes=False)
        guard = Guard(self._route, policy, self._on_response, error_bodies(dialects))
        self.asgi: ASGIApp = below(config.root_path, guard)
        """The application, as a server runs it."""

    def serve(self, opened: LoadedModel, max_running: int) -> None:
        """Take a loaded model, of which so many samples may run at once, and open the doors."""
        self._max_running = max_running
        share, limits = self._policy.client_share, opened.model.limits
        queue_limits = QueueLimits(
            max_samples=max_running + self.config.max_queued_requests,
            max_tokens=self.config.max_admitted_tokens,
            share=share,
        )
        capacity = Capacity(
            num_seats=max_running,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            step_tokens=opened.step_tokens,
        )
        dispatcher = Dispatcher(capacity, share=share)
        self.serving = Serving(opened=opened, queue_limits=queue_limits, dispatcher=dispatcher)
        self.link.after_step = dispatcher.after_step
        self.link.start_accepting()

    def close(self) -> None:
        """End the threads, and the processes that render."""
        if self.serving is not None and self.serving.model.dialogue is not None:
            self.serving.model.dialogue.close()
        self._readers.close()
        self._compilers.close()

    def _routes(self) -> list[Route]:
        gets: dict[str, Endpoint] = {
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model_card,
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/load": self.load,
            "/version": self.version,
            "/metrics": self.metrics,
            "/openapi.json": self.document,
            "/info": self.info,
            "/": self.page("chat"),
            "/dashboard": self.page("dashboard"),
            **{f"/{name}": self.page(name) for name in LATER},
        }
        owned = [
            *((name, route) for name, dialect in self._dialects.items() for route in self._routes_of(dialect)),
            *(("the server", Route(path, endpoint, methods=["GET"])) for path, endpoint in gets.items()),
            *(("the server", route) for route in self._further(lambda: self._require_serving().opened)),
        ]
        check_routes(owned)
        return [route for _, route in owned]

    def _routes_of(self, dialect: Dialect) -> Iterator[Route]:
        for generating in dialect.generating:
            yield Route(generating.path, self._generating(generating), methods=["POST"])
        for converting in dialect.converting:
            yield Route(converting.path, self._converting(converting), methods=["POST"])
        for describing in dialect.describing:
            yield Route(describing.path, self._describing(describing), methods=["GET"])
        for probing in dialect.probing:
            yield Route(probing.path, self._probing(probing), methods=["GET"])

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find the route; what the router refuses becomes an error object."""
        scope["app"] = self  # the router raises its 404 and 405 only when it finds an application here
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            headers = dict(error.headers or {})
            allowed = f"; use {headers.get('Allow')}" if "Allow" in headers else ""
            refused = f"{scope['method']} is not allowed here{allowed}"
            text = refused if error.status_code == 405 else self._no_such_path(scope["path"])
            raise ApiError(error.status_code, text, headers=headers) from None

    def _no_such_path(self, path: str) -> str:
        """Say that there is nothing, and what may have been meant: a base URL without its /v1, or with two."""
        known = {route.path for route in self._router.routes if isinstance(route, Route)}
        guesses = (f"/v1{path}", path.removeprefix("/v1"))
        hint = next(
            (f"; did you mean {guess}? A client's base URL ends in /v1" for guess in guesses if guess in known), ""
        )
        return f"no such path: {path[:200]}{hint}"

    # ---- generation -------------------------------------------------------------------------------------------------

    def _generating(self, route: Generating) -> Endpoint:
        """Return the endpoint of a POST route whose reply comes from the engine."""

        async def endpoint(request: Request) -> Response:
            return await self._generate(request, route.body, route.to_call, renders=route.renders)

        return endpoint

    async def _generate(self, request: Request, kind: type[_B], to_call: ToCall, *, renders: bool) -> Response:
        arrived = time.monotonic()
        serving = self._require_serving()
        data = await self._read(request)

        def understand() -> tuple[_B, Call]:
            body = parse(data, kind)
            salt = self._salt(request, getattr(body, "cache_salt", None))
            return body, to_call(body, serving.model, self.config, salt)

        body, call = await self._readers.run(
            len(data), understand, renders=renders, seconds=self.config.request_timeout
        )
        self._note_unknown(body)
        left = arrived + self.config.request_timeout - time.monotonic()
        call = await self._compilers.hold(call, serving.model.grammars, left)
        call = replace(call, names=call.names | {call.id, request.scope["state"]["request_id"]})
        timing = Timing(deadline=arrived + self.config.request_timeout, keep_alive_s=self.config.sse_keep_alive)
        return CallResponse(self.link, serving, self._open_calls, call, timing, self._readers.large)

    def _probing(self, route: Probing) -> Endpoint:
        """Return the endpoint of a GET route that makes a fixed request."""

        async def endpoint(request: Request) -> Response:
            serving = self._require_serving()
            call = route.to_call(serving.model, self.config)
            seconds = min(_PROBE_SECONDS, self.config.request_timeout)  # a paused engine draws nothing until resumed
            timing = Timing(deadline=time.monotonic() + seconds, keep_alive_s=0)
            return CallResponse(self.link, serving, self._open_calls, call, timing, self._readers.large)

        return endpoint

    # ---- text -------------------------------------------------------------------------------------------------------

    def _converting(self, route: Converting) -> Endpoint:
        """Return the endpoint of a POST route that converts between texts and tokens."""

        async def endpoint(request: Request) -> Response:
            return await self._convert(request, route.body, route.work, renders=route.renders)

        return endpoint

    async def _convert(self, request: Request, kind: type[_B], work: Work, *, renders: bool) -> Response:
        serving = self._require_serving()
        data = await self._read(request)

        def convert() -> tuple[_B, bytes]:
            body = parse(data, kind)
            return body, to_json(work(body, serving.model))

        body, reply = await self._readers.run(len(data), convert, renders=renders, seconds=self.config.request_timeout)
        self._note_unknown(body)
        return _json(reply)

    def _describing(self, route: Describing) -> Endpoint:
        """Return the endpoint of a GET route that describes the model or the load."""

        async def endpoint(request: Request) -> Response:
            model = self._require_serving().model
            return _json(to_json(route.describe(model, self._occupancy())))

        return endpoint

    # ---- what there is ----------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        model = self._require_serving().model
        return _json(to_json({"object": "list", "data": [model.card(name) for name in model.names]}))

    async def model_card(self, request: Request) -> Response:
        """GET /v1/models/{id}; an id may have slashes."""
        model, name = self._require_serving().model, request.path_params["model"]
        if not name:
            raise HTTPException(404)
        return _json(to_json(model.card(model.name_for(name))))

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json(to_json({"version": nano_inference.__version__}))

    async def document(self, request: Request) -> Response:
        """GET /openapi.json: written in a thread, for whoever asks first and all who ask meanwhile and later."""
        if self._document is None:
            self._document = asyncio.create_task(
                self._readers.large.run(self._describe, seconds=self.config.request_timeout)
            )
            self._document.add_done_callback(self._end_document)
        return _json(await asyncio.shield(self._document))

    def _describe(self) -> bytes:
        return to_json(openapi(self._dialects, needs_key=not self._policy.keys.is_empty))

    def _end_document(self, done: asyncio.Task[bytes]) -> None:
        """Let the next who asks try again when there is no document."""
        if done.cancelled() or done.exception() is not None:
            self._document = None

    def page(self, name: str) -> Endpoint:
        """Return the endpoint of a page, or of a file that one loads later; it is put together at the first request."""

        async def endpoint(request: Request) -> Response:
            if name not in self._pages:
                self._pages[name] = load_page(name)
            return page_response(self._pages[name], request)

        return endpoint

    async def info(self, request: Request) -> Response:
        """GET /info: the model, its limits and what may be asked of it, for pages and people."""
        return _json(to_json(info(self._require_serving().model, self.config, self._max_running)))

    # ---- how it is --------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """GET /health: whether this process is worth keeping; llama.cpp's `status`, and what the dialects add."""
        state = self.link.state
        status = {"status": "ok" if state == "ready" else state}
        fields = status | health_fields(self._dialects, self._occupancy()) | status
        return _json(to_json(fields), 200 if state in ("ready", "draining") else 503)

    def _occupancy(self) -> Occupancy:
        stats = self.link.last_stats
        return Occupancy(
            is_ready=self.link.state == "ready",
            num_running=stats.num_running if stats else 0,
            max_running=self._max_running,
        )

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether requests are taken."""
        state = self.link.state
        return _json(to_json({"status": state}), 200 if state == "ready" else 503)

    async def load(self, request: Request) -> Response:
        """GET /load: open requests (vLLM's `server_load`), and the engine's own counts."""
        stats = self.link.last_stats
        return _json(
            to_json(
                {
                    "server_load": self._open_calls.num,
                    "running": stats.num_running if stats else 0,
                    "waiting": stats.num_waiting if stats else 0,
                }
            )
        )

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        if self.serving is None:
            text = not_loaded()
        else:
            queue_limits = self.serving.queue_limits
            self.serving.observer.clients(
                queue_limits.num_clients, queue_limits.largest_part, self.serving.dispatcher.num_waiting
            )
            text = self.serving.observer.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _require_serving(self) -> Serving:
        """Return the model that is served. Raises `ApiError` while there is none that takes requests."""
        self.link.require_ready()
        assert self.serving is not None, "the doors open after a model is there"
        return self.serving

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.receive, self._policy.max_body_bytes, self._policy.body_timeout)

    def _salt(self, request: Request, asked: str | None) -> str:
        return self._policy.keys.cache_salt(request.scope["state"].get("key_index"), asked)

    def _note_unknown(self, body: Body) -> None:
        """Log each unknown field once; refuse it when the server is strict."""
        options = getattr(body, "stream_options", None)
        inner = unknown_fields(options.model_extra or {}) if isinstance(options, Body) else []
        own = (name for name in unknown_fields(body.model_extra or {}) if name not in body.neutral_names)
        names = [*own, *(f"stream_options.{name}" for name in inner)]
        if names and self.config.strict:
            shown = ", ".join(repr(name[:64]) for name in names[:8])
            raise ApiError(400, f"unknown fields: {shown}", param=names[0][:64], code="unknown_field")
        new = sorted({name[:64] for name in names} - self._noted)[: _MAX_NOTED_FIELDS - len(self._noted)]
        self._noted.update(new)
        if new:
            shown = ", ".join(map(repr, new[:8]))
            _log.warning("unknown fields are left out: %s%s", shown, f" and {len(new) - 8} more" if new[8:] else "")

    def _on_response(self, scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
        """Count and log a finished request."""
        route = scope.get("route")
        template = route.path if isinstance(route, Route) else "other"
        if self.serving is not None:
            self.serving.observer.responded(scope["method"], template, status or 499, seconds)
            if isinstance(error, ApiError) and error.code in _REJECTIONS:
                self.serving.observer.rejected(_REJECTIONS[error.code])
        notes = scope["state"].get("notes") or {}
        told = notes.pop("error", None) or error
        log_access(
            AccessRecord(
                ts=time.time(),
                level="error" if status is not None and status >= 500 else "info",
                request_id=scope["state"].get("request_id"),
                method=scope["method"],
                path=scope["path"],
                status=status,
                total_ms=seconds * 1e3,
                client_abort=True if status is None else None,
                error_type=None if told is None else getattr(told, "type", type(told).__name__),
                error_code=getattr(told, "code", None),
                error_param=getattr(told, "param", None),
                **notes,
            )
        )


def check_routes(owned: Sequence[tuple[str, Route]]) -> None:
    """Raise `PluginError` for a method and path that are there twice; each route comes with its owner's name."""
    owners: dict[tuple[str, str], str] = {}
    for name, route in owned:
        for method in sorted(route.methods or ()):
            if (method, route.path) in owners:
                first = owners[method, route.path]
                raise PluginError(f"{method} {route.path} is served twice: by {first} and by {name}")
            owners[method, route.path] = name


def below(root: str, app: ASGIApp) -> ASGIApp:
    """Return an application that is also found below a path, for a proxy that leaves it in front."""
    if not root:
        return app

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == root or path.startswith(f"{root}/"):
            scope = {**scope, "path": path.removeprefix(root) or "/"}
        await app(scope, receive, send)

    return stripped


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
