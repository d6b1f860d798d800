"""`ModelsFront`: the ASGI application in front of the models. It forwards each request to the server of its model.

The model is that of the body's field `model`, or of the query's parameter `model`. A POST without one goes to the
default model, a GET without one to any loaded model, preferably the default. Only a POST loads a model, or a request
with a key: a page of another site can cause any other request, by an image for example, and not every browser says so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import parse_qs

import httpx2
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from nano_inference.server.dialect import (
    Dialect,
    UnloadedModel,
    listings,
    openai_stream_error,
    stored_paths,
    stream_errors,
)
from nano_inference.server.errors import ApiError, queue_full
from nano_inference.server.front.forwarding import (
    DESCRIBE_TIMEOUT_S,
    fetch_all,
    forwarded_headers,
    request_for,
    respond,
    respond_text,
    return_reply,
    summed_load,
)
from nano_inference.server.front.merging import merge
from nano_inference.server.front.models import HostedModel, ModelEntry, Models
from nano_inference.server.guard import GuardPolicy, read_body, while_connected
from nano_inference.server.model import OWNER, unknown_model
from nano_inference.server.openapi import openapi
from nano_inference.server.pages import LATER, Page, load_page, page_response

LOAD_PATH, UNLOAD_PATH = "/models/load", "/models/unload"
NOT_FOUND = 404
_LARGE_BODY = 64 << 10  # bodies of more bytes are parsed in a thread
_MODEL_NAMES = ("model", "name")  # fields with a model's name; Ollama's clients still send the second one


class ModelsFront:
    """Forwards to the servers of `Models`: see `run.Front`."""

    def __init__(
        self,
        models: Models,
        client: httpx2.AsyncClient,
        policy: GuardPolicy,
        dialects: Mapping[str, Dialect],
        *,
        any_model: bool,
        has_pages: bool,
        load_timeout: float,
    ) -> None:
        """`any_model`: unknown names mean the default model. `load_timeout`: seconds that a request waits for one."""
        self.models = models
        self.is_draining = False
        self._client, self._policy = client, policy
        self._any_model, self._load_timeout, self._has_pages = any_model, load_timeout, has_pages
        self._stream_errors = stream_errors(dialects)
        self._stored, self._dialects = stored_paths(dialects), dialects
        self._about_all: dict[str, Callable[[Scope, Send], Awaitable[None]]] = {
            **dict.fromkeys(("/health", "/ping", "/liveness", "/ready"), self._health),
            "/load": self._load,
            "/metrics": self._metrics,
            "/openapi.json": self._document,
        }
        self._lists: dict[str, Callable[[Scope, Send], Awaitable[None]]] = {
            **dict.fromkeys(("/v1/models", "/v1/models/", "/models"), self._cards),
            **dict.fromkeys(listings(dialects), self._listing),
            "/info": self._info,
        }
        self._page_names = {"/": "chat", **{f"/{name}": name for name in ("dashboard", "docs", *LATER)}}
        self._pages: dict[str, Page] = {}
        self._openapi: asyncio.Task[dict[str, Any]] | None = None
        self._listings = listings(dialects)
        self._started = int(time.time())

    @property
    def num_open(self) -> int:
        """Requests that are answered, or wait for a model."""
        return self.models.num_open

    async def open(self) -> None:
        """Load the default model. Raises `ReplicaFailed`."""
        await self.models.open()

    async def run(self) -> None:
        """Never return: a model that cannot be loaded is an error of the requests that name it."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """End all models."""
        await self.models.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that the guard has admitted. Raises `ApiError`, `ClientGone`."""
        path, is_read = scope["path"], scope["method"] in ("GET", "HEAD")
        if is_read and path in self._about_all:
            await self._about_all[path](scope, send)
        elif is_read and path in self._page_names and self._has_pages:
            name = self._page_names[path]
            if name not in self._pages:
                self._pages[name] = load_page(name)
            await page_response(self._pages[name], Request(scope))(scope, receive, send)
        elif self.is_draining:
            raise queue_full("the server is shutting down", code="shutting_down")
        elif is_read and path in self._lists:
            await self._lists[path](scope, send)
        elif is_read and path.startswith(("/v1/models/", "/models/")):
            await self._card(scope, send)
        else:
            body = await read_body(receive, self._policy.max_body_bytes, self._policy.body_timeout)
            await while_connected(self._answer(scope, body, send), receive)

    # ---- one model --------------------------------------------------------------------------------------------------

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if any(pattern.fullmatch(scope["path"]) for pattern in self._stored):
            await self._forward_stored(scope, body, send)
            return
        path = scope["path"].removeprefix("/v1")
        if scope["method"] == "POST" and path in (LOAD_PATH, UNLOAD_PATH):
            await self._switch(path, body, send)
            return
        if scope["method"] in ("GET", "HEAD"):
            model = self._in_query(scope) or self._any()
        else:
            fields = await asyncio.to_thread(object_of, body) if len(body) > _LARGE_BODY else object_of(body)
            if fields is None and body:
                model = self._any()  # its error does not depend on the model
            else:
                model = self._named(fields or {}) or self._in_query(scope) or self.models.default
        await self._forward(model, scope, body, send)

    def _in_query(self, scope: Scope) -> HostedModel | None:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        return self._named({"model": query["model"][-1]}) if "model" in query else None

    def _use(self, scope: Scope, model: HostedModel) -> AbstractAsyncContextManager[str]:
        """Return `Models.use`. Raises `ApiError` 403 if the request may not load the model and would."""
        may_load = scope["method"] == "POST" or scope["state"]["key_index"] is not None
        if not may_load and model.state not in ("loaded", "loading"):
            text = f"{model.entry.name} is {model.state}: POST its name as `model` to {LOAD_PATH}; without a key, GET"
            raise ApiError(403, f"{text} loads no model", param="model", code="load_needs_post")
        return self.models.use(model, self._load_timeout)

    def _any(self) -> HostedModel:
        loaded = self.models.loaded
        return self.models.default if self.models.default in loaded or not loaded else loaded[0]

    def _named(self, fields: Mapping[str, Any]) -> HostedModel | None:
        name = next((fields[one] for one in _MODEL_NAMES if fields.get(one)), None)
        if not isinstance(name, str):
            return None  # absent, or of a type that the model's server refuses
        found = self.models.find(name)
        if found is None and not self._any_model:
            raise unknown_model(name, self._names())
        return found

    async def _forward(self, model: HostedModel, scope: Scope, body: bytes, send: Send) -> None:
        """Forward a request; once more if the server died, or closed the connection, before it sent a byte."""
        for is_last in (False, True):
            async with self._use(scope, model) as url:
                try:
                    reply = await self._client.send(request_for(self._client, url, scope, body), stream=True)
                except httpx2.HTTPError:
                    await self.models.has_ended(model, url)  # then it is loaded again
                    if is_last:
                        text = f"the server of {model.entry.name} does not answer"
                        raise queue_full(text, code="model_died") from None
                    continue
                try:
                    await return_reply(reply, send, self._stream_errors.get(scope["path"], openai_stream_error))
                finally:
                    await reply.aclose()
                return

    async def _forward_stored(self, scope: Scope, body: bytes, send: Send) -> None:
        """Ask the loaded models one after another for a stored reply, since its id does not name its model."""
        models = self.models.loaded or [self.models.default]
        for model in models:
            async with self._use(scope, model) as url:
                try:
                    reply = await self._client.send(request_for(self._client, url, scope, body), stream=True)
                except httpx2.HTTPError:
                    continue
                try:
                    if reply.status_code != NOT_FOUND or model is models[-1]:
                        await return_reply(reply, send, self._stream_errors.get(scope["path"], openai_stream_error))
                        return
                finally:
                    await reply.aclose()
        raise queue_full("the servers of the loaded models died", code="model_died")

    async def _switch(self, path: str, body: bytes, send: Send) -> None:
        """Load or unload the model that the body names, as llama.cpp's router does."""
        name = (object_of(body) or {}).get("model")
        if not isinstance(name, str):
            raise ApiError(400, "model must be the name of a model", param="model")
        model = self.models.find(name)
        if model is None:
            raise unknown_model(name, self._names())
        if path == UNLOAD_PATH:
            await self.models.unload(model)
        else:
            async with self.models.use(model, self._load_timeout):
                pass
        await respond(send, 200, {"success": True, "model": model.entry.name, "status": {"value": model.state}})

    def _names(self) -> list[str]:
        return [one for hosted in self.models.hosted for one in hosted.entry.names]

    # ---- all models -------------------------------------------------------------------------------------------------

    async def _health(self, scope: Scope, send: Send) -> None:
        """Send 200 once the default model was loaded: the others are loaded by requests."""
        is_loading = self.models.default.state == "loading" and not self.models.default.last_used
        status = "draining" if self.is_draining else "loading" if is_loading else "ok"
        accepts = status == "ok" or (status == "draining" and scope["path"] != "/ready")
        states = Counter(one.state for one in self.models.hosted)  # without names: the path needs no key
        await respond(send, 200 if accepts else 503, {"status": status, "models": states})

    async def _cards(self, scope: Scope, send: Send) -> None:
        """Send the list of models: those of loaded ones from their servers, with each one's state."""
        await respond(send, 200, {"object": "list", "data": await self._all_cards(scope)})

    async def _card(self, scope: Scope, send: Send) -> None:
        """Send one model's card; with `load=true` in the query, after loading it: only then are its limits known."""
        name = scope["path"].partition("models/")[2]
        found = self._named({"model": name}) or self.models.default
        if parse_qs(scope["query_string"].decode("latin-1")).get("load") == ["true"]:
            async with self._use(scope, found):
                pass
        cards = [card for card in await self._all_cards(scope) if card["id"] in found.entry.names]
        await respond(send, 200, next((one for one in cards if one["id"] == name), cards[0]))

    async def _all_cards(self, scope: Scope) -> list[dict[str, Any]]:
        replies = await self._fetch_all(scope, "/v1/models")
        cards: list[dict[str, Any]] = []
        for index, model in enumerate(self.models.hosted):
            own = json.loads(replies[index])["data"] if index in replies else unloaded_cards(model.entry, self._started)
            cards += [{**card, "status": {"value": model.state}} for card in own]
        return cards

    async def _listing(self, scope: Scope, send: Send) -> None:
        """Send what a dialect lists of the models."""
        replies = await self._fetch_all(scope, scope["path"])
        unloaded = [
            UnloadedModel(names=one.entry.names, file_bytes=one.entry.file_bytes, created=self._started)
            for index, one in enumerate(self.models.hosted)
            if index not in replies
        ]
        await respond(send, 200, self._listings[scope["path"]]([json.loads(one) for one in replies.values()], unloaded))

    async def _info(self, scope: Scope, send: Send) -> None:
        """Send GET /info of the model in the query, or of a loaded one, with all models' states."""
        model = self._in_query(scope) or self._any()
        async with self._use(scope, model) as url:
            headers = forwarded_headers(scope)
            try:
                reply = await self._client.get(f"{url}/info", headers=headers, timeout=DESCRIBE_TIMEOUT_S)
            except httpx2.HTTPError:
                raise queue_full(f"the server of {model.entry.name} does not answer", code="model_died") from None
        states = [
            {"id": one.entry.name, "state": one.state, "open": one.num_open, "waiting": one.num_waiting}
            for one in self.models.hosted
        ]
        await respond(send, reply.status_code, {**reply.json(), "models": states})

    async def _load(self, scope: Scope, send: Send) -> None:
        await respond(send, 200, summed_load(await self._fetch_all(scope, "/load")))

    async def _metrics(self, scope: Scope, send: Send) -> None:
        texts = await self._fetch_all(scope, "/metrics")
        await respond_text(send, (own_metrics(self.models.hosted) + merge(texts)).encode())

    async def _document(self, scope: Scope, send: Send) -> None:
        if self._openapi is None:
            making = asyncio.to_thread(openapi, self._dialects, needs_key=not self._policy.keys.is_empty)
            self._openapi = asyncio.create_task(making)
        await respond(send, 200, await asyncio.shield(self._openapi))

    async def _fetch_all(self, scope: Scope, path: str) -> dict[int, str]:
        """Return index -> reply to a GET of a path, of the loaded models that answer."""
        urls = {index: one.url for index, one in enumerate(self.models.hosted) if one.state == "loaded"}
        return await fetch_all(self._client, urls, scope, path)


def object_of(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body; None if it is not one."""
    try:
        value = from_json(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def unloaded_cards(entry: ModelEntry, created: int) -> list[dict[str, Any]]:
    """Return the /v1/models entries of a model that is not loaded: what is known without its files."""
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": OWNER,
            "root": entry.name,
            "parent": None if name == entry.name else entry.name,
        }
        for name in entry.names
    ]


def own_metrics(hosted: Sequence[HostedModel]) -> str:
    """Return the front's metrics as Prometheus text: which models are loaded, and their memory."""
    registry = CollectorRegistry()
    loaded = Gauge("nano_inference_model_loaded", "1 if the model is loaded.", ["model_name"], registry=registry)
    memory = Gauge(
        "nano_inference_model_resident_bytes", "Memory of the model's processes.", ["model_name"], registry=registry
    )
    for one in hosted:
        is_loaded = one.state == "loaded"
        loaded.labels(one.entry.name).set(is_loaded)
        memory.labels(one.entry.name).set(one.num_bytes if is_loaded else 0)
    return generate_latest(registry).decode()
