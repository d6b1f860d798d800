"""`Books`: the engine's queues and mailboxes, changed only in sections that an exception cannot leave half done.

A section that is interrupted (Ctrl-C, a bug) leaves the books torn. They are repaired at once, or, when the repair is
interrupted as well, before the next section: queues and block tables are rebuilt from the sequences that have not
ended, and a delivery that was under way is completed. Nothing depends on an `except` or a `finally` being reached.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

from nano_inference.core import Core
from nano_inference.exclusive import Exclusive
from nano_inference.ledger import Ledger
from nano_inference.types import Delta, EngineBusy, StepResult

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Books:
    """Owns the core's queues and the ledger. Accessed by one thread at a time; the engine sees to that."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.ledger = Ledger()
        self._repair_rest: weakref.WeakMethod[Callable[[], None]] | None = None
        self._sections = Exclusive(_inside)
        self._undelivered: tuple[Delta, ...] | None = None
        """What a section has settled and not yet delivered; None between two deliveries."""

    def also_repair(self, repair: Callable[[], None]) -> None:
        """Let `repair`, a method, repair what sections change besides core and ledger; it can be called repeatedly.

        It is held weakly: without a cycle, the memory of a dropped engine is free at once.
        """
        self._repair_rest = weakref.WeakMethod(repair)

    def change(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, run as a section. Raises `EngineBusy` when called from inside another section."""
        return self._sections.run(lambda: self._change(work))

    @property
    def is_changing(self) -> bool:
        """Whether a section runs."""
        return self._sections.is_running()

    @property
    def is_torn(self) -> bool:
        """Whether a section runs, or was interrupted and is not repaired yet."""
        return self.core.is_torn

    def deliver(self, deltas: Seq[Delta], *, keep_samples: bool = True) -> None:
        """Deliver what a section settled; from here on it is completed and not taken back. Called inside a section."""
        self._undelivered = tuple(deltas)
        self.ledger.deliver(deltas, keep_samples=keep_samples)
        self.core.settle()
        self._undelivered = None

    def end(self, request_ids: Iterable[int] | None, *, keep_samples: bool = False) -> tuple[Delta, ...]:
        """End requests, all of them for None; return their last deltas. Called inside a section."""
        ids = self.ledger.live_requests() if request_ids is None else tuple(request_ids)
        deltas = tuple(self.core.abort(seq) for one in ids for seq in self.ledger.sequences_of(one))
        self.deliver(deltas, keep_samples=keep_samples)
        return deltas

    def step(self, *, admit_new: bool) -> StepResult:
        """Run a step of the core, and deliver what it gave."""
        return self.change(lambda: self._step(admit_new))

    def _step(self, admit_new: bool) -> StepResult:
        result = self.core.step(admit_new=admit_new)
        self.deliver(result.deltas)
        return result

    def reset(self, core: Core) -> None:
        """Replace the core and the ledger, after every request has ended."""
        self.core, self.ledger = core, Ledger()

    def _change(self, work: Callable[[], Result]) -> Result:
        if self.core.is_torn:
            self._repair()
        self.core.is_torn = True
        try:
            result = work()
        except BaseException:
            if self.core.is_torn:
                self._repair()
            raise
        self.core.is_torn = False
        return result

    def _repair(self) -> None:
        """Make the books whole. Can be interrupted at any point and called again."""
        if self._undelivered is None:
            self.core.recover(self.ledger.sequences())
        else:
            self.ledger.deliver(self._undelivered, is_repeated=True)
            self.core.settle()
            self.core.recover(self.ledger.sequences())
            self._undelivered = None
        repair_rest = None if self._repair_rest is None else self._repair_rest()
        if repair_rest is not None:  # its owner can be gone: then nothing of it is left to repair
            repair_rest()
        self.core.is_torn = False
        _log.warning("a step was interrupted; its requests are computed again, and cached prefixes are forgotten")


def _inside() -> EngineBusy:
    return EngineBusy(
        "the engine was called from inside one of its own steps, by a token program, a matcher or a signal handler; "
        "call it between two steps"
    )
