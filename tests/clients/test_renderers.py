"""renderers' client, which verifiers and prime-rl use: it renders messages to tokens for /inference/v1/generate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.process import NEEDED, Served

renderers = pytest.importorskip("renderers", reason=f"renderers: {NEEDED}")
transformers = pytest.importorskip("transformers", reason=f"transformers: {NEEDED}")

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def renderer(tiny_directory: Path) -> Any:
    """A renderer with the tiny model's chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_directory)
    return renderers.create_renderer(tokenizer, renderers.DefaultRendererConfig())


def run_with_client(server: Served, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await work(client)

    return asyncio.run(run())


def generated(server: Served, renderer: Any, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    from renderers.client import generate

    params = {"sampling_params": GREEDY, **fields}
    reply: dict[str, Any] = run_with_client(
        server, lambda client: generate(client=client, renderer=renderer, messages=messages, model="tiny", **params)
    )
    return reply


def test_generate_equals_the_servers_chat(tiny_server: Served, renderer: Any) -> None:
    reply = generated(tiny_server, renderer)
    chat = tiny_server.ask(
        "/v1/chat/completions", {"messages": HELLO, **GREEDY, "return_token_ids": True, "logprobs": True}
    )
    (choice,) = chat["choices"]
    assert reply["prompt_ids"] == chat["prompt_token_ids"]
    assert reply["completion_ids"] == choice["token_ids"] and reply["finish_reason"] == choice["finish_reason"]
    expected = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(reply["completion_logprobs"], expected, strict=True))
    assert reply["content"] == choice["message"]["content"].strip()
    assert reply["usage"]["completion_tokens"] == len(reply["completion_ids"]) and reply["request_id"]
    assert reply["routed_experts"] is None and reply["sampling_mask"] is None


def test_sampling_params_and_cache_salt_reach_the_server(tiny_server: Served, renderer: Any) -> None:
    params = {"temperature": 1.2, "top_k": 5, "top_p": 0.9, "seed": 3, "max_tokens": 24, "min_tokens": 24}
    replies = [
        generated(tiny_server, renderer, sampling_params=one, cache_salt="policy-1", priority=0)
        for one in (params, params, {**params, "seed": 4}, {**params, "return_sampling_mask": True})
    ]
    tokens = [reply["completion_ids"] for reply in replies]
    assert tokens[0] == tokens[1] == tokens[3] != tokens[2] and len(tokens[0]) == 24
    assert all(token in mask for token, mask in zip(tokens[3], replies[3]["sampling_mask"], strict=True))


def test_overlong_prompt_error_has_the_context_length(tiny_server: Served, renderer: Any) -> None:
    from renderers.client import OverlongPromptError

    with pytest.raises(OverlongPromptError) as caught:
        generated(tiny_server, renderer, prompt_ids=[1] * 600)
    assert caught.value.max_prompt_len == 512
