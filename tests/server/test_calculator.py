"""A nanochat model's calculator over HTTP: it runs on request, and its tokens and parts are marked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nano_inference
from tests.server.tiny import Running, running

CALCULATOR = Path(nano_inference.__file__).parent / "nanochat" / "data" / "calculator"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = "What is 123 plus 456?"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "calculator": True}


@pytest.fixture(scope="module")
def calculating() -> Iterator[Running]:
    with running(CALCULATOR) as one:
        yield one


def answer(server: Running, **fields: Any) -> dict[str, Any]:
    reply = server.post(CHAT, {**ASK, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_calculator_output_is_marked_in_parts_and_mask(calculating: Running) -> None:
    choice = answer(calculating, return_token_ids=True, logprobs=True, top_logprobs=2)
    parts = choice["message"]["parts"]
    assert [part["type"] for part in parts if part["type"] != "text"] == ["python", "python_output"]
    expression, result = (
        next(part["text"] for part in parts if part["type"] == kind) for kind in ("python", "python_output")
    )
    assert eval(expression) == int(result) == 579
    assert f"[{expression} → {result}]" in choice["message"]["content"]
    forced = [token for token, mask in zip(choice["token_ids"], choice["mask"], strict=True) if not mask]
    tokenizer = calculating.opened.model.tokenizer
    assert tokenizer.decode(forced, skip_special=False) == f"<|output_start|>{result}<|output_end|>"
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert [entry["logprob"] for entry, mask in zip(entries, choice["mask"], strict=True) if not mask] == [0.0] * len(
        forced
    )


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
def test_calculator_is_on_in_chats_by_default(calculating: Running, path: str) -> None:
    """Without its tool the model answers that the calculator gave no result."""
    field = "input" if path == "/v1/responses" else "messages"
    turn = {field: ASK["messages"], "temperature": 0, "stream": False}
    reply = calculating.post(path, turn if path in ("/v1/responses", "/api/chat") else {**turn, "max_tokens": 64})
    assert reply.status_code == 200, reply.text
    assert "579" in reply.text and "no result" not in reply.text


def test_parts_of_earlier_answer_are_encoded_as_calls(calculating: Running) -> None:
    first = answer(calculating, return_token_ids=True)
    dialogue = calculating.opened.model.dialogue
    assert dialogue is not None
    content = first["message"]["parts"]
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": content}]
    again = dialogue.encode([*turns, {"role": "user", "content": "hi"}])
    for message in (first["message"], {"role": "assistant", "content": content}):
        body = {"messages": [turns[0], message, {"role": "user", "content": "hi"}]}
        reply = calculating.post("/tokenize", body)
        assert reply.json()["tokens"] == again
    start = len(dialogue.encode(turns[:1]))
    assert again[start : start + len(first["token_ids"])] == first["token_ids"]


@pytest.mark.parametrize(
    "parts", ["x", [1], [{"type": "python"}], [{"type": "image", "text": "x"}], [{"type": "text", "text": 1}]]
)
def test_invalid_parts_are_refused(calculating: Running, parts: Any) -> None:
    message = {"role": "assistant", "content": "x", "parts": parts}
    reply = calculating.post(CHAT, {"messages": [{"role": "user", "content": "x"}, message]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages.1.parts"


def test_calculator_is_refused_by_model_without_one(server: Running) -> None:
    for path, body in ((CHAT, ASK), (TEXT, {"prompt": "x", "calculator": True})):
        reply = server.post(path, body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "calculator"
