"""The servers that golden requests are sent to, each a `nano-inference serve` process with a small model."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from tests.server.reasoner import make_reasoner
from tests.server.tiny import make_tiny
from tests.server.trainer import make_weights

NAMES = ("random", "reasoner", "calculator", "trainer")
"""A random model that writes bytes; one that reasons, then answers or calls a function; the packaged nanochat model;
the random one again, with the routes of trainers."""


@contextmanager
def served(directory: Path) -> Iterator[Mapping[str, str]]:
    """Write the models below `directory`, serve them, and return {name: URL} while the block runs."""
    random = make_tiny(directory / "random")
    reasoner = make_reasoner(directory / "reasoner")
    make_weights(random, directory / "weights" / "step-1", seed=1)
    make_weights(random, directory / "weights" / "step-2", seed=2)
    models: Mapping[str, Sequence[str]] = {
        "random": [str(random)],
        "reasoner": [str(reasoner)],
        "calculator": ["calculator"],
        "trainer": [str(random), "--enable-rl", "--weights-dir", str(directory / "weights")],
    }
    with ExitStack() as stack:
        processes = {name: stack.enter_context(_process(name, arguments)) for name, arguments in models.items()}
        urls = {name: _url(process) for name, process in processes.items()}
        deadline = time.monotonic() + 120
        while any(httpx2.get(f"{url}/ready", timeout=60).status_code != 200 for url in urls.values()):
            assert time.monotonic() < deadline, "a server loads for two minutes"
            time.sleep(0.05)
        yield urls


@contextmanager
def _process(name: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    model, *flags = arguments
    fixed = ["--port", "0", "--num-threads", "1", "--no-log-requests", "--served-model-name", name]
    command = [sys.executable, "-P", "-m", "nano_inference", "serve", "--model", model, *fixed, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    read: list[str] = []
    for line in process.stderr:
        read.append(line)
        if found := re.search(r"listening on (http://[^\s,]+)", line):
            return found[1]
    raise RuntimeError(f"no server: {''.join(read)}")
