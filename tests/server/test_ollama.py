"""Ollama's API over HTTP: streams of lines, whole replies, options, refusals, embeddings, and facts of the model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialects.ollama import OllamaChatBody, OllamaReply, Pieces, ask_ollama_chat
from nano_inference.server.dialects.ollama_models import VERSION
from nano_inference.server.errors import ApiError
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content
from tests.server.mounted import JSON, ids
from tests.server.taught import make_caller
from tests.server.tiny import TEMPLATE, Running, make_tiny, running

GENERATE, CHAT, EMBED, EMBEDDINGS, SHOW = "/api/generate", "/api/chat", "/api/embed", "/api/embeddings", "/api/show"
HELLO: list[JSON] = [{"role": "user", "content": "hello"}]
GREEDY: JSON = {"temperature": 0, "num_predict": 12}
SCHEMA: JSON = {"enum": [{"x": 1}, {"x": 2}]}
TOOL: JSON = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {"type": "object"}}}
COUNTS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


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


def test_whole_answer_is_the_chat_completions(server: Running) -> None:
    asked = {"messages": HELLO, "temperature": 0, "top_k": 40, "top_p": 0.9, "max_tokens": 12}
    expected = server.post("/v1/chat/completions", asked).json()
    content = expected["choices"][0]["message"]["content"]
    for path in (GENERATE, CHAT):
        answer = whole(server, path)
        assert datetime.fromisoformat(answer.pop("created_at")).tzinfo is not None
        durations = [answer.pop(name) for name in COUNTS]
        assert all(isinstance(one, int) for one in durations)
        assert durations[0] > 0 and durations[1] == 0 and durations[2] > 0 and durations[3] > 0
        part = {"response": content} if path == GENERATE else {"message": {"role": "assistant", "content": content}}
        assert answer == part | {
            "model": "tiny",
            "done": True,
            "done_reason": "length",
            "prompt_eval_count": expected["usage"]["prompt_tokens"],
            "eval_count": 12,
        }


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


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_done_reasons(server: Running, path: str) -> None:
    letters = {"temperature": 0, "num_predict": 60}
    stopped = whole(server, path, options={**letters, "stop": ["b"]}, format={"enum": ["aab"]})
    assert (text_of(stopped), stopped["done_reason"]) == ('"aa', "stop")
    assert whole(server, path, options={"num_predict": 2})["done_reason"] == "length"
    ended = whole(server, path, options=letters, format={"enum": ["a"]})
    assert (text_of(ended), ended["done_reason"]) == ('"a"', "stop")


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_logprobs_of_each_token(server: Running, path: str) -> None:
    rows = whole(server, path, logprobs=True, top_logprobs=2)["logprobs"]
    assert len(rows) == 12 and all({"token", "logprob"} <= {*row} and len(row["top_logprobs"]) == 2 for row in rows)
    lines = server.lines(path, body(path, logprobs=True, top_logprobs=2))
    assert [row for one in lines for row in one.get("logprobs", [])] == rows
    assert "logprobs" not in whole(server, path)


def test_request_without_a_prompt_loads_the_model(server: Running) -> None:
    for path, fields in ((GENERATE, {}), (GENERATE, {"prompt": ""}), (CHAT, {"messages": []}), (CHAT, {})):
        for keep, reason in (("5m", "load"), (0, "unload")):
            asked = {"model": "tiny", **fields, "keep_alive": keep}
            (line,) = server.lines(path, asked)
            assert server.post(path, {**asked, "stream": False}).json() | {"created_at": ""} == line | {
                "created_at": ""
            }
            assert (line["done"], line["done_reason"], text_of(line)) == (True, reason, "")


def test_failure_in_a_stream_is_a_line_with_an_error(server: Running) -> None:
    call = ask_ollama_chat(OllamaChatBody.model_validate(body(CHAT)), server.opened.model, ServerConfig(), "")
    reply = OllamaReply(call, [])
    assert reply.fail(ApiError(503, "no memory", code="x")) == b'{"error":"no memory"}\n'


# ---- prompts


def test_prompt_is_rendered_unless_raw(server: Running) -> None:
    assert whole(server, GENERATE, raw=True)["prompt_eval_count"] == 5
    rendered = server.post("/tokenize", {"messages": HELLO}).json()["count"]
    assert whole(server, GENERATE)["prompt_eval_count"] == rendered
    both = [{"role": "system", "content": "Be."}, *HELLO]
    count = server.post("/tokenize", {"messages": both}).json()["count"]
    assert whole(server, GENERATE, system="Be.")["prompt_eval_count"] == count
    assert whole(server, GENERATE, system="Be.")["response"] == whole(server, CHAT, messages=both)["message"]["content"]


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


def test_calls_and_results_are_rendered_as_in_chat_completions(server: Running) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    theirs = [*messages, {"role": "tool", "tool_name": "f", "content": "9"}]
    text = {"function": {"name": "f", "arguments": '{"x": 1}'}, "type": "function"}
    ours = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [text]}]
    ours.append({"role": "tool", "name": "f", "content": "9"})
    count = server.post("/tokenize", {"messages": ours}).json()["count"]
    answer = whole(server, CHAT, messages=theirs)
    assert answer["prompt_eval_count"] == count


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


def test_answer_with_a_call(tmp_path: Path) -> None:
    with running(make_caller(tmp_path)) as server:
        fields: JSON = {"tools": [TOOL], "options": {"temperature": 0, "num_predict": 100}}
        call = {"function": {"index": 0, "name": "f", "arguments": {"x": 1}}}
        answer = whole(server, CHAT, **fields)
        assert answer["message"] == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert answer["done_reason"] == "stop"
        one, last = server.lines(CHAT, body(CHAT, **fields))
        assert one["message"] == answer["message"] and not one["done"]
        assert last["message"] == {"role": "assistant", "content": ""} and last["eval_count"] == answer["eval_count"]
        cut = whole(server, CHAT, tools=[TOOL], options={"temperature": 0, "num_predict": 40})
        assert cut["message"]["content"].startswith("<tool_call>\n{") and cut["done_reason"] == "length"
        assert "tool_calls" not in cut["message"]
        assert "tool_calls" not in whole(server, CHAT)["message"]


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_formats(server: Running, path: str) -> None:
    options = {"temperature": 0, "num_predict": 100}
    assert text_of(whole(server, path, format="json", options=options)).startswith("{")
    answer = json.loads(text_of(whole(server, path, format=SCHEMA, options=options)))
    assert answer in ({"x": 1}, {"x": 2})
    for nothing in ("", None, {}):
        assert text_of(whole(server, path, format=nothing)) == text_of(whole(server, path))


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


def test_thinking_of_earlier_answers_is_given_to_the_template(thinker: Running) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "b"}, *HELLO]
    plain = whole(thinker, CHAT, messages=turns)["prompt_eval_count"]
    turns[1] = {**turns[1], "thinking": "hm"}
    assert whole(thinker, CHAT, messages=turns)["prompt_eval_count"] == plain + 2


def test_reasoning_is_separate_if_the_prompt_opens_it(thinker: Running) -> None:
    options = {"temperature": 0, "num_predict": 100}
    structure = {"enum": ["so</think> yes"]}
    answer = whole(thinker, CHAT, think=True, options=options, format=structure)
    assert answer["message"] == {"role": "assistant", "content": 'yes"', "thinking": '"so'}
    lines = thinker.lines(CHAT, body(CHAT, think=True, options=options, format=structure))
    for name in ("content", "thinking"):
        assert "".join(one["message"].get(name, "") for one in lines) == answer["message"].get(name, "")


# ---- options


CHANGES: list[JSON] = [
    {"temperature": 0},
    {"seed": 4},
    {"top_p": 0},
    {"top_p": 0.2},
    {"top_k": 1},
    {"min_p": 0.9},
    {"repeat_penalty": 3.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"num_predict": 29},
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_each_option_changes_the_answer(server: Running, path: str, change: JSON) -> None:
    hot: JSON = {"temperature": 1.9, "seed": 3, "num_predict": 30, "top_k": 0, "top_p": 1.0}
    plain = whole(server, path, options=hot)
    assert text_of(whole(server, path, options=hot)) == text_of(plain)
    assert text_of(whole(server, path, options={**hot, **change})) != text_of(plain)


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


def test_answer_fills_the_context_by_default(server: Running) -> None:
    for options in ({}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 0}):
        asked = {"stream": False, "options": {"temperature": 0, "seed": 1, **options}, "raw": True}
        answer = server.post(GENERATE, {"prompt": "hello", **asked}).json()
        assert answer["done_reason"] == "stop" or answer["eval_count"] == 512 - 5


def test_seeds_have_64_bits(server: Running) -> None:
    hot = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "num_predict": 30}
    for seed in (2**63, 2**64 - 1):
        one, two = (text_of(whole(server, CHAT, options={**hot, "seed": seed})) for _ in range(2))
        assert one == two != text_of(whole(server, CHAT, options={**hot, "seed": seed - 1}))
    assert server.post(CHAT, body(CHAT, options={"seed": 2**64})).status_code == 400


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


def test_a_strict_server_refuses_hints(tiny_directory: Path) -> None:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, strict=True)) as strict:
        assert whole(strict, CHAT)["done"]
        for fields, name in (({"keep_alive": 1}, "keep_alive"), ({"options": {"num_ctx": 1}}, "options.num_ctx")):
            reply = strict.post(CHAT, body(CHAT, **fields))
            assert (reply.status_code, reply.json()) == (400, {"error": f"fields without effect: {name!r}"})


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


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_prompt_longer_than_the_context_is_refused(server: Running, path: str) -> None:
    long = {"prompt": "a" * 600} if path == GENERATE else {"messages": [{"role": "user", "content": "a" * 600}]}
    reply = server.post(path, body(path, **long))
    assert reply.status_code == 400 and "size of 512" in reply.json()["error"]


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


@pytest.mark.parametrize(
    ("path", "fields"), [(EMBED, {"input": ""}), (EMBED, {"input": []}), (EMBED, {}), (EMBEDDINGS, {"prompt": ""})]
)
def test_empty_input_is_refused(server: Running, path: str, fields: JSON) -> None:
    reply = server.post(path, fields)
    assert reply.status_code == 400 and reply.json()["error"].startswith("prompt" if path == EMBEDDINGS else "input")


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


def test_show(server: Running) -> None:
    reply = server.post(SHOW, {"model": "tiny:latest"}).json()
    assert reply == server.post(SHOW, {"name": "tiny"}).json()
    assert reply["template"] == TEMPLATE and reply["capabilities"] == ["completion", "embedding", "tools"]
    facts = reply["model_info"]
    assert facts["general.architecture"] == "LlamaForCausalLM"
    assert (facts["LlamaForCausalLM.context_length"], facts["LlamaForCausalLM.block_count"]) == (512, 2)
    unknown = server.post(SHOW, {"model": "other"})
    assert unknown.status_code == 404 and "other" in unknown.json()["error"]
