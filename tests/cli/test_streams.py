"""Commands whose stdin, stdout or stderr is closed or full, or whose reader has exited."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from tests.cli.test_serve import command
from tests.server.tiny import make_tiny
from tests.warm import Forked, Forker

FULL = "import os; full = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.dup2(full, 2); os.close(full)"
UNREAD = "import os; pipe = os.pipe(); os.dup2(pipe[1], 2); os.close(pipe[0]); os.close(pipe[1])"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("unheard"))


def python(text: str, redirection: str) -> subprocess.CompletedProcess[str]:
    words = shlex.join([sys.executable, "-c", text])
    return subprocess.run(["bash", "-c", f"exec {words} {redirection}"], capture_output=True, text=True, timeout=120)


Process = subprocess.Popen[bytes] | Forked


def check_server(start: Callable[[list[str]], Process], directory: Path) -> None:
    """Start a server, which can say nothing, at a free port; it must answer and end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(command(directory, "--port", str(port)))
    try:
        reply = None
        while reply is None or reply.status_code == 503:
            assert process.poll() is None, "the server has exited"
            with contextlib.suppress(httpx2.TransportError):
                reply = httpx2.post(
                    f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60
                )
            if reply is None or reply.status_code == 503:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("before", [FULL, UNREAD], ids=["full", "unread"])
def test_server_runs_with_unwritable_streams(directory: Path, forker: Forker, before: str) -> None:
    def start(words: list[str]) -> Forked:
        process = forker.start(words[3:], before=before)
        assert process.stderr is not None
        process.stderr.close()
        return process

    check_server(start, directory)


def test_server_runs_with_closed_streams(directory: Path) -> None:
    """Python starts without them."""
    check_server(lambda words: subprocess.Popen(["bash", "-c", f"exec {shlex.join(words)} <&- >&- 2>&-"]), directory)


@pytest.mark.parametrize("redirection", ["2>&-", "<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_not_reused(redirection: str) -> None:
    text = (
        "import os, sys\n"
        "from nano_inference.cli.app import prepare\n"
        "prepare()\n"
        "opened = os.open(os.devnull, os.O_RDONLY)\n"
        "print('hello', file=sys.stderr); print('hello'); sys.stdin.read()\n"
        "sys.exit(7 if opened > 2 and all(os.get_inheritable(one) for one in range(3)) else 8)\n"
    )
    assert python(text, redirection).returncode == 7


def test_stderr_drops_failed_writes_and_stdout_does_not() -> None:
    prepared = "import sys; from nano_inference.cli.app import prepare; prepare();"
    lost = python(f"{prepared} print('x' * 100_000, file=sys.stderr, flush=True); print('whole')", "2>/dev/full")
    assert (lost.returncode, lost.stdout) == (0, "whole\n")
    kept = python(f"{prepared} print('caf\\u00e9 \\udcff', file=sys.stderr)", "")
    assert kept.stderr == "café \\udcff\n"
    assert python(f"{prepared} print('x', flush=True)", ">/dev/full").returncode != 0
