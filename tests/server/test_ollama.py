"""Ollama's API over HTTP: streams of lines, whole replies, options, refusals, embeddings, and facts of the model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialects.ollama import Pieces
from nano_inference.server.dialects.ollama_models import VERSION
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content
from tests.server.mounted import JSON, ids
from tests.server.tiny import TEMPLATE, Running, make_tiny, running

GENERATE, CHAT, EMBED, EMBEDDINGS, SHOW = "/api/generate", "/api/chat", "/api/embed", "/api/embeddings", "/api/show"
HELLO: list[JSON] = [{"role": "user", "content": "hello"}]
GREEDY: JSON = {"temperature": 0, "num_predict": 12}
TOOL: JSON = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose chat template has variables for reasoning and a place for that of earlier answers."""
    template = (
        "{% for one in messages if one.reasoning_content %}{{ one.reasoning_content }}{% endfor %}"
        "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
        + TEMPLATE
        + "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    )
    with running(make_tiny(tmp_path_factory.mktemp("thinker"), template=template)) as one:
        yield one


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


# ---- replies


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


# ---- prompts


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


# ---- tools, formats, thinking


def test_complete_calls_have_arguments_as_objects() -> None:
    pieces = Pieces()
    events = [CallStart(0, "f"), CallArguments(0, '{"x"'), CallArguments(0, ": 1}")]
    assert pieces.add([Content("a"), *events[:2]], is_end=False) == {"content": "a"}
    call = {"function": {"index": 0, "name": "f", "arguments": {"x": 1}}}
    assert pieces.add([events[2], CallEnd(0)]) == {"content": "", "tool_calls": [call]}
    assert pieces.add([CallStart(1, "g"), CallArguments(1, '{"y')]) == {"content": ""}, "it was cut off"


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_think_sets_the_templates_variables(thinker: Running, server: Running, path: str) -> None:
    plain = whole(thinker, path)["prompt_eval_count"]
    assert whole(thinker, path, think=True)["prompt_eval_count"] == plain + len("<think>")
    assert whole(thinker, path, think=False)["prompt_eval_count"] == plain
    assert whole(thinker, path, think="high")["prompt_eval_count"] == plain + len("high")
    assert "thinking" in thinker.post(SHOW, {}).json()["capabilities"]
    assert whole(server, path, think=False)["done"] and "thinking" not in server.post(SHOW, {}).json()["capabilities"]
    for think in (True, "low"):
        reply = server.post(path, body(path, think=think))
        assert (reply.status_code, reply.json()["error"][:6]) == (400, "think:")


def test_reasoning_is_separate_if_the_prompt_opens_it(thinker: Running) -> None:
    options = {"temperature": 0, "num_predict": 100}
    structure = {"enum": ["so</think> yes"]}
    answer = whole(thinker, CHAT, think=True, options=options, format=structure)
    assert answer["message"] == {"role": "assistant", "content": 'yes"', "thinking": '"so'}
    lines = thinker.lines(CHAT, body(CHAT, think=True, options=options, format=structure))
    for name in ("content", "thinking"):
        assert "".join(one["message"].get(name, "") for one in lines) == answer["message"].get(name, "")


# ---- options


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


# ---- embeddings


def test_embeddings_are_openais(server: Running) -> None:
    texts = ["hello", "other"]
    reply = server.post(EMBED, {"model": "tiny", "input": texts}).json()
    expected = server.post("/v1/embeddings", {"input": texts}).json()
    assert reply["embeddings"] == [pytest.approx(one["embedding"], abs=1e-5) for one in expected["data"]]
    assert (reply["model"], reply["prompt_eval_count"], reply["load_duration"]) == ("tiny", 10, 0)
    assert reply["total_duration"] > 0
    one = server.post(EMBED, {"input": "hello", "dimensions": 4}).json()["embeddings"]
    assert len(one) == 1 and len(one[0]) == 4 and sum(x * x for x in one[0]) == pytest.approx(1, abs=1e-5)
    raw = server.post(EMBEDDINGS, {"model": "tiny", "prompt": "hello"}).json()
    plain = server.post("/v1/embeddings", {"input": "hello", "normalize": False}).json()["data"][0]["embedding"]
    assert raw == {"embedding": pytest.approx(plain, abs=1e-5)}


def test_long_text_is_cut_at_its_end_unless_truncate_is_false(server: Running) -> None:
    long = "abcdefg" * 120
    cut = server.post(EMBED, {"input": long}).json()
    assert cut["prompt_eval_count"] == 512
    kept = server.post("/v1/embeddings", {"input": ids(long)[:512]}).json()["data"][0]["embedding"]
    assert cut["embeddings"][0] == pytest.approx(kept, abs=1e-5)
    assert server.post(EMBEDDINGS, {"prompt": long}).status_code == 200
    reply = server.post(EMBED, {"input": long, "truncate": False})
    assert reply.status_code == 400 and re.search(r"input .* 512; .* set truncate$", reply.json()["error"])


# ---- facts


def test_lists_describe_the_served_model(server: Running) -> None:
    (entry,) = server.client.get("/api/tags").json()["models"]
    assert entry["name"] == entry["model"] == "tiny:latest" and re.fullmatch("[0-9a-f]{64}", entry["digest"])
    parameters = server.client.get("/info").json()["parameters"]
    assert entry["size"] == 4 * parameters and entry["details"]["family"] == "LlamaForCausalLM"
    (loaded,) = server.client.get("/api/ps").json()["models"]
    assert loaded["context_length"] == 512 and loaded["digest"] == entry["digest"] and loaded["size_vram"] == 0
    assert server.client.get("/api/version").json() == {"version": VERSION}
    assert server.client.head("/").status_code == server.client.head("/api/tags").status_code == 200
