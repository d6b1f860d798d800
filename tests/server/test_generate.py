"""vLLM's /inference/v1/generate: fields, refusals, whole replies and streams."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.detokenizer import LogprobEntry
from nano_inference.server.dialect import Route
from nano_inference.server.dialects.generate import GenerateBody, GenerateReply, ask_generate, rank_of
from nano_inference.types import TokenLogprob
from tests.cases import failures
from tests.server.mounted import JSON, ended_after, ids, mounted
from tests.server.tiny import Running

pytestmark = pytest.mark.slow

PATH = "/inference/v1/generate"
ROUTE = Route(path=PATH, body=GenerateBody, ask=ask_generate, reply=GenerateReply, summary="Complete token ids.")
HOT: JSON = {"temperature": 1.5, "seed": 3, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with mounted(tiny_directory, ROUTE) as one:
        yield one


def body_of(sampling: JSON, **fields: Any) -> JSON:
    """Return a body; greedy and short by default."""
    return {"token_ids": ids("hello"), "sampling_params": {"temperature": 0, "max_tokens": 12, **sampling}, **fields}


def generate(server: Running, sampling: JSON, **fields: Any) -> JSON:
    """Return the JSON of a successful POST."""
    reply = server.post(PATH, body_of(sampling, **fields))
    assert reply.status_code == 200, reply.text
    answer: JSON = reply.json()
    return answer


def test_continuous_usage_counts_the_tokens_so_far(server: Running) -> None:
    body = body_of({**HOT, "n": 3}, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    chunks = server.events(PATH, body)[:-1]
    num_new = [sum(len(choice["token_ids"]) for choice in one["choices"]) for one in chunks]
    assert [one["usage"]["completion_tokens"] for one in chunks] == list(accumulate(num_new))
    assert sum(num_new) == 120
    plain = server.events(PATH, body_of(HOT, stream=True))
    assert all("usage" not in one for one in plain[:-1]) and plain[-2]["choices"]


def test_rank_of_tokens_in_and_outside_the_top() -> None:
    top = (TokenLogprob(7, -0.5), TokenLogprob(9, -1.0))
    assert rank_of(LogprobEntry(9, "", -1.0, top, 0), 2) == 2
    assert rank_of(LogprobEntry(3, "", -4.0, (*top, TokenLogprob(3, -4.0)), 0), 2) is None
    assert rank_of(LogprobEntry(3, "", -4.0, (TokenLogprob(3, -4.0),), 0), 0) is None


REFUSED: list[tuple[JSON, JSON, str]] = [
    ({}, {"token_ids": []}, "token_ids"),
    ({}, {"token_ids": [-1]}, "token_ids.0"),
    ({}, {"token_ids": [260]}, "token_ids"),
    ({}, {"token_ids": [1] * 600}, "token_ids"),
    ({}, {"token_ids": "hello"}, "token_ids"),
    ({}, {"cache_salt": "a@b"}, "cache_salt"),
    ({}, {"request_id": ""}, "request_id"),
    ({}, {"stream_options": {"include_usage": True}}, "stream_options"),
    ({"structured_outputs": {"structural_tag": "{}"}}, {}, "sampling_params.structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "((["}}, {}, "sampling_params.structured_outputs.regex"),
    ({"max_new_tokens": 5}, {}, "sampling_params.max_new_tokens"),
    ({"temperature": -1}, {}, "sampling_params.temperature"),
    ({"top_p": 0}, {}, "sampling_params.top_p"),
    ({"n": 17}, {}, "sampling_params.n"),
    ({"logprobs": 21}, {}, "sampling_params.logprobs"),
    ({"logprobs": -1}, {}, "sampling_params.logprobs"),
    ({"prompt_logprobs": 21}, {}, "sampling_params.prompt_logprobs"),
    ({"prompt_logprobs": 1}, {"stream": True}, "sampling_params.prompt_logprobs"),
    ({"min_tokens": 13}, {}, "sampling_params.min_tokens"),
    ({"stop_token_ids": [260]}, {}, "sampling_params.stop_token_ids"),
    ({"allowed_token_ids": []}, {}, "sampling_params.allowed_token_ids"),
    ({"logit_bias": {"260": 1.0}}, {}, "sampling_params.logit_bias"),
    ({"output_kind": 3}, {}, "sampling_params.output_kind"),
    ({"output_kind": 2}, {"stream": True}, "sampling_params.output_kind"),
    ({"stop": "a", "detokenize": False}, {}, "sampling_params.stop"),
    ({"truncation_side": "both"}, {}, "sampling_params.truncation_side"),
    ({"truncate_prompt_tokens": 0}, {}, "sampling_params.truncate_prompt_tokens"),
    ({"logprob_token_ids": [1]}, {}, "sampling_params.logprob_token_ids"),
    ({"logprob_token_ids": [260], "logprobs": 1}, {}, "sampling_params.logprob_token_ids"),
    ({}, {"answer_start": 2}, "answer_start"),
]


def test_unsupported_or_invalid_field_is_named(server: Running) -> None:
    def check(sampling: JSON, fields: JSON, param: str) -> None:
        reply = server.post(PATH, body_of(sampling, **fields))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param), error
        assert param in error["message"] or "size of 512" in error["message"]

    assert failures(check, REFUSED) == []


def test_aborted_request_returns_its_tokens_so_far(server: Running) -> None:
    sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 200, "ignore_eos": True, "logprobs": 1}
    whole = generate(server, sampling)["choices"][0]
    reply = ended_after(server, 20, lambda: generate(server, sampling, request_id="gone"))
    assert reply["request_id"] == "gone"
    (choice,) = reply["choices"]
    count = len(choice["token_ids"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
    assert 0 < count < 200 and choice["token_ids"] == whole["token_ids"][:count]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]


def test_an_answer_is_scored_as_it_was_sampled(server: Running) -> None:
    asked = {**HOT, "top_k": 20, "presence_penalty": 0.7, "logprobs": 0}
    prompt = ids("hello")
    (choice,) = generate(server, asked)["choices"]
    text = [*prompt, *choice["token_ids"]]
    reply = generate(server, {**asked, "prompt_logprobs": 0}, token_ids=text, answer_start=len(prompt))
    entries = reply["prompt_logprobs"]
    assert entries[: len(prompt)] == [None] * len(prompt) and reply["choices"][0]["token_ids"] == []
    found = [entry[str(token)]["logprob"] for token, entry in zip(text, entries, strict=True) if entry]
    assert found == [entry["logprob"] for entry in choice["logprobs"]["content"]]
