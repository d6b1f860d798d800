"""`DeltaStream`: one request's deltas as an iterator, which a refused call leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nano_inference.types import Delta, EngineBusy


class DeltaStream(Iterator[Delta]):
    """Owns a claimed request: it is ended when the stream is closed, at its end, or by an exception inside `next`.

    `EngineBusy` is no such exception: a `next` that is refused changed nothing, and a later one returns the next delta.
    """

    def __init__(self, take: Callable[[], Delta | None], end: Callable[[], None]) -> None:
        """`take` returns the next delta, after as many steps as that takes, or None at the end; `end` ends it."""
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
        except BaseException:  # an interrupt may have taken a delta with it: what came after would not fit
            self.close()
            raise

    def close(self) -> None:
        """End the request unless it has ended. May be called from anywhere, also from inside a step, and repeatedly."""
        if not self._is_closed:
            self._end()
            self._is_closed = True

    def __del__(self) -> None:
        """End the request of a stream that was dropped."""
        self.close()
