"""Requests and replies in vLLM's form, without our server's extensions."""

from __future__ import annotations

from typing import Any

from nano_inference import EngineRequest, SamplingParams
from nano_inference.rl.pool.dialect import SampleBuilder, request_json, samples_of

REQUEST = EngineRequest(prompt=(4, 5, 6), params=SamplingParams(max_tokens=2, seed=2**64 - 3), num_samples=2)


def choice(index: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
    entries = [{"token": f"token_id:{token}", "logprob": -0.5 * token, "top_logprobs": []} for token in tokens]
    return {"index": index, "token_ids": tokens, "logprobs": {"content": entries}, "finish_reason": None, **fields}


def test_request_has_only_fields_of_vllm() -> None:
    body = request_json(REQUEST, "m", "job-1")
    assert set(body) == {"model", "request_id", "token_ids", "sampling_params"}
    params = body["sampling_params"]
    assert (params["n"], params["seed"], params["logprobs"], params["max_tokens"]) == (2, -3, 0, 2)
    assert not {"return_raw_logprobs", "return_sampling_mask", "stop", "logit_bias"} & set(params)


def test_reply_without_masks_and_versions_gives_samples_of_the_workers_version() -> None:
    reply = {"choices": [choice(1, [7], finish_reason="stop"), choice(0, [8, 9], finish_reason="length")]}
    first, second = samples_of(reply, REQUEST, 3)
    assert (first.completion_tokens, first.logprobs, first.mask) == ((8, 9), (-4.0, -4.5), (1, 1))
    assert (second.completion_tokens, second.finish_reason) == ((7,), "stop")
    assert (first.token_versions, first.weight_version, first.seed) == ((3, 3), 3, 2**64 - 3)


def test_chunks_of_a_stream_add_up_to_the_sample() -> None:
    builder = SampleBuilder(REQUEST, 0, 3)
    deltas = [builder.add(choice(0, [8])), builder.add(last := choice(0, [9], finish_reason="length"))]
    assert [delta.token_ids for delta in deltas] == [(8,), (9,)] and deltas[1].versions == (3,)
    assert (
        builder.sample(last, {}) == samples_of({"choices": [choice(0, [8, 9], finish_reason="length")]}, REQUEST, 3)[0]
    )
