"""The routes over a real socket: fields, log-probabilities, streams, usage, errors, queue limits, deadlines."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import socket
import threading
import time
import tracemalloc
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import transformers

import nano_inference
from nano_inference import InferenceEngine, SamplingParams
from nano_inference.server.config import ServerConfig
from tests.server.mounted import engine_sample, ids
from tests.server.stepped import gated, stepped
from tests.server.tiny import Running, running

pytestmark = pytest.mark.slow

COMPLETE = "/v1/completions"
CALCULATOR = Path(nano_inference.__file__).parent / "nanochat" / "data" / "calculator"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = dict[str, Any]


def complete(server: Running, **fields: Any) -> JSON:
    """POST a completion that must succeed; greedy by default."""
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    reply = server.post(COMPLETE, body)
    assert reply.status_code == 200, reply.text
    answer: JSON = reply.json()
    return answer


def chat(server: Running, **fields: Any) -> JSON:
    """POST a chat that must succeed; greedy by default."""
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    reply = server.post(CHAT, body)
    assert reply.status_code == 200, reply.text
    answer: JSON = reply.json()
    return answer


def ids_of(reply: JSON, index: int = 0) -> list[int]:
    return list(reply["choices"][index]["token_ids"])


SAMPLING: list[JSON] = [
    {"temperature": 0.0},
    {"temperature": 1.7, "seed": 3},
    {"temperature": 1.5, "seed": 3, "top_p": 0.4},
    {"temperature": 1.5, "seed": 3, "top_k": 2},
    {"temperature": 1.5, "seed": 3, "min_p": 0.5},
    {"repetition_penalty": 3.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {"65": 100.0, "66": 99.9}},
    {"allowed_token_ids": [120, 121, 122]},
    {"ignore_eos": True, "max_tokens": 40},
    {"min_tokens": 12, "logit_bias": {"257": 100.0}},
    {"max_tokens": 0},
]


@pytest.mark.parametrize("fields", SAMPLING)
def test_sampling_fields_equal_engine_results(server: Running, engine: InferenceEngine, fields: JSON) -> None:
    reply = complete(server, logprobs=3, **fields)
    sample = engine_sample(engine, ids("hello"), logprobs=3, **fields)
    choice = reply["choices"][0]
    assert choice["token_ids"] == list(sample.completion_tokens)
    assert choice["finish_reason"] == sample.finish_reason
    assert choice["prompt_token_ids"] == ids("hello")
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(list(sample.logprobs), abs=1e-5)
    if fields.get("max_tokens") != 0:
        answer = chat(server, logprobs=True, **fields)
        sample = engine_sample(engine, answer["prompt_token_ids"], **fields)
        assert ids_of(answer) == list(sample.completion_tokens)


NOTHING_LEFT: list[JSON] = [
    {"allowed_token_ids": ids("a"), "bad_words": ["a"]},
    {"allowed_token_ids": ids("a"), "bad_words": ["aaa"]},
]


@pytest.mark.parametrize("fields", NOTHING_LEFT)
def test_request_that_forbids_every_token_is_answered_with_400(server: Running, fields: JSON) -> None:
    body = {"prompt": "hello", "max_tokens": 5, **fields}
    reply = server.post(COMPLETE, body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "no token can be drawn" in reply.json()["error"]["message"]
    events = server.events(COMPLETE, {**body, "stream": True})
    assert (events[-2]["error"]["type"], events[-1]) == ("invalid_request_error", "[DONE]")


def test_choices_are_numbered_prompt_by_prompt(server: Running, engine: InferenceEngine) -> None:
    prompts, params = ["one", "twothree", "four"], SamplingParams(temperature=1.3, seed=9, max_tokens=7)
    body: JSON = {"prompt": prompts, "n": 3, "temperature": 1.3, "seed": 9, "max_tokens": 7, "return_token_ids": True}
    choices = server.post(COMPLETE, body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(9))
    expected = [
        (ids(prompt), list(sample.completion_tokens))
        for prompt in prompts
        for sample in engine.generate([ids(prompt)], params, num_samples_per_prompt=3)
    ]
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in choices] == expected
    assert len({tuple(tokens) for _, tokens in expected[:3]}) == 3, "samples differ"


def test_echoed_prompt_has_logprobs(server: Running, tiny_directory: Path) -> None:
    prompt = "héllo\ud7ff"
    for count in (0, 2):
        choice = complete(server, prompt=prompt, echo=True, logprobs=count, max_tokens=4)["choices"][0]
        form = choice["logprobs"]
        assert form["token_logprobs"][0] is None and form["top_logprobs"][0] is None
        assert "".join(form["tokens"]) == choice["text"]
        tokens = [*ids(prompt), *choice["token_ids"]]
        assert form["token_logprobs"][1:] == pytest.approx(reference_logprobs(tiny_directory, tokens), abs=1e-4)
        assert {len(row) for row in form["top_logprobs"][1:]} <= {max(1, count), count + 1}
        assert form["text_offset"] == [sum(map(len, form["tokens"][:index])) for index in range(len(tokens))]
        assert choice["prompt_logprobs"] is None
    choice = complete(server, prompt=prompt, echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1)["choices"][0]
    assert {len(row) for row in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert {len(row) for row in choice["prompt_logprobs"][1:]} <= {3, 4}
    scored = complete(server, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    assert (scored["choices"][0]["text"], scored["choices"][0]["finish_reason"]) == (prompt, "length")
    assert scored["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2},
        {"logprobs": 0, "max_tokens": 0},
        {"logprobs": 1, "n": 2, "temperature": 1, "seed": 3},
        {"logprobs": 1, "prompt": ["hé", "x"], "return_token_ids": True},
    ],
)
def test_a_stream_echoes_a_prompt_with_logprobs_as_a_whole_reply_does(server: Running, options: JSON) -> None:
    """As in vLLM: the prompt and its log-probabilities come with the first token, null for the prompt's first."""
    body = {"model": "tiny", "prompt": "h\u00e9llo\ud7ff", "temperature": 0, "max_tokens": 5, "echo": True, **options}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    own = {name: body.pop(name) for name in ("return_token_ids",) if name in body}
    whole = client.completions.create(**body, extra_body=own)
    joined: dict[int, JSON] = {one.index: {"text": ""} for one in whole.choices}
    for chunk in client.completions.create(**body, extra_body=own, stream=True):
        (choice,) = chunk.choices
        joined[choice.index]["text"] += choice.text
        for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
            joined[choice.index].setdefault(name, []).extend(values)
    for one in whole.choices:
        assert one.logprobs is not None
        assert joined[one.index] == {"text": one.text, **one.logprobs.to_dict()}


def reference_logprobs(directory: Path, tokens: Sequence[int]) -> list[float]:
    """Return Transformers' log-probabilities of each id but the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
    return [float(scores[index, token]) for index, token in enumerate(tokens[1:])]


def test_greedy_tokens_and_logprobs_equal_transformers(server: Running, tiny_directory: Path) -> None:
    answer = chat(server, logprobs=True, top_logprobs=3, max_tokens=20, ignore_eos=True)
    prompt, tokens = answer["prompt_token_ids"], ids_of(answer)
    expected = reference_logprobs(tiny_directory, [*prompt, *tokens])[len(prompt) - 1 :]
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)
    assert [entry["top_logprobs"][0]["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)


def text_of(events: Sequence[Any]) -> dict[int, str]:
    """Return the texts of a stream's choices."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


ALPHABETS = (
    "abc é",
    "日本語中文",
    "😀👩‍👩‍👧🇩🇪",
    "".join(map(chr, range(32, 127))),
    "עברית العربية",
    "\x00\x01\n\r\t\u2028\ufeff",
)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randrange(1, 24)))


def counted(server: Running) -> tuple[float, float]:
    """Return the prompt and output tokens of the metrics."""
    text = server.client.get("/metrics").text
    found = [
        re.search(rf"^vllm:{name}_total{{[^}}]*}} (\S+)$", text, re.M)
        for name in ("prompt_tokens", "generation_tokens")
    ]
    first, second = (float(one[1]) for one in found if one is not None)
    return first, second


def test_streams_equal_complete_replies(server: Running) -> None:
    """Token counts equal the tokenizer's for prompts and outputs."""
    rng = random.Random(37)
    tokenizer = server.opened.model.tokenizer
    bodies: list[tuple[str, JSON]] = []
    for number in range(60):
        text = random_text(rng)
        body: JSON = {"max_tokens": rng.randrange(1, 24), "seed": number, "temperature": rng.choice([0, 0.7, 1.5])}
        body |= {"stop": [random_text(rng)[:2], "a"]} if number % 3 == 0 else {}
        body |= {"n": 2} if number % 7 == 0 else {}
        body |= {"skip_special_tokens": False} if number % 5 == 0 else {}
        body |= {"prompt": text} if number % 2 else {"messages": [{"role": "user", "content": text}]}
        bodies.append((COMPLETE if number % 2 else CHAT, {**body, "return_token_ids": True}))

    def both(job: tuple[str, JSON]) -> tuple[JSON, list[Any]]:
        path, body = job
        reply = server.post(path, body)
        assert reply.status_code == 200, reply.text
        return reply.json(), server.events(path, {**body, "stream": True, "stream_options": {"include_usage": True}})

    before = counted(server)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(both, bodies))
    after = counted(server)
    usages = [(body.get("n", 1), whole["usage"]) for (_, body), (whole, _) in zip(bodies, answers, strict=True)]
    assert after[0] - before[0] == 2 * sum(n * one["prompt_tokens"] for n, one in usages)
    assert after[1] - before[1] == 2 * sum(one["completion_tokens"] for _, one in usages)
    for (path, body), (whole, events) in zip(bodies, answers, strict=True):
        choices = whole["choices"]
        is_chat = path == CHAT
        texts = {one["index"]: one["message"]["content"] if is_chat else one["text"] for one in choices}
        assert text_of(events) == texts, body
        prompt = whole["prompt_token_ids"] if is_chat else choices[0]["prompt_token_ids"]
        if not is_chat:
            assert prompt == tokenizer.encode(body["prompt"])
        for usage in (whole["usage"], events[-2]["usage"]):
            assert usage["prompt_tokens"] == len(prompt)
            assert usage["completion_tokens"] == sum(len(one["token_ids"]) for one in choices)
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for one in choices:
            if one["stop_reason"] is None and one["finish_reason"] == "length":
                skip = body.get("skip_special_tokens", True)
                assert texts[one["index"]] == tokenizer.decode(one["token_ids"], skip_special=skip)


ERRORS: list[tuple[str, Any, int, str | None, str | None, str]] = [
    (COMPLETE, {}, 400, "prompt", None, "prompt: field required"),
    (COMPLETE, [], 400, None, "invalid_json", "must be a JSON object"),
    (CHAT, {"messages": HELLO, "model": "no/such"}, 404, "model", "model_not_found", "'no/such' does not exist"),
    (COMPLETE, {"prompt": "a" * 512}, 400, "prompt", "context_length_exceeded", "has 512 tokens"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_field", "suffix is not supported"),
    ("/tokenize", {}, 400, "prompt", None, "exactly one of prompt, messages and content"),
    ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model", "model_not_found", "'x' does not exist"),
    ("/detokenize", {"tokens": [260]}, 400, "tokens", None, "token id 260 is not in the vocabulary"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "code", "says"), ERRORS)
def test_errors(
    server: Running, path: str, body: Any, status: int, param: str | None, code: str | None, says: str
) -> None:
    bodies = [body]
    if isinstance(body, dict) and path.startswith("/v1"):
        bodies.append({**body, "stream": True})
    for one in bodies:
        reply = server.post(path, one)
        assert reply.status_code == status
        assert reply.headers["content-type"] == "application/json"
        assert len(reply.content) <= 8192
        (name, error), *others = reply.json().items()
        assert (name, others) == ("error", [])
        assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
        assert says in error["message"]
        assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
        assert (error["param"], error["code"]) == (param, code)
        for internal in ("Traceback", "0x", "site-packages", "nano_inference", ".py", str(Path.home())):
            assert internal not in reply.text


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_stop_regex_ends_an_answer_with_its_match(server: Running, path: str) -> None:
    asked = {"prompt": "a"} if path == COMPLETE else {"messages": HELLO}
    letters = {str(ids(char)[0]): 100.0 for char in "ab"}
    fields = {**asked, "logit_bias": letters, "temperature": 1.5, "seed": 1, "max_tokens": 60}

    def text_of(choice: JSON) -> str:
        return str(choice["text"] if path == COMPLETE else choice["message"]["content"])

    plain = text_of(server.post(path, fields).json()["choices"][0])
    for pattern in ("ab+a", ["zz", "ab+a"]):
        choice = server.post(path, {**fields, "stop_regex": pattern}).json()["choices"][0]
        found = re.search("ab+a", plain)
        assert found is not None and text_of(choice) == plain[: found.end()]
        assert (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == ("stop", "ab+a", "ab+a")
    both = {**fields, "stop_regex": "ab+a", "stop": plain[:3], "bad_words": ["z"]}
    assert server.post(path, both).json()["choices"][0]["matched_stop"] == plain[:3]
    *_, last, _ = server.events(path, {**fields, "stop_regex": "ab+a", "stream": True})
    assert last["choices"][0]["matched_stop"] == "ab+a"
    refused = server.post(path, {**fields, "stop_regex": "^a"}).json()["error"]
    assert refused["param"] == "stop_regex" and "'^a' at position 0 is not supported" in refused["message"]
    endless = server.post(path, {**fields, "logit_bias": {str(ids("a")[0]): 100.0}, "stop_regex": "(a|aa)+b"})
    assert endless.status_code == 500 and "stop_regex: '(a|aa)+b' needs more than" in endless.json()["error"]["message"]


def test_wrong_paths_and_methods(server: Running) -> None:
    for path in ("/nope", "/v1", "/v1/chat", "/v1/completions/", "/metrics/x", "/models/a", "/tokenize/a"):
        reply = server.client.get(path)
        assert reply.status_code == 404, path
        assert reply.json()["error"]["type"] == "not_found_error"
    posts = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/apply-template")
    for path in posts:
        for method in ("GET", "HEAD", "DELETE", "OPTIONS"):
            reply = server.client.request(method, path)
            assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
            if method != "HEAD":
                assert reply.json()["error"]["message"] == f"{method} is not allowed here; use POST"
    for path in GETS:
        reply = server.client.post(path, json={})
        assert reply.status_code == 405
        assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD"}
    for path, meant in (("/messages", "/v1/messages"), ("/v1/v1/models", "/v1/models"), ("/v1/health", "/health")):
        message = server.client.get(path).json()["error"]["message"]
        assert message == f"no such path: {path}; did you mean {meant}? A client's base URL ends in /v1"
    assert server.client.get("/" + "x" * 5000).json()["error"]["message"] == "no such path: /" + "x" * 199


def test_chats_without_v1_are_openais(server: Running) -> None:
    """The path is also that of nanochat's web chat, which models of nanochat have."""
    for body in ({"model": "tiny", "messages": HELLO}, {"messages": [{"role": "system", "content": "b"}, *HELLO]}):
        body |= {"seed": 1, "max_tokens": 4}
        short, long = (server.post(path, body).json() for path in ("/chat/completions", CHAT))
        assert short["choices"] == long["choices"] and short["object"] == "chat.completion"
        chunks = server.events("/chat/completions", {**body, "stream": True})
        assert chunks[-1] == "[DONE]" and chunks[0]["object"] == "chat.completion.chunk"
    refused = server.post("/chat/completions", {"messages": HELLO, "model": "absent"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    refused = server.post("/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}).json()["error"]
    assert refused["param"] == "messages.0.role" and "'developer'" in refused["message"]
    refused = server.post("/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}).json()["error"]
    assert (refused["type"], refused["n_ctx"]) == ("exceed_context_size_error", 512)


def test_chats_without_v1_and_a_model_are_nanochats_if_it_is_served() -> None:
    path, body = "/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with running(CALCULATOR) as server:
        assert server.events(path, body)[-1]["done"] is True
        assert server.post(path, {**body, "model": "tiny"}).json()["object"] == "chat.completion"
        refused = server.post(path, {"messages": [{"role": "system", "content": "x"}]}).json()
        assert refused["error"]["message"].startswith("messages.0.role: ")


def test_fingerprint_is_that_of_program_and_model(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    first = server.post(CHAT, body).json()["system_fingerprint"]
    assert first.startswith(f"b{nano_inference.__version__}-")
    assert {one["system_fingerprint"] for one in server.events(CHAT, {**body, "stream": True})[:-1]} == {first}
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).json()["system_fingerprint"] == first


def test_metrics_of_a_request_are_in_its_reply(tiny_directory: Path, server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True}
    assert "metrics" not in server.post(CHAT, body).json()
    names = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
    config = ServerConfig(port=0, log_requests=False, enable_per_request_metrics=True)
    with running(tiny_directory, config) as measured:
        for path, asked in ((CHAT, body), ("/v1/completions", {"prompt": "a", "max_tokens": 4, "ignore_eos": True})):
            metrics = measured.post(path, asked).json()["metrics"]
            assert metrics.keys() == names and all(value >= 0 for value in metrics.values())
            decoded = metrics["mean_itl_ms"] * 3
            assert decoded == pytest.approx(metrics["generation_time_ms"])
            whole = metrics["time_to_first_token_ms"] + decoded
            assert metrics["tokens_per_second"] == pytest.approx(4e3 / whole)
        one = {**body, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, _ = measured.events(CHAT, one)
        assert last["metrics"].keys() == names - {"mean_itl_ms"}
        assert not [chunk for chunk in chunks if "metrics" in chunk]
        assert "metrics" not in measured.post(CHAT, {**body, "n": 2}).json()


GETS = (
    *("/v1/models", "/v1/models/", "/models", "/v1/models/tiny", "/tokenizer_info", "/health", "/ping", "/liveness"),
    *("/ready", "/load", "/version", "/metrics", "/openapi.json", "/"),
)


def test_models(tiny_directory: Path) -> None:
    config = ServerConfig(port=0, log_requests=False, served_model_name=("org/tiny", "other"))
    with running(tiny_directory, config) as server:
        listed = server.client.get("/v1/models").json()
        assert all(server.client.get(path).json() == listed for path in ("/v1/models/", "/models"))
        assert listed["object"] == "list"
        assert [(card["id"], card["root"], card["parent"]) for card in listed["data"]] == [
            ("org/tiny", "org/tiny", None),
            ("other", "org/tiny", "org/tiny"),
        ]
        assert all(card["max_model_len"] == 512 and card["object"] == "model" for card in listed["data"])
        for name in ("org/tiny", "org%2Ftiny"):
            assert server.client.get(f"/v1/models/{name}").json() == listed["data"][0]
        reply = server.client.get("/v1/models/tiny")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert complete(server, model="other")["model"] == "other"
        assert complete(server)["model"] == "org/tiny"
        assert server.post(COMPLETE, {"prompt": "a", "model": "tiny"}).status_code == 404


def wait_for(condition: Callable[[], bool], server: Running) -> None:
    """Poll /load until the condition is true; each request passes through the server's loop."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        server.client.get("/load")


def test_requests_above_queue_limit_are_refused(tiny_directory: Path) -> None:
    """One may run and one may wait: two of ten concurrent requests are answered."""
    config = ServerConfig(port=0, log_requests=False, max_queued_requests=1)
    with (
        running(tiny_directory, config, stepped, max_batch_size=1) as server,
        gated(server) as gate,
        ThreadPoolExecutor(10) as pool,
    ):
        body = {"prompt": "a", "max_tokens": 2}
        answers: list[Future[Any]] = [pool.submit(server.post, COMPLETE, body) for _ in range(10)]
        wait_for(lambda: sum(one.done() for one in answers) == 8, server)
        assert server.client.get("/load").json()["server_load"] == 2
        gate.open()
        replies = [one.result(60) for one in answers]
        assert sorted(one.status_code for one in replies) == [200] * 2 + [503] * 8
        for one in replies:
            if one.status_code == 503:
                assert one.headers["retry-after"] == "1"
                assert one.json()["error"]["code"] == "queue_full"
                assert one.json()["error"]["type"] == "unavailable_error"
        assert server.post(COMPLETE, body).status_code == 200, "the places are free again"
        queue_limits = server.app.pipeline.limits  # released after the response was sent
        assert queue_limits is not None
        wait_for(lambda: (queue_limits.num_samples, queue_limits.num_tokens) == (0, 0), server)


def test_samples_of_a_call_are_admitted_together(tiny_directory: Path) -> None:
    config = ServerConfig(port=0, log_requests=False, max_queued_requests=3, max_admitted_tokens=300)
    with (
        running(tiny_directory, config, stepped, max_batch_size=1) as server,
        gated(server) as gate,
        ThreadPoolExecutor(4) as pool,
    ):
        first = pool.submit(server.post, COMPLETE, {"prompt": "a", "max_tokens": 2})
        wait_for(lambda: server.client.get("/load").json()["server_load"] == 1, server)
        for stream in (False, True):
            reply = server.post(COMPLETE, {"prompt": "a", "n": 4, "max_tokens": 2, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
        reply = server.post(COMPLETE, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2})
        assert reply.status_code == 503
        reply = server.post(COMPLETE, {"prompt": "a", "max_tokens": 298})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "too_many_tokens")
        second = pool.submit(server.post, COMPLETE, {"prompt": "a", "n": 3, "max_tokens": 2})
        wait_for(lambda: server.client.get("/load").json()["server_load"] == 2, server)
        gate.open()
        assert first.result(60).status_code == 200
        assert len(second.result(60).json()["choices"]) == 3
        for body, param, says in (
            ({"prompt": "a", "n": 5}, "n", "the request has 5 samples; this server accepts 4 at once"),
            ({"prompt": ["a"] * 5}, "n", "the request has 5 samples"),
            ({"prompt": "a", "max_tokens": 300}, "max_tokens", "can reach 301 tokens; this server accepts 300 at once"),
            ({"prompt": "a", "n": 2, "max_tokens": 150}, "max_tokens", "can reach 301 tokens"),
        ):
            reply = server.post(COMPLETE, body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
            assert says in reply.json()["error"]["message"]
        assert server.post(COMPLETE, {"prompt": "a", "n": 4, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_started_sample_ends_with_its_tokens_at_deadline(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The clock is advanced while the engine is blocked."""
    hours = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + hours[0] * 3600, time=time.time)
    monkeypatch.setattr("nano_inference.server.pipeline.time", clock)
    config = ServerConfig(port=0, log_requests=False, sse_keep_alive=0.02)
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "n": 2, "temperature": 1, "seed": 1}
    body |= {"stop": "never\x00", "return_token_ids": True}
    with (
        running(tiny_directory, config, stepped) as server,
        gated(server, free_steps=6) as gate,
        ThreadPoolExecutor(1) as pool,
    ):
        if stream:
            streamed = pool.submit(server.events, COMPLETE, {**body, "stream": True})
        else:
            posted = pool.submit(server.post, COMPLETE, body)
        assert gate.is_blocked.wait(60)
        server.on_loop(lambda: None)  # now the event loop has the deltas of every step
        hours[0] = 1
        if stream:
            events = streamed.result(60)
            assert events[-1] == "[DONE]"
            ends = [c for e in events[:-1] for c in e["choices"] if c["finish_reason"] is not None]
            texts = text_of(events)
        else:
            ends = posted.result(60).json()["choices"]
            texts = {one["index"]: one["text"] for one in ends}
        assert [(one["finish_reason"], one["stop_reason"]) for one in ends] == [("length", "timeout")] * 2
        hours[0] = 0
        gate.open()
        for one in server.post(COMPLETE, {**body, "max_tokens": 20}).json()["choices"]:
            written = texts[one["index"]]
            assert written and one["text"].startswith(written.rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 400, "ignore_eos": True}}),
        ("/api/generate", {"model": "tiny", "prompt": "hello", "options": {"num_predict": 400}}),
    ],
)
def test_a_body_is_not_kept_while_its_reply_is_streamed(tiny_directory: Path, path: str, body: dict[str, Any]) -> None:
    data = json.dumps({**body, "stream": True, "padding": "x" * (3 << 20)}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    with (
        running(tiny_directory, make=stepped) as server,
        gated(server) as gate,
        socket.create_connection((server.client.base_url.host, server.client.base_url.port), timeout=60) as wire,
    ):
        tracemalloc.start()
        try:
            wire.sendall(f"{head}\r\n\r\n".encode() + data)
            assert wire.recv(15) == b"HTTP/1.1 200 OK"
            assert gate.is_blocked.wait(60)
            # The reply starts a moment before its handler lets go of the body; then nothing moves.
            deadline = time.monotonic() + 60
            while tracemalloc.get_traced_memory()[0] >= 2 << 20 and time.monotonic() < deadline:
                gc.collect()
                time.sleep(0.01)
            assert tracemalloc.get_traced_memory()[0] < 2 << 20
        finally:
            tracemalloc.stop()
            gate.open()


@pytest.mark.parametrize("stream", [False, True])
def test_unstarted_request_is_refused_at_deadline(tiny_directory: Path, stream: bool) -> None:
    config = ServerConfig(port=0, log_requests=False, request_timeout=0.2)
    with running(tiny_directory, config, stepped) as server, gated(server) as gate:
        body = {"prompt": "hello", "stream": stream}
        if stream:
            events = server.events(COMPLETE, body)
            assert (events[-2]["error"]["code"], events[-1]) == ("timeout", "[DONE]")
        else:
            reply = server.post(COMPLETE, body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "timeout")
            assert reply.headers["x-should-retry"] == "false"
        gate.open()


def test_silent_stream_sends_keep_alive_comments(tiny_directory: Path) -> None:
    config = ServerConfig(port=0, log_requests=False, sse_keep_alive=0.05)
    with running(tiny_directory, config, stepped) as server, gated(server) as gate:
        lines = []
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        with server.client.stream("POST", COMPLETE, json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 2:
                    gate.open()
        assert lines.count(": keep-alive") >= 2
        assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert data[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_too_many_large_bodies_are_refused(tiny_directory: Path) -> None:
    with running(tiny_directory) as server:
        resume, started = threading.Event(), threading.Event()
        pool: Any = server.app.pipeline.workers.large

        def wait() -> None:
            started.set()
            resume.wait(60)

        async def fill() -> None:
            for _ in range(32):
                asyncio.get_running_loop().create_task(pool.run(wait, seconds=60))

        asyncio.run_coroutine_threadsafe(fill(), server.loop).result(30)
        started.wait(30)
        large = {"prompt": "x" * 20_000, "max_tokens": 1}
        refused = server.post("/v1/completions", large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert server.post("/tokenize", {"prompt": "x" * 20_000}).status_code == 200
        resume.set()


@pytest.mark.parametrize("name", ["../../etc/passwd", "..%2f..%2fetc", "tiny\x00", "file:///tiny"])
def test_model_field_never_opens_a_path(server: Running, name: str) -> None:
    """T25: a request can only name the served model, never a path."""
    refused = server.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    quoted = urllib.parse.quote(name, safe="%/")
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port), timeout=30) as wire:
        wire.sendall(f"GET /v1/models/{quoted} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        reply = b"".join(iter(lambda: wire.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 404 ") and b"root:" not in reply


@pytest.mark.parametrize("stream", [False, True])
def test_header_announces_reduced_max_tokens(stream: bool, server: Running) -> None:
    room = server.client.get("/v1/models").json()["data"][0]["max_model_len"] - 40
    body = {"prompt": [65] * 40, "temperature": 0, "ignore_eos": True, "stream": stream}
    reply = server.post("/v1/completions", {**body, "max_tokens": room + 1})
    assert (reply.status_code, reply.headers["x-max-tokens"]) == (200, str(room))
    assert "x-max-tokens" not in server.post("/v1/completions", {**body, "max_tokens": room}).headers
    if not stream:
        assert reply.json()["usage"]["completion_tokens"] == room
    unlimited = server.post(CHAT, {"messages": HELLO, "stream": stream})
    assert unlimited.status_code == 200 and "x-max-tokens" not in unlimited.headers
