"""litellm; it needs an older openai than the other clients and so has a separate virtual environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.clients.process import NEEDED, Served, succeed

PYTHON = Path(sys.prefix) / "litellm" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip(f"litellm: {NEEDED}", allow_module_level=True)


def test_litellm_returns_the_servers_replies(tiny_server: Served, tmp_path: Path) -> None:
    params = {"temperature": 0, "max_tokens": 12}
    chat = tiny_server.ask("/v1/chat/completions", params | {"messages": [{"role": "user", "content": "hello"}]})
    text = tiny_server.ask("/v1/completions", params | {"prompt": "once"})
    script = Path(__file__).with_name("litellm_calls.py")
    printed = succeed([str(PYTHON), str(script), tiny_server.url], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    got = json.loads(printed.decode().splitlines()[-1])
    content = chat["choices"][0]["message"]["content"]
    assert [got[kind] for kind in ("whole", "streamed", "asynchronous", "asynchronously_streamed")] == [content] * 4
    assert got["text"] == text["choices"][0]["text"]
    assert got["usage"] == [chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]]
    assert got["finish_reason"] == chat["choices"][0]["finish_reason"]
    assert got["bad_field"][0] == "BadRequestError" and "temperature" in got["bad_field"][1]
    assert got["bad_model"][0] == "NotFoundError" and "other" in got["bad_model"][1]
