"""Every known field without support: refused by name over HTTP on every path, accepted with a neutral value.

Where a dialect's own tests already send all of a table, that is only held here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from nano_inference.server.dialects import generate, llamacpp_body, messages, ollama_body, responses, sglang
from nano_inference.server.schema import ChatBody
from nano_inference.server.unsupported import HINTS, NEUTRAL
from tests.server import test_generate, test_llamacpp, test_messages, test_responses, test_sglang, test_unsupported
from tests.server.mounted import CONVERTING, GENERATING, NANOCHATS, ids, mounted
from tests.server.test_unsupported import DECLARED, asking
from tests.server.tiny import Running, make_tiny

JSON = dict[str, Any]
Values = Mapping[str, tuple[Any, ...]]
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
INPUT_TOKENS = "/v1/responses/input_tokens"
GENERATE, SGLANG, LLAMA, WEB = "/inference/v1/generate", "/generate", "/completion", "/chat/completions"
OLLAMA, OLLAMA_CHAT = "/api/generate", "/api/chat"
HELLO = [{"role": "user", "content": "a"}]
BODIES: Mapping[str, JSON] = MappingProxyType(
    {
        RESPONSES: {"input": "a", "max_output_tokens": 1},
        INPUT_TOKENS: {"input": "a"},
        MESSAGES: {"messages": HELLO, "max_tokens": 1},
        COUNT: {"messages": HELLO},
        "/v1/chat/completions/input_tokens": {"messages": HELLO},
        GENERATE: {"token_ids": ids("a"), "sampling_params": {"max_tokens": 1}},
        SGLANG: {"text": "a", "sampling_params": {"max_new_tokens": 1}},
        LLAMA: {"prompt": "a", "n_predict": 1},
        WEB: {"messages": HELLO, "max_tokens": 1},
        OLLAMA: {"prompt": "a", "options": {"num_predict": 1}},
        OLLAMA_CHAT: {"messages": HELLO, "options": {"num_predict": 1}},
        "/api/embed": {"input": "a"},
        "/api/embeddings": {"prompt": "a"},
        "/api/show": {},
        "/v1/embeddings": {"input": "a"},
        "/detokenize": {"tokens": [1]},
    }
)
"""Paths that `test_unsupported` does not test."""
OWN: Mapping[str, Values] = MappingProxyType(
    {
        RESPONSES: responses.UNSUPPORTED,
        INPUT_TOKENS: responses.UNSUPPORTED,
        MESSAGES: messages.UNSUPPORTED,
        COUNT: messages.UNSUPPORTED,
        GENERATE: generate.UNSUPPORTED,
        SGLANG: sglang.UNSUPPORTED,
        LLAMA: llamacpp_body.UNSUPPORTED,
        OLLAMA: ollama_body.UNSUPPORTED,
        OLLAMA_CHAT: ollama_body.UNSUPPORTED,
    }
)
"""Path -> the dialect's unsupported fields with their neutral values."""
PARAMS: Mapping[str, Values] = MappingProxyType(
    {GENERATE: generate.UNSUPPORTED_PARAMS, SGLANG: sglang.UNSUPPORTED_PARAMS}
)
"""The same for nested sampling parameters."""
ASKING: Mapping[str, Any] = MappingProxyType({"max_tokens": 2, "response_format": {"type": "text"}, "n": 2})
"""Unsupported fields that are declared, so that their types are checked first."""
FOREIGN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        MESSAGES: messages.CHAT_ONLY,
        COUNT: messages.CHAT_ONLY,
        **dict.fromkeys(
            (RESPONSES, INPUT_TOKENS),
            frozenset(responses.CHAT_NAMES) | (frozenset(ChatBody.model_fields) - DECLARED[RESPONSES] - HINTS.keys()),
        ),
    }
)
"""Chat fields that a dialect lacks or calls otherwise: refused unless null."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with mounted(make_tiny(tmp_path_factory.mktemp("refusing")), NANOCHATS) as one:
        yield one


def refused(server: Running, path: str, body: JSON, param: str) -> None:
    """Send a body that must be refused naming the field, in the form of its dialect."""
    reply = server.post(path, body)
    error = reply.json()["error"]
    assert reply.status_code == 400, (param, reply.text)
    if isinstance(error, str):  # Ollama's form
        assert error.startswith(f"{param} "), error
        return
    named = error.get("param") or error.get("details", {}).get("param")
    assert named == param or (path == LLAMA and param in error["message"]), error


def taken(server: Running, path: str, body: JSON) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 200, (body, reply.text)


def columns(table: Values) -> list[JSON]:
    """Return bodies that cover all neutral values of all fields."""
    count = max(map(len, table.values()))
    return [{name: values[column % len(values)] for name, values in table.items()} for column in range(count)]


def common(path: str) -> Values:
    """Return the unsupported fields of other servers that the path does not handle itself."""
    own = DECLARED[path] | set(OWN.get(path, {})) | FOREIGN.get(path, frozenset())
    return {name: values for name, values in NEUTRAL.items() if name not in own}


def test_every_path_has_a_refusal_test() -> None:
    assert {*BODIES, *test_unsupported.BODIES} == {one.path for one in GENERATING} | {one.path for one in CONVERTING}


@pytest.mark.parametrize("path", BODIES)
def test_unsupported_fields_of_other_servers_are_refused(server: Running, path: str) -> None:
    for index, name in enumerate(common(path)):
        values = asking(name)
        refused(server, path, {**BODIES[path], name: values[index % len(values)]}, name)


@pytest.mark.parametrize("path", BODIES)
def test_neutral_fields_of_other_servers_are_accepted(server: Running, path: str) -> None:
    for neutral in columns(common(path)):
        taken(server, path, {**BODIES[path], **neutral})


@pytest.mark.parametrize("path", [path for path in OWN if path not in PARAMS and path != LLAMA])
def test_unsupported_fields_of_the_dialect_are_refused(server: Running, path: str) -> None:
    for name in OWN[path]:
        refused(server, path, {**BODIES[path], name: ASKING.get(name, ["x"])}, name)


@pytest.mark.parametrize("path", OWN)
def test_neutral_fields_of_the_dialect_are_accepted(server: Running, path: str) -> None:
    for neutral in columns(OWN[path]):
        taken(server, path, {**BODIES[path], **neutral})
    for neutral in columns(PARAMS[path]) if path in PARAMS else ():
        body = BODIES[path]
        taken(server, path, {**body, "sampling_params": {**body["sampling_params"], **neutral}})


@pytest.mark.parametrize("path", FOREIGN)
def test_chat_only_fields_are_refused(server: Running, path: str) -> None:
    for name in FOREIGN[path]:
        refused(server, path, {**BODIES[path], name: ASKING.get(name, "x")}, name)
    taken(server, path, {**BODIES[path], **dict.fromkeys(FOREIGN[path])})


def test_dialect_tests_cover_their_tables() -> None:
    for path, sent in (
        (GENERATE, {param for _, _, param in test_generate.REFUSED}),
        (SGLANG, {param for _, _, param in test_sglang.REFUSED}),
        (LLAMA, {param for _, param in test_llamacpp.REFUSED}),
    ):
        assert {*OWN[path], *(f"sampling_params.{name}" for name in PARAMS.get(path, ()))} <= sent


def test_responses_refusals_over_http(server: Running) -> None:
    for fields, param in test_responses.REFUSED:
        if param == "previous_response_id":
            continue  # not refused: it names a stored response
        refused(server, RESPONSES, {**BODIES[RESPONSES], **fields}, param)


def test_messages_refusals_over_http(server: Running) -> None:
    assert len(test_messages.REFUSED_FIELDS) > 40
    for fields, param in test_messages.REFUSED_FIELDS:
        body = {**BODIES[MESSAGES], **fields}
        reply = server.post(MESSAGES, {name: value for name, value in body.items() if value is not ...})
        assert reply.status_code == (404 if param == "model" else 400)
        assert reply.json()["error"]["details"]["param"] == param
