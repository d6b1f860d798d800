"""`ChildServer`: a `serve` process of one replica, controlled by its pipes.

The parent writes the setup as a line of JSON to stdin and keeps the pipe open: at its end, also when the parent is
killed, the child drains and exits, so no process is left behind. The child writes one line of JSON to stdout: its URL,
or why it could not start.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_inference.support.processes import PYTHON, start_worker

COMMAND: tuple[str, ...] = (*PYTHON, "-m", "nano_inference.server.front.process")
_DIRECTORY = Path(sys.executable).anchor or "/"


class ReplicaFailed(Exception):
    """A replica ended, or could not start. The message is one line."""


class ClusterLost(Exception):
    """What runs the replicas has ended. The message is one line."""


class ChildServer:
    """Owns the process. Its methods block; they may be called from different threads."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the process. `setup`: see `process.main`."""
        self._popen = start_worker(COMMAND, cwd=Path(_DIRECTORY), keeps_stderr=True)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `wait_ready` reports it
            self._popen.stdin.write(json.dumps(setup).encode() + b"\n")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._popen.pid

    def wait_ready(self) -> str:
        """Wait until the model is loaded and return the server's URL. Raises `ReplicaFailed`."""
        assert self._popen.stdout is not None
        line = b""
        while not line.endswith(b"\n") and (piece := self._popen.stdout.read(1 << 16)):
            line += piece
        reply = json.loads(line) if line.endswith(b"\n") else {"error": f"ended with code {self._popen.wait()}"}
        if "error" in reply:
            raise ReplicaFailed(str(reply["error"]))
        return str(reply["url"])

    def wait(self) -> int:
        """Wait until the process has ended and return its exit code, negative for a signal."""
        return self._popen.wait()

    def stop(self, timeout: float) -> None:
        """Let it drain; kill it after `timeout` seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(timeout)
        except Exception:
            self._popen.kill()
            self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()
