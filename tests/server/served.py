"""A `nano-inference serve` process whose stderr a test can wait for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

PATIENCE = 120.0
ROOT = Path(__file__).parents[2]
_START = (
    "import json, sys; from tests.hiding import hide; hide(json.loads(sys.argv.pop(1))); "
    "from nano_inference.cli import main; sys.exit(main())"
)


class Process:
    """A server process; a thread reads its stderr."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, hidden: Collection[str] = ()
    ) -> None:
        """Start it; imports of the modules `hidden` fail in it, as if they were not installed."""
        command = [sys.executable, "-c", _START, json.dumps(sorted(hidden)), "serve", *arguments]
        self._popen = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, cwd=ROOT
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stderr is not None
        with self._popen.stderr as stream:
            for line in stream:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._lines.append("")
            self._news.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Return all matches in stderr when there are `count`."""
        expression = re.compile(pattern)
        with self._news:
            found: list[re.Match[str]] = []

            def has_come() -> bool:
                found[:] = [match for line in self._lines if (match := expression.search(line))]
                return len(found) >= count or self._lines[-1:] == [""]

            assert self._news.wait_for(has_come, PATIENCE), self._lines
            assert len(found) >= count, self._lines
            return found

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def end(self) -> int:
        """Request shutdown and return the exit code."""
        self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(PATIENCE)
        finally:
            self._popen.kill()
            self._reader.join(PATIENCE)
