"""`Mailboxes`: open requests and what their callers have not taken yet; `DeltaStream`: an iterator over one."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as Seq

from nano_inference.core.admission import Admission
from nano_inference.core.core import Core
from nano_inference.core.sequence import Sequence
from nano_inference.types import Delta, EngineBusy, EngineRequest, TrainingSample


class Mailboxes:
    """Owns the requests that have not ended, and what their callers have not taken yet.

    | request | of | where its output waits | who takes it |
    |---|---|---|---|
    | claimed | a stream, `AsyncEngine` | `_deltas` | `take_delta`, `take_deltas`, `collect` |
    | owned by a call | `generate`, `score` | `_collections`, samples only | `collect` at the call's end |
    | neither | `add_request` | `_finished`, samples only | `take_finished` for `step` |
    """

    def __init__(self, core: Core, admission: Admission) -> None:
        self._core = core
        self._admission = admission
        self._live: dict[int, list[Sequence]] = {}  # request id -> its sequences that have not ended
        self._deltas: dict[int, deque[Delta]] = {}  # claimed request -> its deltas that were not taken
        self._collections: dict[int, list[TrainingSample]] = {}
        """Request of a running call, unless claimed -> its finished samples; its deltas are not kept."""
        self._unread: set[int] = set()  # claimed requests with new deltas since the last `take_deltas`
        self._finished: list[TrainingSample] = []
        """Finished samples of requests that are neither claimed nor owned by a call."""
        self.num_ended = 0
        """Number of requests that have ended."""
        self._owned: set[int] = set()  # requests of the running call
        self._streams: dict[weakref.ref[DeltaStream], int] = {}
        self._ended_streams: deque[int | weakref.ref[DeltaStream]] = deque()
        """Requests of closed streams, and references to dropped ones, that are still to be aborted."""

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def add(self, requests: Seq[EngineRequest], *, claimed: bool, is_owned: bool, prefixes: Seq[str] = ()) -> list[int]:
        """Check and queue requests, all or none; return their ids. Raises `BadRequest`, after one of `prefixes`.

        A claimed request gets a mailbox for its deltas, another one of a call a list for its samples.
        """
        admitted = self._admission.admit_all(requests, self._core.version, self._core.adapters, prefixes)
        ids = [self._admission.take(sequences) for sequences in admitted]
        for one, sequences in zip(ids, admitted, strict=True):
            if claimed:
                self._deltas[one] = deque()
            elif is_owned:
                self._collections[one] = []
            if is_owned:
                self._owned.add(one)
            self._live[one] = sequences
            self._core.enqueue(sequences)
        return ids

    def abort(self, request_ids: Iterable[int] | None, *, keep_samples: bool = False) -> tuple[Delta, ...]:
        """End these requests now, all of them for None; return their last deltas."""
        ids = tuple(self._live if request_ids is None else dict.fromkeys(request_ids))
        deltas = tuple(map(self._core.abort, [seq for one in ids for seq in self._live.get(one, ())]))
        self.deliver(deltas, keep_samples=keep_samples)
        return deltas

    def collect(self, request_id: int) -> list[TrainingSample]:
        """Abort and forget a request that is claimed or a call's; return its samples in order."""
        self.abort((request_id,))
        samples = self._collections.pop(request_id, [])
        samples += [delta.sample for delta in self._deltas.pop(request_id, ()) if delta.sample is not None]
        self._unread.discard(request_id)
        self._owned.discard(request_id)
        return sorted(samples, key=lambda sample: sample.sample_index)

    def end_owned(self) -> None:
        """Abort and forget the requests of a call that is over."""
        for request_id in tuple(self._owned):
            self.collect(request_id)

    def stream(self, request_id: int, take: Callable[[], Delta | None], close: Callable[[], None]) -> DeltaStream:
        """Return a stream of a claimed request, which ends with the stream; `close` calls `end_streams` if it can."""

        def end() -> None:
            self._ended_streams.append(request_id)
            close()

        stream = DeltaStream(take, end)
        self._streams[weakref.ref(stream, self._ended_streams.append)] = request_id
        return stream

    def end_streams(self) -> None:
        """Abort and forget the requests of closed and dropped streams."""
        while self._ended_streams:
            ended = self._ended_streams.popleft()
            request_id = ended if isinstance(ended, int) else self._streams.pop(ended, None)
            if request_id is not None:
                self.collect(request_id)

    # ---- deltas and samples -----------------------------------------------------------------------------------------

    def is_live(self, request_id: int) -> bool:
        return request_id in self._live

    def ended_among(self, request_ids: Iterable[int]) -> list[int]:
        """Return those of these requests that have ended or are unknown."""
        return [one for one in request_ids if one not in self._live]

    def is_claimed(self, request_id: int) -> bool:
        return request_id in self._deltas

    def take_delta(self, request_id: int) -> Delta | None:
        """Return and remove the oldest delta of a claimed request; None if there is none."""
        mailbox = self._deltas.get(request_id)
        return mailbox.popleft() if mailbox else None

    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return and remove all deltas of these claimed requests; those of one request are in order."""
        found: list[Delta] = []
        for one in [one for one in self._unread if one in request_ids]:
            mailbox = self._deltas.get(one, ())
            found += mailbox
            if mailbox:
                self._deltas[one] = deque()
            self._unread.discard(one)
        return found

    def deliver(self, deltas: Iterable[Delta], *, keep_samples: bool = True) -> None:
        """Put deltas into mailboxes, and finished samples of other requests where `collect` finds them.

        Those of requests that no call owns are for `take_finished`, and dropped without `keep_samples`.
        """
        for delta in deltas:
            mailbox = self._deltas.get(delta.request_id)
            if mailbox is not None:
                mailbox.append(delta)
                self._unread.add(delta.request_id)
            elif delta.sample is not None:
                kept = self._collections.get(delta.request_id, self._finished if keep_samples else [])
                kept.append(delta.sample)
            if delta.sample is None:
                continue
            group = self._live.get(delta.request_id, ())
            left = [seq for seq in group if seq.sample_index != delta.sample_index]
            if left:
                self._live[delta.request_id] = left
            elif group:
                self.num_ended += 1
                del self._live[delta.request_id]

    def take_finished(self) -> list[TrainingSample]:
        """Return and remove the samples of requests that are neither claimed nor owned by a call."""
        finished, self._finished = self._finished, []
        return finished


class DeltaStream(Iterator[Delta]):
    """Owns a claimed request, which ends when the stream is closed, exhausted, or fails in `next`.

    A dropped stream's request ends at the next step boundary, by a weak reference: Python would ignore a Ctrl-C that
    arrives in a `__del__`. A `next` that raises `EngineBusy` changes nothing.
    """

    def __init__(self, take: Callable[[], Delta | None], end: Callable[[], None]) -> None:
        """`take` runs steps and returns the next delta, or None at the end; `end` ends the request."""
        self._take = take
        self._end = end
        self._is_closed = False

    def __next__(self) -> Delta:
        """Return the next delta. Raises `EngineBusy`, and what a step raises."""
        try:
            delta = None if self._is_closed else self._take()
        except EngineBusy:
            raise
        except BaseException:  # an interrupt may have lost a delta: later ones must not follow
            self.close()
            raise
        if delta is None:
            self.close()
            raise StopIteration
        return delta

    def close(self) -> None:
        """End the request unless it has ended. Can be called from anywhere, inside a step too, and repeatedly."""
        if not self._is_closed:
            self._end()
            self._is_closed = True
