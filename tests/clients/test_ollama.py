"""Ollama's Python client: whole answers and streams, tools, schemas, embeddings, and questions about the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.process import NEEDED, Served, serving

ollama = pytest.importorskip("ollama", reason=NEEDED)
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 12, "num_ctx": 256}


@pytest.fixture(scope="module")
def caller_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a model that answers "hello" with a call of `f`."""
    from tests.server.taught import make_caller  # imports Transformers

    directory = make_caller(tmp_path_factory.mktemp("caller"))
    options = ("--served-model-name", "caller", "--kv-cache-bytes", "8388608", "--num-threads", "1", "--device", "cpu")
    with serving(directory, *options) as served:
        yield served


@pytest.fixture
def client(tiny_server: Served) -> Iterator[Any]:
    with ollama.Client(host=tiny_server.url) as one:
        yield one


def test_whole_answers_and_streams(client: Any, tiny_server: Served) -> None:
    chat = client.chat("tiny", HELLO, options=GREEDY, keep_alive="5m")
    assert (chat.done_reason, chat.eval_count, chat.message.role) == ("length", 12, "assistant")
    assert chat.total_duration > 0 and chat.created_at
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    content = tiny_server.ask("/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    *parts, last = client.chat("tiny:latest", HELLO, options=GREEDY, stream=True)
    assert chat.message.content == content == "".join(part.message.content for part in parts)
    assert last.done and last.eval_count == 12 and last.prompt_eval_count == chat.prompt_eval_count
    text = client.generate("tiny", "hello", options=GREEDY)
    assert (
        text.response
        == content
        == "".join(part.response for part in client.generate("tiny", "hello", options=GREEDY, stream=True))
    )
    raw = client.generate("tiny", "hello", raw=True, options=GREEDY, logprobs=True, top_logprobs=2)
    assert raw.prompt_eval_count == 5 and len(raw.logprobs) == 12 and len(raw.logprobs[0].top_logprobs) == 2
    assert client.generate("tiny").done_reason == "load"


def test_tools_given_as_functions_are_called(caller_server: Served) -> None:
    def f(x: int) -> int:
        """Double a number.

        Args:
          x: The number.
        """
        return 2 * x

    with ollama.Client(host=caller_server.url) as client:
        options = {"temperature": 0, "num_predict": 100}
        answer = client.chat("caller", HELLO, tools=[f], options=options)
        (call,) = answer.message.tool_calls
        assert (call.function.name, f(**call.function.arguments)) == ("f", 2)
        streamed = [
            one
            for part in client.chat("caller", HELLO, tools=[f], options=options, stream=True)
            for one in part.message.tool_calls or ()
        ]
        assert streamed == [call]
        result = {"role": "tool", "tool_name": "f", "content": "2"}
        assert client.chat("caller", [*HELLO, answer.message, result], tools=[f], options=GREEDY).done


def test_questions_about_the_model(client: Any) -> None:
    (listed,) = client.list().models
    assert listed.model == "tiny:latest" and listed.size > 0 and listed.details.quantization_level == "float32"
    (loaded,) = client.ps().models
    assert loaded.context_length == 512 and loaded.digest == listed.digest
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "embedding", "tools"] and "messages" in shown.template
    assert shown.modelinfo["general.architecture"] == "LlamaForCausalLM"


def test_errors_name_what_was_wrong(client: Any) -> None:
    for fields, status, name in (
        ({"model": "other"}, 404, "'other'"),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ({"messages": [{**HELLO[0], "images": [b"png"]}]}, 400, "messages.0.images"),
        ({"think": True, "stream": True}, 400, "think"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            reply = client.chat(**{"model": "tiny", "messages": HELLO, **fields})
            list(reply)
        assert caught.value.status_code == status and name in caught.value.error
