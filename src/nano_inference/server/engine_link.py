"""`EngineLink`: wraps an `AsyncEngine` with the server's state, tickets, metrics and errors; `LoadedModel`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from nano_inference.async_engine import AsyncEngine
from nano_inference.engine_thread import DrivenEngine, Turn
from nano_inference.server.dispatch import Enqueue
from nano_inference.server.errors import ApiError, internal_error
from nano_inference.server.metrics import Metrics, SampleRecord
from nano_inference.server.model import ServedModel
from nano_inference.server.ticket import PromptRequest, SampleTimes, Ticket, bare_id
from nano_inference.types import BadRequest, Delta, StepStats, TrainingSample

State = Literal["loading", "ready", "draining", "stopped", "dead"]
Answer = TypeVar("Answer")

_log = logging.getLogger("nano_inference.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model, ready to be served."""

    engine: DrivenEngine
    metrics: Metrics
    model: ServedModel
    step_tokens: int = 256
    """Maximum tokens of one step."""


class EngineLink:
    """Owns the server's engine. All methods are called on the event loop."""

    def __init__(self, *, step_timeout: float) -> None:
        self.state: State = "loading"
        self.failure: BaseException | None = None
        """The error that stopped the engine or its loading."""
        self.last_stats: StepStats | None = None
        self.after_step: Callable[[StepStats], StepStats] = lambda stats: stats
        """Called after each step; returns the counts for the metrics."""
        self._step_timeout = step_timeout
        self._engine: AsyncEngine[DrivenEngine] | None = None
        self._open: dict[Ticket, _TicketReceiver] = {}
        self.metrics: Metrics | None = None
        """Set by `start`."""

    # ---- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self, load: Callable[[], LoadedModel]) -> LoadedModel:
        """Load the model in the engine's thread; return when the engine accepts requests. Raises loading errors."""
        loaded: list[LoadedModel] = []

        def load_engine() -> DrivenEngine:
            loaded.append(load())
            return loaded[0].engine

        self._engine = AsyncEngine(
            load_engine,
            observer=self,
            step_timeout=self._step_timeout,
            end_error=lambda cause: _shutting_down() if cause is None else internal_error(),
        )
        try:
            await self._engine.start()
        except Exception as error:
            self.state, self.failure = "dead", error
            raise
        self.metrics = loaded[0].metrics
        return loaded[0]

    def start_accepting(self) -> None:
        """Accept requests, unless shutdown has started."""
        if self.state == "loading":
            self.state = "ready"

    def drain(self) -> None:
        """Accept no more requests. Open ones continue, or end with the tokens they have if the engine is paused."""
        if self.state == "ready" and self._engine is not None:
            self._engine.drain()
        if self.state in ("loading", "ready"):
            self.state = "draining"

    def abort_all(self) -> None:
        """Fail all open tickets."""
        for ticket in tuple(self._open):
            ticket.fail(_shutting_down())

    @property
    def num_open(self) -> int:
        """Open tickets."""
        return len(self._open)

    async def stop(self, timeout: float = 10.0) -> None:
        """Stop the engine between two steps; after `timeout` seconds, abandon its thread."""
        if self.state != "dead":
            self.state = "stopped"
        if self._engine is not None:
            await self._engine.stop(timeout)

    @property
    def engine(self) -> AsyncEngine[DrivenEngine]:
        """The engine; available after `start`."""
        assert self._engine is not None, "not started"
        return self._engine

    # ---- requests ---------------------------------------------------------------------------------------------------

    @contextmanager
    def submit(
        self, requests: Sequence[PromptRequest], names: Iterable[str] = (), enqueue: Enqueue | None = None
    ) -> Iterator[Ticket]:
        """Queue requests and yield the ticket that receives their deltas; leaving the block aborts open samples.

        `names` are the client's ids of the call, for `end_requests`. `enqueue` passes each request to the engine when
        it is its turn; without it all are passed at once. Raises `ApiError` unless the engine is ready.
        """
        engine = self._ready_engine()
        assert self.metrics is not None, "set before the engine is ready"
        ticket = Ticket(requests, names)
        receiver = self._open[ticket] = _TicketReceiver(ticket, self.metrics)
        try:
            with engine.submit(requests, receiver, () if enqueue is not None else None) as submission:
                if enqueue is not None:
                    enqueue(ticket, lambda _, indices: engine.enter(submission, indices))
                    self.wake()  # the metrics of waiting requests are updated after a turn
                yield ticket
        finally:
            ticket.close()
            self._open.pop(ticket, None)
            receiver.count_aborted("error" if self.state == "dead" else ticket.end_reason)

    async def call(self, work: Callable[[], Answer]) -> Answer:
        """Return `work()`, run on the engine's thread between two steps."""
        return await self._ready_engine().call(lambda _: work())

    async def watch(
        self, look: Callable[[], Answer | None], first: Callable[[], object] | None = None
    ) -> asyncio.Future[Answer]:
        """Call `look` on the engine's thread after each turn until it returns a result: `AsyncEngine.watch`."""
        return await self._ready_engine().watch(look, first)

    def wake(self) -> None:
        """Wake the engine's thread for a turn. Can be called from any thread."""
        if self._engine is not None:
            self._engine.wake()

    async def end_requests(
        self, names: Iterable[str] | None = None, *, first: Callable[[], object] | None = None
    ) -> int:
        """End open calls now, those with one of these ids or all; return the number of samples ended.

        Their samples end as "abort" with the tokens they have. `first` runs just before, on the engine's thread;
        requests submitted later are not ended.
        """
        engine = self._ready_engine()
        wanted = None if names is None else frozenset(map(bare_id, names))
        tickets = [ticket for ticket in self._open if wanted is None or ticket.names & wanted]
        for ticket in tickets:
            ticket.dispatch_now()
        return await engine.end_submissions([self._open[ticket] for ticket in tickets], first=first)

    def require_ready(self) -> None:
        """Raise `ApiError` 503 unless requests are accepted."""
        self._ready_engine()

    def _ready_engine(self) -> AsyncEngine[DrivenEngine]:
        """Return the engine. Raises `ApiError` 503 unless it is ready."""
        if self.state == "ready":
            assert self._engine is not None
            return self._engine
        if self.state == "loading":
            raise ApiError(503, "the model is being loaded", code="loading", headers={"retry-after": "1"})
        if self.state == "dead":
            raise ApiError(503, "the engine has failed", code="engine_dead", headers={"x-should-retry": "false"})
        raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})

    # ---- reports of the engine --------------------------------------------------------------------------------------

    def on_turn(self, turn: Turn) -> None:
        """Publish the counts of a step."""
        self.last_stats = self.after_step(turn.result.stats)
        if self.metrics is not None:
            self.metrics.step(self.last_stats)
            self.metrics.halted(turn.is_halted)

    def on_death(self, error: BaseException) -> None:
        """Refuse requests from now on."""
        self.state, self.failure = "dead", error
        if self.metrics is not None:
            self.metrics.engine_died()


class _TicketReceiver:
    """Passes the engine's reports to a ticket, and updates its times and the metrics."""

    def __init__(self, ticket: Ticket, metrics: Metrics) -> None:
        self._ticket = ticket
        self._metrics = metrics

    def on_started(self, prompt_index: int, sample_index: int, at: float) -> None:
        """Record when a sample first left the queue."""
        times = self._ticket.times[prompt_index][sample_index]
        times.started = times.started or at

    def on_delta(self, prompt_index: int, delta: Delta, at: float) -> None:
        """Count a delta's tokens and put it into the ticket."""
        ticket = self._ticket
        times = ticket.times[prompt_index][delta.sample_index]
        if delta.token_ids:
            _count_tokens(self._metrics, times, len(delta.token_ids), at)
        if delta.sample is not None:
            times.ended = at
            failed = delta.finish_reason == "abort" and delta.sample.stop_reason is not None
            reason = "error" if failed else delta.sample.finish_reason
            self._metrics.finished(_ended_record(ticket, prompt_index, times, reason, delta.sample))
        ticket.put(prompt_index, delta)

    def on_failure(self, error: Exception) -> None:
        """Fail the ticket."""
        if isinstance(error, BadRequest):
            self._ticket.fail(ApiError(400, str(error)))
        else:
            self._ticket.fail(error if isinstance(error, ApiError) else _unexpected(error))

    def count_aborted(self, reason: str) -> None:
        """Record the end of samples that were still open when the ticket was closed."""
        for prompt_index, row in enumerate(self._ticket.times):
            for times in row:
                if times.ended is None:
                    times.ended = time.monotonic()
                    self._metrics.finished(_ended_record(self._ticket, prompt_index, times, reason))


def _count_tokens(metrics: Metrics, times: SampleTimes, num_tokens: int, now: float) -> None:
    """Count new tokens of a sample; report its time to first token, or the gap since its last token."""
    times.num_tokens += num_tokens
    before, times.last_token = times.last_token, now
    if before is None:
        times.first_token = now
        metrics.first_token(now - times.arrived)
    else:
        metrics.token_gap(now - before, num_tokens)


def _ended_record(
    ticket: Ticket, prompt_index: int, times: SampleTimes, reason: str, sample: TrainingSample | None = None
) -> SampleRecord:
    """Return the metrics record of an ended sample; `sample` is None if the ticket was closed before its end."""
    assert times.ended is not None
    request, row = ticket.requests[prompt_index], ticket.times[prompt_index]
    return SampleRecord(
        prompt_tokens=len(request.prompt),
        cached_tokens=sample.num_cached_tokens if sample else 0,
        output_tokens=times.num_tokens,
        params_n=request.num_samples,
        params_max_tokens=request.params.max_tokens or 0,
        finish_reason=reason,
        num_preemptions=sample.num_preemptions if sample else 0,
        arrived=times.arrived,
        started=times.started,
        first_token=times.first_token,
        ended=times.ended,
        ends_request=all(one.ended is not None for one in row),
        longest_output=max(one.num_tokens for one in row),
    )


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def _unexpected(error: Exception) -> ApiError:
    """Log the failure of one request; return its client's error."""
    _log.error("a request could not be queued: %s: %s", type(error).__name__, error, exc_info=error)
    return internal_error()
