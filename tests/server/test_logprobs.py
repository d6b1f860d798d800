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

pytestmark = pytest.mark.slow

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
ADJUSTED: dict[str, JSON] = {
    "bias": {"logit_bias": {str(CHOSEN): 100}},
    "allowed": {"allowed_token_ids": [CHOSEN]},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
}


@pytest.mark.parametrize("name", ADJUSTED)
def test_raw_logprobs_at_temperature_0_are_the_models_own(name: str, server: Running, tiny_directory: Path) -> None:
    choice = complete(server, **ADJUSTED[name], temperature=0, max_tokens=1, logprobs=0, return_token_ids=True)
    (token,) = choice["token_ids"]
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_directory)
    with torch.no_grad():
        logits_V = model(torch.tensor([ids("hello")])).logits[0, -1].double()
    assert token == max([CHOSEN] if name != "choice" else ids("yn"), key=lambda one: float(logits_V[one]))
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([float(logits_V.log_softmax(-1)[token])], abs=1e-4)
