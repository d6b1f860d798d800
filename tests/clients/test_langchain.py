"""langchain-openai's chat model and its embeddings."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served
from tests.clients.weather import City, Day, Weekday

langchain = pytest.importorskip("langchain_openai", reason=f"langchain-openai: {NEEDED}")
tools = pytest.importorskip("langchain_core.tools", reason=f"langchain-core: {NEEDED}")

pytest_plugins = ["tests.clients.servers"]

ROOM: dict[str, Any] = {"max_tokens": 400, "temperature": 1}


def model_of(server: Served, **options: Any) -> Any:
    """Return langchain's chat model for the server; greedy and short by default."""
    defaults = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}
    return langchain.ChatOpenAI(**(defaults | options), max_retries=0)


def direct_reply(server: Served, text: str, **fields: Any) -> dict[str, Any]:
    """Return the server's reply to the same request, without langchain."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12, **fields}
    reply: dict[str, Any] = server.ask("/v1/chat/completions", body)
    return reply


def test_invoke_and_stream_equal_the_servers_reply(tiny_server: Served) -> None:
    expected = direct_reply(tiny_server, "hello")
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


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # raised in langchain
def test_structured_output(roomy_server: Served, method: str) -> None:
    for options in ({"seed": 1}, {"seed": 2}, {"use_responses_api": True}):
        model = model_of(roomy_server, **ROOM, **options).with_structured_output(Day, method=method)
        assert isinstance(model.invoke("hello"), Day)
        assert isinstance(list(model.stream("hello"))[-1], Day)


@pytest.mark.parametrize("is_response", [False, True])
def test_bound_tools_are_called(roomy_server: Served, is_response: bool) -> None:
    @tools.tool
    def weather(city: City, day: Weekday) -> str:
        """Return the weather."""
        return f"rain in {city} on {day}"

    model = model_of(roomy_server, **ROOM, use_responses_api=is_response)
    bound = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    message = bound.invoke("hello")
    (call,) = message.tool_calls
    result = weather.invoke(call)
    assert result.content.startswith("rain in") and result.tool_call_id == call["id"]
    talk = [("human", "hello"), message, result]
    assert model.bind(max_tokens=12).invoke(talk).usage_metadata["input_tokens"] > 12
    chunks = [chunk for chunk in bound.stream("hello") if chunk.tool_call_chunks]
    assert len(chunks) > 3, "the call is streamed"
    (whole,) = functools.reduce(operator.add, chunks).tool_calls
    assert weather.invoke(whole).content.startswith("rain in")


def test_embeddings_equal_the_servers(tiny_server: Served) -> None:
    place = {"model": "tiny", "base_url": f"{tiny_server.url}/v1", "api_key": "none", "max_retries": 0}
    # Without the option langchain encodes texts with OpenAI's tokenizer.
    embeddings = langchain.OpenAIEmbeddings(**place, check_embedding_ctx_length=False)
    texts = ["hello", "good morning", "hello"]
    reply = tiny_server.ask("/v1/embeddings", {"input": texts})
    got = embeddings.embed_documents(texts)
    assert got == [pytest.approx(entry["embedding"], abs=1e-6) for entry in reply["data"]]
    assert got[0] == pytest.approx(got[2], abs=1e-6) != got[1]
    assert embeddings.embed_query("hello") == pytest.approx(got[0], abs=1e-6)
    short = langchain.OpenAIEmbeddings(**place, check_embedding_ctx_length=False, dimensions=8)
    assert len(short.embed_query("hello")) == 8
