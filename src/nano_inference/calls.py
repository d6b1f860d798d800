"""`Calls`: one call into an engine at a time, and the requests that end with a call or with a stream."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from nano_inference.books import Books
from nano_inference.delta_stream import DeltaStream
from nano_inference.exclusive import Exclusive
from nano_inference.types import Delta, EngineBusy, TrainingSample

Result = TypeVar("Result")
Given = ParamSpec("Given")

_log = logging.getLogger(__name__)


class HasCalls(Protocol):
    """What `as_call` needs of an object whose methods it wraps."""

    @property
    def calls(self) -> Calls:
        """Whose turns its methods take."""


Owner = TypeVar("Owner", bound=HasCalls)


def as_call(method: Callable[Concatenate[Owner, Given], Result]) -> Callable[Concatenate[Owner, Given], Result]:
    """Make a method refuse a second thread, with `EngineBusy`, while another call runs."""

    @wraps(method)
    def call(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self.calls.run(lambda: method(self, *args, **kwargs))

    return call


class Calls:
    """Owns an engine's turn, and knows which requests belong to the call that runs and which to a stream.

    Nothing here depends on an `except` or a `finally` being reached: what an interrupted call left open is ended at
    the beginning of the next one.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._turn = Exclusive(_in_use)
        self._owned: set[int] = set()
        """Requests of the call that runs."""
        self._streams: dict[weakref.ref[DeltaStream], int] = {}
        """Streams that were given out, and their requests."""
        self._dead_streams: set[weakref.ref[DeltaStream]] = set()
        """Streams that were garbage collected."""
        self._dropped: set[int] = set()
        """Requests of streams that were closed while they could not be aborted, such as inside a step."""

    def run(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, run as one call: until it returns, calls from other threads raise `EngineBusy`.

        `work` may call the engine. What it owns is aborted and forgotten at its end.
        """
        if self._turn.is_running_here():
            return work()
        return self._turn.run(lambda: self._run_outermost(work))

    def own(self, request_id: int) -> None:
        """Let a request end with the call that runs."""
        self._owned.add(request_id)

    def collect(self, request_id: int) -> list[TrainingSample]:
        """Return a claimed request's samples, in order, and forget it; what has not ended is aborted."""

        def close() -> list[TrainingSample]:
            self._books.end((request_id,))
            self._owned.discard(request_id)
            return self._books.ledger.close(request_id)

        return self._books.change(close)

    def stream(self, request_id: int, take: Callable[[], Delta | None]) -> DeltaStream:
        """Return a stream of a claimed request's deltas, which `take` gives; the request ends with the stream."""
        stream = DeltaStream(partial(self.run, take), partial(self._drop, request_id))
        self._streams[weakref.ref(stream, self._dead_streams.add)] = request_id
        return stream

    def end_dropped(self) -> None:
        """Abort and forget the requests of streams that were closed or garbage collected."""
        if not (self._dead_streams or self._dropped):
            return
        for stream in tuple(self._dead_streams):
            request_id = self._streams.get(stream)
            if request_id is not None:
                self._dropped.add(request_id)
            self._streams.pop(stream, None)
            self._dead_streams.discard(stream)
        for request_id in tuple(self._dropped):
            self.collect(request_id)
            self._dropped.discard(request_id)

    def _run_outermost(self, work: Callable[[], Result]) -> Result:
        """Run a call that is inside no other. What an earlier one owned is ended first: its end was interrupted."""
        self._end_owned()
        try:
            return work()
        finally:
            self._end_owned()

    def _end_owned(self) -> None:
        """Abort and forget the requests of a call that is over, and of closed streams."""
        for request_id in tuple(self._owned):
            self.collect(request_id)
        self.end_dropped()

    def _drop(self, request_id: int) -> None:
        """End a stream's request: now, or at the next step boundary while a step or another thread's call runs.

        A stream may be closed anywhere, by the garbage collector in any thread.
        """
        self._dropped.add(request_id)
        if self._books.is_changing:
            return
        try:
            self.run(self.end_dropped)
        except EngineBusy:
            _log.debug("request %d is aborted at the end of the step that runs", request_id)


def _in_use() -> EngineBusy:
    return EngineBusy(
        "another thread is using the engine: one thread drives it at a time; AsyncEngine serves several callers"
    )
