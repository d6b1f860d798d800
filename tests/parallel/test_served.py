"""`serve` and `generate` with `--tensor-parallel`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx2
import pytest

from nano_inference.cli import main
from tests.cli.test_serve import LONG, process
from tests.parallel.test_processes import SOON_S, ranks_of, wait_until
from tests.server.tiny import events_in, make_tiny, running

pytestmark = pytest.mark.slow

PARALLEL = ("--tensor-parallel", "2")
DIVIDED = {"tensor_parallel": 2, "kernels": "off"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("served"))


def test_a_server_reports_the_loss_of_a_rank(directory: Path) -> None:
    short = {"prompt": "continue", "max_tokens": 8, "seed": 1, "ignore_eos": True}
    with running(directory, **DIVIDED) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        answers = [client.post("/v1/completions", json=short).json()["choices"][0]["text"] for _ in range(2)]
        assert answers[0] == answers[1]
        assert client.get("/health").status_code == 200
        (rank,) = ranks_of(os.getpid())
        with client.stream("POST", "/v1/completions", json=LONG) as reply:
            pieces = reply.iter_text()
            text = next(pieces)
            os.kill(rank, signal.SIGKILL)
            start = time.monotonic()
            text += "".join(pieces)
        assert time.monotonic() - start < SOON_S
        last, done = events_in(text)[-2:]
        assert last["error"]["message"] == "internal server error" and done == "[DONE]"
        wait_until(lambda: client.get("/health").status_code == 503, SOON_S)
        assert not ranks_of(os.getpid())


def test_a_server_that_stops_leaves_no_rank(directory: Path) -> None:
    with process(directory, *PARALLEL) as server:
        server.wait_for(r"ready: served\d*")
        (rank,) = ranks_of(server.popen.pid)
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0
    wait_until(lambda: not Path(f"/proc/{rank}").exists(), SOON_S)


def test_a_size_that_does_not_divide_is_one_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(directory), *PARALLEL[:1], "5", "hello"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "nano-inference: --tensor-parallel: 5 does not divide the 4 attention heads; possible: 2, 4"
