"""`App`: the routes. Each reads a body, lets a pure function interpret it, and sends the reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import nano_inference
from nano_inference.server.answering import Timing
from nano_inference.server.body import parse, read_json
from nano_inference.server.call import Call
from nano_inference.server.compiling import Compilers
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import (
    Converting,
    Describing,
    Dialect,
    Generating,
    Occupancy,
    Probing,
    Recalling,
    error_bodies,
    health_fields,
)
from nano_inference.server.dispatch import Capacity, Dispatcher
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError
from nano_inference.server.fields import IgnoredFields, refuse_lost
from nano_inference.server.guard import Guard, GuardPolicy, read_body
from nano_inference.server.limits import QueueLimits
from nano_inference.server.log import log_access, record_of
from nano_inference.server.metrics import CONTENT_TYPE, not_loaded
from nano_inference.server.model import info
from nano_inference.server.openapi import openapi
from nano_inference.server.pages import LATER, Page, load_page, page_response
from nano_inference.server.reply_store import ClientReplies, ReplyStore
from nano_inference.server.schema import Body
from nano_inference.server.serving import CallResponse, OpenCalls, Serving
from nano_inference.server.worker_pool import BodyWorkers
from nano_inference.support.plugins import PluginError

_PROBE_SECONDS = 20.0  # deadline of a probing route: SGLang's value for /health_generate
_REJECTIONS = {
    "queue_full": "max_num_queued_reqs",
    "too_many_tokens": "max_num_queued_tokens",
    "quota_exceeded": "client_quota",
    "shutting_down": "draining",
    "engine_dead": "dead",
}
"""Error code -> reason in `metrics.REJECTIONS`."""

_log = logging.getLogger("nano_inference.server")
Endpoint = Callable[[Request], Awaitable[Response]]
FurtherRoutes = Callable[[Callable[[], LoadedModel]], Sequence[Route]]
"""Returns routes, given a function that returns the loaded model or raises `ApiError` while there is none."""


class App:
    """Owns the routes and their shared state: engine link, admission limits, dispatcher, worker threads.

    `further` returns routes that belong to no dialect; `replies` stores replies that clients refer to later. Raises
    `PluginError` for a route that is defined twice.
    """

    def __init__(
        self,
        config: ServerConfig,
        policy: GuardPolicy,
        link: EngineLink,
        dialects: Mapping[str, Dialect],
        further: FurtherRoutes,
        replies: ReplyStore,
    ) -> None:
        self.config = config
        self.link = link
        self._replies = replies
        self.serving: Serving | None = None
        self._dialects = dialects
        self._further = further
        self._policy = policy
        self.workers = BodyWorkers()
        self.compilers = Compilers()
        self.ignored = IgnoredFields(config.strict)
        self._open_calls = OpenCalls()
        self._max_running = 0  # limit of running samples
        self._document: asyncio.Task[bytes] | None = None
        """Creates the OpenAPI document; started by the first request for it."""
        self._pages: dict[str, Page] = {}
        self.routes = self._make_routes()
        self._router = Router(self.routes, redirect_slashes=False)
        self.guard = Guard(self._route, policy, self._on_response, error_bodies(dialects))
        """Admits requests, and reports each response."""
        self.asgi: ASGIApp = strip_root_path(config.root_path, self.guard)  # the ASGI application

    def serve(self, loaded: LoadedModel, max_running: int) -> None:
        """Start to accept requests for a loaded model that runs up to `max_running` samples at once."""
        self._max_running = max_running
        share, limits = self._policy.client_share, loaded.model.limits
        queue_limits = QueueLimits(
            max_samples=max_running + self.config.max_queued_requests,
            max_tokens=self.config.max_admitted_tokens,
            share=share,
        )
        capacity = Capacity(
            num_seats=max_running,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            step_tokens=loaded.step_tokens,
        )
        dispatcher = Dispatcher(capacity, share=share)
        self.serving = Serving(loaded=loaded, queue_limits=queue_limits, dispatcher=dispatcher)
        self.link.start_accepting(dispatcher)

    def close(self) -> None:
        """End the worker threads."""
        self.workers.close()
        self.compilers.close()

    def _make_routes(self) -> list[Route]:
        gets: dict[str, Endpoint] = {
            "/v1/models": self.models,
            "/models": self.models,
            "/v1/models/{model:path}": self.model_card,
            "/health": self.health,
            "/ping": self.health,
            "/liveness": self.health,
            "/ready": self.ready,
            "/load": self.load,
            "/version": self.version,
            "/metrics": self.metrics,
            "/openapi.json": self.document,
            "/info": self.info,
        }
        pages = {"/": "chat", "/dashboard": "dashboard", "/docs": "docs", **{f"/{name}": name for name in LATER}}
        gets |= {path: self.page(name) for path, name in pages.items() if self.config.pages}
        owned = [
            *((name, route) for name, dialect in self._dialects.items() for route in self._routes_of(dialect)),
            *(("the server", Route(path, endpoint, methods=["GET"])) for path, endpoint in gets.items()),
            *(("the server", route) for route in self._further(lambda: self._require_serving().loaded)),
        ]
        owners: dict[tuple[str, str], str] = {}
        for name, route in owned:
            for method in sorted(route.methods or ()):
                if (first := owners.get((method, route.path))) is not None:
                    raise PluginError(f"{method} {route.path} is served twice: by {first} and by {name}")
                owners[method, route.path] = name
        return [route for _, route in owned]

    def _routes_of(self, dialect: Dialect) -> Iterator[Route]:
        for generating in dialect.generating:
            yield Route(generating.path, partial(self._generate, generating), methods=["POST"])
        for converting in dialect.converting:
            yield Route(converting.path, partial(self._convert, converting), methods=["POST"])
        for describing in dialect.describing:
            yield Route(describing.path, partial(self._describe, describing), methods=["GET"])
        for probing in dialect.probing:
            yield Route(probing.path, partial(self._probe, probing), methods=["GET"])
        for recalling in dialect.recalling:
            yield Route(recalling.path, partial(self._recall, recalling), methods=[recalling.method])

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the route; turn the router's 404 and 405 into `ApiError`."""
        scope["app"] = self  # without it, the router answers 404 and 405 itself instead of raising
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            headers = dict(error.headers or {})
            allowed = f"; use {headers.get('Allow')}" if "Allow" in headers else ""
            text = f"{scope['method']} is not allowed here{allowed}"
            if error.status_code != 405:
                path, known = scope["path"], {route.path for route in self.routes}
                guesses = [one for one in (f"/v1{path}", path.removeprefix("/v1")) if one in known]
                hint = f"; did you mean {guesses[0]}? A client's base URL ends in /v1" if guesses else ""
                text = f"no such path: {path[:200]}{hint}"
            raise ApiError(error.status_code, text, headers=headers) from None

    # ---- generation -------------------------------------------------------------------------------------------------

    async def _generate(self, named: Generating, request: Request) -> Response:
        arrived = time.monotonic()
        serving = self._require_serving()
        data = await self._read(request)

        def to_call() -> tuple[Body, Call]:
            route = named
            if named.choose is not None:
                route = named.choose(read_json(data, named.body.malformed_status), serving.model) or named
            body = parse(data, route.body)
            refuse_lost(body, serving.model, answers=True)
            index, asked = request.scope["state"].get("key_index"), getattr(body, "cache_salt", None)
            salt = self._policy.keys.cache_salt(index, asked)
            if route.to_stored_call is not None:
                call = route.to_stored_call(body, serving.model, self.config, salt, self._replies_of(request))
            else:
                call = route.to_call(body, serving.model, self.config, salt)
            return body, call

        seconds = self.config.request_timeout
        body, call = await self.workers.run(len(data), to_call, renders=named.renders, seconds=seconds)
        self.ignored.report(body, serving.model)
        left = arrived + self.config.request_timeout - time.monotonic()
        call = await self.compilers.add_matchers(call, serving.model.grammars, left)
        names = call.names | {call.id, request.scope["state"]["request_id"]}
        call = replace(call, names=names, form=named.form)
        timing = Timing(deadline=arrived + self.config.request_timeout, keep_alive_s=self.config.sse_keep_alive)
        return self._response(serving, call, timing)

    async def _probe(self, route: Probing, request: Request) -> Response:
        serving = self._require_serving()
        if await self.link.engine.call(lambda engine: engine.is_halted):
            return _json(to_json({"status": "paused"}))
        call = route.to_call(serving.model, self.config)
        seconds = min(_PROBE_SECONDS, self.config.request_timeout)
        return self._response(serving, call, Timing(deadline=time.monotonic() + seconds, keep_alive_s=0))

    def _response(self, serving: Serving, call: Call, timing: Timing) -> Response:
        return CallResponse(self.link, serving, self._open_calls, call, timing, self.workers.large)

    # ---- text -------------------------------------------------------------------------------------------------------

    async def _convert(self, route: Converting, request: Request) -> Response:
        serving = self._require_serving()
        data = await self._read(request)

        def convert() -> tuple[Body, bytes]:
            body = parse(data, route.body)
            refuse_lost(body, serving.model, answers=False)
            if route.stored_work is not None:
                return body, to_json(route.stored_work(body, serving.model, self._replies_of(request)))
            return body, to_json(route.work(body, serving.model))

        seconds = self.config.request_timeout
        body, reply = await self.workers.run(len(data), convert, renders=route.renders, seconds=seconds)
        self.ignored.report(body, serving.model)
        return _json(reply)

    # ---- model, documents, pages ------------------------------------------------------------------------------------

    async def _describe(self, route: Describing, request: Request) -> Response:
        model = self._require_serving().model
        return _json(to_json(route.describe(model, self._occupancy())))

    async def _recall(self, route: Recalling, request: Request) -> Response:
        self._require_serving()
        replies, name = self._replies_of(request), request.path_params["id"]

        def recall() -> bytes:
            reply = route.work(replies, name, dict(request.query_params))
            return reply if isinstance(reply, bytes) else to_json(reply)

        seconds = self.config.request_timeout
        return _json(await self.workers.run(replies.size_of(name), recall, renders=False, seconds=seconds))

    def _replies_of(self, request: Request) -> ClientReplies:
        """Return the stored replies of the request's API key."""
        return ClientReplies(self._replies, request.scope["state"].get("key_index"))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        model = self._require_serving().model
        return _json(to_json({"object": "list", "data": [model.card(name) for name in model.names]}))

    async def model_card(self, request: Request) -> Response:
        """GET /v1/models/{id}; the id may contain slashes, and if it is empty all are listed."""
        model, name = self._require_serving().model, request.path_params["model"]
        if not name:  # a client's URL ended in a slash
            return await self.models(request)
        return _json(to_json(model.card(model.name_for(name))))

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json(to_json({"version": nano_inference.__version__}))

    async def document(self, request: Request) -> Response:
        """GET /openapi.json: created once, in a thread."""
        if self._document is None:

            def make() -> bytes:
                return to_json(openapi(self._dialects, needs_key=not self._policy.keys.is_empty))

            def drop_failed(done: asyncio.Task[bytes]) -> None:
                if done.cancelled() or done.exception() is not None:
                    self._document = None

            making = self.workers.large.run(make, seconds=self.config.request_timeout)
            self._document = asyncio.create_task(making)
            self._document.add_done_callback(drop_failed)
        return _json(await asyncio.shield(self._document))

    def page(self, name: str) -> Endpoint:
        """Return the endpoint of a page, or of a file that a page loads; bundled at the first request."""

        async def endpoint(request: Request) -> Response:
            if name not in self._pages:
                self._pages[name] = load_page(name)
            return page_response(self._pages[name], request)

        return endpoint

    async def info(self, request: Request) -> Response:
        """GET /info: the model, its limits and defaults."""
        return _json(to_json(info(self._require_serving().model, self.config, self._max_running)))

    # ---- health and load --------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """GET /health: 200 unless loading or dead; llama.cpp's `status`, and the dialects' fields."""
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
        """GET /ready: 200 while requests are accepted."""
        state = self.link.state
        return _json(to_json({"status": state}), 200 if state == "ready" else 503)

    async def load(self, request: Request) -> Response:
        """GET /load: open requests (vLLM's `server_load`), and the engine's counts."""
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
            self.serving.metrics.clients(
                queue_limits.num_clients, queue_limits.largest_part, self.serving.dispatcher.num_waiting
            )
            text = self.serving.metrics.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _require_serving(self) -> Serving:
        """Return the served model. Raises `ApiError` 503 unless requests are accepted."""
        _ = self.link.engine  # raises unless it accepts requests
        assert self.serving is not None, "requests are accepted after the model is loaded"
        return self.serving

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.receive, self._policy.max_body_bytes, self._policy.body_timeout)

    def _on_response(self, scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
        """Count and log a finished request."""
        route = scope.get("route")
        template = route.path if isinstance(route, Route) else "other"
        if self.serving is not None:
            self.serving.metrics.responded(scope["method"], template, status or 499, seconds)
            if isinstance(error, ApiError) and error.code in _REJECTIONS:
                self.serving.metrics.rejected(_REJECTIONS[error.code])
        call_fields = scope["state"].get("log_fields") or {}
        error = call_fields.pop("error", None) or error
        log_access(replace(record_of(scope, status, seconds, error), **call_fields))


def strip_root_path(root: str, app: ASGIApp) -> ASGIApp:
    """Return an application that also serves paths below `root`, for a proxy that does not strip the prefix."""
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
