"""The lineage of weight versions over HTTP: part of replies; tokens of another lineage are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from tests.server.tiny import Running, running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
DRAW: dict[str, Any] = {"max_tokens": 3, "seed": 1, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    config = ServerConfig(port=0, log_requests=False, enable_rl=True)
    with running(tiny_directory, config, lineage="pool-1") as one:
        yield one


def test_replies_and_rl_routes_return_lineage(server: Running) -> None:
    for path, body in ((TEXT, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
        choice = server.post(path, DRAW | body).json()["choices"][0]
        assert choice["lineage"] == "pool-1" and choice["weight_versions"][0]["number"] == 0
        chunks = server.events(path, DRAW | body | {"stream": True})
        assert [one["choices"][0].get("lineage") for one in chunks if one != "[DONE]"][-1] == "pool-1"
    sglang = server.post("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}).json()
    assert sglang["meta_info"]["lineage"] == "pool-1"
    vllm = server.post("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}).json()
    assert vllm["choices"][0]["lineage"] == "pool-1"
    assert server.post("/v1/embeddings", {"input": "x"}).json()["lineage"] == "pool-1"
    for path in ("/weight_info", "/get_model_info", "/is_paused"):
        assert server.client.get(path).json()["lineage"] == "pool-1", path


@pytest.mark.parametrize(
    ("path", "body"), [(TEXT, {"prompt": [72, 105]}), (CHAT, {"messages": MESSAGES, "answer_token_ids": [72, 105]})]
)
def test_tokens_of_another_lineage_are_refused(server: Running, path: str, body: dict[str, Any]) -> None:
    refused = server.post(path, DRAW | body | {"lineage": "pool-2"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "lineage"
    assert all(part in error["message"] for part in ("'pool-2'", "'pool-1'", "--lineage"))
    assert server.post(path, DRAW | body | {"lineage": "pool-1"}).status_code == 200
    assert server.post(path, DRAW | body).status_code == 200
