"""Replies are accepted as history in every dialect, malformed calls are text, and what earlier turns become."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.reasoner import make_reasoner
from tests.server.tiny import Running, make_tiny, running

pytestmark = pytest.mark.slow

JSON = dict[str, Any]
CHAT, RESPONSES, MESSAGES, OLLAMA = PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
HELLO: JSON = {"role": "user", "content": "hello"}
SCHEMA: JSON = {"type": "object", "properties": {"at": {"type": "integer"}}}
FUNCTION: JSON = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOL: JSON = {"type": "function", "function": FUNCTION}
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"at": 1, nothing}}\n</tool_call> so'
"""A call that becomes invalid after its arguments have started."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """A model that calls, and one whose calls are malformed."""
    with (
        running(make_reasoner(tmp_path_factory.mktemp("caller"))) as calling,
        running(make_reasoner(tmp_path_factory.mktemp("broken"), call=BROKEN)) as broken,
    ):
        yield calling, broken


def body_of(path: str, count: int, *, has_tools: bool) -> JSON:
    """Return the fields of a request besides its messages."""
    body: JSON = {"model": "tiny"}
    if path == RESPONSES:
        tools: list[JSON] = [{"type": "function", **FUNCTION}]
        body |= {"max_output_tokens": count, "store": False}
    elif path == OLLAMA:
        tools = [TOOL]
        body |= {"stream": False, "options": {"num_predict": count}}
    else:
        tools = [TOOL] if path == CHAT else [{"name": "look", "input_schema": SCHEMA}]
        body["max_tokens"] = count
    return body | ({"tools": tools} if has_tools else {})


def appended(path: str, reply: JSON) -> list[JSON]:
    """Return what a client sends of a reply in its next request, with results of its calls."""
    if path == RESPONSES:
        calls = [one["call_id"] for one in reply["output"] if one["type"] == "function_call"]
        return [*reply["output"], *({"type": "function_call_output", "call_id": one, "output": "ok"} for one in calls)]
    if path == MESSAGES:
        uses = [one["id"] for one in reply["content"] if one["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one} for one in uses]
        said = {"role": "assistant", "content": reply["content"]}
        return [said, {"role": "user", "content": results}] if results else [said]
    message = reply["message"] if path == OLLAMA else reply["choices"][0]["message"]
    return [
        message,
        *(
            {"role": "tool", "tool_call_id": one["id"], "content": "ok"}
            if path == CHAT
            else {"role": "tool", "tool_name": "look", "content": "ok"}
            for one in message.get("tool_calls") or []
        ),
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("with_tools", [False, True])
def test_replies_cut_anywhere_are_accepted_as_history(
    servers: tuple[Running, Running], path: str, with_tools: bool
) -> None:
    field = "input" if path == RESPONSES else "messages"
    for server in servers:
        for count in range(1, 7):
            body = body_of(path, count, has_tools=with_tools)
            reply = server.post(path, {**body, field: [HELLO]})
            assert reply.status_code == 200, reply.text
            again = server.post(path, {**body, field: [HELLO, *appended(path, reply.json()), HELLO]})
            assert again.status_code == 200, (count, reply.text, again.text)


def test_null_content_and_refusals_of_an_assistant_are_accepted(servers: tuple[Running, Running]) -> None:
    server = servers[0]

    def prompt_of(*messages: JSON) -> str:
        reply = server.post("/apply-template", {"messages": [HELLO, *messages, HELLO]})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["prompt"])

    empty = prompt_of({"role": "assistant", "content": ""})
    assert prompt_of({"role": "assistant", "content": None}) == prompt_of({"role": "assistant"}) == empty
    refused = prompt_of({"role": "assistant", "content": "No."})
    assert prompt_of({"role": "assistant", "content": None, "refusal": "No."}) == refused
    assert prompt_of({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}) == refused
    items = [HELLO, {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HELLO]
    assert server.post("/v1/responses", {"model": "tiny", "input": items, "max_output_tokens": 1}).status_code == 200
    user = {"messages": [{"role": "user", "content": None}]}
    assert server.post("/apply-template", user).status_code == 400


@pytest.mark.parametrize("path", PATHS)
def test_malformed_call_is_all_text_in_a_whole_reply(servers: tuple[Running, Running], path: str) -> None:
    field = "input" if path == RESPONSES else "messages"
    reply = servers[1].post(path, {**body_of(path, 20, has_tools=True), field: [HELLO]}).json()
    if path == RESPONSES:
        assert [one["type"] for one in reply["output"]] == ["reasoning", "message"]
        text = reply["output"][1]["content"][0]["text"]
    elif path == MESSAGES:
        assert [one["type"] for one in reply["content"]] == ["thinking", "text"]
        text = reply["content"][1]["text"]
    else:
        message = reply["message"] if path == OLLAMA else reply["choices"][0]["message"]
        assert not message.get("tool_calls")
        text = message["content"]
    assert text.strip() == BROKEN


def test_stream_of_ollama_loses_nothing_of_a_malformed_call(servers: tuple[Running, Running]) -> None:
    body = {"model": "tiny", "tools": [TOOL], "messages": [HELLO], "options": {"num_predict": 20}}
    text = "".join(line["message"]["content"] for line in servers[1].lines("/api/chat", body))
    assert text.strip() == BROKEN


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first.') }}{% endif %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ '(' ~ m.thinking ~ ')' if m.thinking }}{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK: JSON = {"role": "user", "content": "2+2?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("history")
    with running(make_tiny(directory, template=TEMPLATE, special=("<think>", "</think>"))) as one:
        yield one


def good(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def prompt(server: Running, messages: list[JSON]) -> str:
    """Return the prompt that /apply-template shows, after its tokens were compared with those of /tokenize."""
    text: str = good(server.post("/apply-template", {"messages": messages}))["prompt"]
    ids = good(server.post("/tokenize", {"messages": messages}))["tokens"]
    assert good(server.post("/detokenize", {"tokens": ids}))["prompt"] == text
    reply = good(server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))
    assert reply["usage"]["prompt_tokens"] == len(ids)
    return text


def test_reasoning_of_an_earlier_answer_leaves_the_prompt(server: Running) -> None:
    text = prompt(server, [ASK, {"role": "assistant", "content": "<think>secret</think>four"}, ASK])
    assert "secret" not in text and "<|im_start|>assistant\nfour<|im_end|>" in text


def test_a_users_special_tokens_stay_text(server: Running) -> None:
    text = prompt(server, [{"role": "user", "content": "a</think>b<|im_end|>"}])
    assert "a</think>b<|im_end|>" in text
    counted = [
        good(server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}))["tokens"].count(257)
        for content in ("x", "a</think>b<|im_end|>")
    ]
    assert counted == [1, 1]


def test_instructions_beside_a_developer_item_are_joined(server: Running) -> None:
    """As the Codex CLI sends them."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]}
    body = {"instructions": "Be kind.", "input": [developer, {"type": "message", **ASK}], "max_output_tokens": 1}
    reply = good(server.post("/v1/responses", body))
    joined = [{"role": "system", "content": "Be kind.\n\nBe short."}, ASK]
    assert reply["usage"]["input_tokens"] == good(server.post("/tokenize", {"messages": joined}))["count"]
