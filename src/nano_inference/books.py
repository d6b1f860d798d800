"""`Books`: the engine's queues and mailboxes, changed only in sections that an exception cannot leave half done.

A section that is interrupted (Ctrl-C, a bug) leaves the books torn. They are repaired at once, or, when the repair is
interrupted as well, before the next section: queues and block tables are rebuilt from the sequences that have not
ended, and a delivery that was under way is completed. Nothing depends on an `except` or a `finally` being reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from nano_inference.core import Core
from nano_inference.exclusive import Exclusive
from nano_inference.ledger import Ledger
from nano_inference.types import Delta, EngineBusy

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Books:
    """Owns the core's queues and the ledger. Accessed by one thread at a time; the engine sees to that."""

    def __init__(self, core: Core, repair_rest: Callable[[], None]) -> None:
        """`repair_rest` repairs what a section may change besides core and ledger; it can be called repeatedly."""
        self.core = core
        self.ledger = Ledger()
        self._repair_rest = repair_rest
        self._sections = Exclusive(_inside)
        self._undelivered: tuple[Delta, ...] | None = None
        """What a section has settled and not yet delivered; None between two deliveries."""

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
        self._repair_rest()
        self.core.is_torn = False
        _log.warning("a step was interrupted; its requests are computed again, and cached prefixes are forgotten")


def _inside() -> EngineBusy:
    return EngineBusy(
        "the engine was called from inside one of its own steps, by a token program, a matcher or a signal handler; "
        "call it between two steps"
    )
