"""`serve` as a process: start, rejected settings, shutdown."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from tests.server.tiny import events_in, make_tiny
from tests.warm import Forked, Forker

pytestmark = pytest.mark.slow

LONG = {"prompt": "continue", "max_tokens": 480, "ignore_eos": True, "seed": 1, "stream": True}
ENDLESS = {**LONG, "max_tokens": 30_000}
"""Longer than any test."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a long context."""
    return make_tiny(tmp_path_factory.mktemp("patient"), positions=32768)


def command(directory: Path | str, *options: str) -> list[str]:
    port = () if "--port" in options else ("--port", "0")
    fixed = (*port, "--num-threads", "1", "--kv-cache-bytes", str(8 << 20))
    return [sys.executable, "-m", "nano_inference", "serve", "--model", str(directory), *fixed, *options]


class Process:
    """A server process; a thread reads its stderr."""

    def __init__(self, popen: subprocess.Popen[str] | Forked) -> None:
        self.popen = popen
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self.lines.append("")
            self._news.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match in the lines of stderr."""
        with self._news:
            while True:
                found = next((m for line in self.lines if (m := re.search(pattern, line))), None)
                if found is not None:
                    return found
                assert "" not in self.lines and self._news.wait(60), f"{pattern!r} is not in {self.lines}"

    @property
    def url(self) -> str:
        return self.wait_for(r"listening on (http://\S+),")[1]

    def end(self) -> int:
        """Wait for the process and return its exit code."""
        code = self.popen.wait(60)
        self._reader.join(60)
        assert self.popen.stderr is not None
        self.popen.stderr.close()
        return code


@contextmanager
def followed(popen: subprocess.Popen[str] | Forked) -> Iterator[Process]:
    """Yield a server that has been started; end it after the block."""
    one = Process(popen)
    try:
        yield one
    finally:
        one.popen.kill()
        one.end()


def process(directory: Path, *options: str) -> AbstractContextManager[Process]:
    """Run a server in a process that imports everything, as a user's does."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    return followed(subprocess.Popen(command(directory, *options), stderr=pipe, stdout=null, text=True))


def forked(forker: Forker, directory: Path, *options: str, before: str = "") -> AbstractContextManager[Process]:
    """Run a server in a fork, after the code `before`."""
    return followed(forker.start(command(directory, *options)[3:], before=before))


def test_process_starts_and_logs_requests(directory: Path) -> None:
    with process(directory) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        seen = []
        while not seen or seen[-1] != (200, "ok"):
            reply = client.get("/health")
            seen.append((reply.status_code, reply.json()["status"]))
            with suppress(subprocess.TimeoutExpired):
                server.popen.wait(0.05)
        assert set(seen) <= {(503, "loading"), (200, "ok")}
        assert client.get("/ready").status_code == 200
        server.wait_for(r"ready: served\d*")
        assert not any(line.startswith("{") for line in server.lines), "probes are not logged"
        early = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"})
        assert early.status_code == 200
        line = json.loads(server.wait_for(r"^\{.*")[0])
        assert (line["request_id"], line["status"], line["output_tokens"]) == ("mine", 200, 1)
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "zebra": 1})
        warning = json.loads(server.wait_for(r"^\{.*zebra.*")[0])
        assert (warning["level"], warning["logger"]) == ("warning", "nano_inference.server")


HEED = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
"""nohup ignores SIGHUP."""


@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 1), (signal.SIGHUP, 3)])
def test_signal_finishes_open_requests(forker: Forker, directory: Path, number: signal.Signals, times: int) -> None:
    """Both a closing terminal and its shell send SIGHUP."""
    with forked(forker, directory, before=HEED) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        server.wait_for("ready: ")
        with client.stream("POST", "/v1/completions", json=LONG) as stream:
            parts = stream.iter_text()
            text = next(parts)
            for _ in range(times):
                server.popen.send_signal(number)
                while times > 1 and client.get("/ready").status_code == 200:
                    pass
            text += "".join(parts)
        events = events_in(text)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize("how", ["twice", "no time"])
def test_second_signal_or_zero_timeout_aborts_open_requests_and_new_ones_are_refused(
    forker: Forker, patient: Path, how: str
) -> None:
    options = ("--shutdown-timeout", "0") if how == "no time" else ()
    with forked(forker, patient, *options) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        server.wait_for("ready: ")
        with client.stream("POST", "/v1/completions", json={**ENDLESS, "n": 16}) as stream:
            parts = stream.iter_text()
            text = next(parts)
            server.popen.send_signal(signal.SIGTERM)
            if how == "twice":
                while client.get("/ready").status_code == 200:
                    pass
                refused = client.post("/v1/completions", json={"prompt": "a"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                server.popen.send_signal(signal.SIGINT)
            text += "".join(parts)
        events = events_in(text)
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "shutting_down"
        assert server.end() == 0
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_loading_server_ends_immediately(directory: Path, number: signal.Signals) -> None:
    with process(directory) as server:
        server.wait_for("listening on")
        server.popen.send_signal(number)
        assert server.end() == 0
        assert not any("Traceback" in line for line in server.lines)


def test_root_path_is_optional_in_requests_and_ctrl_c_ends_an_idle_server(forker: Forker, directory: Path) -> None:
    with forked(forker, directory, "--root-path", "/llm") as server:
        base = server.url
        assert base.endswith("/llm")
        server.wait_for("ready: ")
        for url in (f"{base}/v1/models", f"{base.removesuffix('/llm')}/v1/models", f"{base}/health"):
            assert httpx2.get(url, timeout=60).status_code == 200
        assert httpx2.get(f"{base}x/v1/models", timeout=60).status_code == 404
        server.popen.send_signal(signal.SIGINT)
        assert server.end() == 0
        assert not any("Traceback" in line for line in server.lines)
