"""Log-probabilities of the whole vocabulary (`-1`) and of named tokens, in all forms of replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


def test_seeds_have_64_bits(server: Running) -> None:
    assert complete(server, seed=SEED, temperature=2.0)["text"] == complete(server, seed=-1, temperature=2.0)["text"]
    refused = server.post("/v1/completions", {"prompt": "a", "seed": 2**64})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
