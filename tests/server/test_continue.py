"""The calls of Continue's extension, which its command line does not make: completion of code, by three providers.

Read in its sources (core/llm/llms: `Ollama.ts`, `OpenAI.ts`, `LlamaCpp.ts`, commit d0a3c0b6). Its own template puts the
text before and after the cursor into one prompt, unless Ollama's template has a place for the text after it.
"""

from __future__ import annotations

from tests.server.mounted import JSON
from tests.server.tiny import Running

HOLE = "<fim_prefix>def f():\n    return <fim_suffix>\n<fim_middle>"
STOPS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "/src/", "#- coding: utf-8", "```"]
HELLO: list[JSON] = [{"role": "user", "content": "hello"}]


def greedy_text(server: Running) -> str:
    """Return the completion that each provider must receive."""
    reply = server.post("/v1/completions", {"prompt": HOLE, "temperature": 0, "max_tokens": 8, "stop": STOPS})
    return str(reply.json()["choices"][0]["text"])


def test_ollamas_provider_completes_code(server: Running) -> None:
    shown = server.post("/api/show", {"name": "tiny"}).json()
    assert ".Suffix" not in shown["template"], "it would send `suffix`, which is refused"
    options = {"temperature": 0, "num_predict": 8, "stop": STOPS, "num_ctx": 8192}
    body = {"model": "tiny", "prompt": HOLE, "raw": True, "options": options, "keep_alive": 1800, "stream": True}
    lines = server.lines("/api/generate", body)
    assert "".join(line["response"] for line in lines) == greedy_text(server) and lines[-1]["done"] is True
    (listed,) = server.client.get("/api/tags").json()["models"]
    assert listed["name"] == "tiny:latest"
    embedded = server.post("/api/embed", {"model": "tiny", "input": ["hello", "other"]}).json()
    assert len(embedded["embeddings"]) == 2


def test_ollamas_provider_chats(server: Running) -> None:
    options = {"temperature": 0, "num_predict": 8, "num_ctx": 8192}
    fields = {"model": "tiny", "options": options, "think": False, "keep_alive": 1800, "stream": True}
    lines = server.lines("/api/chat", {**fields, "messages": [{**HELLO[0], "images": None}]})
    assert lines[0]["message"]["role"] == "assistant" and lines[-1]["eval_count"] == 8


def test_openais_provider_completes_code_by_the_older_route(server: Running) -> None:
    shaped = {"temperature": 0, "max_tokens": 8, "top_p": 1, "stop": STOPS}
    *chunks, end = server.events("/v1/completions", {"model": "tiny", "prompt": HOLE, "stream": True, **shaped})
    assert "".join(one["choices"][0]["text"] for one in chunks) == greedy_text(server) and end == "[DONE]"


def test_llamacpps_provider_completes_code(server: Running) -> None:
    shaped = {"n_predict": 8, "temperature": 0, "top_k": 40, "stop": STOPS}
    chunks = server.events("/completion", {"model": "tiny", "prompt": HOLE, "stream": True, **shaped})
    assert "".join(one.get("content", "") for one in chunks) == greedy_text(server)


def test_suffix_and_mistrals_route_are_refused(server: Running) -> None:
    refused = server.post("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b"})
    assert (refused.status_code, refused.json()["error"]) == (400, "suffix is not supported here")
    assert server.post("/v1/fim/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}).status_code == 404
