"""Pause, resume, abort, cache flush, sleep and state queries of trainers over HTTP, and their effect on requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

import nano_inference
from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.security import KeyRing
from nano_inference.server.trainers.facts import DESCRIPTIONS
from nano_inference.server.trainers.routes import ADMIN_PATHS, LORA_PATHS, QUESTIONS, REFUSED_COMMANDS, STREAM_PATHS
from tests.cases import failures
from tests.server.tiny import Running
from tests.server.trainer import LONG, PROMPT, SHORT, Hold, Stream, held, ok, refused, serving, until

pytestmark = pytest.mark.slow

WRONG = {"tags": 1, "mode": 1, "is_checkpoint_format": 1}
"""Wrong types, so that commands with these fields are refused without an effect."""
HALTED = 'nano_inference_engine_halted{engine="0",model_name="tiny"} '
"""Start of a line of /metrics."""


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, max_batch_size=2, max_tokens_per_batch=16) as one:
        yield one


@pytest.fixture(autouse=True)
def awake(server: Running) -> Iterator[None]:
    yield
    server.post("/wake_up", {})
    server.post("/resume", {})
    server.post("/abort_requests", {})
    blocks = server.on_engine(lambda: server.opened.engine.parts.kv)
    assert blocks.num_free_blocks() == blocks.num_blocks


def whole(server: Running, params: Any = LONG, prompt: Any = PROMPT) -> tuple[int, ...]:
    return Stream(server, prompt, params).result().completion_tokens


def is_paused(server: Running) -> bool:
    return bool(ok(server.client.get("/is_paused"))["is_paused"])


def start_three(server: Running, names: bool = False) -> list[Stream]:
    """Start a running request, one with a long prompt and one that waits (at most two run at once)."""
    first = Stream(server, names=("cmpl-first",) if names else ()).started()
    with held(server):
        others = [
            Stream(server, tuple(range(1, 101)), names=("chatcmpl-second",) if names else ()),
            Stream(server, (7, 7, 7), names=("third",) if names else ()),
        ]
        assert all(stream.is_submitted.wait(60) for stream in others)
    return [first, *others]


@pytest.mark.parametrize(("clear_cache", "path"), [("ON", "query"), ("false", "body")])
def test_pause_keep_does_not_change_the_output(server: Running, clear_cache: str, path: str) -> None:
    expected = [whole(server), whole(server, prompt=tuple(range(1, 101))), whole(server, prompt=(7, 7, 7))]
    streams = start_three(server)
    for _ in range(2):
        if path == "query":
            ok(server.client.post(f"/pause?mode=keep&clear_cache={clear_cache}"))
        else:
            ok(server.post("/pause", {"mode": "keep", "clear_cache": clear_cache == "ON"}))
    assert is_paused(server)
    late = Stream(server, params=SHORT)
    late.is_submitted.wait(60)
    counts = [len(stream.tokens) for stream in streams]
    kv = server.opened.engine.parts.kv
    assert server.on_engine(lambda: kv.num_free_blocks() == kv.num_blocks) == (clear_cache == "ON")
    assert [len(stream.tokens) for stream in streams] == counts, "a paused engine emitted tokens"
    assert not late.tokens and not late.reading.done()
    for _ in range(2):
        assert ok(server.client.post("/resume"))["status"] == "resumed"
    assert not is_paused(server)
    assert [stream.result().completion_tokens for stream in streams] == expected
    assert late.result().completion_tokens == whole(server, SHORT)


def test_pause_aborts_by_default_and_returns_partial_samples(server: Running) -> None:
    expected = whole(server)
    streams = start_three(server)
    reply = ok(server.client.post("/pause"))
    assert (reply["status"], reply["num_aborted"]) == ("paused", 3)
    samples = [stream.result() for stream in streams]
    assert [sample.finish_reason for sample in samples] == ["abort"] * 3
    assert all(sample.stop_reason is None for sample in samples)
    first = samples[0].completion_tokens
    assert first and first == expected[: len(first)] == streams[0].tokens
    assert len(samples[0].logprobs) == len(first)
    assert samples[2].completion_tokens == ()
    assert is_paused(server)
    late = Stream(server, params=SHORT)
    assert ok(server.client.post("/pause?mode=keep"))["num_aborted"] == 0
    ok(server.client.post("/resume"))
    assert late.result().finish_reason == "length"


@pytest.mark.parametrize("body", [{"mode": "wait"}, {"wait_for_inflight_requests": True}])
def test_pause_wait_finishes_running_requests_and_starts_no_other(server: Running, body: Any) -> None:
    streams = start_three(server)
    streams[1].started()
    reply = ok(server.post("/pause", body))
    assert reply["status"] == "paused" and is_paused(server)
    assert streams[0].reading.done() and streams[1].reading.done(), "the pause was reported before the last delta"
    assert len(streams[0].result().completion_tokens) == 200
    assert not streams[2].tokens
    ok(server.client.post("/pause?mode=wait"))
    ok(server.client.post("/resume"))
    assert len(streams[2].result().completion_tokens) == 200


@pytest.mark.parametrize("overtaking", [["/resume", "/pause?mode=wait"], ["/pause?mode=keep&clear_cache=false"]])
def test_waiting_pause_fails_when_overtaken(server: Running, overtaking: list[str]) -> None:
    stream = Stream(server).started()
    with ThreadPoolExecutor() as pool:
        with held(server):
            replies = []
            for number, path in enumerate(["/pause?mode=wait&clear_cache=false", *overtaking], start=1):
                replies.append(pool.submit(server.client.post, path))
                until(server, lambda number=number: server.link.engine.num_commands >= number)
        first, *others = [reply.result(60) for reply in replies]
    assert refused(first, 409, "overtaken")["code"] == "overtaken"
    assert all(ok(one) for one in others) and is_paused(server)
    ok(server.client.post("/resume"))
    assert len(stream.result().completion_tokens) == 200


@pytest.mark.parametrize(("path", "end"), [("/resume", "length"), ("/sleep?level=1&mode=keep", "abort")])
def test_drain_aborts_requests_that_cannot_continue(tiny_directory: Path, path: str, end: str) -> None:
    with serving(tiny_directory, max_batch_size=1) as one:
        running = Stream(one).started()
        waiting = Stream(one)
        assert waiting.is_submitted.wait(60)
        ok(one.client.post(path))
        one.on_loop(one.link.drain)
        assert (running.result().finish_reason, waiting.result().finish_reason) == (end, end)
        assert running.result().completion_tokens == running.tokens != ()
        until(one, lambda: one.link.num_open == 0)


@pytest.mark.parametrize("another", [False, True])
def test_disconnect_cancels_a_waiting_pause(server: Running, another: bool) -> None:
    engine, link = server.opened.engine, server.link
    stream = Stream(server).started()
    with ThreadPoolExecutor() as pool:
        before = Hold(server)
        assert before.is_active.wait(60)
        leaving = send_raw(server, "/pause?mode=wait&clear_cache=false")
        until(server, lambda: link.engine.num_commands >= 1)
        others = [pool.submit(server.client.post, "/pause?mode=wait&clear_cache=false")] if another else []
        until(server, lambda: link.engine.num_commands >= 1 + another)
        after = Hold(server)
        before.release()
        assert after.is_active.wait(60)
        assert engine.is_pausing
        leaving.close()
        until(server, lambda: link.engine.num_commands >= (1 if another else 2))
        after.release()
        assert all(ok(one.result(60)) for one in others)
    assert server.on_engine(lambda: (engine.is_pausing, engine.is_paused)) == (False, another)
    assert server.on_engine(lambda: link.engine.num_watches) == 0
    ok(server.client.post("/resume"))
    assert len(stream.result().completion_tokens) == 200
    assert Stream(server, params=SHORT).result().finish_reason == "length"


def send_raw(server: Running, path: str) -> socket.socket:
    """Send a command without a body; do not wait for the reply."""
    client = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode())
    return client


@pytest.mark.parametrize(
    ("form", "asked", "ended"),
    [("vllm", "cmpl-first", 0), ("vllm", "chatcmpl-third", 2), ("sglang", "second", 1), ("sglang list", "first", 0)],
)
def test_abort_by_id_ends_only_that_request(server: Running, form: str, asked: str, ended: int) -> None:
    streams = start_three(server, names=True)
    if form == "vllm":
        reply = ok(server.post("/abort_requests", {"request_ids": [asked, "unknown"]}))
    else:
        reply = ok(server.post("/abort_request", {"rid": asked if form == "sglang" else [asked]}))
    assert reply["num_aborted"] == 1
    samples = [stream.result() for stream in streams]
    reasons = [sample.finish_reason for sample in samples]
    assert reasons == ["abort" if i == ended else "length" for i in range(3)]
    aborted = samples[ended].completion_tokens
    assert aborted == streams[ended].tokens and (ended or aborted)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_requests", {}),
        ("/abort_request", {"abort_all": True}),
        ("/update_weight_version", {"new_version": "x", "abort_all_requests": True}),
    ],
)
def test_abort_all(server: Running, path: str, body: Any) -> None:
    streams = start_three(server)
    ok(server.post(path, body))
    assert [stream.result().finish_reason for stream in streams] == ["abort"] * 3
    assert not is_paused(server)


def test_abort_of_unknown_id_has_no_effect(server: Running) -> None:
    assert ok(server.post("/abort_requests", {"request_ids": ["unknown"]}))["num_aborted"] == 0
    refused(server.post("/abort_request", {}), 400, "rid")
    refused(server.post("/abort_request", {"rid": ""}), 400, "rid")


@pytest.mark.parametrize(
    ("body", "is_aborted", "is_free"),
    [
        ({}, True, True),
        ({"mode": "abort"}, True, True),
        ({"mode": "retract"}, False, True),
        ({"mode": "in_place"}, False, False),
    ],
)
def test_sglang_pause_modes(server: Running, body: Any, is_aborted: bool, is_free: bool) -> None:
    expected = whole(server)
    stream = Stream(server).started()
    reply = ok(server.post("/pause_generation", body))
    assert reply["success"] is True and reply["message"]
    assert is_paused(server) and stream.reading.done() == is_aborted
    kv = server.opened.engine.parts.kv
    assert server.on_engine(lambda: kv.num_free_blocks() == kv.num_blocks) == is_free
    assert ok(server.post("/continue_generation", {}))["success"] is True
    tokens = stream.result().completion_tokens
    assert tokens == expected[: len(tokens)] and (len(tokens) == 200) != is_aborted


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"), ("GET", "/flush_cache")]
)
def test_flush_drops_cached_prefixes(server: Running, method: str, path: str) -> None:
    prompt = tuple(range(1, 101))
    whole(server, SHORT, prompt)
    assert Stream(server, prompt, SHORT).result().num_cached_tokens > 0
    reply = ok(server.client.request(method, path))
    assert reply["success"] is True and (reply.get("num_blocks") or reply["flushed_items"]) > 0
    assert Stream(server, prompt, SHORT).result().num_cached_tokens == 0


def test_reset_running_requests_recomputes_their_kv(server: Running) -> None:
    expected = whole(server)
    stream = Stream(server).started()
    ok(server.client.post("/reset_prefix_cache?reset_running_requests=true"))
    assert not is_paused(server)
    sample = stream.result()
    assert sample.num_preemptions == 1 and sample.completion_tokens == expected


@pytest.mark.parametrize(("level", "mode"), [(0, "abort"), (1, "keep"), (1, "wait")])
def test_sleep_and_wake_up(server: Running, level: int, mode: str) -> None:
    expected = whole(server)
    stream = Stream(server).started()
    reply = ok(server.client.post(f"/sleep?level={level}&mode={mode}"))
    assert (reply["status"], reply["level"]) == ("sleeping", level)
    assert ok(server.client.get("/is_sleeping"))["is_sleeping"] is True
    engine = server.opened.engine
    assert server.on_engine(lambda: (engine.is_asleep, engine.is_paused)) == (level == 1, level == 0)
    assert server.comes_to_show(HALTED + "1.0")
    late = Stream(server, params=SHORT)
    if level:
        assert ok(server.client.post("/wake_up?tags=weights"))["status"] == "sleeping"
        assert not late.tokens
        reply = ok(server.client.post("/wake_up?tags=kv_cache&tags=weights"))
    else:
        reply = ok(server.client.post("/wake_up"))
    assert reply["status"] == "awake"
    assert ok(server.client.get("/is_sleeping"))["is_sleeping"] is False and server.comes_to_show(HALTED + "0.0")
    assert late.result().finish_reason == "length"
    tokens = stream.result().completion_tokens
    assert tokens == expected[: len(tokens)] and (len(tokens) == 200) == (mode != "abort")


def test_sglang_memory_resumes_once_all_parts_are_named(server: Running) -> None:
    stream = Stream(server).started()
    engine = server.opened.engine
    assert ok(server.post("/release_memory_occupation", {}))["success"] is True
    assert server.on_engine(lambda: engine.is_asleep)
    assert "kv_cache" in ok(server.post("/resume_memory_occupation", {"tags": ["weights"]}))["message"]
    assert server.on_engine(lambda: engine.is_asleep)
    ok(server.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}))
    assert not server.on_engine(lambda: engine.is_asleep)
    assert len(stream.result().completion_tokens) == 200


def test_pause_wait_of_a_sleeping_engine_is_refused(server: Running) -> None:
    stream = Stream(server).started()
    ok(server.client.post("/sleep?mode=keep"))
    refused(server.client.post("/pause?mode=wait"), 409, "asleep")
    ok(server.client.post("/wake_up"))
    assert len(stream.result().completion_tokens) == 200


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/pause?mode=stop", None, "mode"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/pause?mode=keep", {"wait_for_inflight_requests": True}, "wait_for_inflight_requests"),
        ("/pause", {"clear_cache": 1}, "clear_cache"),
        ("/abort_requests", {"request_ids": "one"}, "request_ids"),
        ("/sleep?level=3", None, "level"),
        ("/wake_up?tags=all", None, "tags"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/release_memory_occupation", {"tags": ["all"]}, "tags"),
        ("/weight_checker", {"action": "reset"}, "action must be checksum or compare, got 'reset'"),
        ("/weight_checker", {"action": "compare"}, "checksum"),
        ("/update_weight_version", {"new_version": ""}, "new_version"),
    ],
)
def test_invalid_value_is_refused_and_has_no_effect(server: Running, path: str, body: Any, part: str) -> None:
    response = server.client.post(path) if body is None else server.post(path, body)
    refused(response, 400, part)
    assert not is_paused(server) and ok(server.client.get("/is_sleeping"))["is_sleeping"] is False


@pytest.mark.parametrize("path", sorted(REFUSED_COMMANDS))
def test_unsupported_command_is_refused_with_501(server: Running, path: str) -> None:
    response = server.post(path, {"serialized_named_tensors": []})
    error = refused(response, 501, path)
    assert response.json()["success"] is False and response.json()["message"] == error["message"]


def test_every_path_exists_and_rejects_other_methods(server: Running) -> None:
    def check(path: str) -> None:
        wrong, right = ("POST", "GET") if path in QUESTIONS else ("PUT", "POST")
        body: dict[str, Any] = {} if right == "GET" else {"json": WRONG}
        if path in STREAM_PATHS:
            body = {"content": b"", "headers": {"content-type": "application/octet-stream"}}
        assert server.client.request(wrong, path, **(body or {"json": {}})).status_code == 405
        assert server.client.request(right, path, **body).status_code in (200, 400, 501)

    assert failures(check, zip(sorted((ADMIN_PATHS - LORA_PATHS) | QUESTIONS))) == []


def test_path_without_enable_rl_names_the_option(tiny_directory: Path, closed: Running) -> None:
    def check(path: str) -> None:
        for response in (closed.client.get(path), closed.post(path, {})):
            refused(response, 404, path, "--enable-lora" if path in LORA_PATHS else "--enable-rl")

    assert failures(check, zip(sorted((ADMIN_PATHS | QUESTIONS) - DESCRIPTIONS))) == []


def test_model_and_load_are_described_without_enable_rl(closed: Running, server: Running) -> None:
    for path in sorted(DESCRIPTIONS):
        reply = closed.client.get(path)
        assert reply.status_code == 200, path
        described = server.client.get(path).json()
        assert isinstance(described, list) or reply.json().keys() == described.keys()
        assert closed.post(path, {}).status_code == 405
    info = closed.client.get("/get_model_info").json()
    assert (info["model_path"], info["max_model_len"], info["is_generation"]) == ("tiny", 512, True)
    described = closed.client.get("/get_server_info").json()
    assert (described["context_length"], described["dp_size"]) == (512, 1)


@pytest.fixture(scope="module")
def closed(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, enable_rl=False) as one:
        yield one


INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/pause?modus=keep", None, "modus"),
        ("/finish_weight_update", {"checksun": "00"}, "checksun"),
        ("/update_weights", {"update_info": {"weight_dir": "one", "checksum": "00"}}, "update_info.checksum"),
        ("/init_weight_transfer_engine", {"init_info": {**INIT, "group": "g"}}, "init_info.group"),
    ],
)
def test_unknown_field_is_refused_by_name(server: Running, path: str, body: Any, name: str) -> None:
    response = server.client.post(path) if body is None else server.post(path, body)
    error = refused(response, 400, f"{name}: there is no such field")
    assert (error["param"], error["code"]) == (name, "unknown_field")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/reset_prefix_cache", {"reset_external": True, "reset_connector": False}),
        ("/flush_cache", {"timeout": 30.0}),
        ("/flush_cache?timeout=30", None),
        ("/abort_request", {"rid": "unknown", "abort_message": "late"}),
    ],
)
def test_field_without_effect_is_accepted(server: Running, path: str, body: Any) -> None:
    ok(server.client.post(path) if body is None else server.post(path, body))


def test_server_info_has_vllms_configuration(server: Running) -> None:
    reply = server.client.get("/server_info?config_format=json").json()
    assert reply["program_version"] == nano_inference.__version__
    assert (reply["version"], reply["weights"]) == (0, "present") and isinstance(reply["weight_version"], str)
    config = reply["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "gloo"}
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["lora_config"] is None and config["parallel_config"]["data_parallel_size"] == 1
    assert server.client.get("/get_world_size").json() == {"world_size": 1}
    refused(server.client.get("/server_info?config_format=text"), 400, "config_format")


def test_loads_counts_running_and_waiting_requests(server: Running) -> None:
    def load() -> tuple[int, int, int]:
        (one,) = server.client.get("/v1/loads").json()["loads"]
        return one["num_running_reqs"], one["num_waiting_reqs"], one["num_total_reqs"]

    assert load() == (0, 0, 0)
    assert ok(server.client.get("/v1/loads"))["program_version"] == nano_inference.__version__
    ok(server.client.post("/pause?mode=keep"))
    streams = [Stream(server, params=SHORT) for _ in range(3)]
    assert all(stream.is_submitted.wait(60) for stream in streams)
    assert load() == (0, 3, 3)
    ok(server.client.post("/resume"))
    for stream in streams:
        stream.result()
    assert load() == (0, 0, 0)


def test_update_weight_version_sets_the_label(server: Running) -> None:
    for name, shown in (("policy-7", "policy-7"), (8, "8")):
        reply = ok(server.post("/update_weight_version", {"new_version": name}))
        assert reply["success"] is True and reply["weight_version"] == shown and reply["version"] == 0
        sample = Stream(server, params=SHORT).result()
        assert dict(sample.version_labels) == {0: name}
        assert ok(server.client.get("/model_info"))["weight_version"] == shown


def test_weight_checker_returns_and_compares_the_checksum(server: Running) -> None:
    found = ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"]
    assert found == server.on_engine(server.opened.engine.weights_checksum)
    assert ok(server.post("/weight_checker", {"action": "compare", "checksum": found}))["equal"] is True
    other = ok(server.post("/weight_checker", {"action": "compare", "checksum": "0" * 32}))
    assert (other["success"], other["equal"]) == (False, False)


def test_commands_are_refused_while_the_model_loads() -> None:
    config = ServerConfig(enable_rl=True)
    app = App(config, guard_policy(config, KeyRing.of(())), EngineLink(step_timeout=60), installed_dialects())

    async def ask() -> None:
        transport = httpx2.ASGITransport(app.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            refused(await client.post("/pause"), 503, "being loaded")
            refused(await client.get("/weight_info"), 503, "being loaded")
            refused(await client.post("/start_weight_update", json={}), 503, "being loaded")

    asyncio.run(ask())
    app.close()


@pytest.mark.parametrize(("fields", "mode"), [({}, "raw"), ({"enable_rl": True}, "processed")])
def test_default_logprobs_mode_depends_on_enable_rl(fields: Any, mode: str) -> None:
    assert ServerConfig(**fields).logprobs_mode == mode
    assert ServerConfig(logprobs_mode="tempered", **fields).logprobs_mode == "tempered"
    assert ServerConfig.from_dict(ServerConfig(**fields).to_dict()) == ServerConfig(**fields)
    with pytest.raises(ValueError, match="logprobs_mode"):
        ServerConfig(logprobs_mode="best", **fields)  # type: ignore[arg-type]
