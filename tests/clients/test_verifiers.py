"""verifiers: an environment with a tool, played by relayed chats and by the token ids of its training client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine
from tests.clients.process import NEEDED, Served, serving, succeed
from tests.server.scripted import make_following

PYTHON = Path(sys.prefix) / "verifiers" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip(f"verifiers: {NEEDED}", allow_module_level=True)

CALL, ANSWER = "<|call|>", "<|answer|>"
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> calls {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    f"{{% if message.tool_calls %}}{CALL}{{% for call in message.tool_calls %}}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}"
    f"</tool_call>{{% endfor %}}{{% elif message.role == 'assistant' %}}{ANSWER}{{% endif %}}"
    "{{ message.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    f"{{% if messages[-1].role == 'tool' %}}{ANSWER}{{% else %}}{CALL}{{% endif %}}{{% endif %}}"
)
"""Marks what the model writes next, in the history too, so that a turn's tokens begin with those of the turn before."""
BODY = '{"name": "plus", "arguments": {"a": 2, "b": 3}}'
FOLLOWERS = {
    **{CALL: "<tool_call>", "<tool_call>": BODY, BODY: "</tool_call>", "</tool_call>": "<|im_end|>"},
    **{ANSWER: "It is 5.", "It is 5.": "<|im_end|>"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls `plus` and then gives the sum."""
    return make_following(tmp_path_factory.mktemp("by_heart"), TEMPLATE, (CALL, ANSWER), FOLLOWERS)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    options = ("--served-model-name", "by-heart", "--device", "cpu", "--kv-cache-bytes", "16777216", "--enable-rl")
    with serving(model, *options) as served:
        yield served


@pytest.fixture(scope="module")
def episodes(server: Served, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One episode by each client."""
    here = Path(__file__).parent
    directory = tmp_path_factory.mktemp("verifiers")
    command = [str(PYTHON), str(here / "verifiers_calls.py"), server.url, str(model)]
    printed = succeed(command, directory, PYTHONPATH=os.fspath(here), HOME=os.fspath(directory))
    found: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
    return found


@pytest.mark.parametrize("client", ["eval", "train"])
def test_an_environment_calls_its_tool_and_is_rewarded(episodes: dict[str, Any], client: str) -> None:
    episode = episodes[client]
    (trace,) = episode["traces"]
    assert episode["ok"] and not episode["errors"] and not trace["errors"]
    assert trace["rewards"]["is_right"]["score"] == 1.0 and trace["metrics"]["num_tool_results"] == 1.0
    messages = [node["message"] for node in trace["nodes"]]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = messages[1]["tool_calls"]
    assert call["name"] == "plus" and json.loads(call["arguments"]) == {"a": 2, "b": 3}
    assert messages[3]["content"] == "It is 5."
    assert [node["sampled"] for node in trace["nodes"]] == [False, True, False, True]


def test_the_training_client_has_the_engines_tokens_and_logprobs(episodes: dict[str, Any], model: Path) -> None:
    (trace,) = episodes["train"]["traces"]
    ids = [token for node in trace["nodes"] for token in node["token_ids"]]
    mask = [bit for node in trace["nodes"] for bit in node["mask"]]
    found = [logprob for node in trace["nodes"] for logprob in node["logprobs"]]
    with InferenceEngine(EngineConfig(str(model), device="cpu", dtype="float32", kv_cache_bytes=16 << 20)) as engine:
        scores = [0.0, *engine.score(ids)]
    assert sum(mask) == 6, "a call of three tokens, an answer of one, and two ends"
    assert len(found) == sum(mask)
    assert found == pytest.approx([score for score, bit in zip(scores, mask, strict=True) if bit], abs=1e-5)
