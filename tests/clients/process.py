"""Starts `nano-inference serve` and client programs as processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

PATIENCE = 300.0
"""Timeout in seconds."""
NEEDED = "not installed; `make test-clients` creates an environment with the clients"
_REDIRECTS = (
    *("OPENAI_", "OLLAMA_", "CODEX_", "AIDER_", "CONTINUE_", "LLM_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_"),
    *("GUIDELLM_", "NANO_INFERENCE_PORT"),
)
"""Prefixes of environment variables that redirect a client."""


@dataclass
class Served:
    """A server process and its stderr so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def ask(self, path: str, body: Any) -> Any:
        """POST JSON and return the JSON of the reply."""
        response = httpx2.post(f"{self.url}{path}", json=body, timeout=PATIENCE)
        assert response.status_code == 200, response.text
        return response.json()

    def answers(self) -> list[dict[str, Any]]:
        """Return the access log, one record per finished request."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Served]:
    """Serve a model while the block runs; then check exit status, traceback and statuses."""
    command = [sys.executable, "-m", "nano_inference", "serve", "-m", str(model), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=offline())
    served = Served(process)
    news: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, served.lines, news), name="stderr")
    reader.start()
    try:
        served.url = _line(news, "listening on ", served).removeprefix("listening on ").partition(",")[0]
        _line(news, "ready:", served)
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join(60)
    stderr = "\n".join(served.lines)
    assert process.returncode == 0 and "Traceback" not in stderr, stderr[-4000:]
    assert all((answer.get("status") or 499) < 500 for answer in served.answers()), stderr[-4000:]


def run(command: Sequence[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a client program in `cwd`, without access to a model hub."""
    return subprocess.run(
        command, cwd=cwd, env=offline(cwd) | environ, capture_output=True, check=False, timeout=PATIENCE
    )


def succeed(command: Sequence[str], cwd: Path, **environ: str) -> bytes:
    """Run a client program that must succeed; return its stdout."""
    done = run(command, cwd, **environ)
    assert done.returncode == 0, f"{done.stdout.decode()[-4000:]}\n{done.stderr.decode()[-4000:]}"
    return done.stdout


def offline(home: Path | None = None) -> dict[str, str]:
    """Return the environment without variables that redirect a client, and with hubs disabled."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_REDIRECTS)}
    kept |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return kept if home is None else kept | {"HF_HOME": str(home / "hf")}


def program(name: str) -> str:
    """Return the path of a program in the Python environment of the tests."""
    return str(Path(sys.executable).parent / name)


def node_program(name: str) -> str:
    """Return the path of a program of an npm package in the Python environment of the tests."""
    return str(Path(sys.prefix) / "node" / "node_modules" / ".bin" / name)


def _read(process: subprocess.Popen[str], lines: list[str], news: queue.SimpleQueue[str]) -> None:
    assert process.stderr is not None
    with process.stderr as stderr:
        for line in stderr:
            lines.append(line.rstrip("\n"))
            news.put(lines[-1])


def _line(news: queue.SimpleQueue[str], prefix: str, served: Served) -> str:
    deadline = time.monotonic() + PATIENCE
    while served.process.poll() is None and time.monotonic() < deadline:
        try:
            line = news.get(timeout=1.0)
        except queue.Empty:
            continue
        if line.startswith(prefix):
            return line
    raise AssertionError("the server did not start:\n" + "\n".join(served.lines))
