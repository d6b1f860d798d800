"""A multimodal model's text part behind every dialect: prompts with tokens of images are refused, as ids and text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference.cli import main
from tests.server.tiny import Running, make_tiny, running

IMAGE, TOKEN = "<|image|>", 260


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama inside a Mistral 3, with a token for images."""
    path = make_tiny(tmp_path_factory.mktemp("wrapped"), special=(IMAGE,))
    fields = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    text = json.loads((path / "config.json").read_text())
    fields |= {"text_config": text, "image_token_index": TOKEN, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(fields))
    named = {f"language_model.{name}": value for name, value in load_file(path / "model.safetensors").items()}
    save_file({**named, "vision_tower.conv.weight": torch.zeros(3, 4)}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Running]:
    with running(directory) as one:
        yield one


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [1, 2, TOKEN], "max_tokens": 2}),
    ("/v1/completions", {"prompt": f"a{IMAGE}", "max_tokens": 2}),
    ("/v1/embeddings", {"input": f"a{IMAGE}b"}),
    ("/api/generate", {"model": "tiny", "prompt": f"a{IMAGE}b", "raw": True}),
    ("/completion", {"prompt": [1, TOKEN], "n_predict": 2}),
    ("/generate", {"input_ids": [1, TOKEN], "sampling_params": {"max_new_tokens": 2}}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_dialect_refuses_tokens_of_images(server: Running, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert "is the model's image_token_index: images and videos are not supported" in reply.text, reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": user(f"a{IMAGE}b")}),
        ("/v1/messages", {"model": "tiny", "messages": user(f"a{IMAGE}b")}),
    ],
)
def test_text_is_answered_and_a_message_cannot_hold_such_tokens(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    assert server.post(path, {**body, "max_tokens": 2}).status_code == 200


def test_info_lists_the_text_part_and_what_is_ignored(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "info", str(directory), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForCausalLM, text part of Mistral3ForConditionalGeneration"
    assert facts["ignored_tensors"] == {"vision_tower.": 1}
    assert main(["models", "info", str(directory)]) == 0
    assert "\nignored tensors     vision_tower. 1\n" in capsys.readouterr().out
