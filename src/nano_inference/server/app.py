"""`App`: the routes of all dialects. Each reads a body, lets a pure function interpret it, and sends the reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import nano_inference
from nano_inference.core.outbox import Outbox
from nano_inference.server import guard
from nano_inference.server.answering import Answer, Timing
from nano_inference.server.body import parse, read_json
from nano_inference.server.call import Call, Transcript, transcripts_of, usage
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import (
    DIALECTS_GROUP,
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
from nano_inference.server.dialects import (
    generate,
    llamacpp,
    messages,
    ollama,
    openai,
    responses,
    sglang,
    tokens,
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
from nano_inference.server.security import Client, KeyRing
from nano_inference.server.trainers.routes import ADMIN_PATHS, STREAM_PATHS, rl_routes
from nano_inference.server.worker_pool import BodyWorkers, Compilers
from nano_inference.support.plugins import PluginError, table

OWN_DIALECTS: Mapping[str, Dialect] = {
    "openai": openai.DIALECT,
    "responses": responses.DIALECT,
    "messages": messages.DIALECT,
    "generate": generate.DIALECT,
    "sglang": sglang.DIALECT,
    "llamacpp": llamacpp.DIALECT,
    "ollama": ollama.DIALECT,
    "embeddings": openai.EMBEDDINGS,
    "tokens": tokens.DIALECT,
}
_PROBE_SECONDS = 20.0  # deadline of a probing route: SGLang's value for /health_generate
_REJECTIONS = {
    "queue_full": "max_num_queued_reqs",
    "too_many_tokens": "max_num_queued_tokens",
    "quota_exceeded": "client_quota",
    "shutting_down": "draining",
    "engine_dead": "dead",
}
"""Error code -> reason in `metrics.REJECTIONS`."""

Endpoint = Callable[[Request], Awaitable[Response]]


def installed_dialects() -> Mapping[str, Dialect]:
    """Return the dialects of this package and of all installed ones, by name. Raises `PluginError`."""
    return table(DIALECTS_GROUP, OWN_DIALECTS, Dialect)


def guard_policy(config: ServerConfig, keys: KeyRing) -> GuardPolicy:
    """Return `guard.policy_of` with the trainers' commands as admin paths. Raises `ValueError`."""
    return guard.policy_of(config, keys, ADMIN_PATHS, STREAM_PATHS)


class App:
    """Owns the routes and their shared state: engine link, admission limits, dispatcher, stored replies, threads.

    Raises `PluginError` for a route that is defined twice.
    """

    def __init__(
        self, config: ServerConfig, policy: GuardPolicy, link: EngineLink, dialects: Mapping[str, Dialect]
    ) -> None:
        self.config = config
        self.link = link
        self.loaded: LoadedModel | None = None  # set by `serve`, as the next two
        self.limits: QueueLimits | None = None
        self.dispatcher: Dispatcher | None = None
        self._max_running = 0  # limit of running samples
        self._replies = ReplyStore(config.max_stored_replies, config.max_stored_bytes, config.max_body_bytes)
        self._dialects = dialects
        self._policy = policy
        self.workers = BodyWorkers()
        self.compilers = Compilers()
        self.ignored = IgnoredFields(config.strict)
        self.num_open = 0  # calls that are being answered
        self._document: asyncio.Task[bytes] | None = None
        self._pages: dict[str, Page] = {}
        self.routes = self._make_routes()
        self._router = Router(self.routes, redirect_slashes=False)
        self.guard = Guard(self._route, policy, self._on_response, error_bodies(dialects))
        self.asgi: ASGIApp = strip_root_path(config.root_path, self.guard)  # the ASGI application

    def serve(self, loaded: LoadedModel, max_running: int) -> None:
        """Start to accept requests for a loaded model that runs up to `max_running` samples at once."""
        self.loaded, self._max_running = loaded, max_running
        share, limits = self._policy.client_share, loaded.model.limits
        self.limits = QueueLimits(
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
        self.dispatcher = Dispatcher(capacity, share=share)
        self.link.start_accepting(self.dispatcher)

    def close(self) -> None:
        """End the worker threads."""
        self.workers.close()
        self.compilers.close()

    def require_loaded(self) -> LoadedModel:
        """Return the loaded model. Raises `ApiError` 503 unless requests are accepted."""
        _ = self.link.engine  # raises unless it accepts requests
        assert self.loaded is not None, "requests are accepted after the model is loaded"
        return self.loaded

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
            *(("the server", route) for route in rl_routes(self.link, self.config, self._policy, self.require_loaded)),
        ]
        owners: dict[tuple[str, str], str] = {}
        for name, route in owned:
            for method in sorted(route.methods or ()):
                if (first := owners.get((method, route.path))) is not None:
                    raise PluginError(f"{method} {route.path} is served twice: by {first} and by {name}")
                owners[method, route.path] = name
        return [route for _, route in owned]

    def _routes_of(self, dialect: Dialect) -> Iterator[Route]:
        kinds: tuple[tuple[Sequence[Any], Callable[[Any, Request], Awaitable[Response]], str], ...] = (
            (dialect.generating, self._generate, "POST"),
            (dialect.converting, self._convert, "POST"),
            (dialect.describing, self._describe, "GET"),
            (dialect.probing, self._probe, "GET"),
            (dialect.recalling, self._recall, "GET"),
        )
        for routes, endpoint, method in kinds:
            for route in routes:
                yield Route(route.path, partial(endpoint, route), methods=[getattr(route, "method", method)])

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

    # ---- a dialect's routes -----------------------------------------------------------------------------------------

    async def _generate(self, named: Generating, request: Request) -> Response:
        arrived, seconds, state = time.monotonic(), self.config.request_timeout, request.scope["state"]
        model = self.require_loaded().model
        data = await self._read(request)

        def to_call() -> tuple[Body, Call]:
            route = named
            if named.choose is not None:
                route = named.choose(read_json(data, named.body.malformed_status), model) or named
            body = parse(data, route.body)
            refuse_lost(body, model, answers=True)
            salt = self._policy.keys.cache_salt(state.get("key_index"), getattr(body, "cache_salt", None))
            if route.to_stored_call is not None:
                return body, route.to_stored_call(body, model, self.config, salt, self._replies_of(request))
            return body, route.to_call(body, model, self.config, salt)

        body, call = await self.workers.run(len(data), to_call, renders=named.renders, seconds=seconds)
        self.ignored.report(body, model)
        call = await self.compilers.add_matchers(call, model.grammars, arrived + seconds - time.monotonic())
        call = replace(call, names=call.names | {call.id, state["request_id"]}, form=named.form)
        return CallResponse(self, call, Timing(deadline=arrived + seconds, keep_alive_s=self.config.sse_keep_alive))

    async def _probe(self, route: Probing, request: Request) -> Response:
        model = self.require_loaded().model
        if await self.link.engine.call(lambda engine: engine.is_halted):
            return _json({"status": "paused"})
        seconds = min(_PROBE_SECONDS, self.config.request_timeout)
        timing = Timing(deadline=time.monotonic() + seconds, keep_alive_s=0)
        return CallResponse(self, route.to_call(model, self.config), timing)

    async def _convert(self, route: Converting, request: Request) -> Response:
        model = self.require_loaded().model
        data = await self._read(request)

        def convert() -> tuple[Body, bytes]:
            body = parse(data, route.body)
            refuse_lost(body, model, answers=False)
            if route.stored_work is not None:
                return body, to_json(route.stored_work(body, model, self._replies_of(request)))
            return body, to_json(route.work(body, model))

        seconds = self.config.request_timeout
        body, reply = await self.workers.run(len(data), convert, renders=route.renders, seconds=seconds)
        self.ignored.report(body, model)
        return _json(reply)

    async def _describe(self, route: Describing, request: Request) -> Response:
        return _json(route.describe(self.require_loaded().model, self._occupancy()))

    async def _recall(self, route: Recalling, request: Request) -> Response:
        self.require_loaded()
        replies, name = self._replies_of(request), request.path_params["id"]

        def recall() -> bytes:
            reply = route.work(replies, name, dict(request.query_params))
            return reply if isinstance(reply, bytes) else to_json(reply)

        seconds = self.config.request_timeout
        return _json(await self.workers.run(replies.size_of(name), recall, renders=False, seconds=seconds))

    def _replies_of(self, request: Request) -> ClientReplies:
        """Return the stored replies of the request's API key."""
        return ClientReplies(self._replies, request.scope["state"].get("key_index"))

    async def _read(self, request: Request) -> bytes:
        return await read_body(request.receive, self._policy.max_body_bytes, self._policy.body_timeout)

    # ---- the server's own routes ------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        model = self.require_loaded().model
        return _json({"object": "list", "data": [model.card(name) for name in model.names]})

    async def model_card(self, request: Request) -> Response:
        """GET /v1/models/{id}; the id may contain slashes, and if it is empty all are listed."""
        model, name = self.require_loaded().model, request.path_params["model"]
        if not name:  # a client's URL ended in a slash
            return await self.models(request)
        return _json(model.card(model.name_for(name)))

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json({"version": nano_inference.__version__})

    async def document(self, request: Request) -> Response:
        """GET /openapi.json: created once, in a thread, at the first request; again if that failed."""
        made = self._document
        if made is None or (made.done() and (made.cancelled() or made.exception() is not None)):
            work = partial(openapi, self._dialects, needs_key=not self._policy.keys.is_empty)
            making = self.workers.large.run(lambda: to_json(work()), seconds=self.config.request_timeout)
            made = self._document = asyncio.create_task(making)
        return _json(await asyncio.shield(made))

    def page(self, name: str) -> Endpoint:
        """Return the endpoint of a page, or of a file that a page loads; bundled at the first request."""

        async def endpoint(request: Request) -> Response:
            if name not in self._pages:
                self._pages[name] = load_page(name)
            return page_response(self._pages[name], request)

        return endpoint

    async def info(self, request: Request) -> Response:
        """GET /info: the model, its limits and defaults."""
        return _json(info(self.require_loaded().model, self.config, self._max_running))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 unless loading or dead; llama.cpp's `status`, and the dialects' fields."""
        state = self.link.state
        status = {"status": "ok" if state == "ready" else state}
        fields = status | health_fields(self._dialects, self._occupancy()) | status
        return _json(fields, 200 if state in ("ready", "draining") else 503)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while requests are accepted."""
        state = self.link.state
        return _json({"status": state}, 200 if state == "ready" else 503)

    async def load(self, request: Request) -> Response:
        """GET /load: open requests (vLLM's `server_load`), and the engine's counts."""
        stats = self.link.last_stats
        running, waiting = (stats.num_running, stats.num_waiting) if stats else (0, 0)
        return _json({"server_load": self.num_open, "running": running, "waiting": waiting})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        text = not_loaded()
        if self.loaded is not None and self.limits is not None and self.dispatcher is not None:
            metrics = self.loaded.metrics
            metrics.clients(self.limits.num_clients, self.limits.largest_part, self.dispatcher.num_waiting)
            text = metrics.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    def _occupancy(self) -> Occupancy:
        stats = self.link.last_stats
        return Occupancy(
            is_ready=self.link.state == "ready",
            num_running=stats.num_running if stats else 0,
            max_running=self._max_running,
        )

    def _on_response(self, scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
        """Count and log a finished request."""
        route = scope.get("route")
        template = route.path if isinstance(route, Route) else "other"
        if self.loaded is not None:
            self.loaded.metrics.responded(scope["method"], template, status or 499, seconds)
            if isinstance(error, ApiError) and error.code in _REJECTIONS:
                self.loaded.metrics.rejected(_REJECTIONS[error.code])
        call_fields = scope["state"].get("log_fields") or {}
        error = call_fields.pop("error", None) or error
        log_access(record_of(scope, status, seconds, error) | call_fields)


class CallResponse(Response):
    """Runs a call when it is sent, and releases its resources when sending ends in any way."""

    def __init__(self, app: App, call: Call, timing: Timing) -> None:
        self._app, self._call, self._timing = app, call, timing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the call, submit it to the engine, send the answer."""
        app, call, timing = self._app, self._call, self._timing
        assert app.limits is not None and app.loaded is not None, "there is a call"
        client: Client = scope["state"]["client"]
        transcripts: list[Transcript] = []
        outbox: Outbox | None = None
        error: ApiError | None = None
        app.num_open += 1
        try:
            with app.limits.reserve(call, client), app.link.submit(call.requests, call.names, client) as outbox:
                transcripts += transcripts_of(call, outbox.times)  # after admission, since there may be many
                answer = Answer(
                    call=call,
                    outbox=outbox,
                    tokenizer=app.loaded.model.tokenizer,
                    timing=timing,
                    pool=app.workers.large,
                    send=send,
                    transcripts=transcripts,
                )
                error = await answer.run(receive)
        finally:
            app.num_open -= 1
            scope["state"]["log_fields"] = log_fields(call, transcripts, outbox, error)


def log_fields(
    call: Call, transcripts: list[Transcript], outbox: Outbox | None, error: ApiError | None
) -> dict[str, Any]:
    """Return the access log's fields of a call: token counts, timings in ms, and the end."""
    counts = usage(call, transcripts)
    times = [] if outbox is None else [one for row in outbox.times for one in row]
    first = min((one.first_token for one in times if one.first_token is not None), default=None)
    started = min((one.started for one in times if one.started is not None), default=None)
    last = max((one.last_token for one in times if one.last_token is not None), default=None)
    arrived = None if outbox is None else outbox.arrived
    num_new = counts["completion_tokens"]
    return {
        "model": call.model,
        "n": call.num_samples,
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": num_new,
        "queue_ms": None if started is None or arrived is None else (started - arrived) * 1e3,
        "ttft_ms": None if first is None or arrived is None else (first - arrived) * 1e3,
        "decode_tps": (num_new - 1) / (last - first) if first and last and last > first else None,
        "finish_reason": transcripts[0].finish_reason if transcripts else None,
        "error": error,
    }


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


def _json(value: object, status: int = 200) -> Response:
    return Response(value if isinstance(value, bytes) else to_json(value), status, media_type="application/json")
