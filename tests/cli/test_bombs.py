"""Template bombs: `serve` keeps answering and ends at SIGTERM, `generate` and `chat` print the reason."""

from __future__ import annotations

import io
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from nano_inference.cli import main
from tests.cli.test_serve import forked
from tests.server.tiny import make_tiny
from tests.warm import Forker

GUARD_S = 120
"""Time limit of a process in seconds."""
BOMB = (
    "{% if messages[-1].content == 'bomb' %}"
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    "{% elif messages[-1].content == 'text' %}"
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    "{% endif %}{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
)
"""A loop of minutes for one message, text without end for another."""
SAYS = "the chat template takes more than 1 s of CPU time to render these messages"


@pytest.fixture(scope="module")
def bombed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bombed"), template=BOMB)


def chat(url: str, content: str) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=GUARD_S)


def test_template_bomb_fails_alone_and_sigterm_ends_the_server(forker: Forker, bombed: Path) -> None:
    with forked(forker, bombed) as server, ThreadPoolExecutor(4) as threads:
        server.wait_for("^ready: ")
        url = server.url
        bombs = [threads.submit(chat, url, "bomb") for _ in range(2)]
        body = {"prompt": "hello", "max_tokens": 2}
        while not all(bomb.done() for bomb in bombs):
            assert httpx2.get(f"{url}/health", timeout=GUARD_S).status_code == 200
            assert httpx2.post(f"{url}/v1/completions", json=body, timeout=GUARD_S).status_code == 200
            assert chat(url, "hello").status_code == 200
        refused = [bomb.result() for bomb in bombs]
        assert [one.status_code for one in refused] == [400, 400]
        error = refused[0].json()["error"]
        assert (error["message"], error["param"]) == (f"messages: {SAYS}", "messages")
        assert chat(url, "hello").status_code == 200
        last = threads.submit(chat, url, "bomb")
        httpx2.get(f"{url}/health", timeout=GUARD_S)
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(GUARD_S) == 0
        assert last.exception() is not None or last.result().status_code >= 400


def test_request_that_waits_for_a_template_ends_by_its_own_limit(forker: Forker, bombed: Path) -> None:
    with forked(forker, bombed, "--request-timeout", "0.5") as server:
        server.wait_for("^ready: ")
        late = chat(server.url, "bomb")
        assert late.status_code == 503
        error = late.json()["error"]
        said = "the request took more than 0.5 s (--request-timeout) while the chat template rendered its messages"
        assert (error["message"], error["code"]) == (said, "timeout")


def test_generate_and_chat_report_a_templates_limit_in_one_line(
    bombed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(bombed), "--max-tokens", "2"]
    assert main(["generate", "text", *options]) == 2
    said = f"nano-inference: {bombed}: the chat template writes too much text for these messages"
    assert capsys.readouterr().err.splitlines()[-1] == said
    monkeypatch.setattr("sys.stdin", io.StringIO("bomb\nhello\n"))
    assert main(["chat", *options]) == 0
    out, err = capsys.readouterr()
    assert f"nano-inference: {bombed}: {SAYS}\n" in err and out
