"""What a trainer relies on, over HTTP: the server's part of the acceptance tests of rl.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference.server.config import ServerConfig
from tests.server.mounted import NANOCHATS, mounted
from tests.server.tiny import Running, running

pytestmark = pytest.mark.slow

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(b"What is a rollout?")
ASK: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 24,
    "seed": 11,
    "temperature": 0.8,
    "ignore_eos": True,
    "logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


@pytest.fixture(scope="module")
def rollouts(tiny_directory: Path) -> Iterator[Running]:
    """A server with --enable-rl."""
    with mounted(
        tiny_directory, NANOCHATS, config=ServerConfig(port=0, log_requests=False, enable_rl=True), lineage="pool-1"
    ) as one:
        yield one


def choices(server: Running, **fields: Any) -> list[dict[str, Any]]:
    reply = server.post(TEXT, {**ASK, **fields})
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["choices"]
    return found


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20}])
def test_logprobs_equal_trainer_recomputation(rollouts: Running, tiny_directory: Path, fields: dict[str, Any]) -> None:
    """Log-probabilities after temperature and truncation, as a trainer recomputes them."""
    (choice,) = choices(rollouts, return_sampling_mask=True, **fields)
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    tokens = torch.tensor([PROMPT + choice["token_ids"]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(PROMPT) - 1 : -1] / fields.get("temperature", 0.8)
    for position, (token, reported) in enumerate(
        zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    ):
        row, kept = logits[position], choice["sampling_mask"][position]
        expected = row.log_softmax(-1)[token] if kept is None else row[kept].log_softmax(-1)[kept.index(token)]
        assert abs(float(expected) - reported) < 1e-4
    assert (choice["sampling_mask"][0] is None) == (not fields or ("top_p" not in fields and "top_k" not in fields))


def test_concurrent_requests_do_not_change_output(rollouts: Running) -> None:
    """vLLM issue 51226: on a CPU, an unseeded mate changed what a seeded request drew."""
    (alone,) = choices(rollouts)
    mates = [{"prompt": [*PROMPT, i], "seed": None if i % 2 else i, "max_tokens": 8 + i} for i in range(15)]
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(choices, rollouts, **mate) for mate in mates]
        (among,) = choices(rollouts)
        assert all(len(other.result()) == 1 for other in others)
    assert among["token_ids"] == alone["token_ids"]


def test_samples_of_one_seed_differ_and_repeat(rollouts: Running) -> None:
    """tt-metal issue 53077: n samples of one seed were n times the same."""
    first, second = (choices(rollouts, n=8) for _ in range(2))
    assert len({tuple(one["token_ids"]) for one in first}) == 8
    assert [one["token_ids"] for one in first] == [one["token_ids"] for one in second]


def test_processes_without_seed_sample_differently(rollouts: Running, tiny_directory: Path) -> None:
    """TRL issue 7040: engines with equal seeds gave duplicate groups."""
    with running(tiny_directory) as other:
        drawn = [tuple(choices(one, seed=None)[0]["token_ids"]) for one in (rollouts, other, rollouts)]
    assert len(set(drawn)) == 3


def test_partial_answer_continues_identically(rollouts: Running) -> None:
    (whole,) = choices(rollouts)
    for cut in (1, 7, 23):
        ids = whole["token_ids"][:cut]
        (rest,) = choices(rollouts, prompt=PROMPT + ids, max_tokens=24 - cut)
        assert ids + rest["token_ids"] == whole["token_ids"]
        reported = [*whole["logprobs"]["token_logprobs"][:cut], *rest["logprobs"]["token_logprobs"]]
        assert reported == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)


def test_prompt_is_scored_without_output(rollouts: Running) -> None:
    (choice,) = choices(rollouts, max_tokens=0, echo=True, logprobs=1)
    assert choice["token_ids"] == [] and len(choice["logprobs"]["token_logprobs"]) == len(PROMPT)
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_every_reply_format_has_masks_and_versions(rollouts: Running) -> None:
    span = [{"version": "0", "start": 0, "end": 24, "number": 0}]
    chat = {name: value for name, value in ASK.items() if name != "prompt"} | {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
    }
    for path, body in ((TEXT, ASK), (CHAT, chat)):
        (choice,) = rollouts.post(path, body).json()["choices"]
        assert (choice["mask"], choice["weight_versions"]) == ([1] * 24, span)
        chunks = [chunk["choices"][0] for chunk in rollouts.events(path, {**body, "stream": True})[:-1]]
        assert [m for chunk in chunks for m in chunk.get("mask", ())] == [1] * 24
        assert chunks[-1]["weight_versions"] == span
        plain = {name: value for name, value in body.items() if not name.startswith("return_")}
        (choice,) = rollouts.post(path, plain).json()["choices"]
        assert choice["weight_versions"] == span and "mask" not in choice


def test_other_dialects_return_masks_and_versions(rollouts: Running) -> None:
    span = [{"version": "0", "start": 0, "end": 4, "number": 0}]
    llama = {"prompt": "x", "n_predict": 4, "ignore_eos": True, "return_tokens": True}
    reply = rollouts.post("/completion", llama).json()
    assert (reply["weight_versions"], reply["mask"]) == (span, [1] * 4)
    *pieces, last = rollouts.events("/completion", {**llama, "stream": True})
    assert [m for piece in pieces for m in piece["mask"]] == [1] * 4 and last["weight_versions"] == span
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    assert rollouts.events("/chat/completions", chat)[-1]["weight_versions"][0]["version"] == "0"
    reply = rollouts.post(
        "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    ).json()
    assert [(one["start"], one["end"]) for one in reply["meta_info"]["weight_versions"]] == [(0, 4)]
    assert rollouts.post("/v1/embeddings", {"input": ["x", "y"]}).json()["weight_versions"] == [0, 0]
    claude = {**chat, "model": "tiny"}
    assert rollouts.post("/v1/messages", claude).json()["weight_versions"][0]["version"] == "0"


MESSAGES = [{"role": "user", "content": "Hi"}]
DRAW: dict[str, Any] = {"max_tokens": 3, "seed": 1, "ignore_eos": True, "return_token_ids": True}


def test_replies_and_rl_routes_return_lineage(rollouts: Running) -> None:
    for path, body in ((TEXT, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
        choice = rollouts.post(path, DRAW | body).json()["choices"][0]
        assert choice["lineage"] == "pool-1" and choice["weight_versions"][0]["number"] == 0
        chunks = rollouts.events(path, DRAW | body | {"stream": True})
        assert [one["choices"][0].get("lineage") for one in chunks if one != "[DONE]"][-1] == "pool-1"
    sglang = rollouts.post("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}).json()
    assert sglang["meta_info"]["lineage"] == "pool-1"
    vllm = rollouts.post("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}).json()
    assert vllm["choices"][0]["lineage"] == "pool-1"
    assert rollouts.post("/v1/embeddings", {"input": "x"}).json()["lineage"] == "pool-1"
    for path in ("/weight_info", "/get_model_info", "/is_paused"):
        assert rollouts.client.get(path).json()["lineage"] == "pool-1", path


@pytest.mark.parametrize(
    ("path", "body"), [(TEXT, {"prompt": [72, 105]}), (CHAT, {"messages": MESSAGES, "answer_token_ids": [72, 105]})]
)
def test_tokens_of_another_lineage_are_refused(rollouts: Running, path: str, body: dict[str, Any]) -> None:
    refused = rollouts.post(path, DRAW | body | {"lineage": "pool-2"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "lineage"
    assert all(part in error["message"] for part in ("'pool-2'", "'pool-1'", "--lineage"))
    assert rollouts.post(path, DRAW | body | {"lineage": "pool-1"}).status_code == 200
    assert rollouts.post(path, DRAW | body).status_code == 200
