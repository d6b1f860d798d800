"""Run `nano-inference` with a fault: `python faulty.py FAULT serve …`.

It occurs once, before a sample with max_tokens `MARK` draws its token number `STEP`: the step raises (`raise`), raises
MemoryError (`memory`) or SystemExit (`exit`), never ends (`stuck`), or has NaN logits for the sample (`nan`).
`detok`: writing the text of the sample whose stop string is the mark raises.
"""

from __future__ import annotations

import sys
import threading
from importlib.abc import MetaPathFinder
from typing import Any

MARK, STEP = 77, 5
INNARDS = "injected at 0x7f0000001000 in /usr/lib/secret.py:12"
"""What no client may read."""
RAISED = {"raise": RuntimeError(INNARDS), "memory": MemoryError(INNARDS), "exit": SystemExit(3)}


def faulty(run: Any, kind: str) -> Any:
    """Return an executor's `run` that fails once."""
    spent: list[object] = []

    def faulty_run(self: Any, rows: Any, copies: Any, fresh: Any) -> Any:
        is_due = [
            row.params.max_tokens == MARK and row.start + len(row.tokens) - row.num_prompt >= STEP for row in rows
        ]
        if spent or True not in is_due:
            return run(self, rows, copies, fresh)
        spent.append(kind)
        if kind in RAISED:
            raise RAISED[kind]
        if kind == "stuck":
            threading.Event().wait(3600)
        victim, sampler = rows[is_due.index(True)].id, self.sampler

        def draw(logits: Any, drawn: Any) -> Any:
            for index, row in enumerate(drawn):
                if row.id == victim:
                    logits[index] = float("nan")
            return sampler(logits, drawn)

        self.sampler = draw
        try:
            return run(self, rows, copies, fresh)
        finally:
            self.sampler = sampler

    return faulty_run


class SpoilWriting(MetaPathFinder):
    """Patches `detokenizer` just before `transcript` imports it. Importing pydantic earlier would change options."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        if name != "nano_inference.server.transcript":
            return
        sys.meta_path.remove(self)
        from nano_inference.server import detokenizer

        patched: Any = detokenizer
        detokenize = patched.detokenize

        def faulty_detokenize(state: Any, delta: Any, generation: Any) -> Any:
            if f"mark{MARK}" in generation.stops:
                raise RuntimeError("injected")
            return detokenize(state, delta, generation)

        patched.detokenize = faulty_detokenize


def main() -> int:
    """Install the fault and run the command line."""
    kind = sys.argv[1]
    if kind == "detok":
        sys.meta_path.insert(0, SpoilWriting())
    else:
        from nano_inference.executors.cpu.executor import CpuExecutor
        from nano_inference.executors.torch.executor import TorchExecutor

        patched: Any
        for patched in (CpuExecutor, TorchExecutor):
            patched.run = faulty(patched.run, kind)
    from nano_inference.cli import main as run

    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
