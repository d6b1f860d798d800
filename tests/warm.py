"""Commands in forks of a process that has imported what `serve` uses: importing takes longer than most of them run.

Not multiprocessing's forkserver: a process has only one, in which `tests.weights` imports Transformers, and pydantic.

`python -m tests.warm FD MODULES` reads jobs from the socket FD: JSON objects {"argv", "environ", "cwd", "before",
"is_terminal"}. Each arrives with two descriptors: stderr or a terminal, and a socket for the process id and, at the
end, the exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

ROOT = Path(__file__).parents[1]
SERVING = (
    *("nano_inference.cli.app", "nano_inference.cli.chat.local", "nano_inference.cli.chat.remote"),
    *("nano_inference.engine", "nano_inference.build", "uvicorn", "prometheus_client"),
)
"""Without pydantic, with which cyclopts would check values: a command imports it later."""
MAX_JOB = 1 << 20


class Forked:
    """A command in a fork, with the methods of `subprocess.Popen` that tests use; stderr is a pipe or a terminal."""

    def __init__(self, pid: int, stderr: TextIO | None, reports: socket.socket) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._reports = reports

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the command runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
        return code

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], timeout)[0]:
            self.returncode = int(self._reports.recv(64))
            self._reports.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that has imported the modules, as a context manager."""

    def __init__(self, modules: Sequence[str] = SERVING) -> None:
        self._jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules]
            null = subprocess.DEVNULL
            self._popen = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=null, stdout=null)

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._jobs.close()
        self._popen.wait()

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str] = os.environ,
        *,
        before: str = "",
        terminal: int | None = None,
    ) -> Forked:
        """Run `nano-inference ARGV` after the code `before`.

        stdin and stdout are /dev/null. With `terminal`, a descriptor, it is all three streams and controls the command.
        """
        job = json.dumps(
            {
                "argv": list(argv),
                "environ": dict(environ),
                "cwd": str(Path.cwd()),
                "before": before,
                "is_terminal": terminal is not None,
            }
        ).encode()
        assert len(job) < MAX_JOB
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if terminal is not None:
            with theirs:
                socket.send_fds(self._jobs, [job], [terminal, theirs.fileno()])
            return Forked(int(reports.recv(64)), None, reports)
        read_end, write_end = os.pipe()
        with theirs:
            socket.send_fds(self._jobs, [job], [write_end, theirs.fileno()])
        os.close(write_end)
        return Forked(int(reports.recv(64)), os.fdopen(read_end), reports)


def main() -> None:
    """Import the modules, then fork a parent of each job's command; it ends with the socket's other end."""
    jobs = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy all pages of these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(jobs, MAX_JOB, 2)
        if not message:
            return
        if not os.fork():
            jobs.close()
            follow(message, *descriptors)
        for one in descriptors:
            os.close(one)


def follow(message: bytes, stderr: int, reports: int) -> None:
    """Fork the command and report its process id and exit code; return in the command's process alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        os.close(stderr)
        os.write(reports, b"%d" % child)
        os.write(reports, b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    job = json.loads(message)
    if job.pop("is_terminal"):
        enter(stderr)
    else:
        os.dup2(stderr, 2)
    os.close(stderr)
    os.close(reports)
    run(**job)


def enter(terminal: int) -> None:
    """Make a terminal this process's streams, and let it control the process: Ctrl-C sends a signal."""
    import fcntl  # only here: on Windows there is none
    import termios

    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    # The old objects know that their files can seek.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    sys.__stderr__ = sys.stderr  # type: ignore[misc]  # a command lets the original one drop failed writes


def run(argv: list[str], environ: dict[str, str], cwd: str, before: str) -> None:
    """Run a command and exit with its code."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    exec(before, {})
    from nano_inference.cli import main as command

    sys.exit(command(argv))


if __name__ == "__main__":
    main()
