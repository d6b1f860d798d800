"""Stored responses: retrieval, deletion, continuation, isolation by key, limits; token counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItemList

from nano_inference.server.config import ServerConfig
from nano_inference.server.reply_store import ReplyStore, StoredReply
from tests.server.test_openai_client import client_of
from tests.server.test_responses import streamed
from tests.server.tiny import MAX_LEN, Running, running

pytestmark = pytest.mark.slow

JSON = dict[str, Any]
PATH = "/v1/responses"
SHORT: JSON = {"temperature": 0, "max_output_tokens": 8, "return_token_ids": True}
KEYS = ("first-key-1", "second-key-2")
USER = {"role": "user", "content": "once"}


@pytest.fixture(scope="module")
def keyed(tiny_directory: Path) -> Iterator[Running]:
    """A server with two keys."""
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, api_key=KEYS)) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def asked(server: Running, path: str = PATH, **fields: Any) -> JSON:
    reply = server.post(path, fields if path != PATH else {**SHORT, **fields})
    assert reply.status_code == 200, reply.text
    body: JSON = reply.json()
    return body


def refused(reply: Any, status: int, param: str, code: str | None) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (status, param, code), reply.text


def test_stored_response_is_retrieved_and_deleted(server: Running, client: openai.OpenAI) -> None:
    reply = asked(server, input="once", metadata={"a": "b"})
    assert reply["store"] is True and reply["previous_response_id"] is None
    assert server.client.get(f"{PATH}/{reply['id']}").json() == reply
    assert client.responses.retrieve(reply["id"]).output_text == reply["output"][0]["content"][0]["text"]
    deleted = server.client.delete(f"{PATH}/{reply['id']}")
    assert deleted.json() == {"id": reply["id"], "object": "response", "deleted": True}
    for again in (server.client.get(f"{PATH}/{reply['id']}"), server.client.delete(f"{PATH}/{reply['id']}")):
        refused(again, 404, "id", "response_not_found")


def test_streamed_response_is_stored_as_its_last_event(server: Running) -> None:
    *_, last = streamed(server, **SHORT, input="once")
    assert server.client.get(f"{PATH}/{last['response']['id']}").json() == last["response"]


def test_stored_response_is_not_streamed_again(server: Running) -> None:
    name = asked(server, input="once")["id"]
    refused(server.client.get(f"{PATH}/{name}?stream=true"), 400, "stream", "unsupported_field")
    assert server.client.get(f"{PATH}/{name}?stream=false").status_code == 200


def test_input_items_are_listed_in_pages(server: Running, client: openai.OpenAI) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"id": "msg_own", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    name = asked(server, input=items)["id"]

    def page(**query: Any) -> JSON:
        listed: JSON = server.client.get(f"{PATH}/{name}/input_items", params=query).json()
        return listed

    whole = page(order="asc")
    ResponseItemList.model_validate(whole)
    assert [one["type"] for one in whole["data"]] == ["message", "message", *(one["type"] for one in items[2:])]
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert whole["data"][1]["content"] == [{"type": "output_text", "text": "b", "annotations": []}]
    assert whole["data"][4]["id"] == "msg_own" and len({one["id"] for one in whole["data"]}) == 5
    assert page()["data"] == whole["data"][::-1] and not whole["has_more"]
    first = page(order="asc", limit=2)
    assert (first["data"], first["has_more"]) == (whole["data"][:2], True)
    rest = page(order="asc", after=first["last_id"])
    assert (rest["data"], rest["has_more"], rest["first_id"]) == (whole["data"][2:], False, whole["data"][2]["id"])
    assert [one.id for one in client.responses.input_items.list(name)] == [one["id"] for one in page()["data"]]
    for query, param in (({"limit": "0"}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order")):
        refused(server.client.get(f"{PATH}/{name}/input_items", params=query), 400, param, None)
    refused(server.client.get(f"{PATH}/{name}/input_items", params={"after": "none"}), 400, "after", None)


def test_continued_response_has_the_prompt_of_the_whole_conversation(server: Running) -> None:
    first = asked(server, input="once", instructions="Be kind.")
    second = asked(server, input="more", previous_response_id=first["id"])
    third = asked(server, input=[{"role": "user", "content": "end"}], previous_response_id=second["id"])
    items = [USER, *first["output"], {"role": "user", "content": "more"}, *second["output"]]
    items.append({"role": "user", "content": "end"})
    whole = asked(server, input=items, store=False)
    assert third["prompt_token_ids"] == whole["prompt_token_ids"]
    assert third["previous_response_id"] == second["id"]
    listed = server.client.get(f"{PATH}/{third['id']}/input_items?order=asc").json()["data"]
    assert [one["role"] for one in listed] == ["user", "assistant", "user", "assistant", "user"]
    assert asked(server, "/v1/responses/input_tokens", input="end", previous_response_id=second["id"]) == {
        "object": "response.input_tokens",
        "input_tokens": len(whole["prompt_token_ids"]),
    }


def test_other_key_does_not_find_a_response(keyed: Running) -> None:
    mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    name = keyed.post(PATH, {**SHORT, "input": "once"}, **mine).json()["id"]
    for path in (f"{PATH}/{name}", f"{PATH}/{name}/input_items"):
        refused(keyed.client.get(path, headers=other), 404, "id", "response_not_found")
    refused(keyed.client.delete(f"{PATH}/{name}", headers=other), 404, "id", "response_not_found")
    more = {**SHORT, "input": "more", "previous_response_id": name}
    refused(keyed.post(PATH, more, **other), 404, "previous_response_id", "previous_response_not_found")
    assert keyed.client.get(f"{PATH}/{name}").status_code == 401
    assert keyed.client.get(f"{PATH}/{name}", headers=mine).json()["id"] == name
    assert keyed.post(PATH, more, **mine).status_code == 200


def stored(name: str, size: int = 0) -> StoredReply:
    return StoredReply(id=name, reply=b"x" * size, items=b"[]")


def test_store_keeps_the_latest_replies() -> None:
    store = ReplyStore(2, 1 << 20, 1 << 20)
    assert all(store.put(None, stored(name)) for name in "abc")
    assert [store.find(None, name) is not None for name in "abc"] == [False, True, True]
    assert store.remove(None, "b") and not store.remove(None, "b")
    assert store.put(None, stored("d")) and store.find(None, "c") is not None, "removed replies make room"


def test_store_is_bounded_in_bytes() -> None:
    unit = stored("a", 1000).size
    store = ReplyStore(100, 3 * unit, 3 * unit)
    assert not store.put(None, stored("huge", 5000)) and store.find(None, "huge") is None
    assert all(store.put(None, stored(name, 1000)) for name in "abcd")
    assert [store.find(None, name) is not None for name in "abcd"] == [False, True, True, True]
    assert store.put(None, stored("b", 1000)) and store.find(None, "c") is not None, "a replaced reply counts once"


def test_busy_key_does_not_remove_the_replies_of_others() -> None:
    store = ReplyStore(4, 1 << 20, 1 << 20)
    store.put(0, stored("mine", 10))
    for index in range(20):
        store.put(1, stored(f"r{index}", 1000))
    assert store.find(0, "mine") is not None and store.find(1, "r19") is not None and store.find(1, "r16") is None


def test_key_with_many_small_replies_does_not_remove_large_ones() -> None:
    store = ReplyStore(10, 1 << 20, 1 << 20)
    for index in range(3):
        store.put(0, stored(f"large{index}", 10_000))
    for index in range(50):
        store.put(1, stored(f"small{index}", 10))
    assert all(store.find(0, f"large{index}") is not None for index in range(3))
    assert store.find(1, "small43") is not None and store.find(1, "small42") is None


def test_store_without_room_says_so(tiny_directory: Path) -> None:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, max_stored_replies=0)) as server:
        reply = asked(server, input="once")
        assert reply["store"] is False and server.client.get(f"{PATH}/{reply['id']}").status_code == 404


def test_input_tokens_equal_the_usage(server: Running, client: openai.OpenAI) -> None:
    fields: JSON = {"instructions": "Be kind.", "input": [USER]}
    counted = client.responses.input_tokens.count(**fields)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        asked(server, **fields)["usage"]["input_tokens"],
    )
    long = asked(server, "/v1/responses/input_tokens", input="x" * 2 * MAX_LEN)
    assert long["input_tokens"] > 2 * MAX_LEN, "counts prompts beyond the context"
