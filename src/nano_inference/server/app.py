"""The routes. Each reads a body, asks a pure function what it means, and answers; nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import nano_inference
from nano_inference.config import ServerConfig
from nano_inference.server import nanochat_web, tokens
from nano_inference.server.admission import Admission
from nano_inference.server.answering import Timing, answer
from nano_inference.server.body import parse
from nano_inference.server.bridge import Bridge
from nano_inference.server.call import Call, Draft, drafts_of, usage
from nano_inference.server.clients import Client
from nano_inference.server.compiling import Compilers
from nano_inference.server.dispatch import Capacity, Dispatcher
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import Guard, GuardPolicy, read_body
from nano_inference.server.info import info
from nano_inference.server.llamacpp import props
from nano_inference.server.log import AccessRecord, log_access
from nano_inference.server.metrics import CONTENT_TYPE, not_loaded
from nano_inference.server.model import ServedModel
from nano_inference.server.openapi import openapi
from nano_inference.server.pages import LATER, Page, load_page, page_response
from nano_inference.server.paths import (
    CONVERTING,
    GENERATING,
    Converting,
    Generating,
    ToCall,
    Work,
    error_bodies,
)
from nano_inference.server.rl.routes import rl_routes
from nano_inference.server.schema import Body
from nano_inference.server.served import Observer, Opened
from nano_inference.server.sglang import health_generate_call
from nano_inference.server.ticket import Ticket
from nano_inference.server.unsupported import unknown_fields
from nano_inference.server.workshop import Readers, Workshop

_MAX_NOTED_FIELDS = 1000
_HEALTH_SECONDS = 20.0
"""In which /health_generate must have drawn a token; SGLang's figure."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What there is once a model is loaded."""

    opened: Opened
    admission: Admission
    dispatcher: Dispatcher

    @property
    def model(self) -> ServedModel:
        """The model, as the routes know it."""
        return self.opened.model

    @property
    def observer(self) -> Observer:
        """Whoever counts."""
        return self.opened.observer


class App:
    """Owns the routes and what they share: the bridge to the engine, the queue's places, threads for large bodies."""

    def __init__(self, config: ServerConfig, policy: GuardPolicy, bridge: Bridge) -> None:
        self.config = config
        self.bridge = bridge
        self.serving: Serving | None = None
        self._policy = policy
        self._readers = Readers()
        self._compilers = Compilers()
        self._noted: set[str] = set()
        """Unknown fields that were told of already."""
        self._num_answering = 0
        self._max_running = 0
        """Samples that may run at once."""
        self._document: asyncio.Task[bytes] | None = None
        """The OpenAPI document, once somebody has asked for it."""
        self._pages: dict[str, Page] = {}
        self._router = Router(self._routes(), redirect_slashes=False)
        self.asgi: ASGIApp = below(config.root_path, Guard(self._route, policy, self._on_response, error_bodies()))
        """The application, as a server runs it."""

    def serve(self, opened: Opened, max_running: int) -> None:
        """Take a loaded model, of which so many samples may run at once, and open the doors."""
        self._max_running = max_running
        share, limits = self._policy.client_share, opened.model.limits
        admission = Admission(
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
        self.serving = Serving(opened=opened, admission=admission, dispatcher=dispatcher)
        self.bridge.after_step = dispatcher.after_step
        self.bridge.open_doors()

    def close(self) -> None:
        """End the threads, and the processes that render."""
        if self.serving is not None and self.serving.model.dialogue is not None:
            self.serving.model.dialogue.close()
        self._readers.close()
        self._compilers.close()

    def _routes(self) -> list[Route]:
        posts: dict[str, Any] = {one.path: self._generating(one) for one in GENERATING}
        posts |= {one.path: self._converting(one) for one in CONVERTING}
        gets: dict[str, Any] = {
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model_card,
            "/tokenizer_info": self.tokenizer_info,
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/props": self.props,
            "/stats": self.stats,
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
        return [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            *rl_routes(self.bridge, self.config, self._policy, lambda: self._require_serving().opened),
        ]

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

    def _generating(self, dialect: Generating) -> Endpoint:
        """Return the endpoint of a path below which the engine writes."""

        async def endpoint(request: Request) -> Response:
            return await self._generate(request, dialect.body, dialect.to_call, renders=dialect.renders)

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
        timing = Timing(deadline=arrived + self.config.request_timeout, silence=self.config.sse_keep_alive)
        return CallResponse(self, serving, call, timing, self._readers.large)

    # ---- text -------------------------------------------------------------------------------------------------------

    def _converting(self, dialect: Converting) -> Endpoint:
        """Return the endpoint of a path where texts are turned into tokens, or back."""

        async def endpoint(request: Request) -> Response:
            return await self._convert(request, dialect.body, dialect.work, renders=dialect.renders)

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

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info."""
        return _json(to_json(tokens.tokenizer_info(self._require_serving().model)))

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
        return to_json(openapi(needs_key=not self._policy.keys.is_empty))

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
        """GET /health: whether this process is worth keeping; with what llama.cpp and nanochat say there."""
        state = self.bridge.state
        told = nanochat_web.health(state == "ready", self._num_running(), self._max_running)
        status = "ok" if state == "ready" else state
        return _json(to_json({"status": status, **told}), 200 if state in ("ready", "draining") else 503)

    async def health_generate(self, request: Request) -> Response:
        """GET /health_generate, SGLang's: whether a token comes when one is asked for."""
        serving = self._require_serving()
        call = health_generate_call(serving.model, self.config)
        seconds = min(_HEALTH_SECONDS, self.config.request_timeout)  # a paused engine draws none before it goes on
        timing = Timing(deadline=time.monotonic() + seconds, silence=0)
        return CallResponse(self, serving, call, timing, self._readers.large)

    async def props(self, request: Request) -> Response:
        """GET /props, llama.cpp's: the model, and what requests are completed with."""
        return _json(to_json(props(self._require_serving().model, self._max_running)))

    async def stats(self, request: Request) -> Response:
        """GET /stats, nanochat's: how many answers may be under way, and how many are."""
        self._require_serving()
        return _json(to_json(nanochat_web.stats(self._num_running(), self._max_running)))

    def _num_running(self) -> int:
        stats = self.bridge.last_stats
        return stats.num_running if stats else 0

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether requests are taken."""
        state = self.bridge.state
        return _json(to_json({"status": state}), 200 if state == "ready" else 503)

    async def load(self, request: Request) -> Response:
        """GET /load: open requests (vLLM's `server_load`), and the engine's own counts."""
        stats = self.bridge.last_stats
        return _json(
            to_json(
                {
                    "server_load": self._num_answering,
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
            admission = self.serving.admission
            self.serving.observer.clients(
                admission.num_clients, admission.largest_part, self.serving.dispatcher.num_waiting
            )
            text = self.serving.observer.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _require_serving(self) -> Serving:
        """Return the model that is served. Raises `ApiError` while there is none that takes requests."""
        self.bridge.require_ready()
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


class CallResponse(Response):
    """Answers a call when it is sent. Everything it takes is given back when sending ends, however it ends."""

    def __init__(self, app: App, serving: Serving, call: Call, timing: Timing, workshop: Workshop) -> None:
        self._app = app
        self._workshop = workshop
        self._serving = serving
        self._call = call
        self._timing = timing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a place, ask the engine, answer."""
        app, call = self._app, self._call
        drafts: list[Draft] = []
        ticket: Ticket | None = None
        error: ApiError | None = None
        client: Client = scope["state"]["client"]
        serving = self._serving
        app._num_answering += 1
        try:
            with (
                serving.admission.place_for(call, client),
                serving.dispatcher.turns_for(client) as gate,
                app.bridge.submit(call.asks, call.names, gate) as ticket,
            ):
                drafts += drafts_of(call)  # which may be many: not before they are let in
                error = await answer(
                    call, ticket, self._serving.model, self._timing, self._workshop, receive, send, drafts
                )
        finally:
            app._num_answering -= 1
            scope["state"]["notes"] = notes_of(call, drafts, ticket, error)


def notes_of(call: Call, drafts: list[Draft], ticket: Ticket | None, error: ApiError | None) -> dict[str, Any]:
    """Return what the log says of a call: how much there was, how fast it was, how it ended."""
    counts = usage(call, drafts)
    clocks = [] if ticket is None else [clock for row in ticket.clocks for clock in row]
    first = min((c.first_token for c in clocks if c.first_token is not None), default=None)
    started = min((c.started for c in clocks if c.started is not None), default=None)
    last = max((c.last_token for c in clocks if c.last_token is not None), default=None)
    arrived = None if ticket is None else ticket.arrived
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
        "finish_reason": drafts[0].finish_reason if drafts else None,
        "error": error,
    }


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
