"""Tool calls over HTTP: rendering, enforced schemas, streamed parsing; also with OpenAI's client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jsonschema_rs
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.text.grammar import Grammar, Grammars
from nano_inference.text.tool_format import MAX_FORCED_CALLS
from tests.server.tiny import Running, make_tiny, opened, running

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


def test_several_calls_at_once(server: Running) -> None:
    several = [choice_of(server, tool_choice="required", seed=seed, max_tokens=350) for seed in range(4)]
    ended = [one["message"]["tool_calls"] for one in several if one["finish_reason"] == "tool_calls"]
    assert max(map(len, ended)) > 1
    for calls in ended:
        check_calls(calls)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_function_is_called(server: Running, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    for seed in range(4):
        choice = choice_of(server, tool_choice=named, seed=seed)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == [name]


def test_incomplete_call_is_not_returned_as_text(server: Running) -> None:
    for limit in (1, 8, 20, 40, 60):
        for path_fields in (
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        ):
            choice = choice_of(server, **path_fields, max_tokens=limit)
            chunks = server.events(CHAT, {**ASK, **path_fields, "max_tokens": limit, "stream": True})[:-1]
            assert choice["finish_reason"] == "length" or choice["message"]["tool_calls"]
            assert choice["message"]["content"] in (None, "")
            assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


def test_required_call_overrides_response_format(server: Running) -> None:
    """Agents send both; a required call has no content to which response_format applies."""
    choice = choice_of(server, tool_choice="required", response_format={"type": "json_object"}, max_tokens=350)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) <= MAX_FORCED_CALLS


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


def test_text_without_call_is_content(server: Running) -> None:
    choice = choice_of(server, max_tokens=20)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert isinstance(choice["message"]["content"], str)


def test_tool_choice_none_renders_tools_and_parses_no_calls(server: Running) -> None:
    """TRL parses the calls itself."""
    plain = server.post("/tokenize", {"messages": ASK["messages"]}).json()["tokens"]
    reported = server.post("/tokenize", {"messages": ASK["messages"], "tools": TOOLS}).json()["tokens"]
    assert len(reported) > len(plain)
    prompts = []
    for choice in ("none", "auto"):
        reply = server.post(CHAT, {**ASK, "tool_choice": choice, "return_token_ids": True, "max_tokens": 2})
        prompts.append(reply.json()["prompt_token_ids"])
    assert prompts == [reported, reported]


def test_calls_and_results_are_rendered_into_prompt(server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "utc"}'}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:34"},
    ]
    prompt = server.post("/apply-template", {"messages": messages, "tools": TOOLS}).json()["prompt"]
    assert (
        '"name": "clock"' in prompt and '"zone": "utc"' in prompt and "12:34" in prompt and "<tool_response>" in prompt
    )
    assert server.post(CHAT, {**ASK, "messages": messages, "max_tokens": 3}).status_code == 200


def test_deprecated_function_fields(server: Running) -> None:
    body = {
        "messages": ASK["messages"],
        "functions": [tool["function"] for tool in TOOLS],
        "function_call": {"name": "clock"},
        "max_tokens": 200,
    }
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "clock"


class City(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    people: Annotated[int, Field(ge=0, le=999)]


def test_parse_with_a_schema(client: OpenAI) -> None:
    """OpenAI's `parse` sends a strict schema and validates the reply."""
    for seed in range(4):
        reply = client.chat.completions.parse(
            model="tiny",
            messages=ASK["messages"],
            response_format=City,
            seed=seed,
            max_tokens=400,
        )
        message = reply.choices[0].message
        assert isinstance(message.parsed, City)


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, lambda text: len(text) == 4 and text.endswith("c")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"guided_choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"guided_regex": "x+y"}, lambda text: set(text) == {"x", "y"}),
        ({"guided_json": {"enum": [1, 22]}}, lambda text: text in ("1", "22")),
        ({"structured_outputs": {"grammar": 'start: "a" "b"*'}}, lambda text: text.rstrip("b") == "a"),
        ({"grammar": 'root ::= "x" [0-9]'}, lambda text: text[0] == "x" and text[1:].isdigit()),
        ({"ebnf": 'root ::= "hi" | "ho"'}, lambda text: text in ("hi", "ho")),
        ({"regex": "(ab)+"}, lambda text: text.replace("ab", "") == ""),
        ({"json_schema": '{"type":"boolean"}'}, lambda text: text in ("true", "false")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_answer_matches_every_structure(server: Running, fields: dict[str, Any], check: Any) -> None:
    for seed in range(3):
        for path, body in ((CHAT, {"messages": ASK["messages"]}), ("/v1/completions", {"prompt": "x"})):
            reply = server.post(path, {**body, **fields, "max_tokens": 300, "seed": seed})
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert choice["finish_reason"] == "length" or check(text), text


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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools.2.function.name"),
    ({"tools": [*TOOLS, {"type": "calculator"}]}, "calculator"),
    ({"tools": [{"type": "calculator"}], "response_format": {"type": "json_object"}}, "calculator"),
    ({"regex": "a+"}, "regex"),
    ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"guided_grammar": "\n" * 40_000}, "guided_grammar"),
    ({"guided_grammar": 'start: "' + '\\"' * 16_000}, "guided_grammar"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"guided_json": {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals(server: Running, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        reply = server.post(CHAT, {**ASK, **fields, "stream": stream})
        error = reply.json()["error"]
        assert reply.status_code == 400 and (error["param"] or "").startswith(param.split(".")[0]), error


@pytest.fixture(scope="module")
def one_at_a_time(roomy_directory: Path) -> Iterator[Running]:
    with running(roomy_directory, ServerConfig(port=0, log_requests=False), max_batch_size=2) as one:
        yield one


def test_preempted_answer_matches_structure(one_at_a_time: Running) -> None:
    body = {**ASK, "tool_choice": "required", "n": 6, "max_tokens": 200}
    for choice in one_at_a_time.post(CHAT, body).json()["choices"]:
        if choice["finish_reason"] == "tool_calls":
            check_calls(choice["message"]["tool_calls"])


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
