"""The model's generation_config.json over HTTP: used by default, not with `--generation-config none` or RL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.types import ModelError
from tests.server.tiny import opened, running

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "seed": 5, "ignore_eos": True}
OWN = {"top_k": 1, "temperature": 1.5}


@pytest.fixture(scope="module")
def opinionated(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config.json makes sampling greedy."""
    directory = shutil.copytree(tiny_directory, tmp_path_factory.mktemp("opinionated") / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, **OWN}))
    return directory


@pytest.mark.parametrize(
    ("fields", "is_used"), [({}, True), ({"generation_config": "none"}, False), ({"enable_rl": True}, False)]
)
def test_defaults_of_generation_config(opinionated: Path, fields: dict[str, Any], is_used: bool) -> None:
    with running(opinionated, ServerConfig(port=0, log_requests=False, **fields)) as server:
        reported = server.client.get("/info").json()
        texts = [
            server.post("/v1/completions", {**BODY, **more}).json()["choices"][0]["text"]
            for more in ({}, {"temperature": 0}, {"temperature": 1, "top_k": 0})
        ]
    unnamed, likeliest, plain = texts
    assert likeliest != plain and unnamed == (likeliest if is_used else plain)
    assert reported["generation_config"] == ("auto" if is_used else "none")
    wanted = OWN if is_used else {"top_k": 0, "temperature": 1.0}
    assert {name: reported["sampling_defaults"][name] for name in OWN} == wanted
    assert {name: reported["chat_defaults"][name] for name in OWN} == OWN, "the chat page always uses the model's own"


def test_unused_invalid_generation_config_is_ignored(tiny_directory: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_directory, tmp_path / "model")
    (directory / "generation_config.json").write_text('{"top_p": 3, "eos_token_id": 257}')
    with pytest.raises(ModelError, match="top_p"):
        opened(directory, ServerConfig(port=0))
    found = opened(directory, ServerConfig(port=0, generation_config="none"))
    found.engine.shutdown()
    assert found.model.chat_defaults.source == "default for chats"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generation_config": "vllm"}, r"^generation_config must be one of auto, none, got 'vllm'"),
        ({"generation_config": "auto", "enable_rl": True}, "^generation_config must be none with enable_rl: "),
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**fields)
