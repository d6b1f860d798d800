"""`App`: the table of all routes, and those of the server itself. `pipeline` answers those of dialects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

from pydantic_core import to_json
from starlette import routing
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import nano_inference
from nano_inference.server import guard
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import DIALECTS_GROUP, Dialect, error_bodies, health_fields
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
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import Guard, GuardPolicy
from nano_inference.server.log import log_access, record_of
from nano_inference.server.metrics import CONTENT_TYPE, not_loaded
from nano_inference.server.model import info
from nano_inference.server.openapi import openapi
from nano_inference.server.pages import LATER, load_page, page_response
from nano_inference.server.pipeline import Pipeline, json_response
from nano_inference.server.security import KeyRing
from nano_inference.server.trainers.routes import ADMIN_PATHS, STREAM_PATHS, rl_routes
from nano_inference.support.plugins import PluginError, table

OWN_DIALECTS: Mapping[str, Dialect] = {
    "openai": openai.DIALECT,
    "responses": responses.DIALECT,
    "messages": messages.DIALECT,
    "generate": generate.DIALECT,
    "sglang": sglang.DIALECT,
    "llamacpp": llamacpp.DIALECT,
    "ollama": ollama.DIALECT,
    "tokens": tokens.DIALECT,
}
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
    """Owns the table of routes and the pages. Raises `PluginError` for a route that is defined twice."""

    def __init__(
        self, config: ServerConfig, policy: GuardPolicy, link: EngineLink, dialects: Mapping[str, Dialect]
    ) -> None:
        self.config = config
        self.link = link
        self.pipeline = Pipeline(config, policy, link)
        self._dialects = dialects
        self._policy = policy
        self._document: asyncio.Task[bytes] | None = None
        self.routes = self._make_routes()
        self._router = routing.Router(self.routes, redirect_slashes=False)
        self.guard = Guard(self._route, policy, self._on_response, error_bodies(dialects))
        self.asgi: ASGIApp = strip_root_path(config.root_path, self.guard)  # the ASGI application

    def serve(self, loaded: LoadedModel, max_running: int) -> None:
        """Start to accept requests for a loaded model that runs up to `max_running` samples at once."""
        self.pipeline.serve(loaded, max_running)

    def close(self) -> None:
        self.pipeline.close()

    def _make_routes(self) -> list[routing.Route]:
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
            *(("the server", routing.Route(path, endpoint, methods=["GET"])) for path, endpoint in gets.items()),
            *(
                ("the server", route)
                for route in rl_routes(
                    self.link, self.config, self._policy, self.pipeline.require_loaded, self.pipeline.set_adapters
                )
            ),
        ]
        owners: dict[tuple[str, str], str] = {}
        for name, route in owned:
            for method in sorted(route.methods or ()):
                if (first := owners.get((method, route.path))) is not None:
                    raise PluginError(f"{method} {route.path} is served twice: by {first} and by {name}")
                owners[method, route.path] = name
        return [route for _, route in owned]

    def _routes_of(self, dialect: Dialect) -> Iterator[routing.Route]:
        pipeline = self.pipeline
        for route in dialect.generating:
            yield routing.Route(route.path, _Endpoint(partial(pipeline.answer, route)), methods=["POST"])
        for probing in dialect.probing:
            yield routing.Route(probing.path, _Endpoint(partial(pipeline.probe, probing)), methods=["GET"])
        for converting in dialect.converting:
            yield routing.Route(converting.path, partial(pipeline.convert, converting), methods=["POST"])
        for describing in dialect.describing:
            yield routing.Route(describing.path, partial(pipeline.describe, describing), methods=["GET"])
        for recalling in dialect.recalling:
            yield routing.Route(recalling.path, partial(pipeline.recall, recalling), methods=[recalling.method])

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

    # ---- the server's own routes ------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        model = self.pipeline.require_loaded().model
        return json_response({"object": "list", "data": [model.card(name) for name in model.all_names]})

    async def model_card(self, request: Request) -> Response:
        """GET /v1/models/{id}; the id may contain slashes, and if it is empty all are listed."""
        model, name = self.pipeline.require_loaded().model, request.path_params["model"]
        if not name:  # a client's URL ended in a slash
            return await self.models(request)
        return json_response(model.card(model.name_for(name)))

    async def version(self, request: Request) -> Response:
        return json_response({"version": nano_inference.__version__})

    async def document(self, request: Request) -> Response:
        """GET /openapi.json: created once, in a thread, at the first request; again if that failed."""
        made = self._document
        if made is None or (made.done() and (made.cancelled() or made.exception() is not None)):
            work = partial(openapi, self._dialects, needs_key=not self._policy.keys.is_empty)
            making = self.pipeline.workers.large.run(lambda: to_json(work()), seconds=self.config.request_timeout)
            made = self._document = asyncio.create_task(making)
        return json_response(await asyncio.shield(made))

    def page(self, name: str) -> Endpoint:
        """Return the endpoint of a page, or of a file that a page loads; bundled at the first request."""

        async def endpoint(request: Request) -> Response:
            return page_response(load_page(name), request)

        return endpoint

    async def info(self, request: Request) -> Response:
        """GET /info: the model, its limits and defaults."""
        loaded = self.pipeline.require_loaded()
        state_slots = loaded.engine.parts.kv.num_states
        return json_response(info(loaded.model, self.config, self.pipeline.max_running, state_slots))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 unless loading or dead; llama.cpp's `status`, and the dialects' fields."""
        state = self.link.state
        status = {"status": "ok" if state == "ready" else state}
        fields = status | health_fields(self._dialects, self.pipeline.occupancy()) | status
        return json_response(fields, 200 if state in ("ready", "draining") else 503)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while requests are accepted."""
        state = self.link.state
        return json_response({"status": state}, 200 if state == "ready" else 503)

    async def load(self, request: Request) -> Response:
        """GET /load: open requests (vLLM's `server_load`), and the engine's counts."""
        stats = self.link.last_stats
        running, waiting = (stats.num_running, stats.num_waiting) if stats else (0, 0)
        return json_response({"server_load": self.pipeline.num_open, "running": running, "waiting": waiting})

    async def metrics(self, request: Request) -> Response:
        text, pipeline = not_loaded(), self.pipeline
        if pipeline.loaded is not None and pipeline.limits is not None and pipeline.dispatcher is not None:
            metrics = pipeline.loaded.metrics
            metrics.clients(pipeline.limits.num_clients, pipeline.limits.largest_part, pipeline.dispatcher.num_waiting)
            text = metrics.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    def _on_response(self, scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
        route = scope.get("route")
        template = route.path if isinstance(route, routing.Route) else "other"
        if (loaded := self.pipeline.loaded) is not None:
            loaded.metrics.responded(scope["method"], template, status or 499, seconds)
            if isinstance(error, ApiError) and error.code in _REJECTIONS:
                loaded.metrics.rejected(_REJECTIONS[error.code])
        call_fields = scope["state"].get("log_fields") or {}
        error = call_fields.pop("error", None) or error
        log_access(record_of(scope, status, seconds, error) | call_fields)


class _Endpoint:
    """An ASGI application; starlette would call a function with a `Request`."""

    def __init__(self, run: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)


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
