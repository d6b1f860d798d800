"""`EngineLink`: the server's view of an `AsyncEngine`, with a state, tickets, counts and refusals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from nano_inference.async_engine import AsyncEngine
from nano_inference.engine_thread import DrivenEngine, Turn
from nano_inference.server.clocks import count_tokens, ended_record
from nano_inference.server.dispatch import Enqueue
from nano_inference.server.errors import ApiError, internal_error
from nano_inference.server.served import LoadedModel, Observer
from nano_inference.server.ticket import PromptRequest, Ticket, bare_name
from nano_inference.types import BadRequest, Delta, StepStats

State = Literal["loading", "ready", "draining", "stopped", "dead"]
Answer = TypeVar("Answer")

_log = logging.getLogger("nano_inference.server")


class EngineLink:
    """Owns the server's engine. All methods are called on the event loop."""

    def __init__(self, *, step_timeout: float) -> None:
        self.state: State = "loading"
        self.failure: BaseException | None = None
        """What the engine failed of, or could not be loaded for."""
        self.last_stats: StepStats | None = None
        self.after_step: Callable[[StepStats], StepStats] = _unchanged
        """Called after each step; returns the counts to publish."""
        self._step_timeout = step_timeout
        self._engine: AsyncEngine[DrivenEngine] | None = None
        self._open: dict[Ticket, _TicketReceiver] = {}
        self._observer: Observer | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, open_engine: Callable[[], LoadedModel]) -> LoadedModel:
        """Open the engine in the thread that will drive it; return when it can be asked. Raises what opening raised."""
        found: list[LoadedModel] = []

        def open_it() -> DrivenEngine:
            found.append(open_engine())
            return found[0].engine

        self._engine = AsyncEngine(open_it, observer=self, step_timeout=self._step_timeout, end_error=_error_at_the_end)
        try:
            await self._engine.start()
        except Exception as error:
            self.state, self.failure = "dead", error
            raise
        self._observer = found[0].observer
        return found[0]

    def start_accepting(self) -> None:
        """Take requests, unless the server began to shut down meanwhile."""
        if self.state == "loading":
            self.state = "ready"

    def drain(self) -> None:
        """Take no more requests. Those that are open continue, or end with what they have when no step may run."""
        if self.state == "ready" and self._engine is not None:
            self._engine.drain()
        if self.state in ("loading", "ready"):
            self.state = "draining"

    def abort_all(self) -> None:
        """Fail everything that is open."""
        for ticket in tuple(self._open):
            ticket.fail(_shutting_down())

    @property
    def num_open(self) -> int:
        """Tickets that are not closed yet."""
        return len(self._open)

    async def stop(self, timeout: float = 10.0) -> None:
        """End the engine between two steps; a thread that is stuck is left behind."""
        if self.state != "dead":
            self.state = "stopped"
        if self._engine is not None:
            await self._engine.stop(timeout)

    @property
    def engine(self) -> AsyncEngine[DrivenEngine]:
        """The engine in its thread, once `start` was called."""
        assert self._engine is not None, "not started"
        return self._engine

    # ---- asking -----------------------------------------------------------------------------------------------------

    @contextmanager
    def submit(
        self, requests: Sequence[PromptRequest], names: Iterable[str] = (), gate: Enqueue | None = None
    ) -> Iterator[Ticket]:
        """Queue requests and give the ticket to wait with; leaving the block aborts what is still open.

        `names` are what the client calls the whole of them, for `end_requests`. `gate` enters them when their turn has
        come; without one all are entered at once. Raises `ApiError` unless the engine is ready.
        """
        engine = self._ready_engine()
        ticket = Ticket(requests, names)
        receiver = self._open[ticket] = _TicketReceiver(ticket, self._observer)
        try:
            with engine.submit(requests, receiver, () if gate is not None else None) as submission:
                if gate is not None:
                    gate(ticket, lambda _, indices: engine.enter(submission, indices))
                    self.wake()  # what waits is counted after a turn
                yield ticket
        finally:
            ticket.close()
            self._open.pop(ticket, None)
            receiver.count_aborted("error" if self.state == "dead" else ticket.end_reason)

    async def call(self, work: Callable[[], Answer]) -> Answer:
        """Run something on the engine's thread, between two steps, and return what it returns."""
        return await self._ready_engine().call(lambda _: work())

    async def watch(
        self, look: Callable[[], Answer | None], first: Callable[[], object] | None = None
    ) -> asyncio.Future[Answer]:
        """Let the engine's thread look for something after every turn: `AsyncEngine.watch`."""
        return await self._ready_engine().watch(look, first)

    def wake(self) -> None:
        """Let the engine's thread take a turn. Can be called from any thread."""
        if self._engine is not None:
            self._engine.wake()

    async def end_requests(
        self, names: Iterable[str] | None = None, *, first: Callable[[], object] | None = None
    ) -> int:
        """End open requests now, those with one of these names or all; return how many samples that were.

        Their tickets get the samples with what they have, as "abort". `first` is run just before, on the engine's
        thread: what is submitted later is not ended.
        """
        engine = self._ready_engine()
        wanted = None if names is None else frozenset(map(bare_name, names))
        tickets = [ticket for ticket in self._open if wanted is None or ticket.names & wanted]
        for ticket in tickets:
            ticket.dispatch_now()
        return await engine.end_submissions([self._open[ticket] for ticket in tickets], first=first)

    def require_ready(self) -> None:
        """Raise the `ApiError` that says why no request is taken now."""
        self._ready_engine()

    def _ready_engine(self) -> AsyncEngine[DrivenEngine]:
        """Return the engine, or raise the `ApiError` that says why no request is taken now."""
        if self.state == "ready":
            assert self._engine is not None
            return self._engine
        if self.state == "loading":
            raise ApiError(503, "the model is being loaded", code="loading", headers={"retry-after": "1"})
        if self.state == "dead":
            raise ApiError(503, "the engine has failed", code="engine_dead", headers={"x-should-retry": "false"})
        raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})

    # ---- what the engine reports ------------------------------------------------------------------------------------

    def on_turn(self, turn: Turn) -> None:
        """Count a step."""
        self.last_stats = self.after_step(turn.result.stats)
        if self._observer is not None:
            self._observer.step(self.last_stats)
            self._observer.halted(turn.is_halted)

    def on_death(self, error: BaseException) -> None:
        """Refuse everybody from now on."""
        self.state, self.failure = "dead", error
        if self._observer is not None:
            self._observer.engine_died()


class _TicketReceiver:
    """Puts what the engine reports into a ticket, and counts it."""

    def __init__(self, ticket: Ticket, observer: Observer | None) -> None:
        self._ticket = ticket
        self._observer = observer

    def on_started(self, prompt_index: int, sample_index: int, at: float) -> None:
        """Note when a sample left the queue for the first time."""
        clock = self._ticket.times[prompt_index][sample_index]
        clock.started = clock.started or at

    def on_delta(self, prompt_index: int, delta: Delta, at: float) -> None:
        """Count a delta's tokens, and put it into the ticket."""
        ticket, observer = self._ticket, self._observer
        clock = ticket.times[prompt_index][delta.sample_index]
        if delta.token_ids and observer is not None:
            count_tokens(observer, clock, len(delta.token_ids), at)
        if delta.sample is not None:
            clock.ended = at
            gave_up = delta.finish_reason == "abort" and delta.sample.stop_reason is not None
            reason = "error" if gave_up else delta.sample.finish_reason
            if observer is not None:
                observer.finished(ended_record(ticket, prompt_index, clock, reason, delta.sample))
        ticket.put(prompt_index, delta)

    def on_failure(self, error: Exception) -> None:
        """Fail the ticket."""
        if isinstance(error, BadRequest):
            self._ticket.fail(ApiError(400, str(error)))
        else:
            self._ticket.fail(error if isinstance(error, ApiError) else _unexpected(error))

    def count_aborted(self, reason: str) -> None:
        """Count the samples that have not ended, when the caller has left."""
        for prompt_index, clocks in enumerate(self._ticket.times):
            for clock in clocks:
                if clock.ended is None:
                    clock.ended = time.monotonic()
                    if self._observer is not None:
                        self._observer.finished(ended_record(self._ticket, prompt_index, clock, reason))


def _error_at_the_end(cause: BaseException | None) -> ApiError:
    """Return what clients get when the engine ends: it failed of `cause`, or was stopped."""
    return _shutting_down() if cause is None else internal_error()


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def _unchanged(stats: StepStats) -> StepStats:
    return stats


def _unexpected(error: Exception) -> ApiError:
    """Log what only one request failed of; return what its client gets."""
    _log.error("a request could not be queued: %s: %s", type(error).__name__, error, exc_info=error)
    return internal_error()
