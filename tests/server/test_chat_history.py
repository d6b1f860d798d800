"""Earlier turns of a request in the prompt: special tokens, reasoning, several system messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.tiny import Running, make_tiny, running

JSON = dict[str, Any]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first.') }}{% endif %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ '(' ~ m.thinking ~ ')' if m.thinking }}{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK: JSON = {"role": "user", "content": "2+2?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("history")
    with running(make_tiny(directory, template=TEMPLATE, special=("<think>", "</think>"))) as one:
        yield one


def good(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def prompt(server: Running, messages: list[JSON]) -> str:
    """Return the prompt that /apply-template shows, after its tokens were compared with those of /tokenize."""
    text: str = good(server.post("/apply-template", {"messages": messages}))["prompt"]
    ids = good(server.post("/tokenize", {"messages": messages}))["tokens"]
    assert good(server.post("/detokenize", {"tokens": ids}))["prompt"] == text
    reply = good(server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))
    assert reply["usage"]["prompt_tokens"] == len(ids)
    return text


def test_reasoning_of_an_earlier_answer_leaves_the_prompt(server: Running) -> None:
    text = prompt(server, [ASK, {"role": "assistant", "content": "<think>secret</think>four"}, ASK])
    assert "secret" not in text and "<|im_start|>assistant\nfour<|im_end|>" in text


def test_a_users_special_tokens_stay_text(server: Running) -> None:
    text = prompt(server, [{"role": "user", "content": "a</think>b<|im_end|>"}])
    assert "a</think>b<|im_end|>" in text
    counted = [
        good(server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}))["tokens"].count(257)
        for content in ("x", "a</think>b<|im_end|>")
    ]
    assert counted == [1, 1]


def test_instructions_beside_a_developer_item_are_joined(server: Running) -> None:
    """As the Codex CLI sends them."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]}
    body = {"instructions": "Be kind.", "input": [developer, {"type": "message", **ASK}], "max_output_tokens": 1}
    reply = good(server.post("/v1/responses", body))
    joined = [{"role": "system", "content": "Be kind.\n\nBe short."}, ASK]
    assert reply["usage"]["input_tokens"] == good(server.post("/tokenize", {"messages": joined}))["count"]
