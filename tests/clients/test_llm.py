"""The `llm` command, configured by extra-openai-models.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, program, run, succeed

pytest.importorskip("llm", reason=f"llm: {NEEDED}")

OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "12", "--key", "none")


@pytest.fixture
def home(tiny_server: Served, tmp_path: Path) -> Path:
    """llm's user directory with the server's model."""
    lines = ["- model_id: tiny", "  model_name: tiny", f"  api_base: {tiny_server.url}/v1", ""]
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(lines))
    return tmp_path


def llm(home: Path, *arguments: str) -> bytes:
    return succeed([program("llm"), *arguments], home, LLM_USER_PATH=str(home))


def expected(server: Served, *texts: str) -> bytes:
    """Return the expected output of `llm` for a conversation."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    reply = server.ask("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12})
    return bytes(reply["choices"][0]["message"]["content"].encode())


def test_llm_prints_the_servers_answer(tiny_server: Served, home: Path) -> None:
    answer = expected(tiny_server, "hi")
    assert llm(home, "-m", "tiny", "hi", *OPTIONS) == answer + b"\n"
    assert llm(home, "-m", "tiny", "hi", *OPTIONS, "--no-stream") == answer + b"\n"
    more = llm(home, "-c", "more", *OPTIONS)
    assert more == expected(tiny_server, "hi", answer.decode(), "more") + b"\n"
    assert b"tiny" in llm(home, "models", "list")


def test_llm_prints_the_servers_error(home: Path) -> None:
    done = run([program("llm"), "-m", "tiny", "a" * 4000, *OPTIONS], home, LLM_USER_PATH=str(home))
    assert done.returncode != 0 and b"available context size" in done.stderr
