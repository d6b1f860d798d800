"""Peers' workers: processes that are stopped except during their turns; their stderr is written to files."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.roster import Plan
from workloads import Measure, Workload


class Logs:
    """Owns a temporary directory with a file for each process; it stays when the comparison ends."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="compare-"))

    def file(self, name: str) -> Path:
        """Return where a process of that name writes."""
        return self.directory / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".log")


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process and what it started, stopped or not."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was never read cannot be flushed
                pipe.close()


def signal_group(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Send a signal to a process and what it started; nothing when it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


@dataclass
class Worker:
    """Owns a worker process and what it starts."""

    plan: Plan
    process: subprocess.Popen[bytes]
    log: Path
    limit: float
    """Seconds after which it counts as hung."""
    version: str = ""
    has_hung: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self.process.poll() is None

    def ask(self, workload: Workload) -> Measure:
        """Run one workload, with the worker running for as long as it takes. Raises `RuntimeError` when it cannot."""
        if not self.is_alive:
            raise RuntimeError(f"the worker has ended; it wrote to {self.log}")
        assert self.process.stdin
        signal_group(self.process, signal.SIGCONT)
        with suppress(BrokenPipeError):  # it has ended, which `ask` detects
            self.process.stdin.write(json.dumps(asdict(workload)).encode() + b"\n")
            self.process.stdin.flush()
        answer = self.answer()
        self.pause()
        if "error" in answer:
            raise RuntimeError(f"{answer['error']} ({self.log})")
        return Measure(
            seconds=answer["seconds"],
            first_token_seconds=tuple(answer["first_token_seconds"]),
            new_tokens=workload.total_new,
            prompt_tokens=workload.total_prompt,
        )

    def answer(self) -> dict[str, Any]:
        """Wait for a line of JSON. A worker that ends, hangs or says something else is ended: `RuntimeError`."""
        assert self.process.stdout
        deadline, line = time.monotonic() + self.limit, b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                self.has_hung = True
                self.end()
                raise RuntimeError(f"no answer after {self.limit:.0f} s; it wrote to {self.log}")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            line += part
            if not part:
                self.end()
                raise RuntimeError(f"the worker ended; it wrote to {self.log}")
        try:
            body: dict[str, Any] = json.loads(line)
        except ValueError:
            self.end()
            raise RuntimeError(f"the worker said {line[:80]!r} where JSON was due; it wrote to {self.log}") from None
        return body

    def pause(self) -> None:
        """Stop every thread of the worker until it is asked again."""
        signal_group(self.process, signal.SIGSTOP)

    def end(self) -> None:
        """End the worker and what it started."""
        end_group(self.process)


def start(plan: Plan, threads: int, log: Path, limit: float) -> Worker:
    """Start a worker and wait until it has loaded the model. Raises `RuntimeError` when it does not."""
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"} | plan.environment
    with log.open("ab") as file:
        process = subprocess.Popen(
            plan.worker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=os.environ | environment,
            start_new_session=True,
        )
    worker = Worker(plan, process, log, limit)
    try:
        worker.version = str(worker.answer().get("ready", "unknown"))
    except BaseException:
        worker.end()
        raise
    worker.pause()
    return worker
