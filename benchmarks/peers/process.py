"""Peers' processes: each is stopped except in its turns, and writes to a file of its own.

A worker answers workloads, lines of JSON, on stdin and stdout (`protocol.py`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.roster import Plan
from workloads import Measure, Workload


@dataclass
class Peer:
    """Owns a process and what it starts."""

    process: subprocess.Popen[bytes]
    log: Path
    limit: float
    """Seconds after which a start or a turn counts as hung."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group, if there are any."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def pause(self) -> None:
        """Stop every thread until it is resumed."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run."""
        self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the group, stopped or not."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what was never read cannot be flushed
                if pipe is not None:
                    pipe.close()

    def failure(self, text: str) -> RuntimeError:
        """Return an error that names the log."""
        return RuntimeError(f"{text}; it wrote to {self.log}")


def launch(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, has_pipes: bool
) -> subprocess.Popen[bytes]:
    """Start a process group whose output goes to the log, but for stdout if it answers on pipes."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL}
    if has_pipes:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    with log.open("ab") as file:
        outputs = {"stdout": file, "stderr": file} | pipes
        return subprocess.Popen(command, env=environment, start_new_session=True, **outputs)


@dataclass
class Worker(Peer):
    """Owns a worker process."""

    version: str = ""

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, workload: Workload) -> Measure:
        """Run one workload. Raises `RuntimeError` if it fails."""
        if not self.is_alive:
            raise self.failure("the worker has ended")
        assert self.process.stdin
        self.resume()
        with suppress(BrokenPipeError):  # it has ended, which `answer` reports
            self.process.stdin.write(json.dumps(asdict(workload)).encode() + b"\n")
            self.process.stdin.flush()
        answer = self.answer()
        self.pause()
        if "error" in answer:
            raise RuntimeError(f"{answer['error']} ({self.log})")
        return Measure(answer["seconds"], tuple(answer["first_token_seconds"]), workload)

    def answer(self) -> dict[str, Any]:
        """Wait for a line of JSON. A worker that ends, hangs or writes anything else is ended: `RuntimeError`."""
        assert self.process.stdout
        deadline, line = time.monotonic() + self.limit, b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                self.end()
                raise self.failure(f"no answer after {self.limit:.0f} s")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            line += part
            if not part:
                self.end()
                raise self.failure("the worker ended")
        try:
            body: dict[str, Any] = json.loads(line)
        except ValueError:
            self.end()
            raise self.failure(f"the worker said {line[:80]!r} where JSON was due") from None
        return body


def start_worker(plan: Plan, threads: int, log: Path, limit: float) -> Worker:
    """Start a worker and wait until it has loaded the model. Raises `RuntimeError` if it does not."""
    environment = {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1", **plan.environment}
    worker = Worker(launch(plan.worker, environment, log, has_pipes=True), log, limit)
    try:
        worker.version = str(worker.answer().get("ready", "unknown"))
    except BaseException:
        worker.end()
        raise
    worker.pause()
    return worker
