"""`Pipeline`: the requests of dialects' routes, each from its body to the engine and from there to its reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nano_inference.core.outbox import Outbox
from nano_inference.server.body import IgnoredFields, parse, read_json, unread_fields
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Converting, Describing, Occupancy, Probing, Recalling, Route
from nano_inference.server.dispatch import Capacity, Dispatcher
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError, internal_error
from nano_inference.server.events import StreamForm
from nano_inference.server.generation import Generation
from nano_inference.server.guard import ClientGone, GuardPolicy, read_body, until_gone
from nano_inference.server.limits import QueueLimits
from nano_inference.server.log import fields_of
from nano_inference.server.replies import Reply
from nano_inference.server.reply_store import ClientReplies, ReplyStore
from nano_inference.server.security import Client
from nano_inference.server.transcript import Transcript, reply_size, transcripts_of
from nano_inference.server.worker_pool import BodyWorkers, Compilers, WorkerPool
from nano_inference.types import AdapterInfo, BadRequest

Part = Callable[[Transcript, DecodedDelta], bytes]  # returns the events that a client is sent for a delta

_PROBE_SECONDS = 20.0  # deadline of a probing route: SGLang's value for /health_generate
_SMALL_REPLY = 4000
"""Tokens and alternatives of a reply that is serialized on the event loop; a larger one is serialized in a thread."""
_SERIALIZE_TIMEOUT_S = 60.0
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_JSON_HEADERS = [(b"content-type", b"application/json")]
_log = logging.getLogger("nano_inference.server")


class Timing(NamedTuple):
    deadline: float  # on the monotonic clock
    keep_alive_s: float  # seconds without an event after which a stream sends its form's `keep_alive`; 0: never


class Pipeline:
    """Owns what a request passes on its way: threads, limits, the queue before the engine, and stored replies."""

    def __init__(self, config: ServerConfig, policy: GuardPolicy, link: EngineLink) -> None:
        self.config = config
        self.link = link
        self.loaded: LoadedModel | None = None  # set by `serve`, as the next two
        self.limits: QueueLimits | None = None
        self.dispatcher: Dispatcher | None = None
        self.max_running = 0  # limit of running samples
        self.workers = BodyWorkers()
        self.compilers = Compilers()
        self.ignored = IgnoredFields(config.strict)
        self.num_open = 0  # requests that are being answered
        self._policy = policy
        self._replies = ReplyStore(config.max_stored_replies, config.max_stored_bytes, config.max_body_bytes)

    def serve(self, loaded: LoadedModel, max_running: int) -> None:
        """Start to accept requests for a loaded model that runs up to `max_running` samples at once."""
        engine = loaded.engine
        max_running = min(max_running, engine.parts.scheduler_config(engine.config).max_batch_size)
        self.loaded, self.max_running = loaded, max_running
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
        self.workers.close()
        self.compilers.close()

    def require_loaded(self) -> LoadedModel:
        """Return the loaded model. Raises `ApiError` 503 unless requests are accepted."""
        _ = self.link.engine  # raises unless it accepts requests
        assert self.loaded is not None, "requests are accepted after the model is loaded"
        return self.loaded

    def set_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        """Let requests name these adapters, and no others."""
        assert self.loaded is not None, "the model is loaded"
        self.loaded = replace(self.loaded, model=replace(self.loaded.model, adapters=tuple(adapters)))

    # ---- a route whose reply comes from the engine ------------------------------------------------------------------

    async def answer(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = time.monotonic() + self.config.request_timeout
        chosen, generation = await self._asked(route, scope, receive, deadline)
        await self._run(chosen, generation, deadline, scope, receive, send)

    async def _asked(self, route: Route, scope: Scope, receive: Receive, deadline: float) -> tuple[Route, Generation]:
        """Return what a body asks for, and the route that answers it. The body is not kept while it is answered."""
        model, state = self.require_loaded().model, scope["state"]
        data = await self._read(receive)

        def ask() -> tuple[Route, list[str], Generation]:
            chosen = route
            if route.choose is not None:
                chosen = route.choose(read_json(data, route.body.malformed_status), model) or route
            body = parse(data, chosen.body)
            unread = unread_fields(body, model, answers=True)
            salt = self._policy.keys.cache_salt(state.get("key_index"), getattr(body, "cache_salt", None))
            stored = [self._replies_of(scope)] if chosen.stores else []
            return chosen, unread, chosen.ask(body, model, self.config, salt, *stored)

        seconds = self.config.request_timeout
        chosen, unread, generation = await self.workers.run(len(data), ask, renders=route.renders, seconds=seconds)
        self.ignored.report(unread)
        generation = await self.compilers.add_matchers(generation, model.grammars, deadline - time.monotonic())
        return chosen, replace(generation, names=generation.names | {generation.id, state["request_id"]})

    async def _run(
        self,
        route: Route | Probing,
        generation: Generation,
        deadline: float,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Admit a generation, submit it to the engine, send the reply; leaving releases what it holds."""
        assert self.limits is not None, "the model is loaded"
        client: Client = scope["state"]["client"]
        transcripts: list[Transcript] = []
        outbox: Outbox | None = None
        error: ApiError | None = None
        self.num_open += 1
        try:
            with (
                self.limits.reserve(generation, client),
                self.link.submit(generation.requests, generation.names, client) as outbox,
                failed_when_gone(receive, outbox),
            ):
                transcripts += transcripts_of(generation, outbox.times)  # after admission, since there may be many
                reply = route.reply(generation, transcripts)
                timing = Timing(deadline, self.config.sse_keep_alive)
                if generation.stream:
                    error = await send_stream(reply, outbox, timing, route.form, send)
                else:
                    await send_whole(reply, outbox, timing, self.workers.large, send)
        finally:
            self.num_open -= 1
            scope["state"]["log_fields"] = fields_of(generation, transcripts, outbox, error)

    # ---- other routes -----------------------------------------------------------------------------------------------

    async def probe(self, route: Probing, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a fixed request to the engine, unless it is paused."""
        model = self.require_loaded().model
        if await self.link.engine.call(lambda engine: engine.is_halted):
            await json_response({"status": "paused"})(scope, receive, send)
            return
        deadline = time.monotonic() + min(_PROBE_SECONDS, self.config.request_timeout)
        await self._run(route, route.ask(model, self.config), deadline, scope, receive, send)

    async def convert(self, route: Converting, request: Request) -> Response:
        """Answer a request that needs no engine, in a thread."""
        model = self.require_loaded().model
        data = await self._read(request.receive)

        def convert() -> tuple[list[str], bytes]:
            body = parse(data, route.body)
            unread = unread_fields(body, model, answers=False)
            stored = [self._replies_of(request.scope)] if route.stores else []
            return unread, to_json(route.work(body, model, *stored))

        seconds = self.config.request_timeout
        unread, reply = await self.workers.run(len(data), convert, renders=route.renders, seconds=seconds)
        self.ignored.report(unread)
        return json_response(reply)

    async def describe(self, route: Describing, request: Request) -> Response:
        return json_response(route.describe(self.require_loaded().model, self.occupancy()))

    async def recall(self, route: Recalling, request: Request) -> Response:
        self.require_loaded()
        replies, name = self._replies_of(request.scope), request.path_params["id"]

        def recall() -> bytes:
            reply = route.work(replies, name, dict(request.query_params))
            return reply if isinstance(reply, bytes) else to_json(reply)

        seconds = self.config.request_timeout
        return json_response(await self.workers.run(replies.size_of(name), recall, renders=False, seconds=seconds))

    def occupancy(self) -> Occupancy:
        stats = self.link.last_stats
        return Occupancy(
            is_ready=self.link.state == "ready",
            num_running=stats.num_running if stats else 0,
            max_running=self.max_running,
        )

    async def _read(self, receive: Receive) -> bytes:
        return await read_body(receive, self._policy.max_body_bytes, self._policy.body_timeout)

    def _replies_of(self, scope: Scope) -> ClientReplies:
        return ClientReplies(self._replies, scope["state"].get("key_index"))


# ---- from the engine to the client ----------------------------------------------------------------------------------


async def send_whole(reply: Reply[Any], outbox: Outbox, timing: Timing, pool: WorkerPool, send: Send) -> None:
    """Collect all deltas, then send the reply. Raises `ApiError`, and `ClientGone` if the client disconnected."""
    async for _ in parts(reply, outbox, timing, lambda transcript, decoded: b""):
        pass

    def serialize() -> bytes:
        return to_json(reply.whole())

    if reply_size(reply.generation, reply.transcripts) <= _SMALL_REPLY:
        body = serialize()
    else:
        body = await pool.run(serialize, seconds=_SERIALIZE_TIMEOUT_S)
    await _start(reply.generation, [*_JSON_HEADERS, (b"content-length", str(len(body)).encode())], send)
    await send({"type": "http.response.body", "body": body})


async def send_stream(
    reply: Reply[Any], outbox: Outbox, timing: Timing, form: StreamForm, send: Send
) -> ApiError | None:
    """Send events as deltas arrive, and the form's `keep_alive` after a silence.

    A failure is sent as an event, since the status was sent before, and returned. Raises `ClientGone`.
    """

    async def send_some(body: bytes) -> None:
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    await _start(reply.generation, [(b"content-type", form.media_type.encode()), *_STREAM_HEADERS], send)
    await send_some(reply.start())
    failure = None
    try:
        async for events in parts(reply, outbox, timing, reply.part):
            await send_some(form.keep_alive if events is None else events)
        last = reply.end()
    except ClientGone:
        raise
    except Exception as error:
        failure = error if isinstance(error, ApiError) else internal_error()
        if error is not failure:
            _log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=error)
        last = reply.fail(failure)
    await send({"type": "http.response.body", "body": last, "more_body": False})
    return failure


async def parts(reply: Reply[Any], outbox: Outbox, timing: Timing, part: Part) -> AsyncIterator[bytes | None]:
    """Add deltas to the reply's transcripts and yield what `part` returns for them; None after a silence.

    The part of a delta is made before the next delta is added, so that its token counts include no later token. At the
    deadline, started samples end as "length" with the tokens they have; raises `ApiError` if none has started, and for
    a sample that the engine could not finish. A sample that a client aborted ends as "abort".
    """
    generation, transcripts, keep = reply.generation, reply.transcripts, reply.keeps or not reply.generation.stream
    silence_s = timing.keep_alive_s or float("inf")
    while not outbox.is_done:
        left = timing.deadline - time.monotonic()
        try:
            deltas = await outbox.take(max(0.0, min(silence_s, left)))
        except BadRequest as error:
            raise ApiError(400, str(error)) from None
        made: list[bytes] = []
        for prompt_index, delta in deltas:
            transcript = transcripts[prompt_index * generation.num_samples + delta.sample_index]
            decoded = transcript.add_delta(delta, generation, keep=keep)
            if transcript.finish_reason == "abort" and transcript.stop_reason is not None:
                yield b"".join(made)
                raise _engine_error(generation, transcript)
            made.append(part(transcript, decoded))
        if deltas or left > silence_s:
            yield b"".join(made) if deltas else None
        if left <= 0 and not outbox.is_done:
            outbox.end_reason = "length"
            if not any(transcript.token_ids for transcript in transcripts):
                message = "the request timed out before it was started"
                raise ApiError(503, message, code="timeout", headers={"x-should-retry": "false"})
            still_open = [transcript for transcript in transcripts if transcript.finish_reason is None]
            yield b"".join(part(one, one.cut_short(generation, "timeout")) for one in still_open)
            return


@contextmanager
def failed_when_gone(receive: Receive, outbox: Outbox) -> Iterator[None]:
    """Let the outbox raise `ClientGone` if the client disconnects during the block."""

    async def watch() -> None:
        await until_gone(receive)
        outbox.fail(ClientGone())

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _start(generation: Generation, headers: Sequence[tuple[bytes, bytes]], send: Send) -> None:
    """Send status and headers, with the token limit of an answer that was reduced to the context."""
    limit = generation.reduced_max_tokens
    extra = [] if limit is None else [(b"x-max-tokens", str(limit).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, *extra]})


def _engine_error(generation: Generation, transcript: Transcript) -> ApiError:
    reason = str(transcript.stop_reason or "the engine ended the request")
    if reason.startswith("no token can be drawn") and generation.forbids_tokens:
        return ApiError(400, "no token can be drawn: allowed_token_ids, bad_words and min_tokens leave none")
    if "grammar: " in reason:
        return ApiError(400, f"the answer cannot follow its grammar: {reason.partition('grammar: ')[2]}")
    if reason.startswith("out of memory"):
        return ApiError(503, reason, code="out_of_memory", headers={"retry-after": "5"})
    return ApiError(500, f"generation failed: {reason}", headers={"x-should-retry": "false"})


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response; `value` can be encoded already."""
    return Response(value if isinstance(value, bytes) else to_json(value), status, media_type="application/json")
