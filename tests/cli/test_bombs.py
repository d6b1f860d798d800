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

pytestmark = pytest.mark.slow

GUARD_S = 120
"""Time limit of a process in seconds."""
BOMB = (
    "{% if messages[-1].content == 'bomb' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[-1].content == 'text' %}{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}"
    "{% endif %}{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
)
"""A loop of many minutes for one message, too much text for another."""
SAYS = "the chat template writes too much text for these messages"


@pytest.fixture(scope="module")
def bombed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bombed"), template=BOMB)


def chat(url: str, content: str) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=GUARD_S)


def test_request_that_waits_for_a_template_ends_by_its_own_limit(forker: Forker, bombed: Path) -> None:
    """Beside it the server answers, and SIGTERM ends the process although the template loops on."""
    with forked(forker, bombed, "--request-timeout", "4") as server, ThreadPoolExecutor(1) as threads:
        server.wait_for("^ready: ")
        url = server.url
        refused = chat(url, "text")  # before the loop, which takes half of the processor from then on
        error = refused.json()["error"]
        assert (refused.status_code, error["message"], error["param"]) == (400, f"messages: {SAYS}", "messages")
        bomb = threads.submit(chat, url, "bomb")
        while not bomb.done():
            assert httpx2.get(f"{url}/health", timeout=GUARD_S).status_code == 200
        error = bomb.result().json()["error"]
        said = "the request took more than 4 s (--request-timeout) while the chat template rendered its messages"
        assert (bomb.result().status_code, error["message"], error["code"]) == (503, said, "timeout")
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(GUARD_S) == 0


def test_generate_and_chat_report_a_templates_limit_in_one_line(
    bombed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(bombed), "--max-tokens", "2"]
    assert main(["generate", "text", *options]) == 2
    said = f"nano-inference: {bombed}: {SAYS}"
    assert capsys.readouterr().err.splitlines()[-1] == said
    monkeypatch.setattr("sys.stdin", io.StringIO("text\nhello\n"))
    assert main(["chat", *options]) == 0
    out, err = capsys.readouterr()
    assert f"nano-inference: {bombed}: {SAYS}\n" in err and out
