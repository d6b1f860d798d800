"""A loaded model with its queue, and the response that sends a call to it and streams the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nano_inference.server.answering import Timing, answer
from nano_inference.server.call import Call, Transcript, transcripts_of, usage
from nano_inference.server.clients import Client
from nano_inference.server.dispatch import Dispatcher
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.queue_limits import QueueLimits
from nano_inference.server.served import LoadedModel, Observer
from nano_inference.server.ticket import Ticket
from nano_inference.server.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What there is once a model is loaded."""

    opened: LoadedModel
    queue_limits: QueueLimits
    dispatcher: Dispatcher

    @property
    def model(self) -> ServedModel:
        """The model, as the routes know it."""
        return self.opened.model

    @property
    def observer(self) -> Observer:
        """Whoever counts."""
        return self.opened.observer


@dataclass(slots=True)
class OpenCalls:
    """The number of calls that are being answered; accessed only on the event loop."""

    num: int = 0


class CallResponse(Response):
    """Answers a call when it is sent. Everything it takes is given back when sending ends, however it ends."""

    def __init__(
        self,
        link: EngineLink,
        serving: Serving,
        open_calls: OpenCalls,
        call: Call,
        timing: Timing,
        workshop: WorkerPool,
    ) -> None:
        self._link = link
        self._serving = serving
        self._open_calls = open_calls
        self._call = call
        self._timing = timing
        self._workshop = workshop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a place, ask the engine, answer."""
        call, serving = self._call, self._serving
        transcripts: list[Transcript] = []
        ticket: Ticket | None = None
        error: ApiError | None = None
        client: Client = scope["state"]["client"]
        self._open_calls.num += 1
        try:
            with (
                serving.queue_limits.reserve(call, client),
                serving.dispatcher.queue_for(client) as gate,
                self._link.submit(call.requests, call.names, gate) as ticket,
            ):
                transcripts += transcripts_of(call)  # which may be many: not before they are let in
                error = await answer(
                    call, ticket, serving.model, self._timing, self._workshop, receive, send, transcripts
                )
        finally:
            self._open_calls.num -= 1
            scope["state"]["notes"] = log_fields(call, transcripts, ticket, error)


def log_fields(
    call: Call, transcripts: list[Transcript], ticket: Ticket | None, error: ApiError | None
) -> dict[str, Any]:
    """Return what the log says of a call: how much there was, how fast it was, how it ended."""
    counts = usage(call, transcripts)
    clocks = [] if ticket is None else [clock for row in ticket.times for clock in row]
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
        "finish_reason": transcripts[0].finish_reason if transcripts else None,
        "error": error,
    }
