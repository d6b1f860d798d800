"""Loading a model for serving: names, limits, step size, defaults of its files and of the operator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.load import CPU_STEP_TOKENS, for_serving
from nano_inference.types import ModelError
from tests.server.mounted import ids
from tests.server.tiny import NAME, Running, make_tiny, opened, running

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("asked", "tokens"), [(None, CPU_STEP_TOKENS), (2048, 2048), (64, 64)])
def test_steps_are_short_on_a_cpu_unless_asked_otherwise(asked: int | None, tokens: int) -> None:
    assert for_serving(EngineConfig(model_path="m", device="cpu"), asked).max_tokens_per_batch == tokens
    asked_config = ServerConfig(max_tokens_per_batch=asked)
    assert ServerConfig.from_dict(asked_config.to_dict()) == asked_config


def test_names_limits_and_defaults_come_from_the_files(tiny_directory: Path, tmp_path: Path) -> None:
    one = opened(tiny_directory, ServerConfig())
    assert one.model.names == (NAME,)
    assert (one.model.limits.max_model_len, one.model.limits.vocab_size) == (512, 260)
    assert one.model.dialogue is not None
    other = shutil.copytree(tiny_directory, tmp_path / "warm")
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7, "do_sample": True}))
    two = opened(other, ServerConfig(served_model_name=("a", "b")), max_model_len=64)
    assert (two.model.names, two.model.limits.max_model_len) == (("a", "b"), 64)
    assert (two.model.generation["temperature"], two.model.generation["top_k"]) == (0.25, 7)
    for loaded in (one, two):
        loaded.engine.shutdown()


def test_cache_config_info_labels(tiny_directory: Path) -> None:
    one = opened(tiny_directory, ServerConfig())
    line = next(line for line in one.metrics.render().decode().splitlines() if "cache_config_info{" in line)
    kv = one.model.limits
    assert f'kv_cache_size_tokens="{kv.num_blocks * kv.block_size}"' in line
    assert "kv_cache_max_concurrency=" in line
    one.engine.shutdown()


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
    assert reported["state_slots"] == 0, "the model has no recurrent states"
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


HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETE, LLAMA, OLLAMA = "/v1/chat/completions", "/v1/completions", "/completion", "/api/generate"


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(port=0, log_requests=False, **fields)


def prompt_of(server: Running) -> str:
    reply = server.post("/apply-template", {"messages": HELLO})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["prompt"])


def test_chat_template_replaces_the_models(tiny_directory: Path, tmp_path: Path) -> None:
    text = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{{ eos_token }}{% endfor %}"
    file = tmp_path / "other.jinja"
    file.write_text(text)
    for fields in ({"chat_template": text}, {"chat_template_file": str(file)}):
        with running(tiny_directory, config(**fields)) as server:
            assert prompt_of(server) == "<user>hello<|im_end|>"
            assert server.client.get("/props").json()["chat_template"] == text
            reply = server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "return_token_ids": True})
            assert reply.json()["prompt_token_ids"] == [*ids("<user>hello"), 257]
    with running(tiny_directory, config(chat_template="chatml")) as server:
        assert prompt_of(server) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template": "{% for %}"}, "--chat-template: the chat template does not compile"),
        ({"chat_template_file": "/nowhere/at.all"}, "/nowhere/at.all"),
    ],
)
def test_an_unusable_chat_template_ends_the_start(tiny_directory: Path, fields: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tiny_directory, config(**fields))


def test_default_variables_of_the_template_yield_to_a_requests(tmp_path: Path) -> None:
    template = (
        "{{ mood }}{% if enable_thinking %}<think>{% endif %}{% for one in messages %}{{ one.content }}{% endfor %}"
    )
    with running(make_tiny(tmp_path, template=template), config(chat_template_kwargs='{"mood": "sad"}')) as server:
        assert prompt_of(server) == "sadhello"
        reply = server.post("/apply-template", {"messages": HELLO, "chat_template_kwargs": {"mood": "glad"}})
        assert reply.json()["prompt"] == "gladhello"
        asked = {"messages": HELLO, "reasoning_effort": "high", "max_tokens": 1, "return_token_ids": True}
        assert server.post(CHAT, asked).json()["prompt_token_ids"] == ids("sad<think>hello")


@pytest.mark.parametrize("text", ['["a"]', "{", "1"])
def test_variables_of_the_template_are_a_json_object(text: str) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs must be a JSON object"):
        ServerConfig(chat_template_kwargs=text)


def test_reserved_variables_of_the_template_end_the_start(tiny_directory: Path) -> None:
    with pytest.raises(ModelError, match=r"^--chat-template-kwargs.tools is reserved"):
        opened(tiny_directory, config(chat_template_kwargs='{"tools": 1}'))


def test_default_temperature_is_used_unless_a_request_names_one(tiny_directory: Path) -> None:
    with running(tiny_directory, config(temp=0.0)) as server:
        places = {LLAMA: "content", OLLAMA: "response"}

        def texts(path: str, key: str, **fields: Any) -> set[str]:
            asked = {"prompt": "hello", "stream": False, key: 12, **fields}
            replies = [server.post(path, asked).json() for _ in range(4)]
            found = [one["choices"][0]["text"] if "choices" in one else one[places[path]] for one in replies]
            return set(map(str, found))

        greedy = texts(COMPLETE, "max_tokens", temperature=0)
        assert texts(COMPLETE, "max_tokens") == greedy == texts(LLAMA, "n_predict")
        assert len(texts(COMPLETE, "max_tokens", temperature=2)) > 1
        assert len(texts(LLAMA, "n_predict", temperature=2.0, top_k=0, top_p=1.0, min_p=0.0)) > 1
        whole = texts(OLLAMA, "raw", raw=True, options={"num_predict": 12})
        assert whole == greedy


def test_default_length_is_that_of_requests_without_a_limit(tiny_directory: Path) -> None:
    """As in llama.cpp, a request may ask for more."""
    with running(tiny_directory, config(n_predict=5)) as server:
        for path, fields in ((COMPLETE, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
            for asked, count in ((3, 3), (None, 5), (9, 9)):
                reply = server.post(path, {**fields, "max_tokens": asked, "ignore_eos": True})
                assert reply.json()["usage"]["completion_tokens"] == count
        for fields, count in (({}, 5), ({"n_predict": 9}, 9), ({"n_predict": -1}, 5)):
            answer = server.post(LLAMA, {"prompt": "a", "ignore_eos": True, **fields}).json()
            assert answer["tokens_predicted"] == answer["generation_settings"]["n_predict"] == count
        refused = server.post(COMPLETE, {"prompt": "a", "min_tokens": 6})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 200
