"""Log-probabilities of the whole vocabulary (`-1`) and of named tokens, in all forms of replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference.server.config import ServerConfig
from tests.server.mounted import JSON, ids
from tests.server.tiny import Running, running

VOCAB_SIZE = 260
SEED = 2**64 - 1


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, max_logprobs=-1)) as one:
        yield one


def post(server: Running, path: str, **fields: Any) -> Any:
    reply = server.post(path, fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(server: Running, **fields: Any) -> JSON:
    body = {"prompt": ids("hello"), "max_tokens": 4, "seed": SEED, "return_tokens_as_token_ids": True, **fields}
    choice: JSON = post(server, "/v1/completions", **body)["choices"][0]
    return choice


def test_minus_one_is_the_whole_vocabulary(server: Running) -> None:
    choice = complete(server, logprobs=-1, prompt_logprobs=-1)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [VOCAB_SIZE] * 4
    assert [len(row) for row in choice["prompt_logprobs"][1:]] == [VOCAB_SIZE] * 4
    assert sorted(one["rank"] for one in choice["prompt_logprobs"][1].values()) == list(range(1, VOCAB_SIZE + 1))
    message = [{"role": "user", "content": "hello"}]
    chat = post(server, "/v1/chat/completions", messages=message, max_tokens=2, logprobs=True, top_logprobs=-1)
    assert [len(one["top_logprobs"]) for one in chat["choices"][0]["logprobs"]["content"]] == [VOCAB_SIZE] * 2
    params = {"max_tokens": 2, "logprobs": -1, "seed": SEED}
    reply = post(server, "/inference/v1/generate", token_ids=ids("hello"), sampling_params=params)
    assert [len(one["top_logprobs"]) for one in reply["choices"][0]["logprobs"]["content"]] == [VOCAB_SIZE] * 2


def test_named_tokens_replace_the_most_probable_ones(server: Running) -> None:
    whole = complete(server, logprobs=-1)["logprobs"]
    named = complete(server, logprobs=1, logprob_token_ids=[9, 3])["logprobs"]
    assert named["token_logprobs"] == whole["token_logprobs"]
    for row, every, own in zip(named["top_logprobs"], whole["top_logprobs"], named["tokens"], strict=True):
        assert list(row)[:2] == ["token_id:9", "token_id:3"] and set(row) == {"token_id:9", "token_id:3", own}
        assert row == {name: every[name] for name in row}
    message = [{"role": "user", "content": "hello"}]
    fields: JSON = {"messages": message, "max_tokens": 2, "seed": SEED, "logprobs": True, "return_token_ids": True}
    content = post(server, "/v1/chat/completions", **fields, logprob_token_ids=[9, 3])["choices"][0]["logprobs"]
    for entry in content["content"]:
        assert [one["token_id"] for one in entry["top_logprobs"]][:2] == [9, 3]
        assert {one["token_id"] for one in entry["top_logprobs"]} == {9, 3, entry["token_id"]}
    events = server.events("/v1/chat/completions", {**fields, "stream": True, "logprob_token_ids": [9, 3]})[:-1]
    chunks = [event["choices"][0]["logprobs"]["content"] for event in events if event["choices"][0].get("logprobs")]
    assert [entry for chunk in chunks for entry in chunk] == content["content"]
    params = {"max_tokens": 2, "logprobs": 0, "seed": SEED, "logprob_token_ids": [9, 3]}
    reply = post(server, "/inference/v1/generate", token_ids=ids("hello"), sampling_params=params)
    tops = [entry["top_logprobs"] for entry in reply["choices"][0]["logprobs"]["content"]]
    assert [[one["token_id"] for one in top] for top in tops] == [[9, 3]] * 2


CHOSEN = ids("y")[0]
HELLO = [{"role": "user", "content": "hello"}]
GREEDY: JSON = {"temperature": 0, "max_tokens": 1}
ADJUSTED: dict[str, tuple[str, JSON]] = {
    "bias": ("/v1/completions", {**GREEDY, "prompt": ids("hello"), "logprobs": 0, "logit_bias": {str(CHOSEN): 100}}),
    "allowed": ("/v1/completions", {**GREEDY, "prompt": ids("hello"), "logprobs": 0, "allowed_token_ids": [CHOSEN]}),
    "choice": (
        "/v1/chat/completions",
        {**GREEDY, "messages": HELLO, "logprobs": True, "structured_outputs": {"choice": ["yes", "no"]}},
    ),
    "vLLM": (
        "/inference/v1/generate",
        {"token_ids": ids("hello"), "sampling_params": {**GREEDY, "logprobs": 0, "allowed_token_ids": [CHOSEN]}},
    ),
    "SGLang": (
        "/generate",
        {
            **{"input_ids": ids("hello"), "return_logprob": True},
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "regex": "yes|no"},
        },
    ),
    "llama.cpp": (
        "/completion",
        {"prompt": ids("hello"), "temperature": 0, "n_predict": 1, "n_probs": 1, "json_schema": {"type": "integer"}},
    ),
    "Ollama": (
        "/api/chat",
        {
            **{"messages": HELLO, "logprobs": True, "stream": False, "format": {"type": "integer"}},
            "options": {"temperature": 0, "num_predict": 1},
        },
    ),
    "Responses": (
        "/v1/responses",
        {
            **{"input": "hello", "temperature": 0, "max_output_tokens": 1, "include": ["message.output_text.logprobs"]},
            "structured_outputs": {"choice": ["yes", "no"]},
        },
    ),
}


def logprob_in(reply: Any) -> float:
    """Return the first log-probability anywhere in a reply."""
    for name, value in reply.items() if isinstance(reply, dict) else enumerate(reply):
        if name == "logprob" and isinstance(value, float):
            return value
        if name in ("token_logprobs", "output_token_logprobs"):
            return float(value[0][0] if isinstance(value[0], list) else value[0])
        if isinstance(value, dict | list):
            found = logprob_in(value)
            if found <= 0:
                return found
    return 1.0


@pytest.mark.parametrize("name", ADJUSTED)
def test_raw_logprobs_at_temperature_0_are_the_models_own(name: str, server: Running, tiny_directory: Path) -> None:
    path, body = ADJUSTED[name]
    prompt = ids("hello")
    if "prompt" not in body and "token_ids" not in body and "input_ids" not in body:
        prompt = post(server, "/tokenize", messages=HELLO)["tokens"]
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_directory)
    with torch.no_grad():
        logits_V = model(torch.tensor([prompt])).logits[0, -1].double()
    allowed = ids("-0123456789") if "format" in body or "json_schema" in body else ids("yn")
    allowed = [CHOSEN] if str(CHOSEN) in repr(body) else allowed  # named by the bias or the ids
    token = max(allowed, key=lambda one: float(logits_V[one]))
    reply = post(server, path, **({"model": "tiny", **body} if path.startswith("/api") else body))
    assert logprob_in(reply) == pytest.approx(float(logits_V.log_softmax(-1)[token]), abs=1e-4), reply
