"""`Bridge`: the engine in its thread, coroutines outside. Two queues join them; what else is shared is only read there.

Down go commands (callables that the thread runs between two steps), up go the results of steps. Whatever escapes the
engine is a bug: it is logged, told to every waiter, and from then on everybody is refused at once.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from nano_inference.server.clocks import count_tokens, ended_record
from nano_inference.server.errors import ApiError, internal_error
from nano_inference.server.served import Observer, Opened
from nano_inference.server.ticket import Ask, Ticket, bare_name
from nano_inference.types import BadRequest, Delta, StepResult, StepStats

State = Literal["loading", "ready", "draining", "stopped", "dead"]
Answer = TypeVar("Answer")

_WATCH_S = 1.0
"""How often the watchdog looks whether the engine still steps."""
_log = logging.getLogger("nano_inference.server")


class _Stop(Exception):
    """Ends the thread."""


class Bridge:
    """Owns the engine's thread. All methods are the event loop's, unless they begin with `_run`."""

    def __init__(self, *, step_timeout: float) -> None:
        self.state: State = "loading"
        self.failure: BaseException | None = None
        """What the engine died of, or could not be loaded for."""
        self.last_stats: StepStats | None = None
        self._step_timeout = step_timeout
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._tickets: dict[int, tuple[Ticket, int]] = {}
        """The engine's request id -> whose it is, and which of the ticket's prompts."""
        self._open: set[Ticket] = set()
        self._asked: set[asyncio.Future[Any]] = set()
        """What `call` and `watch` have not answered yet."""
        self._watches: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        """What the thread looks for after every turn, and who is told; the thread's own."""
        self._is_draining = False
        """Whether the thread was told that the server ends; the thread's own."""
        self._observer: Observer | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._busy_since: float | None = None
        """When the thread began what it does now; None while it waits. Written by the thread."""

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, open_engine: Callable[[], Opened]) -> Opened:
        """Open the engine in the thread that will drive it; return when it can be asked. Raises what opening raised."""
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Opened] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(open_engine, future), name="engine", daemon=True)
        self._thread.start()
        try:
            opened = await future
        except Exception as error:
            self.state, self.failure = "dead", error
            raise
        self._observer = opened.observer
        self._watchdog = self._loop.create_task(self._watch())
        return opened

    def open_doors(self) -> None:
        """Take requests, unless the server began to shut down meanwhile."""
        if self.state == "loading":
            self.state = "ready"

    def drain(self) -> None:
        """Take no more requests; those that are open go on, unless no step may run: those end with what they have."""
        was_ready = self.state == "ready"
        if self.state in ("loading", "ready"):
            self.state = "draining"
        if was_ready:
            self._commands.put(self._run_begin_drain)

    def abort_all(self) -> None:
        """Fail everything that is open."""
        for ticket in tuple(self._open):
            ticket.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

    @property
    def num_open(self) -> int:
        """Tickets that are not closed yet."""
        return len(self._open)

    async def stop(self, timeout: float = 10.0) -> None:
        """End the thread between two steps; a thread that is stuck is left behind."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self.state != "dead":
            self.state = "stopped"
        self._commands.put(_raise_stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout)
        self._fail_asked(ApiError(503, "the server is shutting down", code="shutting_down"))

    # ---- asking -----------------------------------------------------------------------------------------------------

    @contextmanager
    def submit(self, asks: Sequence[Ask], names: Iterable[str] = ()) -> Iterator[Ticket]:
        """Queue requests, all or none, and give the ticket to wait with; leaving the block aborts what is still open.

        `names` are what the client calls the whole of them, for `end_requests`. Raises `ApiError` unless the engine is
        ready.
        """
        self.require_ready()
        ticket = Ticket(asks, names)
        self._open.add(ticket)
        self._commands.put(lambda: self._run_submit(ticket))
        try:
            yield ticket
        finally:
            self._close(ticket)

    async def call(self, work: Callable[[], Answer]) -> Answer:
        """Run something on the engine's thread, between two steps, and return what it returns."""
        self.require_ready()
        done: asyncio.Future[Answer] = self._ask()
        self._commands.put(lambda: self._run_call(work, done))
        return await done

    async def watch(
        self, look: Callable[[], Answer | None], first: Callable[[], object] | None = None
    ) -> asyncio.Future[Answer]:
        """Let the engine's thread look for something after every turn until it is found; return its future.

        `first` is run there before, and what it raises is raised here; `look` returns None until it finds something, or
        raises. To cancel the future ends the looking. An engine that has nothing to do takes a turn after each command
        only: whoever changes what is looked for from elsewhere has to `wake` it.
        """
        found: asyncio.Future[Answer] = self._ask()

        def begin() -> None:
            if first is not None:
                first()
            if not found.cancelled():
                self._watches[found] = look

        def forget(_: object) -> None:
            if found.cancelled():
                self._commands.put(lambda: self._run_forget(found))

        found.add_done_callback(forget)
        try:
            await self.call(begin)
        except BaseException:
            found.cancel()
            raise
        return found

    def wake(self) -> None:
        """Let the engine's thread take a turn, from whatever thread."""
        self._commands.put(_nothing)

    async def end_requests(
        self, names: Iterable[str] | None = None, *, first: Callable[[], object] | None = None
    ) -> int:
        """End open requests now, those with one of these names or all; return how many samples that were.

        Their tickets get the samples with what they have, as "abort". `first` is run just before, on the engine's
        thread: what is submitted later is not ended.
        """
        wanted = None if names is None else frozenset(map(bare_name, names))
        tickets = [ticket for ticket in self._open if wanted is None or ticket.names & wanted]

        def end() -> int:
            if first is not None:
                first()
            return self._run_end([one for ticket in tickets for one in ticket.queued_ids])

        return await self.call(end)

    def _ask(self) -> asyncio.Future[Any]:
        """Return the future of something that the thread is to answer; the engine's end answers it, too."""
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return future

    def _fail_asked(self, error: Exception) -> None:
        for future in tuple(self._asked):
            if not future.done():
                future.set_exception(error)

    def require_ready(self) -> None:
        """Raise the `ApiError` that says why no request is taken now."""
        if self.state == "ready":
            return
        if self.state == "loading":
            raise ApiError(503, "the model is being loaded", code="loading", headers={"retry-after": "1"})
        if self.state == "dead":
            raise ApiError(503, "the engine has failed", code="engine_dead", headers={"x-should-retry": "false"})
        raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})

    def _close(self, ticket: Ticket) -> None:
        """Forget a ticket; whatever has not ended is aborted at the next step boundary."""
        ticket.is_closed = True
        self._open.discard(ticket)
        self._count_aborted(ticket)
        if ticket.request_ids is not None:
            ids = ticket.request_ids
            for one in ids:
                self._tickets.pop(one, None)
            self._commands.put(lambda: self._run_collect(ids))

    def _count_aborted(self, ticket: Ticket) -> None:
        """Count the samples that nobody waits for any more."""
        reason = "error" if self.state == "dead" else ticket.end_reason
        for prompt_index, clocks in enumerate(ticket.clocks):
            for clock in clocks:
                if clock.ended is None:
                    clock.ended = time.monotonic()
                    if self._observer is not None:
                        self._observer.finished(ended_record(ticket, prompt_index, clock, reason))

    # ---- on the event loop, called by the thread --------------------------------------------------------------------

    def _hear(self, news: Callable[[], None]) -> None:
        """Take news from the thread. What fails here would lose a delta: it is the end, as in the thread itself."""
        try:
            news()
        except Exception as error:
            self._die(error)

    def _on_submitted(self, ticket: Ticket, ids: tuple[int, ...]) -> None:
        if ticket.is_closed:
            self._commands.put(lambda: self._run_collect(ids))
            return
        ticket.request_ids = ids
        self._tickets.update((one, (ticket, index)) for index, one in enumerate(ids))

    def _hand_out(self, deltas: Iterable[Delta], now: float) -> None:
        for delta in deltas:
            if delta.request_id in self._tickets:
                self._deliver(*self._tickets[delta.request_id], delta, now)

    def _on_step(self, result: StepResult, began: float, ended: float, is_halted: bool) -> None:
        """Hand out what a step gave, and count it."""
        self.last_stats = result.stats
        for request_id, sample_index in result.started:
            if request_id in self._tickets:
                ticket, prompt_index = self._tickets[request_id]
                clock = ticket.clocks[prompt_index][sample_index]
                clock.started = clock.started or began
        self._hand_out(result.deltas, ended)
        if self._observer is not None:
            self._observer.step(result.stats)
            self._observer.halted(is_halted)

    def _deliver(self, ticket: Ticket, prompt_index: int, delta: Delta, now: float) -> None:
        clock = ticket.clocks[prompt_index][delta.sample_index]
        if delta.token_ids and self._observer is not None:
            count_tokens(self._observer, clock, len(delta.token_ids), now)
        if delta.sample is not None:
            clock.ended = now
            gave_up = delta.finish_reason == "abort" and delta.sample.stop_reason is not None
            reason = "error" if gave_up else delta.sample.finish_reason
            if self._observer is not None:
                self._observer.finished(ended_record(ticket, prompt_index, clock, reason, delta.sample))
        ticket.put(prompt_index, delta)

    def _die(self, error: BaseException) -> None:
        """Tell everybody that the engine is no more."""
        if self.state == "dead":
            return
        self.state, self.failure = "dead", error
        _log.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
        for ticket in tuple(self._open):
            ticket.fail(internal_error())
        self._fail_asked(internal_error())
        if self._observer is not None:
            self._observer.engine_died()

    async def _watch(self) -> None:
        """Notice an engine that has stopped stepping, and say where it stands.

        Looks are counted, not the clock: in a process that was frozen (`docker pause`) neither could go on.
        """
        since, waited = None, 0.0
        while self.state not in ("stopped", "dead"):
            pause = min(_WATCH_S, self._step_timeout / 2)
            await asyncio.sleep(pause)
            is_same = since is not None and since == self._busy_since
            since, waited = self._busy_since, waited + pause if is_same else 0.0
            if self._thread is not None and not self._thread.is_alive():
                self._die(RuntimeError("the engine's thread has ended"))
            elif waited >= self._step_timeout:
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                self._die(TimeoutError(f"a step has not ended after {self._step_timeout:g} seconds"))

    # ---- on the engine's thread -------------------------------------------------------------------------------------

    def _run(self, open_engine: Callable[[], Opened], future: asyncio.Future[Opened]) -> None:
        """The thread: open the engine, then commands and steps in turns until told to stop."""
        try:
            opened = open_engine()
        except BaseException as error:
            told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} while loading")
            self._tell(lambda: None if future.done() else future.set_exception(told))
            return
        self._engine = opened.engine
        self._tell(lambda: None if future.done() else future.set_result(opened))
        try:
            while True:
                self._run_turn()
        except _Stop:
            self._engine.shutdown()
        except BaseException as error:
            failure = error
            self._tell(lambda: self._die(failure))

    def _run_turn(self) -> None:
        """Run the commands that wait, then one step; without work, wait for a command."""
        if not self._engine.has_pending():
            self._busy_since = None
            command = self._commands.get()
            self._busy_since = time.monotonic()
            command()
        self._busy_since = time.monotonic()
        self._run_commands()
        began = time.monotonic()
        result = self._engine.tick()
        ended = time.monotonic()
        is_halted = self._engine.is_halted
        self._tell(lambda: self._on_step(result, began, ended, is_halted))
        self._run_end_stranded()
        self._run_watches()

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _run_submit(self, ticket: Ticket) -> None:
        """Queue a ticket's requests; a refusal fails the ticket and harms nobody else."""
        ids: list[int] = []
        try:
            for ask in () if ticket.is_closed else ticket.asks:
                ids.append(
                    self._engine.add_request(
                        ask.prompt,
                        ask.params,
                        ask.num_samples,
                        salt=ask.salt,
                        make_matcher=ask.make_matcher,
                        program=ask.program,
                        beginning=ask.beginning,
                        claim=True,
                    )
                )
        except Exception as error:  # of one request: a matcher that cannot be built; a torn engine fails its next step
            self._run_collect(tuple(ids))
            refusal = ApiError(400, str(error)) if isinstance(error, BadRequest) else _unexpected(error)
            self._tell(lambda: ticket.fail(refusal))
            return
        ticket.queued_ids = tuple(ids)
        self._tell(lambda: self._on_submitted(ticket, tuple(ids)))

    def _run_collect(self, ids: tuple[int, ...]) -> None:
        for one in ids:
            self._engine.collect(one)

    def _run_end(self, ids: Sequence[int]) -> int:
        """End requests, and let their tickets have the samples."""
        deltas = self._engine.end_requests(ids)
        now = time.monotonic()
        self._tell(lambda: self._hand_out(deltas, now))
        return len(deltas)

    def _run_begin_drain(self) -> None:
        """From now on, end whatever can no longer go on: nobody is let in any more who could resume."""
        self._is_draining = True

    def _run_end_stranded(self) -> None:
        """End everything when no step may run."""
        if self._is_draining and self._engine.is_halted:
            deltas = self._engine.end_requests()
            now = time.monotonic()
            self._tell(lambda: self._hand_out(deltas, now))

    def _run_watches(self) -> None:
        """Look for what is waited for, and tell of what is there."""
        for found, look in tuple(self._watches.items()):
            try:
                answer = look()
            except Exception as error:
                self._run_forget(found)
                self._tell_failure(found, error)
            else:
                if answer is not None:
                    self._run_forget(found)
                    self._tell_answer(found, answer)

    def _run_forget(self, found: asyncio.Future[Any]) -> None:
        self._watches.pop(found, None)

    def _run_call(self, work: Callable[[], Answer], done: asyncio.Future[Answer]) -> None:
        try:
            answer = work()
        except Exception as error:
            self._tell_failure(done, error)
        else:
            self._tell_answer(done, answer)

    def _tell_answer(self, done: asyncio.Future[Any], answer: object) -> None:
        self._tell(lambda: None if done.done() else done.set_result(answer))

    def _tell_failure(self, done: asyncio.Future[Any], error: Exception) -> None:
        self._tell(lambda: None if done.done() else done.set_exception(error))

    def _tell(self, news: Callable[[], None]) -> None:
        """Run something on the event loop; nothing when it has gone."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._hear, news)
        except RuntimeError:
            _log.debug("the event loop has closed")


def _raise_stop() -> None:
    raise _Stop


def _nothing() -> None:
    """A command that only lets the thread take a turn."""


def _unexpected(error: Exception) -> ApiError:
    """Log what only one request failed of; return what its client is told."""
    _log.error("a request could not be queued: %s: %s", type(error).__name__, error, exc_info=error)
    return internal_error()
