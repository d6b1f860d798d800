"""Who waits for what: the requests that have not ended, and where their deltas go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from nano_inference.sequence import Sequence
from nano_inference.types import Delta, TrainingSample


class Ledger:
    """Owns the open requests and the mailboxes of those that somebody waits for."""

    def __init__(self) -> None:
        self._live: dict[int, list[Sequence]] = {}
        """Request id -> its sequences that have not ended."""
        self._mailboxes: dict[int, deque[Delta]] = {}
        """Deltas of the requests that `generate` and `stream` wait for."""
        self._closed: set[int] = set()
        """Requests that nobody waits for any more, and that have not ended yet."""
        self._finished: list[TrainingSample] = []
        """Samples of other requests, for `step`."""
        self.num_ended = 0
        """Requests that have ended since the start: unchanged, a look for ended ones would find no more."""

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` would give anything."""
        return bool(self._finished)

    def open(self, request_id: int, sequences: list[Sequence], *, claimed: bool) -> None:
        """Note a request; when it is claimed, its deltas are kept for whoever claims them."""
        self._live[request_id] = sequences
        if claimed:
            self._mailboxes[request_id] = deque()

    def is_live(self, request_id: int) -> bool:
        """Whether any of a request's samples has not ended."""
        return request_id in self._live

    def ended_among(self, request_ids: Iterable[int]) -> list[int]:
        """Those of these requests that have ended, or never were."""
        return [one for one in request_ids if one not in self._live]

    def is_claimed(self, request_id: int) -> bool:
        """Whether somebody keeps a mailbox for this request."""
        return request_id in self._mailboxes

    def live_requests(self) -> tuple[int, ...]:
        """The requests that have not ended, oldest first."""
        return tuple(self._live)

    def sequences_of(self, request_id: int) -> tuple[Sequence, ...]:
        """The sequences of a request that have not ended; none when it is not known."""
        return tuple(self._live.get(request_id, ()))

    def mailbox(self, request_id: int) -> deque[Delta]:
        """The deltas that came for a claimed request and were not yet taken."""
        return self._mailboxes[request_id]

    def close(self, request_id: int) -> list[TrainingSample]:
        """Close a claimed request's mailbox; return the samples that came, in order. What still comes is dropped."""
        if request_id in self._mailboxes and request_id in self._live:
            self._closed.add(request_id)
        samples = [delta.sample for delta in self._mailboxes.pop(request_id, ()) if delta.sample is not None]
        return sorted(samples, key=lambda sample: sample.sample_index)

    def deliver(self, deltas: Iterable[Delta], *, keep_samples: bool = True) -> None:
        """Put deltas into the mailboxes that wait for them, and other requests' samples aside for `step`.

        Without `keep_samples` the latter are dropped: whoever ended them has them in hand.
        """
        for delta in deltas:
            is_closed = delta.request_id in self._closed
            if delta.sample is not None:
                self._forget(delta)
            if is_closed:
                continue
            if delta.request_id in self._mailboxes:
                self._mailboxes[delta.request_id].append(delta)
            elif delta.sample is not None and keep_samples:
                self._finished.append(delta.sample)

    def take_finished(self) -> list[TrainingSample]:
        """Return the samples put aside, and forget them."""
        finished, self._finished = self._finished, []
        return finished

    def _forget(self, delta: Delta) -> None:
        """Take an ended sample off the list of the living."""
        left: Seq[Sequence] = [s for s in self._live[delta.request_id] if s.sample_index != delta.sample_index]
        if left:
            self._live[delta.request_id] = list(left)
        else:
            del self._live[delta.request_id]
            self.num_ended += 1
            self._closed.discard(delta.request_id)
