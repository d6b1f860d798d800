"""Peers' workers: processes that answer workloads, lines of JSON, on stdin and stdout (`protocol.py`)."""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.process import Peer, launch
from peers.roster import Plan
from workloads import Measure, Workload


@dataclass
class Worker(Peer):
    """Owns a worker process."""

    version: str = ""
    has_hung: bool = False

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
                self.has_hung = True
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


def start(plan: Plan, threads: int, log: Path, limit: float) -> Worker:
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
