"""Run `nano-inference` with an injected fault.

    python faulty.py FAULT serve …

The fault occurs once, before a sample with max_tokens `MARK` samples its token number `STEP`:

    raise    the step raises                      stuck    the step never ends
    memory   the step raises MemoryError          nan      the sample's logits are NaN
    exit     the step raises SystemExit           detok    writing the sample's text raises
    clock    nothing; SIGUSR1 sets time.time back by an hour
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

MARK = 77
STEP = 5
INNARDS = "injected at 0x7f0000001000 in /usr/lib/secret.py:12"
"""What no client may read."""


class Fault:
    """Knows whether it has struck."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_spent = False

    def strikes(self, rows: Sequence[Any]) -> int | None:
        """Return the index of the marked row when it is time, else None."""
        for index, row in enumerate(rows):
            num_drawn = row.start + len(row.tokens) - row.num_prompt
            if row.params.max_tokens == MARK and num_drawn >= STEP and not self.is_spent:
                self.is_spent = True
                return index
        return None


def fail(kind: str) -> None:
    """Do to a step what the fault is."""
    if kind == "raise":
        raise RuntimeError(INNARDS)
    if kind == "memory":
        raise MemoryError(INNARDS)
    if kind == "exit":
        raise SystemExit(3)
    if kind == "stuck":
        threading.Event().wait(3600)


def install_in_runner(kind: str) -> None:
    """Let steps fail, or logits be no numbers."""
    from nano_inference.executors.cpu.executor import CpuExecutor
    from nano_inference.executors.torch.executor import TorchExecutor

    fault = Fault(kind)
    patched: Any
    for patched in (CpuExecutor, TorchExecutor):
        patched.run = faulty(patched.run, fault, kind)


def faulty(run: Any, fault: Fault, kind: str) -> Any:
    """Return an executor's `run` that fails, or before whose sampler logits are NaN, where the fault strikes."""

    def faulty_run(self: Any, rows: Any, copies: Any, fresh: Any) -> Any:
        victim = fault.strikes(rows)
        if victim is None or kind != "nan":
            if victim is not None:
                fail(kind)
            return run(self, rows, copies, fresh)
        sampler, victim_id = self.sampler, rows[victim].id
        self.sampler = without_numbers(sampler, victim_id)
        try:
            return run(self, rows, copies, fresh)
        finally:
            self.sampler = sampler

    return faulty_run


def without_numbers(sampler: Any, victim_id: object) -> Any:
    """Return a sampler before which one row's logits are NaN."""

    def draw(logits: Any, rows: Sequence[Any]) -> Any:
        for index, row in enumerate(rows):
            if row.id == victim_id:
                logits[index] = float("nan")
        return sampler(logits, rows)

    return draw


def spoil_writing() -> None:
    """Let writing the marked sample's text fail: it is the one whose stop string is the mark."""
    from nano_inference.server import detokenizer

    patched: Any = detokenizer
    detokenize = patched.detokenize

    def faulty_detokenize(state: Any, delta: Any, generation: Any) -> Any:
        if f"mark{MARK}" in generation.stops:
            raise RuntimeError("injected")
        return detokenize(state, delta, generation)

    patched.detokenize = faulty_detokenize


class InstallInWriting(MetaPathFinder):
    """Patches `detokenizer` just before `transcript` imports it. Importing pydantic earlier would alter options."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        if name == "nano_inference.server.transcript":
            sys.meta_path.remove(self)
            spoil_writing()


def install_clock() -> None:
    """Let SIGUSR1 set the clock back."""
    real = time.time
    shift = [0.0]
    time.time = lambda: real() + shift[0]
    signal.signal(signal.SIGUSR1, lambda *_: shift.__setitem__(0, -3600.0))


def main() -> int:
    """Put the fault in and run the command line."""
    kind = sys.argv[1]
    if kind == "detok":
        sys.meta_path.insert(0, InstallInWriting())
    elif kind == "clock":
        install_clock()
    else:
        install_in_runner(kind)
    from nano_inference.cli import main as run

    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
