"""`EngineLink`: the server's state beside its `AsyncEngine`: who may submit, metrics, errors; `LoadedModel`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from nano_inference.async_engine import AsyncEngine, DrivenEngine, Turn
from nano_inference.core.outbox import Outbox
from nano_inference.server.dispatch import Dispatcher
from nano_inference.server.errors import ApiError, internal_error
from nano_inference.server.metrics import Metrics
from nano_inference.server.model import ServedModel
from nano_inference.server.security import Client
from nano_inference.types import Delta, EngineRequest, StepStats

State = Literal["loading", "ready", "draining", "stopped", "dead"]

MAX_UNREAD = 4096  # limit of unread tokens per sample of a client


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    engine: DrivenEngine
    metrics: Metrics
    model: ServedModel
    step_tokens: int = 256  # maximum tokens of one step


class EngineLink:
    """Owns the server's engine. All methods are called on the event loop."""

    def __init__(self, *, step_timeout: float) -> None:
        self.state: State = "loading"
        self.failure: BaseException | None = None  # the error that stopped the engine or its loading
        self.last_stats: StepStats | None = None  # counts of the latest step, with the samples that wait for their turn
        self.metrics: Metrics | None = None  # set by `start`
        self._dispatcher: Dispatcher | None = None
        self._step_timeout = step_timeout
        self._engine: AsyncEngine[DrivenEngine] | None = None
        self._open: dict[Outbox, frozenset[str]] = {}  # open outbox -> ids by which clients can abort it

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

    def start_accepting(self, dispatcher: Dispatcher | None = None) -> None:
        """Accept requests, in the dispatcher's order, unless shutdown has started."""
        self._dispatcher = dispatcher
        if self.state == "loading":
            self.state = "ready"

    def drain(self) -> None:
        """Accept no more requests. Open ones continue, or end with the tokens they have if the engine is paused."""
        if self.state == "ready" and self._engine is not None:
            self._engine.drain()
        if self.state in ("loading", "ready"):
            self.state = "draining"

    def abort_all(self) -> None:
        for outbox in tuple(self._open):
            outbox.fail(_shutting_down())

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def stop(self, timeout: float = 10.0) -> None:
        """Stop the engine between two steps; after `timeout` seconds, abandon its thread."""
        if self.state != "dead":
            self.state = "stopped"
        if self._engine is not None:
            await self._engine.stop(timeout)

    @property
    def engine(self) -> AsyncEngine[DrivenEngine]:
        """The engine. Raises `ApiError` 503 unless requests are accepted."""
        if self.state == "ready":
            assert self._engine is not None
            return self._engine
        if self.state == "loading":
            raise ApiError(503, "the model is being loaded", code="loading", headers={"retry-after": "1"})
        if self.state == "dead":
            raise ApiError(503, "the engine has failed", code="engine_dead", headers={"x-should-retry": "false"})
        raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})

    # ---- requests ---------------------------------------------------------------------------------------------------

    @contextmanager
    def submit(
        self, requests: Sequence[EngineRequest], names: Iterable[str] = (), client: Client | None = None
    ) -> Iterator[Outbox]:
        """Queue requests and yield their outbox; leaving the block aborts open samples.

        `names` are the client's ids of the generation, for `end_requests`. With a client, each request is passed to the
        engine when it is its turn; without one, all at once. Raises `ApiError` unless the engine is ready.
        """
        engine, dispatcher = self.engine, None if client is None else self._dispatcher
        with engine.submit(requests, later=dispatcher is not None) as outbox:
            self._open[outbox] = frozenset(map(bare_id, names))
            if dispatcher is not None and client is not None:
                dispatcher.add(outbox, client, lambda index: engine.enter(outbox, (index,)))
                engine.wake()  # the metrics of waiting requests are updated after a turn
            try:
                yield outbox
            finally:
                del self._open[outbox]
                if dispatcher is not None:
                    dispatcher.remove(outbox)
                self._count_open(outbox)

    async def end_requests(
        self, names: Iterable[str] | None = None, *, first: Callable[[DrivenEngine], object] | None = None
    ) -> int:
        """End open generations now, those with one of these ids or all; return the number of samples ended.

        Their samples end as "abort" with the tokens they have. `first` runs just before, on the engine's thread;
        requests submitted later are not ended.
        """
        engine, wanted = self.engine, None if names is None else frozenset(map(bare_id, names))
        outboxes = [one for one, own in self._open.items() if wanted is None or own & wanted]
        if self._dispatcher is not None:
            for outbox in outboxes:
                self._dispatcher.enter_all(outbox)
        return await engine.abort(outboxes, first=first)

    # ---- reports of the engine --------------------------------------------------------------------------------------

    def on_delta(self, outbox: Outbox, prompt_index: int, delta: Delta, last_token: float | None) -> None:
        """Count a delta's tokens; fail an outbox whose client has too many unread ones."""
        assert self.metrics is not None, "set before the engine is ready"
        times = outbox.times[prompt_index][delta.sample_index]
        if delta.token_ids and times.last_token is not None:
            if last_token is None:
                self.metrics.first_token(times.last_token - outbox.arrived)
            else:
                self.metrics.token_gap(times.last_token - last_token, len(delta.token_ids))
        if delta.sample is not None:
            sample = delta.sample
            failed = delta.finish_reason == "abort" and sample.stop_reason is not None
            self.metrics.finished(
                outbox.requests[prompt_index],
                outbox.times[prompt_index],
                times,
                "error" if failed else sample.finish_reason,
                num_cached=sample.num_cached_tokens,
                num_preemptions=sample.num_preemptions,
            )
        if outbox.num_unread > MAX_UNREAD * outbox.num_samples:
            outbox.fail(ApiError(503, "the client reads too slowly"))

    def on_turn(self, turn: Turn) -> None:
        """Publish the counts of a step, and pass waiting requests to the engine."""
        stats = turn.result.stats
        self.last_stats = stats if self._dispatcher is None else self._dispatcher.after_step(stats)
        if self.metrics is not None:
            self.metrics.step(self.last_stats)
            self.metrics.halted(turn.is_halted)

    def on_death(self, error: BaseException) -> None:
        self.state, self.failure = "dead", error
        if self.metrics is not None:
            self.metrics.engine_died()

    def _count_open(self, outbox: Outbox) -> None:
        assert self.metrics is not None, "set before the engine is ready"
        reason = "error" if self.state == "dead" else outbox.end_reason
        for request, row in zip(outbox.requests, outbox.times, strict=True):
            for times in row:
                if times.ended is None:
                    times.ended = time.monotonic()
                    self.metrics.finished(request, row, times, reason)


def bare_id(request_id: str) -> str:
    """Return a request id without the prefix that replies add."""
    return request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
