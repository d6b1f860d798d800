"""Ollama's API over HTTP: streams of lines, whole replies, options, refusals, embeddings, and facts of the model."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialects.ollama import Pieces
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content
from tests.server.mounted import JSON
from tests.server.tiny import Running, make_tiny, running

pytestmark = pytest.mark.slow

GENERATE, CHAT, EMBED, SHOW = "/api/generate", "/api/chat", "/api/embed", "/api/show"
HELLO: list[JSON] = [{"role": "user", "content": "hello"}]
GREEDY: JSON = {"temperature": 0, "num_predict": 12}
TOOL: JSON = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {"type": "object"}}}


def body(path: str, **fields: Any) -> JSON:
    """Return a request, greedy unless `options` are given."""
    asked: JSON = {"prompt": "hello"} if path == GENERATE else {"messages": HELLO}
    return {"model": "tiny", **asked, "options": GREEDY, **fields}


def whole(server: Running, path: str, **fields: Any) -> JSON:
    """Return the JSON of a successful request without a stream."""
    reply = server.post(path, body(path, stream=False, **fields))
    assert reply.status_code == 200, reply.text
    answer: JSON = reply.json()
    return answer


def text_of(answer: JSON) -> str:
    return str(answer["message"]["content"] if "message" in answer else answer["response"])


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_requests_stream_lines_unless_stream_is_false(server: Running, path: str) -> None:
    answer = whole(server, path)
    for stream in ({}, {"stream": True}, {"stream": None}):
        *parts, last = server.lines(path, body(path, **stream))
        assert [one["done"] for one in parts] == [False] * len(parts) and last["done"] is True
        assert "".join(map(text_of, parts)) == text_of(answer) and text_of(last) == ""
        assert set(last) == set(answer) and all("eval_count" not in one for one in parts)
        for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
            assert last[name] == answer[name]


def test_request_without_a_prompt_loads_the_model(server: Running) -> None:
    for path, fields in ((GENERATE, {}), (GENERATE, {"prompt": ""}), (CHAT, {"messages": []}), (CHAT, {})):
        for keep, reason in (("5m", "load"), (0, "unload")):
            asked = {"model": "tiny", **fields, "keep_alive": keep}
            (line,) = server.lines(path, asked)
            assert server.post(path, {**asked, "stream": False}).json() | {"created_at": ""} == line | {
                "created_at": ""
            }
            assert (line["done"], line["done_reason"], text_of(line)) == (True, reason, "")


def test_model_without_a_chat_template_continues_the_prompt(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    with running(directory) as server:
        assert whole(server, GENERATE)["prompt_eval_count"] == 5
        assert "completion" in server.post(SHOW, {}).json()["capabilities"]
        assert "tools" not in server.post(SHOW, {}).json()["capabilities"]
        reply = server.post(GENERATE, body(GENERATE, system="Be."))
        assert (reply.status_code, reply.json()["error"][:6]) == (400, "system")


def test_names_without_a_tag_mean_latest(server: Running, tiny_directory: Path) -> None:
    for name in ("tiny", "tiny:latest"):
        assert whole(server, CHAT, model=name)["model"] == name
        assert server.post("/v1/chat/completions", {"model": name, "messages": HELLO, "max_tokens": 1}).is_success
    for name in ("tiny:1b", "other", "other:latest"):
        reply = server.post(CHAT, body(CHAT, model=name))
        assert reply.status_code == 404 and name in reply.json()["error"]
    config = ServerConfig(port=0, log_requests=False, served_model_name=("a/b:8b", "c:latest"))
    with running(tiny_directory, config) as tagged:
        assert [one["name"] for one in tagged.client.get("/api/tags").json()["models"]] == ["a/b:8b", "c:latest"]
        assert whole(tagged, CHAT, model="c")["model"] == "c"
        assert tagged.post(CHAT, body(CHAT, model="a/b")).status_code == 404


def test_complete_calls_have_arguments_as_objects() -> None:
    pieces = Pieces()
    events = [CallStart(0, "f"), CallArguments(0, '{"x"'), CallArguments(0, ": 1}")]
    assert pieces.add([Content("a"), *events[:2]], is_end=False) == {"content": "a"}
    call = {"function": {"index": 0, "name": "f", "arguments": {"x": 1}}}
    assert pieces.add([events[2], CallEnd(0)]) == {"content": "", "tool_calls": [call]}
    assert pieces.add([CallStart(1, "g"), CallArguments(1, '{"y')]) == {"content": ""}, "it was cut off"


def test_absent_options_are_the_models_or_ollamas(server: Running, tmp_path: Path) -> None:
    fields = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 5, "max_tokens": 30}
    expected = server.post("/v1/chat/completions", {"messages": HELLO, **fields}).json()["choices"][0]["message"]
    assert whole(server, CHAT, options={"seed": 5, "num_predict": 30})["message"]["content"] == expected["content"]
    directory = make_tiny(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, "temperature": 1.7}))
    with running(directory) as hot:
        changed = hot.post("/v1/chat/completions", {"messages": HELLO, **fields, "temperature": 1.7}).json()
        answer = whole(hot, CHAT, options={"seed": 5, "num_predict": 30})
        assert answer["message"]["content"] == changed["choices"][0]["message"]["content"] != expected["content"]


def test_a_seed_of_minus_one_is_random(server: Running) -> None:
    options = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "num_predict": 30, "seed": -1}
    assert text_of(whole(server, CHAT, options=options)) != text_of(whole(server, CHAT, options=options))


def test_hints_change_nothing_and_are_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    hints = {"num_ctx": 8, "num_gpu": 1, "use_mmap": True, "num_thread": 2, "mirostat_tau": 5.0, "repeat_last_n": 64}
    with caplog.at_level(logging.WARNING, logger="nano_inference.server"):
        for _ in range(2):
            answer = whole(server, CHAT, options={**GREEDY, **hints}, keep_alive="10m")
    assert text_of(answer) == text_of(whole(server, CHAT))
    logged = [record.getMessage() for record in caplog.records]
    assert sum("'options.num_gpu'" in message for message in logged) == 1
    assert not any("repeat_last_n" in message or "mirostat'" in message for message in logged)


REFUSED: list[tuple[str, JSON, str]] = [
    (GENERATE, {"images": ["aaaa"]}, "images"),
    (GENERATE, {"suffix": "x"}, "suffix"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    (GENERATE, {"context": [1, 2]}, "context"),
    (GENERATE, {"raw": True, "system": "Be."}, "system"),
    (GENERATE, {"raw": True, "think": True}, "think"),
    (CHAT, {"messages": [{**HELLO[0], "images": ["aaaa"]}]}, "messages.0.images"),
    (CHAT, {"messages": [{"role": "critic", "content": "a"}]}, "messages.0.role"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools.1.function.name"),
    (CHAT, {"format": "xml"}, "format"),
    (CHAT, {"think": "loud"}, "think"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    *((CHAT, {"options": {name: 2}}, f"options.{name}") for name in ("mirostat", "tfs_z", "typical_p")),
    (CHAT, {"options": {"temperature": 3}}, "options.temperature"),
    (CHAT, {"options": {"num_predict": 0.5}}, "options.num_predict"),
    (CHAT, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    (CHAT, {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
    (CHAT, {"options": {"stop": [""]}}, "options.stop.0"),
]


@pytest.mark.parametrize(("path", "fields", "name"), REFUSED)
def test_unsupported_or_invalid_field_is_named(server: Running, path: str, fields: JSON, name: str) -> None:
    reply = server.post(path, body(path, **fields))
    assert (reply.status_code, list(reply.json())) == (400, ["error"]), reply.text
    assert name in re.split(r"[ :,]", reply.json()["error"]), reply.text


def test_an_answer_larger_than_the_cache_names_its_option(tiny_directory: Path) -> None:
    with running(tiny_directory, kv_cache_bytes=48 << 10) as server:
        reply = server.post(CHAT, body(CHAT, options={"num_predict": 480}))
        assert reply.status_code == 400 and "options.num_predict" in reply.json()["error"], reply.text
