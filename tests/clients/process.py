"""`nano-inference serve` as a process of its own, and other people's programs as processes that talk to it."""

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
"""Seconds that nothing takes unless something is broken."""
NEEDED = "the clients are not installed here; `make test-clients` has an environment with them"
_OTHERS = ("OPENAI_", "LLM_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "GUIDELLM_", "NANO_INFERENCE_PORT")
"""Beginnings of variables that would send a client elsewhere."""


@dataclass
class Served:
    """A server in a process of its own, and what it wrote to stderr so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def ask(self, path: str, body: Any) -> Any:
        """POST JSON without any client, and return the reply."""
        response = httpx2.post(f"{self.url}{path}", json=body, timeout=PATIENCE)
        assert response.status_code == 200, response.text
        return response.json()

    def answers(self) -> list[dict[str, Any]]:
        """Return the access log: one record for each finished request."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Served]:
    """Serve a model while the block runs. Afterwards it must have ended well and never have failed."""
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
    said = "\n".join(served.lines)
    assert process.returncode == 0 and "Traceback" not in said, said[-4000:]
    assert all((answer.get("status") or 499) < 500 for answer in served.answers()), said[-4000:]


def run(command: Sequence[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a client's program in a directory of its own, without any hub to ask."""
    return subprocess.run(
        command, cwd=cwd, env=offline(cwd) | environ, capture_output=True, check=False, timeout=PATIENCE
    )


def succeed(command: Sequence[str], cwd: Path, **environ: str) -> bytes:
    """Run a client's program that must succeed; return what it printed."""
    done = run(command, cwd, **environ)
    assert done.returncode == 0, f"{done.stdout.decode()[-4000:]}\n{done.stderr.decode()[-4000:]}"
    return done.stdout


def offline(home: Path | None = None) -> dict[str, str]:
    """Return the environment without what would send a client elsewhere, hubs and their caches among it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    kept |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return kept if home is None else kept | {"HF_HOME": str(home / "hf")}


def program(name: str) -> str:
    """Return a program of the environment that runs the tests."""
    return str(Path(sys.executable).parent / name)


def _read(process: subprocess.Popen[str], lines: list[str], news: queue.SimpleQueue[str]) -> None:
    assert process.stderr is not None
    with process.stderr as stderr:
        for line in stderr:
            lines.append(line.rstrip("\n"))
            news.put(lines[-1])


def _line(news: queue.SimpleQueue[str], beginning: str, served: Served) -> str:
    """Wait for the line that begins so."""
    deadline = time.monotonic() + PATIENCE
    while served.process.poll() is None and time.monotonic() < deadline:
        try:
            line = news.get(timeout=1.0)
        except queue.Empty:
            continue
        if line.startswith(beginning):
            return line
    raise AssertionError("the server did not come up:\n" + "\n".join(served.lines))
