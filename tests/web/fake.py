"""A server of the real pages whose answers are scripted by the test."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from nano_inference.server.pages import LATER, load_page, page_response

TIMEOUT_S = 60
INFO: dict[str, Any] = {
    "server": "nano-inference test",
    "model": "fake",
    "context": 1000,
    "max_n": 16,
    "max_logprobs": 20,
    "chats": True,
    "calculator": False,
    "dtype": "auto",
    "end_token_ids": [99],
    "sampling_defaults": {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
}


class Answer:
    """One request for an answer, and the stream that the test sends for it."""

    def __init__(self, body: dict[str, Any], headers: dict[str, str], loop: asyncio.AbstractEventLoop) -> None:
        self.body = body
        self.headers = headers
        self.gone = threading.Event()
        self._loop = loop
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def raw(self, data: bytes | None) -> None:
        """Send bytes; None aborts the connection."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, data)

    def event(self, value: Any) -> None:
        self.raw(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())

    def choice(self, delta: dict[str, Any], index: int = 0, **extras: Any) -> None:
        self.event({"choices": [{"index": index, "delta": delta, "finish_reason": None, **extras}]})

    def say(self, *words: str, index: int = 0) -> None:
        """Send words, each as one token with the further alternatives "A" and "B"."""
        for word in words:
            top = [
                {"token": text, "logprob": -1.0 - n, "bytes": [], "token_id": 200 + n} for n, text in enumerate("AB")
            ]
            own = {"token": word, "logprob": -0.1, "bytes": [], "token_id": 7}
            entry = {**own, "top_logprobs": [own, *top]}
            self.choice({"content": word}, index, token_ids=[7], mask=[1], logprobs={"content": [entry]})

    def write(self, *words: str) -> None:
        """Send words of a completion, each as one token with the alternatives " A" and " B"."""
        for word in words:
            top = {word: -0.1, " A": -1.0, " B": -2.0}
            lists = {"tokens": [word], "token_logprobs": [-0.1], "top_logprobs": [top], "text_offset": [0]}
            facts = {"token_ids": [7], "mask": [1], "token_versions": [0], "logprobs": lists}
            self.event({"choices": [{"index": 0, "text": word, "finish_reason": None, **facts}]})

    def end_text(self, reason: str = "length") -> None:
        """End the stream of a completion."""
        self.event({"choices": [{"index": 0, "text": "", "finish_reason": reason, "logprobs": None}]})
        self.event("[DONE]")
        self.raw(b"")

    def finish(self, reason: str = "stop", index: int = 0, version: str = "0", count: int = 1) -> None:
        """Send a sample's finish reason."""
        spans = [{"version": version, "start": 0, "end": count, "number": 0}]
        self.choice({}, index, weight_versions=spans, finish_reason=reason)

    def end(self, reason: str | None = "stop", *, prompt: int = 20, cached: int = 4) -> None:
        """End the stream, after the finish reason (if any) and the usage."""
        if reason is not None:
            self.finish(reason)
        usage = {"prompt_tokens": prompt, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}
        self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self.raw(b"")

    def complete(self, *words: str) -> None:
        """Send a whole answer."""
        self.say(*words)
        self.end()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the test's bytes until the end of the stream; raise `ConnectionError` for an abort."""
        try:
            while (piece := await self._pieces.get()) != b"":
                if piece is None:
                    raise ConnectionError("aborted")
                yield piece
        finally:
            self.gone.set()


class FakeServer:
    """Serves the real pages, with API answers set by the test."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.info = dict(INFO)
        self.by_model: dict[str, dict[str, Any] | None] = {}
        """Answers of /info about further models; None: the model cannot be loaded."""
        self.ready: tuple[int, str] = (200, "ready")
        self.key: str | None = None
        self.refusals: list[tuple[int, dict[str, Any]]] = []
        self.tokens_per_word = 1
        self.answer_headers: dict[str, str] = {}
        """Additional headers of each answer."""
        self.url = ""
        self.paths: list[str] = []
        self.late_requests: list[str] = []
        """Requests for files that the page loads on demand."""
        self.late_response: Response | None = None
        self._answers: queue.Queue[Answer] = queue.Queue()
        names = {"/ready": self._ready, "/info": self._info, "/": self._page, "/dashboard": self._dashboard}
        names |= {f"/{name}": self._later for name in LATER}
        routes: list[Route | Mount] = [Route(path, endpoint) for path, endpoint in names.items()]
        routes += [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._chat, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
        ]
        self.app = Starlette(routes=[Mount(root, routes=routes)] if root else routes)

    def answer(self) -> Answer:
        """Wait for the page's next request and return its answer."""
        return self._answers.get(timeout=TIMEOUT_S)

    async def _page(self, request: Request) -> Response:
        return page_response(load_page("chat"), request)

    async def _dashboard(self, request: Request) -> Response:
        return page_response(load_page("dashboard"), request)

    async def _later(self, request: Request) -> Response:
        self.late_requests.append(request.url.path)
        return self.late_response or page_response(load_page(request.url.path.rpartition("/")[2]), request)

    async def _ready(self, request: Request) -> Response:
        status, text = self.ready
        return JSONResponse({"status": text}, status)

    def _refused(self, request: Request) -> Response | None:
        self.paths.append(request.url.path)
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        presented = "authorization" in request.headers
        message = "this API key is not known" if presented else "an API key is needed"
        return JSONResponse({"error": {"message": message, "code": "invalid_api_key"}}, 401)

    async def _info(self, request: Request) -> Response:
        return self._refused(request) or self._info_of(request.query_params.get("model"))

    def _info_of(self, model: str | None) -> Response:
        if model in (None, self.info["model"]):
            return JSONResponse(self.info)
        if model not in self.by_model:
            return JSONResponse({"error": {"message": "no such model", "code": "model_not_found"}}, 404)
        info = self.by_model[model]
        failed = {"message": f"the model {model} could not be loaded: damaged", "code": "model_not_loaded"}
        return JSONResponse({"error": failed}, 503) if info is None else JSONResponse(info)

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        words = sum(len(str(message["content"]).split()) for message in body["messages"])
        return self._refused(request) or JSONResponse({"count": words * self.tokens_per_word})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if (refused := self._refused(request)) is not None:
            return refused
        if self.refusals:
            status, error = self.refusals.pop(0)
            return JSONResponse({"error": error}, status)
        answer = Answer(body, dict(request.headers), asyncio.get_running_loop())
        self._answers.put(answer)
        return StreamingResponse(answer.pieces(), headers=self.answer_headers, media_type="text/event-stream")


@contextmanager
def serving(root: str = "", port: int = 0) -> Iterator[FakeServer]:
    """Run a fake server for the duration of the block."""
    fake = FakeServer(root)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()  # clients that connect before the server runs wait for it
    fake.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(fake.app, log_level="critical", lifespan="off")
    server, leave = uvicorn.Server(config), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(server, listening, leave)))
    thread.start()
    try:
        yield fake
    finally:
        leave.set()
        thread.join(60)


async def _serve(server: uvicorn.Server, listening: socket.socket, leave: threading.Event) -> None:
    """Serve until `leave` is set, then close all connections, also those with an unfinished answer.

    uvicorn's own end pauses twice for a tenth of a second, at each test.
    """
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await asyncio.to_thread(leave.wait)
    serving.cancel()
    await asyncio.wait([serving])
    asyncio.get_running_loop().remove_reader(listening)
    listening.close()
    for _ in range(2):  # turns of the loop, after which the server knows every accepted connection
        await asyncio.sleep(0)
    for connection in tuple(server.server_state.connections):
        connection.transport.abort()
    await asyncio.sleep(0)  # here they close
