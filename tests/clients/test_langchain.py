"""langchain-openai's chat model."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.process import NEEDED, Served

langchain = pytest.importorskip("langchain_openai", reason=f"langchain-openai: {NEEDED}")


def model_of(server: Served, **options: Any) -> Any:
    """Return langchain's model of our server, greedy and short."""
    given = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}
    return langchain.ChatOpenAI(**given, max_retries=0, **options)


def ours(server: Served, text: str, **fields: Any) -> dict[str, Any]:
    """Return the server's own reply."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12, **fields}
    reply: dict[str, Any] = server.ask("/v1/chat/completions", body)
    return reply


def test_invoke_and_stream_give_what_the_server_says(tiny_server: Served) -> None:
    expected = ours(tiny_server, "hello")
    message = model_of(tiny_server).invoke("hello")
    assert message.content == expected["choices"][0]["message"]["content"]
    usage = message.usage_metadata
    assert usage["output_tokens"] == expected["usage"]["completion_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert message.response_metadata["finish_reason"] == expected["choices"][0]["finish_reason"]
    chunks = list(model_of(tiny_server, stream_usage=True).stream("hello"))
    assert len(chunks) > 2 and "".join(chunk.content for chunk in chunks) == message.content
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["total_tokens"] for usage in usages] == [expected["usage"]["total_tokens"]]


def test_a_conversation_and_stop_words_reach_the_server(tiny_server: Served) -> None:
    talk = [("system", "be brief"), ("human", "hello"), ("ai", "yes?"), ("human", "again")]
    roles = {"human": "user", "ai": "assistant"}
    messages = [{"role": roles.get(role, role), "content": text} for role, text in talk]
    assert model_of(tiny_server).invoke(talk).content == said(ours(tiny_server, "", messages=messages))
    whole = said(ours(tiny_server, "hello"))
    stop = next(char for char in whole[2:] if char.isascii() and char.isprintable())
    assert model_of(tiny_server).invoke("hello", stop=[stop]).content == whole[: whole.index(stop)]


def test_batches_keep_their_order(tiny_server: Served) -> None:
    texts = [f"number {index}" for index in range(8)]
    expected = [said(ours(tiny_server, text)) for text in texts]
    model = model_of(tiny_server)
    assert [message.content for message in model.batch(texts, config={"max_concurrency": 8})] == expected

    async def at_once() -> list[str]:
        answers = [message.content for message in await model.abatch(texts)]
        await model.root_async_client.close()
        return answers

    assert asyncio.run(at_once()) == expected


def test_what_is_not_done_yet_is_refused_by_name(tiny_server: Served) -> None:
    schema = {"title": "answer", "type": "object", "properties": {"value": {"type": "integer"}}}
    model = model_of(tiny_server).with_structured_output(schema, method="json_schema")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        model.invoke("hello")


def said(reply: dict[str, Any]) -> str:
    """Return the text of a reply."""
    return str(reply["choices"][0]["message"]["content"])
