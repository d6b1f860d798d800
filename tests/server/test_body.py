"""Parsing bodies: invalid JSON, schema violations, and their error messages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nano_inference.server.app import App
from nano_inference.server.body import MAX_DEPTH, parse, read_json
from nano_inference.server.errors import ApiError
from nano_inference.server.schema import ChatBody, CompletionBody, DetokenizeBody
from tests.cases import failures
from tests.server.test_every_parameter import TABLES, both_bodies
from tests.server.tiny import Running, events_in, running

JSON = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]


def refusal(data: bytes | str | dict[str, Any], model: Any = CompletionBody) -> ApiError:
    raw = data if isinstance(data, bytes) else (data if isinstance(data, str) else json.dumps(data)).encode()
    with pytest.raises(ApiError) as caught:
        parse(raw, model)
    assert caught.value.status == 400
    assert len(caught.value.to_json()) <= 8192
    return caught.value


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object, got an array"),
        (b'{"prompt":"a"', "not valid JSON"),
        (b'{"prompt":"\xff"}', "not valid JSON"),
        (b'{"prompt":"\\ud800"}', "not valid JSON"),
        (b'{"temperature":NaN}', "not valid JSON"),
        (b'{"seed":' + b"9" * 100_000 + b"}", "not valid JSON"),
        (b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "not valid JSON"),
        (b'{"x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", f"nested deeper than {MAX_DEPTH}"),
    ],
)
def test_invalid_json_is_refused(data: bytes, says: str) -> None:
    error = refusal(data)
    assert says in error.message
    assert (error.code, error.param) == ("invalid_json", None)


RANGES: dict[str, list[Any]] = {
    "n": [0, -1, 2**31, 1.0, 1.5, "1", True, [], {}],
    "temperature": [-0.001, 2.001, 1e308, "1", True, []],
    "top_p": [0, -1, 1.0000001, "0.5", False],
    "presence_penalty": [-2.001, 2.001, "x"],
    "frequency_penalty": [-2.001, 2.001, {}],
    "seed": [-(2**63) - 1, 2**64, 0.5, True],
    "max_tokens": [-1, 2**31, 1e400, "5"],
    "top_k": [-2, 2**31, 0.1],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 101, "1"],
    "min_tokens": [-1, 2**31, True],
    "ignore_eos": [0, 1, "true"],
    "stop_token_ids": [5, [-1], [2**31], ["1"], [True], [1.0], list(range(1025))],
    "include_stop_str_in_output": ["yes", 1],
    "skip_special_tokens": [1],
    "bad_words": ["a", [""], [1], ["x" * 257], ["a"] * 257],
    "allowed_token_ids": [[], [-1], ["a"], 5],
    "truncate_prompt_tokens": [-2, 2**31, "1"],
    "prompt_logprobs": [-2, 1_000_001, True, "1"],
    "return_token_ids": [1, "x"],
    "return_tokens_as_token_ids": [0],
    "add_special_tokens": ["no"],
    "request_id": ["", "a b", "x" * 129, "a\n", "ü/", 5],
    "cache_salt": ["", "a@b", "a/b", "a\\b", "a\0b", "x" * 129, 5],
    "stop": ["", [""], 5, ["a"] * 17, ["x" * 257], [None], {}],
    "stream": ["true", 1],
    "stream_options": [[], "x", {"include_usage": "yes"}, {"continuous_usage_stats": 1}],
    "logit_bias": [[], {"a": 1}, {"-1": 1}, {"1.0": 1}, {"5": "x"}, {"5": 101}, {"5": None}, {"": 1}, {"9" * 11: 1}],
    "model": [5, "x" * 513],
}
COMPLETION_RANGES: dict[str, list[Any]] = {
    "prompt": [None, 5, [], [[]], [1.5], [-1], [2**31], [True], [[1], "a"], ["a", 1], {}, [["a"]], ["a"] * 1025],
    "echo": ["x"],
    "logprobs": [True, -2, 1_000_001],
    "best_of": [-1, 2**31, "1"],
}
CHAT_RANGES: dict[str, list[Any]] = {
    "messages": [None, [], "x", {}, [1], [{}], [{"role": "user", "content": 5}], HELLO * 2049],
    "max_completion_tokens": [-1, "5", 2**31],
    "logprobs": [2, -1, "true"],
    "top_logprobs": [-2, True, 1_000_001],
    "continue_final_message": [1],
    "sample_index": [-1, "1", 1.5],
    "lineage": ["", 1, ["x"], "x" * 129],
    "answer_token_ids": [[], [-1], [True], ["1"], [1.5], "1", {}],
    "add_generation_prompt": ["x"],
    "chat_template_kwargs": ["x", []],
    "parallel_tool_calls": [1],
}


INVALID_VALUES = [
    *((kind, f, v) for kind in ("completion", "chat") for f, values in RANGES.items() for v in values),
    *(("completion", f, v) for f, values in COMPLETION_RANGES.items() for v in values),
    *(("chat", f, v) for f, values in CHAT_RANGES.items() for v in values),
]


def test_invalid_value_error_names_field() -> None:
    def check(kind: str, field: str, value: Any) -> None:
        base: dict[str, Any] = {"prompt": "a"} if kind == "completion" else {"messages": HELLO}
        text = json.dumps({**base, field: value}).replace("Infinity", "1e400")
        error = refusal(text, CompletionBody if kind == "completion" else ChatBody)
        assert error.param is not None and error.param.split(".")[0] == field
        assert error.message.startswith(f"{error.param}: ")
        assert error.code is None
        assert error.type == "invalid_request_error"

    assert failures(check, INVALID_VALUES) == []


@pytest.mark.parametrize(
    ("body", "model", "message"),
    [
        ({}, CompletionBody, "prompt: field required"),
        ({"prompt": "a", "temperature": 3}, CompletionBody, "input should be less than or equal to 2, got 3"),
        ({"prompt": "a", "stop": ["x" * 257]}, CompletionBody, "stop.0: string should have at most 256 characters"),
        ({"messages": [*HELLO, {"content": "x"}]}, ChatBody, "messages.1.role: field required"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, ChatBody, "messages.0.content.0.type: field"),
        ({"tokens": [1, -1]}, DetokenizeBody, "tokens.1: input should be greater than or equal to 0, got -1"),
        (
            {"prompt": "a", "stream_options": {"include_usage": 5}},
            CompletionBody,
            "stream_options.include_usage: input",
        ),
        ({"prompt": "a", "logit_bias": {"bad1": 1, "5": 1, "bad2": 1}}, CompletionBody, "also logit_bias.bad2"),
        (
            {"prompt": "a", "logit_bias": {f"bad{i}": 1 for i in range(20)}},
            CompletionBody,
            "also " + ", ".join(f"logit_bias.bad{i}" for i in range(1, 9)) + ", …",
        ),
        ({"prompt": "a", "logit_bias": {str(i): 0 for i in range(1025)}}, CompletionBody, "at most 1024 entries"),
    ],
)
def test_error_names_path_and_limit(body: dict[str, Any], model: Any, message: str) -> None:
    assert message in refusal(body, model).message


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt":[' + b"null," * 60_000 + b"null]}",
        b'{"prompt":[[' + b"null," * 60_000 + b"null]]}",
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":"x"' % i for i in range(20_000)) + b"}}",
        b'{"prompt":"a","logit_bias":{"' + b"k" * 100_000 + b'":1}}',
        ('{"prompt":"a","logit_bias":{"' + "😀" * 1000 + '":1}}').encode(),
        b'{"prompt":"a","stop":"' + b"x" * 60_000 + b'"}',
    ],
)
def test_error_size_is_bounded(data: bytes) -> None:
    """A list of 100,000 invalid values is one error."""
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate(read_json(data))
    assert caught.value.error_count() < 2_000
    refusal(data)


MAX_LEN = 48
TEXT: JSON = {"prompt": "hello", "max_tokens": 2}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/apply-template")
VALID: list[tuple[str, JSON]] = [
    (path, body)
    for path in PATHS
    for field, case in TABLES[path].items()
    if case.what != "elsewhere"
    for body in both_bodies(path, field, case)
]
"""With every field of these paths, of which few may be invalid."""
ODD_NUMBERS = (
    *("-9223372036854775809", "-9223372036854775808", "-1", "-0.0", "0", "1e-324", "1e-300", "0.10000000000000002"),
    *("1", "2147483647", "2147483648", "9007199254740993", "9223372036854775808", "18446744073709551616", "1e308"),
    *("1e400", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 100_000),
)
ODD_TEXTS = (
    *('""', '"1"', '"\\u0000"', '"\\ud800"', '"\\ufeff"', '"\\u202e"', '"</script>"', '"\\r\\nGET /"', '"👩\u200d👧"'),
    *('"<|im_start|><|im_end|><|bos|><|pad|>"', '"' + "a" * 50_000 + '"', '"' + "e" + "\u0301" * 5000 + '"'),
)
ODD_SHAPES = (
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"a":1}', '{"5":1}', '{"type":"text"}', '{"a":1,"a":2}'),
    *("[" * 10_000 + "]" * 10_000, "[" * 40 + "]" * 40, '{"a":' * 200 + "1" + "}" * 200, "[" + "1," * 5000 + "1]"),
    *("{" + ",".join(f'"{i}":0' for i in range(3000)) + "}", '[{"role":"user","content":"x"}]'),
)
ODD = (*ODD_NUMBERS, *ODD_TEXTS, *ODD_SHAPES)
ODD_KEYS = ('""', '"\\u0000"', '"\\ud800"', '"__proto__"', '"model_config"', '"prompt"', '"n"', '"stream"', '"seed"')


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path in a JSON value except the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [one for key, item in items for one in ((*at, key), *places(item, (*at, key)))]


def changed(value: Any, at: tuple[Any, ...], put: str | None) -> Any:
    """Return a copy with another value at a path; None removes it."""
    copy = value.copy()
    key, *rest = at
    if rest:
        copy[key] = changed(value[key], tuple(rest), put)
    elif put is None:
        del copy[key]
    else:
        copy[key] = put
    return copy


def spoilt(body: JSON, changes: list[tuple[int, str | None]], more: list[tuple[str, str]], whole: int) -> bytes:
    """Return a body with odd JSON at some paths, further or repeated keys, or damaged bytes."""
    raw: list[str] = []
    for index, odd in changes:
        where = places(body)
        if where:
            raw += [] if odd is None else [odd]
            body = changed(body, where[index % len(where)], None if odd is None else f"@@{len(raw) - 1}@@")
    text = json.dumps(body)
    for number, odd in enumerate(raw):
        text = text.replace(f'"@@{number}@@"', odd)
    text = text[:-1] + "".join(f"{',' if text != '{}' else ''}{key}:{value}" for key, value in more) + "}"
    data = text.encode()
    return (data, b"\xef\xbb\xbf" + data, data[:-1], data + b"x", data.replace(b"e", b"\xff"))[whole]


@dataclass
class Answer:
    status: int = 0
    kind: str = ""
    body: bytes = b""


async def request(app: App, path: str, data: bytes) -> Answer:
    """Send a request to the ASGI application without a socket."""
    got, sent = Answer(), False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            got.status = message["status"]
            got.kind = dict(message["headers"])[b"content-type"].decode()
        else:
            got.body += message.get("body", b"")

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "client": None}
    await app.asgi({**scope, "raw_path": path.encode(), "root_path": "", "scheme": "http", "state": {}}, receive, send)
    return got


@pytest.fixture(scope="module")
def small(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory, max_model_len=MAX_LEN) as one:
        yield one


def check_answer(answer: Answer) -> None:
    assert answer.status == 200 or 400 <= answer.status < 500, answer
    if answer.status == 200 and answer.kind.startswith("text/event-stream"):
        events = events_in(answer.body.decode())
        assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1])
        return
    body = json.loads(answer.body)
    assert ("error" in body) == (answer.status != 200)
    if answer.status != 200:
        assert set(body["error"]) >= {"message", "type", "param", "code"} and body["error"]["message"]
        assert len(answer.body) <= 8192
        assert not re.search(
            r"0x[0-9a-f]{4}|Traceback|site-packages|\.py\b|/(usr|home|tmp|root)/", answer.body.decode()
        )


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.nightly)])
def test_mutated_bodies_never_cause_server_error(small: Running, count: int) -> None:
    """No 5xx, no error within a started stream, and the engine stays alive."""

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(VALID),
        st.lists(st.tuples(st.integers(0, 40), st.one_of(st.sampled_from(ODD), st.none())), max_size=2),
        st.lists(st.tuples(st.sampled_from(ODD_KEYS), st.sampled_from(ODD)), max_size=1),
        st.sampled_from((*(0,) * 20, 1, 2, 3, 4)),
    )
    def attack(
        valid: tuple[str, JSON], changes: list[tuple[int, str | None]], more: list[tuple[str, str]], whole: int
    ) -> None:
        data = spoilt(valid[1], changes, more, whole)
        check_answer(asyncio.run_coroutine_threadsafe(request(small.app, valid[0], data), small.loop).result(60))

    attack()
    assert small.client.get("/ready").json() == {"status": "ready"}
    assert small.post("/v1/completions", TEXT).status_code == 200
