"""The proxy in front of several servers: routing, failures, and what it answers about the whole."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from nano_inference.server.app import installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import stream_errors
from nano_inference.server.errors import ApiError
from nano_inference.server.front.forwarding import merge
from tests.server.proxied import Front, proxied
from tests.server.served import Process
from tests.server.tiny import Running, events_in, running

pytestmark = pytest.mark.slow

TURN = [{"role": "user", "content": "Tell me about the sea and all the ships that cross it."}]
CLOSED = "http://127.0.0.1:9"
"""No server listens on this port."""


@pytest.fixture(scope="module")
def servers(tiny_directory: Path) -> Iterator[tuple[Running, Running]]:
    with running(tiny_directory) as first, running(tiny_directory) as second:
        yield first, second


@pytest.fixture
def front(servers: tuple[Running, Running]) -> Iterator[Front]:
    with proxied([server.url for server in servers]) as one:
        yield one


@contextmanager
def scripted(reply: bytes) -> Iterator[str]:
    """Yield the URL of a server that sends these bytes for each request and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # closing it would not end `accept`
            thread.join()


def homes(front: Front, send: Callable[[], Any]) -> list[int]:
    """Send and return the servers to which the requests went."""
    front.servers.placed.clear()
    send()
    return list(front.servers.placed)


def complete(front: Front, prompt: Any, **fields: Any) -> httpx2.Response:
    headers = fields.pop("headers", {})
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    reply = front.client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def test_completion_equals_that_of_the_server_itself(front: Front, servers: tuple[Running, Running]) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
    direct = servers[0].post("/v1/completions", body).json()
    assert front.client.post("/v1/completions", json=body).json()["choices"] == direct["choices"]


@pytest.mark.parametrize("kind", ["tokens", "text", "chat"])
def test_requests_with_a_common_prefix_go_to_one_server(front: Front, kind: str) -> None:
    def send(index: int) -> None:
        if kind == "chat":
            messages = [*TURN, {"role": "assistant", "content": "A" * index}, {"role": "user", "content": "More"}]
            body = {"messages": messages, "max_tokens": 2}
            assert front.client.post("/v1/chat/completions", json=body).status_code == 200
        else:
            complete(front, [*range(32), index] if kind == "tokens" else "The same start of a text, " * 4 + str(index))

    found = homes(front, lambda: [send(index) for index in range(6)])
    assert len(found) == 6 and len(set(found)) == 1


def test_different_prompts_use_both_servers(front: Front, servers: tuple[Running, Running]) -> None:
    for server in servers:
        server.blocker.put_on()
    try:
        with front.client.stream("POST", "/v1/completions", json=endless("first")) as reply:
            lines = reply.iter_lines()  # the response ends with it
            assert next(lines)
            complete(front, "second")
            assert front.servers.placed == [0, 1]
            assert front.servers.all[0].num_open == 1
    finally:
        for server in servers:
            server.blocker.take_off()


def endless(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 480, "ignore_eos": True, "stream": True}


def test_a_session_stays_with_its_server(front: Front, servers: tuple[Running, Running]) -> None:
    for server in servers:
        server.blocker.put_on()
    try:
        with front.client.stream("POST", "/v1/completions", json=endless("busy")) as reply:
            lines = reply.iter_lines()  # the response ends with it
            assert next(lines)
            complete(front, "short", headers={"x-session-id": "a"})
            front.servers.placed.clear()
    finally:
        for server in servers:
            server.blocker.take_off()
    for index in range(4):
        complete(front, f"{index} different", headers={"x-session-id": "a"})
    assert front.servers.placed == [1] * 4


def test_a_client_that_leaves_aborts_its_request(front: Front, servers: tuple[Running, Running]) -> None:
    with front.client.stream("POST", "/v1/completions", json=endless("leave")) as reply:
        assert next(reply.iter_lines())
    deadline = time.monotonic() + 30
    while front.servers.num_open or any(server.link.num_open for server in servers):
        assert time.monotonic() < deadline
    assert [member.num_open for member in front.servers.all] == [0, 0]


def test_a_refused_connection_moves_a_request_to_the_next_server(servers: tuple[Running, Running]) -> None:
    with proxied([CLOSED, servers[1].url]) as front:
        for index in range(4):
            complete(front, f"{index}")
        health = front.client.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["ready"]) == (200, "degraded", 1)


def test_a_503_is_answered_by_another_server_or_returned(servers: tuple[Running, Running]) -> None:
    busy = b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\n{}"
    with scripted(busy) as url:
        with proxied([url, servers[0].url]) as front:
            for index in range(3):
                complete(front, f"{index}")
        with proxied([url]) as front:
            reply = front.client.post("/v1/completions", json={"prompt": "a"})
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")


def test_without_a_server_requests_get_503(front: Front) -> None:
    for index in (0, 1):
        front.on_loop(lambda index=index: front.servers.set_state(index, "unreachable"))
    reply = front.client.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_replica")
    assert (front.client.get("/health").status_code, front.client.get("/ready").status_code) == (503, 503)


def test_a_stream_that_is_cut_off_ends_with_an_error_event() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b'data: {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": []}\n\n'
    cut = event + b'data: {"id": "2", "obj'
    with scripted(head + b"%x\r\n%s\r\n" % (len(cut), cut)) as url, proxied([url]) as front:
        with front.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as reply:
            text = reply.read().decode()
        assert [one for one in events_in(text)[:-1] if one.get("id")] == [json.loads(event[6:])]
        assert events_in(text)[-2]["error"]["code"] == "replica_died" and events_in(text)[-1] == "[DONE]"
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
            front.on_loop(lambda: front.servers.set_state(0, "ready"))
            with pytest.raises(openai.APIError, match="the replica that generated this answer died"):
                list(client.completions.create(model="m", prompt="a", stream=True))


@pytest.mark.parametrize(
    ("path", "start", "last"),
    [
        ("/v1/completions", b'data: {"error":{', b"data: [DONE]"),
        ("/v1/chat/completions", b'data: {"error":{', b"data: [DONE]"),
        ("/generate", b'data: {"error":{', b"data: [DONE]"),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error"', b"}"),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error"', b"}"),
        ("/completion", b'data: {"error":{"code":500', b"}"),
        ("/chat/completions", b'data: {"error": "it died"', b"}"),
        ("/api/generate", b'{"error":"it died"', b"}"),
    ],
)
def test_a_stream_that_is_cut_off_ends_as_its_dialect_does(path: str, start: bytes, last: bytes) -> None:
    """Only streams of OpenAI's form end in [DONE]."""
    ended = stream_errors(installed_dialects())[path](ApiError(500, "it died", code="replica_died"), b"", 1)
    assert ended.startswith(start) and b"it died" in ended and ended.rstrip().endswith(last)


def test_a_responses_stream_that_is_cut_off_fails_its_response(servers: tuple[Running, Running]) -> None:
    """The real events of a server, cut off after the second: `response.failed` has the response of the first."""
    body = {"input": "a", "max_output_tokens": 4, "stream": True}
    with servers[0].client.stream("POST", "/v1/responses", json=body) as reply:
        events = "".join(reply.iter_text()).split("\n\n")
    made = "\n\n".join([": keep-alive", *events[:2], ""]).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    with scripted(head + b"%x\r\n%s\r\n" % (len(made), made)) as url, proxied([url]) as front:
        text = front.client.post("/v1/responses", json={}).text
    first, last = (json.loads(part.partition("data: ")[2]) for part in (events[0], text.rpartition("event: ")[2]))
    assert "event: response.failed\n" in text and last["sequence_number"] > 1
    assert last["response"]["id"] == first["response"]["id"] and last["response"]["status"] == "failed"
    assert "died" in last["response"]["error"]["message"]


def test_lines_that_are_cut_off_end_with_an_error_line() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    cut = b'{"response": "a"}\n{"resp'
    script = head + b"%x\r\n%s\r\n" % (len(cut), cut)
    with scripted(script) as url, proxied([url]) as front:
        reply = front.client.post("/api/generate", json={"prompt": "a"})
        first, last = map(json.loads, reply.text.splitlines())
    assert first == {"response": "a"} and "replica" in last["error"]


def test_health_checks_return_a_server_to_the_routing(servers: tuple[Running, Running]) -> None:
    with proxied([servers[0].url, CLOSED], checks_health=True) as front:
        front.on_loop(lambda: front.servers.set_state(0, "unreachable"))
        deadline = time.monotonic() + 30
        while front.client.get("/health").json()["ready"] != 1 or front.servers.all[1].state != "unreachable":
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
        complete(front, "a")


def test_draining_refuses_new_requests_and_completes_open_ones(front: Front) -> None:
    def drain() -> None:
        front.proxy.is_draining = True

    with front.client.stream("POST", "/v1/completions", json={**endless("x"), "max_tokens": 60}) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        front.on_loop(drain)
        refused = front.client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert (front.client.get("/health").status_code, front.client.get("/ready").status_code) == (200, 503)
        assert "[DONE]" in "".join(lines)


def test_metrics_have_every_server_as_an_engine(front: Front, servers: tuple[Running, Running]) -> None:
    complete(front, "count me")
    lines = front.client.get("/metrics").text.splitlines()
    for engine in "01":
        series = f'vllm:num_requests_running{{engine="{engine}",model_name="tiny"}}'
        assert [line for line in lines if line.split(" ")[0] == series]
    assert "nano_inference_replicas_ready 2" in lines
    assert len([line for line in lines if line.startswith("# TYPE vllm:num_requests_running ")]) == 1
    assert front.client.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}


def test_merged_metrics_label_series_with_and_without_labels() -> None:
    text = '# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b B.\n# TYPE b counter\nb_total{x="1,engine",engine="0"} 2.0\n'
    assert merge({0: text, 3: text}).splitlines() == [
        *("# HELP a A.", "# TYPE a gauge", 'a{engine="0"} 1.0', 'a{engine="3"} 1.0'),
        *("# HELP b B.", "# TYPE b counter", 'b_total{x="1,engine",engine="0"} 2.0'),
        'b_total{x="1,engine",engine="3"} 2.0',
    ]


def test_keys_are_checked_by_the_proxy_and_passed_on(tiny_directory: Path) -> None:
    key = "a-long-secret"
    config = ServerConfig(port=0, log_requests=False, api_key=(key,))
    with running(tiny_directory, config) as server, proxied([server.url], api_key=(key,)) as front:
        assert front.client.get("/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert front.client.get("/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
        assert 'engine="0"' in front.client.get("/metrics", headers=headers).text


def test_pages_and_errors_are_those_of_the_server(front: Front, servers: tuple[Running, Running]) -> None:
    assert front.client.get("/").text == servers[0].client.get("/").text
    for path, body in (("/v1/completions", {"prompt": 5}), ("/nowhere", {})):
        direct, through = servers[0].post(path, body), front.client.post(path, json=body)
        assert (through.status_code, through.json()) == (direct.status_code, direct.json())


def test_workers_are_served_without_torch_and_ray(servers: tuple[Running, Running]) -> None:
    process = Process(["--workers", servers[0].url, "--port", "0"], {}, hidden=("ray", "torch", "transformers"))
    try:
        (ready,) = process.wait_for(r"^ready: 1 workers behind (\S+)")
        assert httpx2.get(f"{ready[1]}/health", timeout=60).json()["status"] == "ok"
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
        through = httpx2.post(f"{ready[1]}/v1/completions", json=body, timeout=60).json()
        assert through["choices"] == servers[0].post("/v1/completions", body).json()["choices"]
    finally:
        assert process.end() == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2, "workers": ("http://a",)}, "set one of them"),
        ({"workers": ("http://a",), "enable_rl": True, "generation_config": "none"}, "workers: routes for trainers"),
        ({"workers": ("http://a,ftp://b",)}, "workers must be URLs .*, got 'ftp://b'"),
        ({"workers": ("http://a/v1",)}, "without a path"),
        ({"workers": ("http://a,http://a",)}, "workers lists a URL twice"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ServerConfig(**settings)
