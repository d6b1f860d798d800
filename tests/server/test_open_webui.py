"""The calls of Open WebUI 0.12.4 to a server, for its OpenAI and its Ollama connections, as they were recorded.

`make test-open-webui` runs the program itself. Of a chat's fields it forwards none that are its own (`chat_id`,
`session_id`, `background_tasks`, `features`): it sends the model, messages, tools and the options that a user has set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.mounted import JSON
from tests.server.taught import make_caller
from tests.server.tiny import Running, running

OPENAI, OLLAMA = "/v1/chat/completions", "/api/chat"
HELLO: list[JSON] = [{"role": "user", "content": "hello"}]
FUNCTION: JSON = {"name": "f", "description": "Does.", "parameters": {"properties": {}, "type": "object"}}
TOOLS: list[JSON] = [{"type": "function", "function": FUNCTION}]
LOADING = {"num_keep": 5, "num_batch": 64, "num_thread": 2, "num_gpu": 0, "use_mmap": True, "use_mlock": True}
"""Advanced parameters of Ollama that change no token; both kinds of connection send them."""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that answers "hello" with a call of `f`."""
    with running(make_caller(tmp_path_factory.mktemp("caller"))) as one:
        yield one


def ok(server: Running, path: str, **fields: Any) -> JSON:
    reply = server.post(path, {"model": "tiny:latest" if path == OLLAMA else "tiny", **fields})
    assert reply.status_code == 200, reply.text
    answer: JSON = reply.json()
    return answer


def test_the_models_of_both_connections_are_listed(server: Running) -> None:
    (listed,) = server.client.get("/v1/models", headers={"authorization": "Bearer none"}).json()["data"]
    assert listed["id"] == "tiny"
    typed = {"content-type": "application/json"}  # without a body
    (tagged,) = server.client.get("/api/tags", headers=typed).json()["models"]
    (loaded,) = server.client.get("/api/ps", headers=typed).json()["models"]
    assert tagged["model"] == loaded["model"] == "tiny:latest" and loaded["expires_at"]
    numbers = server.client.get("/api/version", headers=typed).json()["version"].split(".")
    assert len(numbers) == 3 and all(number.isdigit() for number in numbers), "it takes the lowest of several"
    shown = server.post("/api/show", {"model": "tiny:latest"}).json()
    assert shown["capabilities"] and shown["details"]["family"]
    assert server.client.get("/api/tags", headers={"content-type": ""}).status_code == 200


def test_options_of_a_user_apply_on_both_connections(server: Running) -> None:
    shaped = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "max_tokens": 8}
    expected = ok(server, OPENAI, messages=HELLO, **shaped)["choices"][0]["message"]["content"]
    sent = {**shaped, "frequency_penalty": 0.0, "num_ctx": 256, "keep_alive": "5m", "repeat_last_n": 64, **LOADING}
    chat = ok(server, OPENAI, messages=HELLO, stream=False, reasoning_effort="low", logit_bias={"5": 0}, **sent)
    assert chat["choices"][0]["message"]["content"] == expected
    options = {**shaped, "num_predict": 8, "num_ctx": 256, "mirostat_eta": 0.1, "mirostat_tau": 5.0, **LOADING}
    del options["max_tokens"]
    same = ok(server, OLLAMA, messages=HELLO, options=options, stream=False, keep_alive="5m")
    assert same["message"]["content"] == expected and same["eval_count"] == chat["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (OPENAI, {"mirostat": 2}, "mirostat"),
        (OPENAI, {"repeat_penalty": 1.1}, "repeat_penalty"),
        (OPENAI, {"tfs_z": 0.5}, "tfs_z"),
        (OPENAI, {"think": True}, "think"),
        (OPENAI, {"format": "json"}, "format"),
        (OLLAMA, {"options": {"mirostat": 2}}, "options.mirostat"),
        (OLLAMA, {"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        (OLLAMA, {"think": True}, "think"),
    ],
)
def test_options_that_would_change_the_answer_are_refused_by_name(
    server: Running, path: str, fields: JSON, name: str
) -> None:
    reply = server.post(path, {"model": "tiny", "messages": HELLO, **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert (error["message"] if path == OPENAI else error).startswith(name)


def test_chat_with_tools_over_openais_connection(caller: Running) -> None:
    body = {"stream": True, "model": "tiny", "stream_options": {"include_usage": True}, "tools": TOOLS}
    *chunks, end = caller.events(OPENAI, {**body, "messages": HELLO, "temperature": 0})
    assert end == "[DONE]" and chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []
    parts = [one["choices"][0]["delta"].get("tool_calls", [{}])[0] for one in chunks[:-1]]
    assert "".join(one.get("function", {}).get("arguments", "") for one in parts) == '{"x": 1}'
    call_id = next(one["id"] for one in parts if "id" in one)
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    result = {"role": "tool", "tool_call_id": call_id, "content": json.dumps({"current_timestamp": 1})}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    answered = caller.events(OPENAI, {**body, "messages": messages, "max_tokens": 4})
    assert answered[-1] == "[DONE]" and 0 < answered[-2]["usage"]["completion_tokens"] <= 4  # its end is sampled


def test_chat_with_tools_over_ollamas_connection(caller: Running) -> None:
    body = {"model": "tiny:latest", "stream": True, "tools": TOOLS}
    lines = caller.lines(OLLAMA, {**body, "messages": HELLO, "options": {"temperature": 0}})
    (call,) = [one for line in lines for one in line["message"].get("tool_calls", [])]
    function = {"name": "f", "arguments": {"x": 1}}
    assert call["function"] == {"index": 0, **function} and lines[-1]["done"] is True
    # it makes ids of its own, and adds an index
    numbered = {"index": 0, "id": "call_1", "function": function}
    result = {"role": "tool", "content": json.dumps({"current_timestamp": 1}), "tool_call_id": "call_1"}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [numbered]}, result]
    answered = caller.lines(OLLAMA, {**body, "messages": messages, "options": {"num_predict": 4}})
    assert 0 < answered[-1]["eval_count"] <= 4


def test_titles_and_tags_are_asked_without_a_stream(server: Running) -> None:
    task = [{"role": "user", "content": "### Task:\nGenerate a concise title."}]
    title = ok(server, OPENAI, messages=task, stream=False, max_tokens=1000)
    assert title["choices"][0]["message"]["content"] is not None and title["usage"]["completion_tokens"] <= 1000
    same = ok(server, OLLAMA, messages=task, options={"num_predict": 1000}, stream=False)
    assert isinstance(same["message"]["content"], str) and same["done"] is True


def test_other_routes_that_it_passes_on(server: Running) -> None:
    options = {"num_predict": 4}
    generated = {"model": "tiny:latest", "prompt": "hello", "stream": False, "options": options}
    assert 0 < server.post("/api/generate", generated).json()["eval_count"] <= 4
    unload = {"model": "tiny:latest", "keep_alive": 0, "prompt": ""}
    assert server.lines("/api/generate", unload)[-1]["done_reason"] == "unload"
    assert len(server.post("/api/embed", {"model": "tiny:latest", "input": ["hello"]}).json()["embeddings"]) == 1
    assert len(server.post("/v1/embeddings", {"model": "tiny", "input": "hello"}).json()["data"]) == 1
    tagged = {"model": "tiny:latest", "messages": HELLO, "stream": False, "max_tokens": 4}
    assert 0 < server.post(OPENAI, tagged).json()["usage"]["completion_tokens"] <= 4
