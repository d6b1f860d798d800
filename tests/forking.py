"""A process that imports modules once, and forks a child for each run of code.

To import torch takes longer than most runs. `python -m tests.forking HIDDEN MODULES` reads a JSON object per line from
standard input: {"code", "arguments", "hidden", "out", "err", "limit_s"}. It answers each with the child's exit code.
HIDDEN and "hidden" are lists of modules that cannot be imported: the former by MODULES, the latter by the child.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from tests.hiding import hide

ROOT = Path(__file__).parents[1]
LIMIT_S = 500


class Forks:
    """The process; `run` returns what a child of it printed."""

    def __init__(
        self, modules: Sequence[str], *, hidden: Collection[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it; it imports `modules` where those in `hidden` are not installed."""
        command = [sys.executable, "-m", "tests.forking", json.dumps(sorted(hidden)), *modules]
        pipe, environ = subprocess.PIPE, {**os.environ, **(environment or {})}
        self._popen = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, text=True)

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
    for name in sys.argv[2:]:
        importlib.import_module(name)
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
