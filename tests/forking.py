"""A process that imports torch once, and forks a child for each run of code: the import takes longer than most runs.

`python -m tests.forking HIDDEN` reads a JSON object per line from standard input: {"code", "arguments", "hidden",
"out", "err", "limit_s"}. It answers each with the child's exit code. HIDDEN and "hidden" are lists of modules that
cannot be imported: the former by the imports that all children share, the latter by the child.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from tests.hiding import hide

ROOT = Path(__file__).parents[1]
LIMIT_S = 120


class Forks:
    """The process; `run` returns what a child of it printed."""

    def __init__(self, hidden: Collection[str] = ()) -> None:
        command = [sys.executable, "-m", "tests.forking", json.dumps(sorted(hidden))]
        self._popen = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._popen.__exit__(kind, error, at)

    def run(self, code: str, *arguments: object, hidden: Collection[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run code in a child that has not installed the hidden modules; `arguments` are its `sys.argv[1:]`."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        with TemporaryDirectory() as directory:
            out, err = Path(directory, "out"), Path(directory, "err")
            job = {"code": code, "arguments": list(map(str, arguments)), "hidden": sorted(hidden), "limit_s": LIMIT_S}
            self._popen.stdin.write(json.dumps({**job, "out": str(out), "err": str(err)}) + "\n")
            self._popen.stdin.flush()
            status = int(self._popen.stdout.readline())
            return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())


def main() -> None:
    """Import what all children need, then fork a child for each line."""
    hide(json.loads(sys.argv[1]))
    import numpy
    import safetensors.torch
    import tokenizers
    import torch

    assert all((numpy, safetensors, tokenizers, torch))
    gc.freeze()  # a collection in a child would copy all pages of these objects
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            return run(job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(job: dict[str, Any]) -> None:
    """Run the code in this process, whose exit follows: with an error's traceback, or with the code's own status."""
    signal.alarm(job["limit_s"])
    for number, path in enumerate((os.devnull, job["out"], job["err"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.argv = os.fdopen(0, closefd=False), ["-c", *job["arguments"]]
    hide(job["hidden"])
    exec(compile(job["code"], "<code>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
