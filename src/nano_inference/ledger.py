"""Who waits for what: the requests that have not ended, and where their deltas go."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from nano_inference.sequence import Sequence
from nano_inference.types import Delta, TrainingSample


class Ledger:
    """Owns the open requests and the mailboxes of those that somebody waits for."""

    def __init__(self) -> None:
        self._live: dict[int, list[Sequence]] = {}
        """Request id -> its sequences that have not ended."""
        self._mailboxes: dict[int, deque[Delta]] = {}
        """Deltas of the requests that `generate` and `stream` wait for."""
        self._unread: set[int] = set()
        """Claimed requests whose mailboxes got something since the last `take_deltas`."""
        self._finished: list[TrainingSample] = []
        """Samples of other requests, for `step`."""
        self.num_ended = 0
        """Rises with every request that ends: unchanged, a search for ended ones would find no more."""

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` would give anything."""
        return bool(self._finished)

    def open(self, request_id: int, sequences: list[Sequence], *, claimed: bool) -> None:
        """Note a request; when it is claimed, its deltas are kept for whoever claims them."""
        if claimed:
            self._mailboxes[request_id] = deque()
        self._live[request_id] = sequences

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [seq for group in tuple(self._live.values()) for seq in group]

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

    def take_delta(self, request_id: int) -> Delta | None:
        """Return the oldest delta of a claimed request that was not yet taken; None when there is none."""
        mailbox = self._mailboxes.get(request_id)
        return mailbox.popleft() if mailbox else None

    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return all deltas of these claimed requests that were not yet taken, those of one request in order."""
        found: list[Delta] = []
        for one in [one for one in self._unread if one in request_ids]:
            mailbox = self._mailboxes.get(one, ())
            found += mailbox
            if mailbox:
                self._mailboxes[one] = deque()
            self._unread.discard(one)
        return found

    def close(self, request_id: int) -> list[TrainingSample]:
        """Close a claimed request's mailbox, its samples having ended; return those that came, in order."""
        samples = [delta.sample for delta in self._mailboxes.pop(request_id, ()) if delta.sample is not None]
        self._unread.discard(request_id)
        return sorted(samples, key=lambda sample: sample.sample_index)

    def deliver(self, deltas: Iterable[Delta], *, keep_samples: bool = True, is_repeated: bool = False) -> None:
        """Put deltas into the mailboxes of claimed requests, and other requests' samples aside for `step`.

        Without `keep_samples` the latter are dropped: the caller that ended them has them in hand. `is_repeated`
        completes a delivery that was interrupted: what was delivered before is left alone.
        """
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                if not is_repeated or all(delta is not other for other in mailbox):
                    mailbox.append(delta)
                self._unread.add(delta.request_id)
            elif (
                delta.sample is not None
                and keep_samples
                and (not is_repeated or all(delta.sample is not other for other in self._finished))
            ):
                self._finished.append(delta.sample)
            if delta.sample is not None:
                self._forget(delta)

    def take_finished(self) -> list[TrainingSample]:
        """Return the samples put aside, and forget them."""
        finished, self._finished = self._finished, []
        return finished

    def _forget(self, delta: Delta) -> None:
        """Take an ended sample off the list of the living."""
        group = self._live.get(delta.request_id, ())
        left = [seq for seq in group if seq.sample_index != delta.sample_index]
        if left:
            self._live[delta.request_id] = left
        elif group:
            self.num_ended += 1
            del self._live[delta.request_id]
