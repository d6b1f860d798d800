"""`Calls`: one call into an engine at a time, and the requests that end with a call or with a stream."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from nano_inference.exclusive import Exclusive
from nano_inference.state import EngineState
from nano_inference.types import Delta, EngineBusy, TrainingSample

Result = TypeVar("Result")
Given = ParamSpec("Given")

_log = logging.getLogger(__name__)


def as_call(method: Callable[Concatenate[Any, Given], Result]) -> Callable[Concatenate[Any, Given], Result]:
    """Run a method as a call of its object's `calls`: it raises `EngineBusy` while another thread's call runs."""

    @wraps(method)
    def call(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        calls: Calls = self.calls
        return calls.run(lambda: method(self, *args, **kwargs))

    return call


class DeltaStream(Iterator[Delta]):
    """Owns a claimed request, which ends when the stream is closed, exhausted, or fails in `next`.

    A `next` that raises `EngineBusy` changes nothing.
    """

    _is_closed = True
    """For a stream whose constructor was interrupted."""

    def __init__(self, take: Callable[[], Delta | None], end: Callable[[], None]) -> None:
        """`take` runs steps and returns the next delta, or None at the end; `end` ends the request."""
        self._take = take
        self._end = end
        self._is_closed = False

    def __next__(self) -> Delta:
        """Return the next delta. Raises `EngineBusy`, and what a step raises."""
        try:
            delta = None if self._is_closed else self._take()
            if delta is not None:
                return delta
            self.close()
            raise StopIteration
        except (EngineBusy, StopIteration):
            raise
        except BaseException:  # an interrupt may have lost a delta: later ones must not follow
            self.close()
            raise

    def close(self) -> None:
        """End the request unless it has ended. Can be called from anywhere, inside a step too, and repeatedly."""
        if not self._is_closed:
            self._end()
            self._is_closed = True

    def __del__(self) -> None:
        self.close()


class Calls:
    """Owns the right to call an engine, and tracks the requests owned by the running call and by streams.

    Nothing depends on an `except` or a `finally` being reached: requests that an interrupted call leaves open end at
    the start of the next call.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._running_call = Exclusive(
            lambda: EngineBusy(
                "another thread is using the engine: one thread drives it at a time; AsyncEngine serves several callers"
            )
        )
        self._owned: set[int] = set()
        """Requests of the running call."""
        self._streams: dict[weakref.ref[DeltaStream], int] = {}
        """Open streams and their requests."""
        self._dead_streams: set[weakref.ref[DeltaStream]] = set()
        """Streams that were garbage collected."""
        self._dropped: set[int] = set()
        """Requests of closed streams that are still to be aborted."""

    def run(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, run as one call: until it returns, calls from other threads raise `EngineBusy`.

        `work` may call the engine. Requests that it owns are aborted and forgotten when it ends.
        """
        if self._running_call.is_running_here():
            return work()
        return self._running_call.run(lambda: self._run_outermost(work))

    def own(self, request_id: int) -> None:
        """Make a request end with the running call."""
        self._owned.add(request_id)

    def collect(self, request_id: int) -> list[TrainingSample]:
        """Abort and forget a request that is claimed or a call's; return its samples in order."""

        def close() -> list[TrainingSample]:
            self._state.end((request_id,))
            self._owned.discard(request_id)
            return self._state.requests.close(request_id)

        return self._state.change(close)

    def stream(self, request_id: int, take: Callable[[], Delta | None]) -> DeltaStream:
        """Return a stream of a claimed request's deltas; the request ends with the stream, and not with its call."""
        stream = DeltaStream(partial(self.run, take), partial(self._drop, request_id))
        self._streams[weakref.ref(stream, self._dead_streams.add)] = request_id
        self._owned.discard(request_id)
        return stream

    def end_dropped(self) -> None:
        """Abort and forget the requests of closed and garbage-collected streams."""
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
        """Run a call that is not nested in another; first end what an interrupted call left open."""
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
        """End a stream's request: now, or at the next step boundary while another call or a transaction runs.

        Called in any thread, by the garbage collector too.
        """
        self._dropped.add(request_id)
        if self._state.is_changing:
            return
        try:
            self.run(self.end_dropped)
        except EngineBusy:
            _log.debug("request %d is aborted at the end of the running step", request_id)
