"""Tool calls over HTTP: rendering, enforced schemas, streamed parsing; also with OpenAI's client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI

from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.text.grammar import Grammar, Grammars
from tests.server.tiny import Running, make_tiny, opened, running

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}, "required": ["zone"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": CLOCK}},
]
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 200, "seed": 1}


@pytest.fixture(scope="module")
def roomy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context for function descriptions at one byte per token."""
    return make_tiny(tmp_path_factory.mktemp("roomy"), 4096)


@pytest.fixture(scope="module")
def server(roomy_directory: Path) -> Iterator[Running]:
    with running(roomy_directory) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def choice_of(server: Running, **fields: Any) -> dict[str, Any]:
    reply = server.post(CHAT, {**ASK, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def check_calls(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        assert call["type"] == "function" and call["id"].startswith("call_")
        jsonschema_rs.validate(SCHEMAS[call["function"]["name"]], json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize("seed", range(6))
def test_required_call_matches_schema(server: Running, seed: int) -> None:
    choice = choice_of(server, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1
    check_calls(choice["message"]["tool_calls"])


def test_stream_joins_to_complete_reply(server: Running, client: OpenAI) -> None:
    fields = {"tool_choice": "required", "seed": 5, "max_tokens": 350}
    whole = choice_of(server, **fields)
    chunks = server.events(CHAT, {**ASK, **fields, "stream": True})
    assert chunks[-1] == "[DONE]"
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        assert not delta["delta"].get("content")
        for call in delta["delta"].get("tool_calls", ()):
            if "id" in call:
                names[call["index"]], arguments[call["index"]] = call["function"]["name"], []
            arguments[call["index"]].append(call["function"]["arguments"])
    reported = [(names[index], "".join(arguments[index])) for index in names]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in whole["message"]["tool_calls"]]
    assert reported == calls
    assert deltas[-1]["finish_reason"] == whole["finish_reason"]
    assert max(len(pieces) for pieces in arguments.values()) > 3, "arguments come as they are written"
    with client.chat.completions.stream(
        model="tiny", messages=ASK["messages"], tools=TOOLS, tool_choice="required", seed=5, max_tokens=350
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or ()] == calls


def test_tokens_without_a_choice_are_forced(server: Running) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "ab[01]cd"}, "max_tokens": 20, "logprobs": 0}
    choice = server.post("/v1/completions", {**body, "return_token_ids": True}).json()["choices"][0]
    assert choice["mask"] == [0, 0, 1, 0, 0, 0]
    assert [value == 0.0 for value in choice["logprobs"]["token_logprobs"]] == [True, True, False, True, True, True]


MARKS = {
    "[TOOL_CALLS]": "{% for m in messages %}{{ m.content or '' }}{% endfor %}{{ tools | tojson }}[TOOL_CALLS]",
    "<tool_call>": "{% for m in messages %}{{ m.content or '' }}{% endfor %}{{ tools | tojson }}<tool_call>",
    "<|python_tag|>": "{% for m in messages %}{{ m.content or '' }}{% endfor %}{{ tools | tojson }}<|python_tag|>",
}


@pytest.mark.parametrize("mark", MARKS)
def test_calls_between_special_tokens(mark: str, tmp_path: Path) -> None:
    """The marker is one special token that no text can spell; the call parser sees it."""
    special = (mark, "</tool_call>") if mark == "<tool_call>" else (mark,)
    with running(make_tiny(tmp_path, 4096, template=MARKS[mark], special=special)) as marked:
        for seed in range(3):
            choice = choice_of(
                marked, tool_choice="required", seed=seed, parallel_tool_calls=False, return_token_ids=True
            )
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            check_calls(choice["message"]["tool_calls"])
            assert (260 in choice["token_ids"]) == (mark != "<|python_tag|>"), "Llama's calls need no marker"
        plain = choice_of(marked, tool_choice="none", max_tokens=30)
        assert "tool_calls" not in plain["message"]


def test_answer_is_schema_or_call(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    kinds = set()
    for seed in range(12):
        if seed > 4 and {"stop", "tool_calls"} <= kinds:
            break
        choice = choice_of(server, response_format=form, seed=seed, temperature=2, max_tokens=350)
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            jsonschema_rs.validate(schema, json.loads(choice["message"]["content"]))
        elif choice["finish_reason"] == "tool_calls":
            check_calls(choice["message"]["tool_calls"])
    assert {"stop", "tool_calls"} <= kinds


class SlowGrammars:
    """Grammars that compile after `going` is set."""

    def __init__(self, inner: Grammars, going: threading.Event) -> None:
        self._inner, self._going = inner, going
        self.compiled: list[Grammar] = []

    def matcher(self, grammar: Grammar) -> Any:
        self._going.wait(60)
        self.compiled.append(grammar)
        return self._inner.matcher(grammar)

    def known(self, grammar: Grammar) -> Any:
        return self._inner.known(grammar)


def test_concurrent_requests_share_one_compilation(roomy_directory: Path) -> None:
    """As many requests as a trainer has in flight, with one compiling thread: none is refused."""
    going = threading.Event()
    slow: list[SlowGrammars] = []

    def slowly(directory: Path, config: ServerConfig, **options: Any) -> LoadedModel:
        loaded = opened(directory, config, **options)
        slow.append(SlowGrammars(loaded.model.grammars, going))
        return replace(loaded, model=replace(loaded.model, grammars=slow[0]))  # type: ignore[arg-type]

    with running(roomy_directory, make=slowly) as one, ThreadPoolExecutor(64) as pool:
        body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "ab|cd"}}
        replies = [pool.submit(one.post, "/v1/completions", body) for _ in range(64)]
        for _ in range(2000):
            if one.client.get("/load").json()["server_load"] == 0 and one.app.pipeline.compilers.num_pending:
                break
        going.set()
        assert {reply.result(60).status_code for reply in replies} == {200}
    assert len(slow[0].compiled) == 1


def test_number_of_structures_is_limited(server: Running) -> None:
    prompts = [f"p{index}" for index in range(9)]
    params = [{"regex": f"x{index}", "max_new_tokens": 2} for index in range(9)]
    reply = server.post("/generate", {"text": prompts, "sampling_params": params})
    assert reply.status_code == 400 and "at most 8 different structures" in reply.text
    assert server.post("/generate", {"text": prompts[:8], "sampling_params": params[:8]}).status_code == 200
