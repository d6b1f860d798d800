"""`Models`: several models behind one port, each in a server of its own.

The model is that of the body's field `model`, or of the query's parameter `model`. A POST without one goes to the
default model, a GET without one to any loaded model, preferably the default. Only a POST loads a model, or a request
with a key: a page of another site can cause any other request, by an image for example, and not every browser says so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import httpx2
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Dialect, UnloadedModel, listings, stored_paths
from nano_inference.server.errors import ApiError, queue_full
from nano_inference.server.front.forwarding import DESCRIBE_TIMEOUT_S, fetch_all, forwarded_headers, gauge
from nano_inference.server.front.servers import LARGE_BODY, LOAD_PATH, Answer, Server, Servers, Target
from nano_inference.server.model import OWNER, tagged, unknown_model
from nano_inference.server.openapi import openapi
from nano_inference.server.pages import LATER, load_page, page_response

UNLOAD_PATH = "/models/unload"
STATES = {"stopped": "unloaded", "starting": "loading", "ready": "loaded", "draining": "unloading", "failed": "failed"}
"""`Server.state` -> its name in replies, which llama.cpp's router uses too."""
_MODEL_NAMES = ("model", "name")  # fields with a model's name; Ollama's clients still send the second one


class Models:
    """Chooses the model of a request, and describes all models."""

    def __init__(
        self,
        servers: Servers,
        client: httpx2.AsyncClient,
        dialects: Mapping[str, Dialect],
        config: ServerConfig,
        *,
        needs_key: bool,
    ) -> None:
        """`needs_key`: whether the OpenAPI document says so."""
        self._servers, self._client, self._dialects = servers, client, dialects
        self._any_model, self._needs_key, self._load_timeout = config.any_model, needs_key, config.request_timeout
        self._stored, self._listings = stored_paths(dialects), listings(dialects)
        self._started = int(time.time())
        self._openapi: asyncio.Task[dict[str, Any]] | None = None
        pages = ("/", "/dashboard", "/docs", *(f"/{name}" for name in LATER)) if config.pages else ()
        self.answers: Mapping[str, Answer] = {
            "/openapi.json": self._document,
            **dict.fromkeys(("/v1/models", "/v1/models/", "/models"), self._cards),
            **dict.fromkeys(self._listings, self._listing),
            **dict.fromkeys(pages, self._page),
        }

    def health(self) -> tuple[str, dict[str, Any]]:
        """Return "ok" once the default model was loaded: the others are loaded by requests."""
        default = self._servers.all[0]
        states = Counter(STATES[one.state] for one in self._servers.all)  # without names: the path needs no key
        return "loading" if default.state == "starting" and not default.last_used else "ok", {"models": states}

    def metrics(self) -> str:
        loaded = {json.dumps(one.name, ensure_ascii=False): one.state == "ready" for one in self._servers.all}
        is_loaded = {f"{{model_name={name}}}": float(value) for name, value in loaded.items()}
        num_bytes = [float(one.num_bytes) if one.state == "ready" else 0.0 for one in self._servers.all]
        memory = dict(zip(is_loaded, num_bytes, strict=True))
        text = gauge("nano_inference_model_loaded", "1 if the model is loaded.", is_loaded)
        return text + gauge("nano_inference_model_resident_bytes", "Memory of the model's processes.", memory)

    # ---- one model --------------------------------------------------------------------------------------------------

    async def target(self, scope: Scope, body: bytes) -> Target | Response:
        path, is_read = scope["path"], scope["method"] in ("GET", "HEAD")
        may_start = scope["method"] == "POST" or scope["state"]["key_index"] is not None
        if is_read and path.startswith(("/v1/models/", "/models/")):
            return await self._card(scope, may_start)
        if is_read and path == "/info":
            return await self._info(scope, may_start)
        if scope["method"] == "POST" and path.removeprefix("/v1") in (LOAD_PATH, UNLOAD_PATH):
            return await self._switch(path.removeprefix("/v1"), body)
        if any(pattern.fullmatch(path) for pattern in self._stored):  # the reply's id does not name its model
            lost = queue_full("the servers of the loaded models died", code="model_died")
            models = self._servers.ready or [self._servers.all[0]]
            return Target(servers=lambda: models, may_start=may_start, passed_over=404, lost=lost)
        fields: Mapping[str, Any] | None = {}
        if not is_read:
            fields = await asyncio.to_thread(object_of, body) if len(body) > LARGE_BODY else object_of(body)
        if is_read or (fields is None and body):  # an error of the body does not depend on the model
            model = (self._in_query(scope) if is_read else None) or self._any()
        else:
            model = self._named(fields or {}) or self._in_query(scope) or self._servers.all[0]
        return Target(servers=lambda: [model], attempts=2, may_start=may_start, lost=_silent(model))

    def find(self, name: str) -> Server | None:
        """Return the model with this name; as in Ollama, a name without a tag means the tag `latest`."""
        wanted = tagged(name)
        return next((one for one in self._servers.all if wanted in map(tagged, one.names)), None)

    def _in_query(self, scope: Scope) -> Server | None:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        return self._named({"model": query["model"][-1]}) if "model" in query else None

    def _any(self) -> Server:
        default, loaded = self._servers.all[0], self._servers.ready
        return default if default in loaded or not loaded else loaded[0]

    def _named(self, fields: Mapping[str, Any]) -> Server | None:
        """Return the model that fields name; None if they name none, or by a value that the model's server refuses."""
        name = next((fields[one] for one in _MODEL_NAMES if fields.get(one)), None)
        if not isinstance(name, str):
            return None
        found = self.find(name)
        if found is None and not self._any_model:
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> ApiError:
        return unknown_model(name, [one for server in self._servers.all for one in server.names])

    async def _switch(self, path: str, body: bytes) -> Response:
        """Load or unload the model that the body names, as llama.cpp's router does."""
        name = (object_of(body) or {}).get("model")
        if not isinstance(name, str):
            raise ApiError(400, "model must be the name of a model", param="model")
        model = self.find(name)
        if model is None:
            raise self._unknown(name)
        if path == UNLOAD_PATH:
            await self._servers.unload(model)
        else:
            async with self._servers.use(model, self._load_timeout, may_start=True):
                pass
        return JSONResponse({"success": True, "model": model.name, "status": {"value": STATES[model.state]}})

    async def _info(self, scope: Scope, may_start: bool) -> Response:
        """Return GET /info of the model in the query, or of a loaded one, with all models' states."""
        model = self._in_query(scope) or self._any()
        async with self._servers.use(model, self._load_timeout, may_start=may_start) as url:
            headers = forwarded_headers(scope)
            try:
                reply = await self._client.get(f"{url}/info", headers=headers, timeout=DESCRIBE_TIMEOUT_S)
            except httpx2.HTTPError:
                raise _silent(model) from None
        states = [
            {"id": one.name, "state": STATES[one.state], "open": one.num_open, "waiting": one.num_waiting}
            for one in self._servers.all
        ]
        return JSONResponse({**reply.json(), "models": states}, reply.status_code)

    # ---- all models -------------------------------------------------------------------------------------------------

    async def _cards(self, scope: Scope) -> Response:
        return JSONResponse({"object": "list", "data": await self._all_cards(scope)})

    async def _card(self, scope: Scope, may_start: bool) -> Response:
        """Return one model's card; with `load=true` in the query, after loading it: only then are its limits known."""
        name = scope["path"].partition("models/")[2]
        found = self._named({"model": name}) or self._servers.all[0]
        if parse_qs(scope["query_string"].decode("latin-1")).get("load") == ["true"]:
            async with self._servers.use(found, self._load_timeout, may_start=may_start):
                pass
        cards = [card for card in await self._all_cards(scope) if card["id"] in found.names]
        return JSONResponse(next((one for one in cards if one["id"] == name), cards[0]))

    async def _all_cards(self, scope: Scope) -> list[dict[str, Any]]:
        replies = await fetch_all(self._client, self._servers.urls, scope, "/v1/models")
        cards: list[dict[str, Any]] = []
        for index, model in enumerate(self._servers.all):
            unloaded = {"object": "model", "created": self._started, "owned_by": OWNER, "root": model.name}
            names = [
                {"id": one, **unloaded, "parent": None if one == model.name else model.name} for one in model.names
            ]
            own = json.loads(replies[index])["data"] if index in replies else names
            cards += [{**card, "status": {"value": STATES[model.state]}} for card in own]
        return cards

    async def _listing(self, scope: Scope) -> Response:
        replies = await fetch_all(self._client, self._servers.urls, scope, scope["path"])
        unloaded = [
            UnloadedModel(names=one.names, file_bytes=one.file_bytes, created=self._started)
            for index, one in enumerate(self._servers.all)
            if index not in replies
        ]
        return JSONResponse(self._listings[scope["path"]]([json.loads(one) for one in replies.values()], unloaded))

    async def _page(self, scope: Scope) -> Response:
        return page_response(load_page(scope["path"].removeprefix("/") or "chat"), Request(scope))

    async def _document(self, scope: Scope) -> Response:
        if self._openapi is None:
            making = asyncio.to_thread(openapi, self._dialects, needs_key=self._needs_key)
            self._openapi = asyncio.create_task(making)
        return JSONResponse(await asyncio.shield(self._openapi))


def object_of(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body; None if it is not one."""
    try:
        value = from_json(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _silent(model: Server) -> ApiError:
    return queue_full(f"the server of {model.name} does not answer", code="model_died")
