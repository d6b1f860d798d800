"""Fields that no route reads: refused where their loss would change the answer, else logged once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference.server.body import ANSWER_FIELDS, PROMPT_FIELDS
from nano_inference.server.config import ServerConfig
from tests.server.mounted import CONVERTING, GENERATING, NANOCHATS, mounted
from tests.server.scripted import make_scripted
from tests.server.test_every_parameter import BASES
from tests.server.tiny import Running, make_tiny, running

pytestmark = pytest.mark.slow

JSON = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE, SGLANG, LLAMA = "/inference/v1/generate", "/generate", "/completion"
DECLARED = {one.path: frozenset(one.body.model_fields) for one in (*GENERATING, *CONVERTING)}
ASKING: JSON = {
    "n": 2,
    "max_tokens": 3,
    "think": False,
    "thinking_budget": 0,
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
}
EMPTY = (None, False, 0, "", [], {})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with mounted(make_tiny(tmp_path_factory.mktemp("fields")), NANOCHATS) as one:
        yield one


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = make_tiny(tmp_path_factory.mktemp("strict"), positions=2048)
    with running(directory, ServerConfig(port=0, log_requests=False, strict=True)) as one:
        yield one


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model calls the function `look` in the namespace `agents`."""
    with running(make_scripted(tmp_path_factory.mktemp("agent"), "agents.look", {"at": 1}, "Seen.")) as one:
        yield one


@pytest.mark.parametrize("path", BASES)
def test_fields_whose_loss_changes_the_answer_are_refused(server: Running, path: str) -> None:
    refused = ANSWER_FIELDS if path in {one.path for one in GENERATING} else PROMPT_FIELDS
    for name in refused.keys() - DECLARED[path]:
        reply = server.post(path, {**BASES[path], name: ASKING.get(name, ["x"])})
        assert reply.status_code == 400 and f"{name} is not supported" in reply.text, (name, reply.text)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_their_values_without_effect_are_taken(server: Running, path: str) -> None:
    set_when_empty = {"think", "thinking_budget", "thinking_token_budget"}
    values = {
        name: (None,) if name in set_when_empty else (*EMPTY, *harmless)
        for name, harmless in ANSWER_FIELDS.items()
        if name not in DECLARED[path] | {"max_tokens"}
    }
    for index in range(max(map(len, values.values()))):
        fields = {name: some[index % len(some)] for name, some in values.items()}
        reply = server.post(path, {**BASES[path], **fields})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("path", "part"), [(GENERATE, "sampling_params"), (SGLANG, "sampling_params"), ("/api/chat", "options")]
)
def test_options_are_looked_into(server: Running, caplog: pytest.LogCaptureFixture, path: str, part: str) -> None:
    def body(**fields: Any) -> JSON:
        return {**BASES[path], part: {**BASES[path][part], **fields}}

    reply = server.post(path, body(mirostat=2))
    assert reply.status_code == 400 and f"{part}.mirostat is not supported" in reply.text
    if part == "sampling_params":  # of trainers, which would learn from other samples
        reply = server.post(path, body(temprature=1))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "sampling_params.temprature")
        assert server.post(path, body(skip_clone=True, spaces_between_special_tokens=True)).status_code == 200
    else:
        with caplog.at_level(logging.WARNING, logger="nano_inference.server"):
            assert server.post(path, body(zebra=1)).status_code == 200
        assert "'options.zebra'" in caplog.text
    if path == SGLANG:
        several = {"text": ["a", "b"], "sampling_params": [{"beam_width": 2}, {"beam_width": 1}]}
        assert "sampling_params.beam_width is not supported" in server.post(path, several).text


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, RESPONSES])
@pytest.mark.parametrize("name", ["repeat_last_n", "penalty_last_n"])
def test_window_of_penalties_is_refused_with_a_penalty(server: Running, path: str, name: str) -> None:
    body = {**BASES[path], name: 64}
    assert server.post(path, body).status_code == 200
    for penalty in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        reply = server.post(path, {**body, **penalty})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), reply.text
        assert server.post(path, {**body, **penalty, name: -1}).status_code == 200
        assert server.post(path, {**body, **penalty, name: 0}).status_code == 400, "0 would be no penalty"


def test_other_fields_are_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nano_inference.server"):
        for _ in range(3):
            reply = server.post(CHAT, {**BASES[CHAT], "sparkle": 1, "evil\nname": {"a": 1}, "user": "me"})
            assert reply.status_code == 200
    messages = [text for record in caplog.records if "without effect" in (text := record.getMessage())]
    assert messages == ["fields without effect are ignored: 'evil\\nname', 'sparkle', 'user'"], "on one line"


def test_number_and_length_of_logged_fields_are_bounded(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    flood = {f"field{index}": 1 for index in range(3000)} | {f"{'y' * 100_000}{index}": 1 for index in range(3)}
    with caplog.at_level(logging.WARNING):
        assert server.post(CHAT, {**BASES[CHAT], **flood}).status_code == 200
    logged = server.app.pipeline.ignored.logged
    assert len(logged) <= 1000 and all(len(name) <= 64 for name in logged)
    (line,) = [text for record in caplog.records if "without effect" in (text := record.getMessage())]
    assert len(line) < 1000 and "more" in line


@pytest.mark.parametrize("path", BASES)
def test_a_strict_server_refuses_them(strict: Running, path: str) -> None:
    if path == "/chat/completions":
        return  # only of a nanochat model
    base = BASES[path]
    harmless = {} if "tfs_z" in DECLARED[path] else {"tfs_z": 1.0}
    assert strict.post(path, {**base, **harmless, "zebra": None}).status_code == 200, "they ask for nothing"
    reply = strict.post(path, {**base, "zebra": 1, "x" * 500: 1})
    assert reply.status_code == 400
    assert f"fields without effect: 'zebra', '{'x' * 64}'" in reply.text


FUNCTION: JSON = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
SEARCH: JSON = {"type": "web_search", "external_web_access": False}
SPACE: JSON = {"type": "namespace", "name": "agents", "description": "Work on agents.", "tools": [FUNCTION]}


def test_errors_name_the_functions_place(scripted: Running) -> None:
    for tools, param in (
        ([SEARCH, {**SPACE, "tools": [{**FUNCTION, "name": "not a name"}]}], "tools.0.function.name"),
        ([SEARCH, {**FUNCTION, "name": "not a name"}], "tools.0.function.name"),
        ([{**SPACE, "name": None}], "tools.0.name"),
        ([{"type": "namespace", "name": "n"}], "tools.0.tools"),
    ):
        reply = scripted.post(RESPONSES, {"input": "hi", "tools": tools})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    reply = scripted.post(RESPONSES, {"input": "hi", "tools": [SEARCH], "tool_choice": "required"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice"), "the search is left out"
