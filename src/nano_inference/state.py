"""`EngineState`: queues and open requests, changed only in transactions that an exception cannot leave incomplete.

An exception (Ctrl-C, a bug) can arrive between any two bytecodes. An interrupted transaction is repaired immediately
or, if the repair is interrupted too, before the next transaction: queues and block tables are rebuilt from the
sequences that have not ended, and an interrupted delivery is completed. No step of this depends on an `except` or a
`finally` being reached.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

from nano_inference.core import Core
from nano_inference.exclusive import Exclusive
from nano_inference.sequence import Sequence
from nano_inference.types import Delta, EngineBusy, StepResult, TrainingSample

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class OpenRequests:
    """Owns the requests that have not ended, the mailboxes of claimed requests, and the samples for `step`."""

    def __init__(self) -> None:
        self._live: dict[int, list[Sequence]] = {}
        """Request id -> its sequences that have not ended."""
        self._mailboxes: dict[int, deque[Delta]] = {}
        """Claimed request -> its deltas that were not taken."""
        self._collections: dict[int, list[TrainingSample]] = {}
        """Request of a running call, unless claimed -> its finished samples; its deltas are not kept."""
        self._unread: set[int] = set()
        """Claimed requests with new deltas since the last `take_deltas`."""
        self._finished: list[TrainingSample] = []
        """Finished samples of requests that are neither claimed nor owned by a call."""
        self.num_ended = 0
        """Number of requests that have ended."""

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def open(self, request_id: int, sequences: list[Sequence], *, claimed: bool, is_owned: bool) -> None:
        """Register a request; a claimed one gets a mailbox for its deltas, another one of a call a list for samples."""
        if claimed:
            self._mailboxes[request_id] = deque()
        elif is_owned:
            self._collections[request_id] = []
        self._live[request_id] = sequences

    def sequences(self, request_ids: Iterable[int] | None = None) -> list[Sequence]:
        """Return the sequences of these requests that have not ended; those of all requests, oldest first, for None."""
        ids = tuple(self._live if request_ids is None else dict.fromkeys(request_ids))
        return [seq for one in ids for seq in self._live.get(one, ())]

    def is_live(self, request_id: int) -> bool:
        return request_id in self._live

    def ended_among(self, request_ids: Iterable[int]) -> list[int]:
        """Return those of these requests that have ended or are unknown."""
        return [one for one in request_ids if one not in self._live]

    def is_claimed(self, request_id: int) -> bool:
        return request_id in self._mailboxes

    def take_delta(self, request_id: int) -> Delta | None:
        """Return and remove the oldest delta of a claimed request; None if there is none."""
        mailbox = self._mailboxes.get(request_id)
        return mailbox.popleft() if mailbox else None

    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return and remove all deltas of these claimed requests; those of one request are in order."""
        found: list[Delta] = []
        for one in [one for one in self._unread if one in request_ids]:
            mailbox = self._mailboxes.get(one, ())
            found += mailbox
            if mailbox:
                self._mailboxes[one] = deque()
            self._unread.discard(one)
        return found

    def close(self, request_id: int) -> list[TrainingSample]:
        """Forget what is kept of a request that has ended; return its samples in order."""
        samples = self._collections.pop(request_id, [])
        samples += [delta.sample for delta in self._mailboxes.pop(request_id, ()) if delta.sample is not None]
        self._unread.discard(request_id)
        return sorted(samples, key=lambda sample: sample.sample_index)

    def deliver(self, deltas: Iterable[Delta], *, keep_samples: bool = True, is_repeated: bool = False) -> None:
        """Put deltas into mailboxes, and finished samples of other requests where `close` finds them.

        Those of requests that no call owns are for `take_finished`, and dropped without `keep_samples`.
        `is_repeated` completes an interrupted delivery: deltas that were delivered are skipped.
        """
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                if not is_repeated or all(delta is not other for other in mailbox):
                    mailbox.append(delta)
                self._unread.add(delta.request_id)
            elif delta.sample is not None:
                kept = self._collections.get(delta.request_id, self._finished if keep_samples else [])
                if not is_repeated or all(delta.sample is not other for other in kept):
                    kept.append(delta.sample)
            if delta.sample is not None:
                self._remove_ended(delta)

    def take_finished(self) -> list[TrainingSample]:
        """Return and remove the samples of requests that are neither claimed nor owned by a call."""
        finished, self._finished = self._finished, []
        return finished

    def _remove_ended(self, delta: Delta) -> None:
        group = self._live.get(delta.request_id, ())
        left = [seq for seq in group if seq.sample_index != delta.sample_index]
        if left:
            self._live[delta.request_id] = left
        elif group:
            self.num_ended += 1
            del self._live[delta.request_id]


class EngineState:
    """Owns the core and the open requests. Accessed by one thread at a time, which `Calls` ensures."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.requests = OpenRequests()
        self._repair_others: weakref.WeakMethod[Callable[[], None]] | None = None
        self._transactions = Exclusive(
            lambda: EngineBusy(
                "the engine was called from inside one of its own steps, by a token program, a matcher or a signal "
                "handler; call it between two steps"
            )
        )
        self._undelivered: tuple[Delta, ...] | None = None
        """Deltas of the delivery in progress; None otherwise."""

    def also_repair(self, repair: Callable[[], None]) -> None:
        """Call `repair`, a bound method, after an interruption. It must be repeatable.

        Stored as a weak reference: a cycle would delay freeing the memory of a dropped engine.
        """
        self._repair_others = weakref.WeakMethod(repair)

    def change(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, run as a transaction. Raises `EngineBusy` inside another transaction."""
        return self._transactions.run(lambda: self._change(work))

    @property
    def is_changing(self) -> bool:
        """Whether a transaction runs."""
        return self._transactions.is_running()

    @property
    def needs_repair(self) -> bool:
        """Whether a transaction runs, or was interrupted and not repaired yet."""
        return self.core.needs_recovery

    def deliver(self, deltas: Seq[Delta], *, keep_samples: bool = True) -> None:
        """Deliver deltas; from here on an interruption completes the step instead of undoing it. In a transaction."""
        self._undelivered = tuple(deltas)
        self.requests.deliver(deltas, keep_samples=keep_samples)
        self.core.settle()
        self._undelivered = None

    def end(self, request_ids: Iterable[int] | None, *, keep_samples: bool = False) -> tuple[Delta, ...]:
        """Abort requests, all of them for None; return their last deltas. Called in a transaction."""
        deltas = tuple(map(self.core.abort, self.requests.sequences(request_ids)))
        self.deliver(deltas, keep_samples=keep_samples)
        return deltas

    def step(self, *, admit_new: bool, is_urgent: bool) -> StepResult:
        """Run a step of the core and deliver its deltas, in one transaction."""

        def step() -> StepResult:
            result = self.core.step(admit_new=admit_new, is_urgent=is_urgent)
            self.deliver(result.deltas)
            return result

        return self.change(step)

    def reset(self, core: Core) -> None:
        """Replace the core and the open requests, after every request has ended."""
        self.core, self.requests = core, OpenRequests()

    def _change(self, work: Callable[[], Result]) -> Result:
        if self.core.needs_recovery:
            self._repair()
        self.core.needs_recovery = True
        try:
            result = work()
        except BaseException:
            if self.core.needs_recovery:
                self._repair()
            raise
        self.core.needs_recovery = False
        return result

    def _repair(self) -> None:
        """Repair the state. Can be interrupted at any point and called again."""
        if self._undelivered is not None:
            self.requests.deliver(self._undelivered, is_repeated=True)
            self.core.settle()
        self.core.recover(self.requests.sequences())
        self._undelivered = None
        repair_others = None if self._repair_others is None else self._repair_others()
        if repair_others is not None:  # None if its owner was garbage collected
            repair_others()
        self.core.needs_recovery = False
        _log.warning("a step was interrupted; its requests are computed again, and cached prefixes are forgotten")
