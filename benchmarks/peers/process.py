"""Peers' processes: each is stopped except in its turns, and writes to a file of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
