"""Answers that start with given tokens (`answer_token_ids`), a nanochat model's calculator over HTTP, and /info."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nano_inference
from tests.server.tiny import Running, running

pytestmark = pytest.mark.slow

CALCULATOR = Path(nano_inference.__file__).parent / "nanochat" / "data" / "calculator"
PATH, TEXT = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 5, "temperature": 1.0},
    **{"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
}


def choice(server: Running, **fields: Any) -> dict[str, Any]:
    reply = server.post(PATH, {**BODY, **fields})
    assert reply.status_code == 200, reply.text
    (one,) = reply.json()["choices"]
    return dict(one)


@pytest.mark.parametrize("cut", [1, 13, 29])
def test_continuation_equals_uninterrupted_answer(server: Running, cut: int) -> None:
    whole = choice(server)
    ids = whole["token_ids"]
    rest = choice(server, answer_token_ids=ids[:cut], max_tokens=30 - cut, echo=True)
    assert rest["token_ids"] == ids[cut:] and rest["answer_token_ids"] == ids[:cut]
    assert rest["message"]["content"] == whole["message"]["content"], "a character split by the cut is decoded"
    scores, again = whole["logprobs"]["content"][cut:], rest["logprobs"]["content"]
    assert [one["token_id"] for one in again] == ids[cut:]
    for field in ("logprob", "token"):
        assert [one[field] for one in again] == [one[field] for one in scores]


def test_stream_starts_with_echoed_prefix(server: Running) -> None:
    whole = choice(server)
    body = {**BODY, "answer_token_ids": whole["token_ids"][:9], "max_tokens": 21, "stream": True, "echo": True}
    events = [event["choices"][0] for event in server.events(PATH, body)[:-1]]
    assert "token_ids" not in events[1] and events[1]["answer_token_ids"] == whole["token_ids"][:9]
    assert "".join(event["delta"].get("content") or "" for event in events) == whole["message"]["content"]
    assert [token for event in events for token in event.get("token_ids", [])] == whole["token_ids"][9:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answer_token_ids": [9999]}, "answer_token_ids: token id 9999 is outside the vocabulary of 260"),
        ({"answer_token_ids": [1], "response_format": {"type": "json_object"}}, "functions or a structure"),
        ({"answer_token_ids": [1], "add_generation_prompt": False}, "continue_final_message or without"),
        ({"answer_token_ids": [1] * 600}, "600 tokens leave no room in the context of 512"),
        ({"answer_token_ids": [1] * 500}, "exceeds the available context size of 512"),
        ({"sample_index": -1}, "sample_index"),
    ],
)
def test_invalid_prefix_is_refused(server: Running, fields: dict[str, Any], message: str) -> None:
    reply = server.post(PATH, {**BODY, **fields})
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def calculator() -> Iterator[Running]:
    with running(CALCULATOR) as one:
        yield one


SUM: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "What is 12 + 34?"}], "temperature": 0, "max_tokens": 60},
    **{"return_token_ids": True, "calculator": True, "echo": True},
}


def test_answer_continues_from_every_position_in_a_calculator_call(calculator: Running) -> None:
    whole = calculator.post(PATH, {**SUM, "echo": False}).json()["choices"][0]
    ids, mask = whole["token_ids"], whole["mask"]
    assert 0 in mask and whole["message"]["parts"][0] == {"type": "python", "text": "12+34"}
    for cut in range(1, len(ids)):
        rest = calculator.post(PATH, {**SUM, "answer_token_ids": ids[:cut]}).json()["choices"][0]
        prefix = rest["answer_token_ids"]
        assert prefix + rest["token_ids"] == ids, cut
        assert all(mask[at] == 0 for at in range(cut, len(prefix))), "only forced tokens are added"
        assert rest["message"]["content"] == whole["message"]["content"]
        assert rest["message"]["parts"] == whole["message"]["parts"]


def test_prefix_with_wrong_forced_tokens_is_refused(calculator: Running) -> None:
    whole = calculator.post(PATH, SUM).json()["choices"][0]
    ids = list(whole["token_ids"])
    ids[whole["mask"].index(0) + 1] = ids[1]
    reply = calculator.post(PATH, {**SUM, "answer_token_ids": ids})
    assert reply.status_code == 400 and "where the calculator forces its result" in reply.json()["error"]["message"]


def test_info_fields(server: Running, calculator: Running) -> None:
    info = server.client.get("/info").json()
    assert info["server"] == f"nano-inference {nano_inference.__version__}" and info["model"] == "tiny"
    assert (info["context"], info["vocabulary"], info["end_token_ids"]) == (512, 260, [257])
    assert info["chats"] and not info["calculator"] and info["parameters"] > 10_000
    assert info["sampling_defaults"]["temperature"] == 1.0 and info["architecture"] == "LlamaForCausalLM"
    assert info["generation_config"] == "auto" and info["chat_defaults_source"] == "default for chats"
    sampling = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.0}
    assert info["chat_defaults"] == {**sampling, "max_tokens": 1024}
    assert server.client.get("/v1/models").json()["data"][0]["chat_defaults"] == info["chat_defaults"]
    assert calculator.client.get("/info").json()["calculator"] is True
    assert "/" not in str({key: value for key, value in info.items() if key != "server"}), "no paths"


QUESTION = "What is 123 plus 456?"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "calculator": True}


def answer(server: Running, **fields: Any) -> dict[str, Any]:
    reply = server.post(PATH, {**ASK, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_calculator_output_is_marked_in_parts_and_mask(calculator: Running) -> None:
    choice = answer(calculator, return_token_ids=True, logprobs=True, top_logprobs=2)
    parts = choice["message"]["parts"]
    assert [part["type"] for part in parts if part["type"] != "text"] == ["python", "python_output"]
    expression, result = (part["text"] for part in parts if part["type"] != "text")
    assert eval(expression) == int(result) == 579
    assert f"[{expression} → {result}]" in choice["message"]["content"]
    forced = [token for token, mask in zip(choice["token_ids"], choice["mask"], strict=True) if not mask]
    tokenizer = calculator.opened.model.tokenizer
    assert tokenizer.decode(forced, skip_special=False) == f"<|output_start|>{result}<|output_end|>"
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert {entry["logprob"] for entry, mask in zip(entries, choice["mask"], strict=True) if not mask} == {0.0}


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/responses", "/api/chat"])
def test_calculator_is_on_in_chats_by_default(calculator: Running, path: str) -> None:
    """Without its tool the model answers that the calculator gave no result."""
    field = "input" if path == "/v1/responses" else "messages"
    turn = {field: ASK["messages"], "temperature": 0, "stream": False}
    reply = calculator.post(path, turn if path in ("/v1/responses", "/api/chat") else {**turn, "max_tokens": 64})
    assert reply.status_code == 200, reply.text
    assert "579" in reply.text and "no result" not in reply.text


def test_parts_of_earlier_answer_are_encoded_as_calls(calculator: Running) -> None:
    first = answer(calculator, return_token_ids=True)
    dialogue = calculator.opened.model.dialogue
    assert dialogue is not None
    content = first["message"]["parts"]
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": content}]
    again = dialogue.encode([*turns, {"role": "user", "content": "hi"}])
    for message in (first["message"], {"role": "assistant", "content": content}):
        body = {"messages": [turns[0], message, {"role": "user", "content": "hi"}]}
        reply = calculator.post("/tokenize", body)
        assert reply.json()["tokens"] == again
    start = len(dialogue.encode(turns[:1]))
    assert again[start : start + len(first["token_ids"])] == first["token_ids"]


@pytest.mark.parametrize("parts", ["x", [{"type": "python"}], [{"type": "image", "text": "x"}]])
def test_invalid_parts_are_refused(calculator: Running, parts: Any) -> None:
    message = {"role": "assistant", "content": "x", "parts": parts}
    reply = calculator.post(PATH, {"messages": [{"role": "user", "content": "x"}, message]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages.1.parts"


def test_calculator_is_refused_by_model_without_one(server: Running) -> None:
    for path, body in ((PATH, ASK), (TEXT, {"prompt": "x", "calculator": True})):
        reply = server.post(path, body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "calculator"
