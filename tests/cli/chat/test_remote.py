"""`chat --server`: with this package's server, and with a scripted server that misbehaves."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pty", reason="needs a Unix terminal")

import nano_inference
from nano_inference.cli import main
from nano_inference.server.config import ServerConfig
from tests.cli.screen import terminal
from tests.cli.scripted import Scripted, chunk, scripted
from tests.server.tiny import Running, running
from tests.warm import Forker

pytestmark = pytest.mark.slow

CALCULATOR = Path(nano_inference.__file__).parent / "nanochat" / "data" / "calculator"
WIDE = 160
KEY = "a-key-of-the-test"
_SPY = """
import sys
from nano_inference.cli import main
code = main(sys.argv[1:])
print("imported:", [name for name in ("torch", "numpy", "gguf") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def calculating() -> Iterator[Running]:
    with running(CALCULATOR, ServerConfig(port=0, log_requests=False, api_key=(KEY,))) as one:
        yield one


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as one:
        yield one


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("NANO_INFERENCE_MODEL", raising=False)


VARIED = ("-t", "2", "--top-p", "1", "--min-p", "0")
"""Sampling with which an answer of a random model does not repeat itself, which would end it."""


def ask(capsys: Capture, url: str, *argv: str, code: int = 0) -> tuple[str, str]:
    """Ask one question; return stdout and stderr."""
    found = main(["chat", "--server", url, "-p", "hello", *argv])
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


# ---- this package's server


def test_chat_with_nano_inference_server(calculating: Running) -> None:
    """Imports no torch; the calculator answers, tool output is styled, and slash commands work."""
    arguments = ("chat", "--server", calculating.url.removeprefix("http://"))
    with terminal(*arguments, python=("-c", _SPY), columns=WIDE, NANO_INFERENCE_API_KEY=KEY) as screen:
        screen.prompt()
        screen.send("What is 12+34?\r")
        screen.wait("[12+34 → 46] ")
        screen.wait_raw("\x1b[2;4m46\x1b[0m")
        screen.wait("[18 prompt tokens (0 cached), 29 generated")
        screen.ask("/tokens on")
        screen.ask("/set temperature 0")
        screen.ask("/seed 5")
        screen.ask("plus 5")
        screen.wait("[46+5 → 51] ")
        screen.wait("seed 5]")
        screen.ask("/tokens 2")
        screen.wait("<- drawn")
        screen.ask("/show")
        screen.wait("model: tiny")
        screen.wait("context: 512 tokens")
        screen.wait(f"backend: server {calculating.url}/v1")
        screen.wait("conversation: 4 messages, 85 tokens")
        screen.ask("/set stop_token_ids 5")
        screen.ask("/set prompt_logprobs 1")
        screen.ask("again")
        screen.wait("nano-inference: prompt_logprobs is not available in a chat with a server")
        screen.send("/exit\r")
        assert screen.leave() == 0
        assert "imported: []" in screen.text()


def test_api_key_and_model_name(calculating: Running, capsys: Capture) -> None:
    _, err = ask(capsys, calculating.url, code=1)
    assert re.fullmatch(r"nano-inference: http://127\.0\.0\.1:\d+/v1: 401: .*; give the key as --api-key\n", err)
    _, err = ask(capsys, calculating.url, "--api-key", "wrong-key-of-mine", code=1)
    assert ": 401: " in err and "wrong-key-of-mine" not in err and err.count("\n") == 1
    _, err = ask(capsys, calculating.url, "--api-key", KEY, "--model", "absent", code=1)
    assert "404: the model 'absent' does not exist; served: tiny" in err
    out, err = ask(capsys, calculating.url + "/v1/", "--api-key", KEY, "-m", "tiny", "--max-tokens", "3")
    assert out and "3 generated" in err and "[cut off" in err


def test_context_limit_of_answer_is_printed(calculating: Running, capsys: Capture) -> None:
    _, err = ask(capsys, calculating.url, "--api-key", KEY, "--max-tokens", "1000", "--ignore-eos", *VARIED)
    assert re.search(r"\[cut off: the model's context is full after \d+ tokens\]", err)


# ---- pipes


def test_redirected_stdout_has_answers_only(server: Scripted) -> None:
    """stdout is a pipe, which does not receive the prompt."""
    code = "import subprocess, sys; d = subprocess.run([sys.executable, '-m', 'nano_inference', *sys.argv[1:]], "
    code += "stdout=subprocess.PIPE); print('OUT', d.returncode, d.stdout)"
    server.answer("**hi** \x1b[31m")
    with terminal("chat", "--server", server.url, python=("-c", code), columns=WIDE) as screen:
        screen.prompt()
        screen.send("question\r")
        screen.wait("[first token")
        screen.send("\x04")
        screen.wait("OUT 0 b'**hi** \\x1b[31m\\n'")


def chat_process(server: Scripted, lines: bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nano_inference", "chat", "--quiet", "--server", server.url]
    return subprocess.run(command, input=lines, stderr=subprocess.PIPE, check=False, **options)


def test_broken_pipe_exits_141(server: Scripted) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    server.answer("hi")
    done = chat_process(server, b"hi\n" * 3, stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_undecodable_input_is_replaced(server: Scripted) -> None:
    for _ in range(2):
        server.answer("hi")
    done = chat_process(server, b"caf\xe9 \xff\n\nmore", stdout=subprocess.PIPE, env=os.environ | {"LC_ALL": "C"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hi\nhi\n", b"")
    assert server.post()["messages"][0]["content"] == "caf\ufffd \ufffd"


# ---- a server that misbehaves


def test_request_has_only_requested_fields(server: Scripted, capsys: Capture) -> None:
    """Other servers have their own defaults and lack this package's fields."""
    server.answer("hi")
    out, err = ask(capsys, f"{server.url}/below/", "--api-key", "sesame", "--system", "s", "--top-p", "0.5")
    assert out == "hi\n" and f"[parrot at {server.url}/below/v1]" in err
    models, chat = server.asked.get(), server.asked.get()
    assert (models.path, chat.path) == ("/below/v1/models", "/below/v1/chat/completions")
    assert chat.headers["authorization"] == models.headers["authorization"] == "Bearer sesame"
    assert chat.body == {
        "model": "parrot",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 1024,
        "top_p": 0.5,
    }


def test_given_default_values_are_sent(server: Scripted, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have another default; this package's fields are not sent at their defaults."""
    monkeypatch.setenv("NANO_INFERENCE_TOP_P", "1")
    server.answer("hi")
    ask(capsys, server.url, "--temperature", "1.0", "--no-ignore-eos", "--no-raw-logprobs")
    sent = server.post()
    assert (sent["temperature"], sent["top_p"]) == (1.0, 1.0)
    assert set(sent) == {"model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p"}


def test_chat_defaults_of_nano_inference_server_are_sent(server: Scripted, capsys: Capture) -> None:
    """A request without fields would be sampled with temperature 1. The user's values take precedence."""
    defaults = {"temperature": 0.2, "top_p": 0.9, "min_p": 0.0, "max_tokens": 77, "unknown_field": 3}
    server.models = {"data": [{"id": "a", "owned_by": "nano-inference", "chat_defaults": defaults}]}
    for _ in range(2):
        server.answer("hi")
    _, err = ask(capsys, server.url)
    assert "[chat defaults: temperature 0.2, top_p 0.9 (the server's), at most 77 tokens; /set changes them]" in err
    sent = server.post()
    assert {name: sent.get(name) for name in defaults} == {**defaults, "unknown_field": None}
    ask(capsys, server.url, "--top-p", "1", "--max-tokens", "256")
    sent = server.post()
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.2, 1.0, 256)


def test_invalid_chat_defaults_are_one_line(server: Scripted, capsys: Capture) -> None:
    server.models = {"data": [{"id": "a", "owned_by": "nano-inference", "chat_defaults": {"top_p": "all"}}]}
    _, err = ask(capsys, server.url, code=1)
    assert err == "nano-inference: the server's chat_defaults are invalid: top_p must be a number, got 'all'\n"


def test_calculator_rejection_is_retried_without(server: Scripted, capsys: Capture) -> None:
    """The server was restarted with another model of the same name."""
    server.models = {"data": [{"id": "a", "owned_by": "nano-inference", "calculator": True}]}
    head, server.head = server.head, ""
    refusal = {"error": {"message": "the model has no calculator", "param": "calculator"}}
    server.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n" + json.dumps(refusal).encode())
    server.cut()
    server.raw(head.encode())
    server.answer("hi")
    assert ask(capsys, server.url)[0] == "hi\n"
    assert server.post()["calculator"] is True and "calculator" not in server.post()


@pytest.mark.parametrize(
    ("models", "said", "code"),
    [
        ({"data": []}, "--model must name one of the server's models: it lists none", 2),
        ({"data": [{"id": "a"}, {"id": "b\x1b"}]}, "--model must name one of the server's models: a, b␛", 2),
        ({"data": 3}, "/v1/models: not an OpenAI-compatible server", 1),
        (b"<html>", "the server sent invalid JSON: '<html>'", 1),
    ],
)
def test_missing_model_is_one_line(server: Scripted, capsys: Capture, models: object, said: str, code: int) -> None:
    server.models = models
    out, err = ask(capsys, server.url, code=code)
    assert out == "" and said in err and err.count("\n") == 1


def test_model_may_be_switched_by_an_alias(server: Scripted, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    cards: list[dict[str, Any]] = [{"id": "a", "parent": None}, {"id": "b"}, {"id": "short", "parent": "b"}]
    server.models = {"data": cards}
    server.answer("hi")
    monkeypatch.setattr("sys.stdin", io.StringIO("/model short\nhello\n/model absent\n/model\n"))
    assert main(["chat", "--server", server.url, "--model", "a"]) == 0
    out, err = capsys.readouterr()
    assert "hi\n" in out and server.post()["model"] == "short"
    assert "/model must be followed by one of the server's models: a, b\n" in err
    assert re.search(r"models +a, b\n", out + err)


@pytest.mark.parametrize(
    ("script", "out", "said"),
    [
        ([b'data: {"error": {"message": "out of\\nmemory"}}\n\n'], "", "the server failed: out of memory"),
        ([b"data: nonsense\n\n"], "", "the server sent invalid JSON: 'nonsense'"),
        ([b"data: [1]\n\n"], "", "the server sent an invalid event: '[1]'"),
        ([chunk("half")], "half\n", "the connection was lost in the middle of the answer"),
        ([chunk("half"), b"\xff\xfe\xfd garbage\n\ndata: {{{\n\n"], "half\n", "invalid JSON: '{{{'"),
        ([], "", "the connection was lost in the middle of the answer"),
    ],
)
def test_failure_keeps_partial_answer(
    server: Scripted, capsys: Capture, script: list[object], out: str, said: str
) -> None:
    for one in script:
        server.raw(one) if isinstance(one, bytes) else server.event(one)
    server.cut()
    text, err = ask(capsys, server.url, code=1)
    failures = [line for line in err.splitlines() if line.startswith("nano-inference: ")]
    assert text == out and len(failures) == 1 and said in failures[0]


def test_partial_answer_stays_in_the_conversation(forker: Forker, server: Scripted) -> None:
    with terminal("chat", "--server", server.url, forker=forker, columns=WIDE) as screen:
        screen.prompt()
        screen.send("question\r")
        server.say("half")
        server.cut()
        screen.wait("nano-inference: the connection was lost in the middle of the answer")
        screen.prompt()
        server.post()
        screen.send("/tokens on\rmore\r")
        body = server.post()
        assert [message["content"] for message in body["messages"]] == ["question", "half", "more"]
        assert body["logprobs"] is True and body["top_logprobs"] == 5
        server.answer("rest")
        screen.wait("[this answer has no probabilities]")
        screen.prompt()
        screen.send("\x04")
        assert screen.leave() == 0


def test_invalid_usage_is_reported_before_requests(capsys: Capture) -> None:
    _, err = ask(capsys, "ftp://x", code=2)
    assert err == "nano-inference: --server must be a URL such as http://127.0.0.1:8000, got 'ftp://x'\n"
    _, err = ask(capsys, "x", "--nanochat", code=2)
    assert err == "nano-inference: --server and --nanochat exclude each other\n"
