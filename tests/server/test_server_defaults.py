"""What an operator sets for all requests: the chat template, the default temperature, the longest answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.types import ModelError
from tests.server.mounted import ids
from tests.server.tiny import Running, make_tiny, opened, running

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
