"""`CallResponse`: submits a call to the engine and sends its answer; `Serving`: the loaded model with its queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nano_inference.core.outbox import Outbox
from nano_inference.server.answering import Answer, Timing
from nano_inference.server.call import Call, Transcript, transcripts_of, usage
from nano_inference.server.dispatch import Dispatcher
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError
from nano_inference.server.limits import QueueLimits
from nano_inference.server.metrics import Metrics
from nano_inference.server.model import ServedModel
from nano_inference.server.security import Client
from nano_inference.server.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The loaded model with its admission limits and dispatcher."""

    loaded: LoadedModel
    queue_limits: QueueLimits
    dispatcher: Dispatcher

    @property
    def model(self) -> ServedModel:
        return self.loaded.model

    @property
    def metrics(self) -> Metrics:
        return self.loaded.metrics


@dataclass(slots=True)
class OpenCalls:
    """Number of calls being answered; accessed only on the event loop."""

    num: int = 0


@dataclass(eq=False, repr=False)
class CallResponse(Response):
    """Runs a call when it is sent, and releases its resources when sending ends in any way."""

    link: EngineLink
    serving: Serving
    open_calls: OpenCalls
    call: Call
    timing: Timing
    pool: WorkerPool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the call, submit it to the engine, send the answer."""
        call, serving = self.call, self.serving
        transcripts: list[Transcript] = []
        outbox: Outbox | None = None
        error: ApiError | None = None
        client: Client = scope["state"]["client"]
        self.open_calls.num += 1
        try:
            with (
                serving.queue_limits.reserve(call, client),
                self.link.submit(call.requests, call.names, client) as outbox,
            ):
                transcripts += transcripts_of(call, outbox.times)  # after admission, since there may be many
                answer = Answer(
                    call=call,
                    outbox=outbox,
                    tokenizer=serving.model.tokenizer,
                    timing=self.timing,
                    pool=self.pool,
                    send=send,
                    transcripts=transcripts,
                )
                error = await answer.run(receive)
        finally:
            self.open_calls.num -= 1
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
