"""Identification of clients and their quotas, on a real socket."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from nano_inference.server.app import guard_policy
from nano_inference.server.config import DEFAULT_SHARE, ServerConfig
from nano_inference.server.security import IPV6_PREFIX, KeyRing, address_of, load_keys, networks
from tests.server.mounted import GENERATING
from tests.server.test_every_parameter import BASES
from tests.server.tiny import Running, make_tiny, running

GREEDY, OTHER, ADMIN = "key-of-the-greedy", "key-of-the-other", "key-of-an-admin"
KEYS = {"api_key": (GREEDY, OTHER)}
COMPLETE = "/v1/completions"
ENDLESS = {"prompt": "count", "max_tokens": 8000, "ignore_eos": True, "seed": 1, "stream": True}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(port=0, log_requests=False, **fields)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context that no answer fills during a test."""
    return make_tiny(tmp_path_factory.mktemp("patient"), positions=32768)


@contextmanager
def serving(directory: Path, **fields: Any) -> Iterator[Running]:
    """Serve with four seats and no queue by default; the engine runs a few steps after each request."""
    fields = {"max_queued_requests": 0, "max_admitted_tokens": 1 << 30} | fields
    with running(directory, config(**fields), max_batch_size=4, kv_cache_bytes=64 << 20) as server:
        server.blocker.put_on()
        try:
            yield server
        finally:
            server.blocker.take_off()


@contextmanager
def streams(server: Running, count: int, headers: dict[str, str]) -> Iterator[list[Iterator[str]]]:
    """Open endless streams; return when each has sent its first event."""
    with ExitStack() as stack, httpx2.Client(base_url=server.url, timeout=60) as client:
        found = []
        for _ in range(count):
            stream = stack.enter_context(client.stream("POST", COMPLETE, json=ENDLESS, headers=headers))
            assert stream.status_code == 200, stream.read()
            texts = stream.iter_text()
            assert next(texts)
            found.append(texts)
        yield found


@pytest.mark.slow
def test_client_at_quota_leaves_a_seat_for_others(patient: Path) -> None:
    with (
        serving(patient, **KEYS, max_queued_requests=60) as server,
        ThreadPoolExecutor(8) as pool,
        streams(server, 3, bearer(GREEDY)),
    ):
        body = {**ENDLESS, "stream": False}
        greedy = [pool.submit(server.post, COMPLETE, body, **bearer(GREEDY)) for _ in range(8)]
        while server.on_loop(lambda: server.link.num_open) < 11:
            pass
        reply = server.post(COMPLETE, {"prompt": "a", "max_tokens": 3}, **bearer(OTHER))
        assert reply.status_code == 200
        assert not any(one.done() for one in greedy), "it waited for the end of another client's request"
        server.on_loop(server.link.abort_all)
        assert {one.result().status_code for one in greedy} == {503}


def refusal(path: str, body: Any) -> tuple[str, str | int]:
    """Return the message and type of an error in its dialect."""
    error = body["error"]
    if path.startswith("/api/"):
        return error, 429
    if path == "/v1/messages":
        assert body["type"] == "error"
    if path == "/chat/completions":
        assert body["detail"] == error["message"]
    if path == "/completion":
        return error["message"], error["code"]
    return error["message"], error["type"]


@pytest.mark.slow
def test_request_over_quota_is_refused_in_every_dialect(patient: Path) -> None:
    bodies = {path: body for path, body in BASES.items() if path in {one.path for one in GENERATING}}
    with serving(patient, **KEYS) as server, streams(server, 3, bearer(GREEDY)):
        for path, body in bodies.items():
            reply = server.post(path, body, **bearer(GREEDY))
            assert (reply.status_code, reply.headers.get("retry-after")) == (429, "1"), (path, reply.text)
            text, kind = refusal(path, reply.json())
            assert kind in ("rate_limit_error", 429), (path, reply.text)
            assert "hold 3 samples" in text and "3 of 4" in text and "--client-share" in text, text
        assert server.post(COMPLETE, BASES[COMPLETE], **bearer(OTHER)).status_code == 200
        text = server.client.get("/metrics", headers=bearer(OTHER)).text
        rejections = [line for line in text.splitlines() if 'reason="client_quota"' in line and "_total" in line]
        assert [line.rpartition(" ")[2] for line in rejections] == [f"{len(bodies)}.0"]
        assert "\nnano_inference_clients" in text and "\nnano_inference_largest_client_samples" in text
        assert GREEDY not in text and "key 0" not in text


@pytest.mark.slow
def test_call_larger_than_any_quota_is_answered_with_400(patient: Path) -> None:
    with serving(patient, **KEYS) as server:
        reply = server.post(COMPLETE, {"prompt": "a", "n": 4, "max_tokens": 1}, **bearer(GREEDY))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
        assert "3 of one client" in reply.json()["error"]["message"]


def forwarded(*hops: str) -> dict[str, str]:
    return {"x-forwarded-for": ", ".join(hops)}


@pytest.mark.slow
def test_forwarded_address_of_trusted_proxy_is_used(patient: Path) -> None:
    with (
        serving(patient, trusted_proxy=("127.0.0.0/8", "::1")) as server,
        streams(server, 3, forwarded("198.51.100.1")),
    ):
        for hops, status in (
            (("198.51.100.1",), 429),
            (("203.0.113.9", "198.51.100.1"), 429),  # addresses sent by the client are ignored
            (("198.51.100.2",), 200),
            (("198.51.100.1", "203.0.113.9", "127.0.0.2"), 200),
        ):
            reply = server.post(COMPLETE, BASES[COMPLETE], **forwarded(*hops))
            assert reply.status_code == status, (hops, reply.text)


@pytest.mark.slow
def test_undispatched_request_is_aborted(patient: Path) -> None:
    with serving(patient, max_queued_requests=60) as server, ThreadPoolExecutor(16) as pool:
        body = {**ENDLESS, "stream": False}
        asked = [pool.submit(server.post, COMPLETE, body) for _ in range(12)]
        assert server.comes_to_show('vllm:num_requests_waiting{engine="0",model_name="tiny"} 8.0')
        assert server.client.get("/load").json() == {"server_load": 12, "running": 4, "waiting": 8}

        async def end() -> int:
            return await server.link.end_requests()

        assert asyncio.run_coroutine_threadsafe(end(), server.loop).result(60) == 12
        choices = [one.result(60).json()["choices"][0] for one in asked]
        assert {one["finish_reason"] for one in choices} == {"abort"}


def named(peer: str | None, *headers: str, trusted: tuple[str, ...] = ()) -> str:
    scope: dict[str, Any] = {
        "client": None if peer is None else (peer, 5),
        "headers": [(b"x-forwarded-for", value.encode()) for value in headers],
    }
    return address_of(scope, networks(trusted, "trusted_proxy")).removeprefix("address ")


def test_address_of_reads_forwarded_addresses_from_the_end() -> None:
    proxies = ("10.0.0.0/8", "fd00::/8")
    assert named("192.0.2.1") == "192.0.2.1"
    assert named("192.0.2.1", "198.51.100.1", trusted=proxies) == "192.0.2.1"
    assert named("10.0.0.1", trusted=proxies) == "10.0.0.1"
    assert named("10.0.0.1", "1.1.1.1, 198.51.100.1", trusted=proxies) == "198.51.100.1"
    assert named("10.0.0.1", "1.1.1.1", "198.51.100.1, 10.0.0.2", trusted=proxies) == "198.51.100.1"
    assert named("fd00::1", "198.51.100.1:4711", trusted=proxies) == "198.51.100.1"
    assert named("10.0.0.1", "rubbish, 10.0.0.2", trusted=proxies) == "10.0.0.2"
    assert named("10.0.0.1", "", trusted=proxies) == "10.0.0.1"
    assert named("10.0.0.1", ",".join(["10.0.0.2"] * 10_000), trusted=proxies) == "10.0.0.2"
    assert named("::ffff:10.0.0.1", "::ffff:198.51.100.1", trusted=proxies) == "198.51.100.1"
    assert named(None, "198.51.100.1", trusted=("0.0.0.0/0",)) == "unknown"


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert IPV6_PREFIX == 64
    assert named("2001:db8:0:1::5") == named("2001:db8:0:1:ffff::9") == "2001:db8:0:1::/64"
    assert named("2001:db8:0:2::5") != named("2001:db8:0:1::5")
    assert named("::1", "[2001:db8:0:1::7]:443", trusted=("::1",)) == "2001:db8:0:1::/64"
    assert ipaddress.ip_network(named("fe80::1%eth0")).prefixlen == 64


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({}, 1.0),
        ({"trusted_proxy": ("127.0.0.1",)}, DEFAULT_SHARE),
        ({"host": "0.0.0.0", "insecure": True}, DEFAULT_SHARE),
        ({"api_key": (GREEDY,)}, 1.0),
        (KEYS, DEFAULT_SHARE),
        ({"api_key": (GREEDY,), "enable_rl": True, "admin_key": (ADMIN,)}, DEFAULT_SHARE),
        ({**KEYS, "enable_rl": True}, 1.0),
        ({"client_share": 0.5}, 0.5),
    ],
)
def test_default_share(fields: dict[str, Any], share: float) -> None:
    one = config(**fields)
    assert guard_policy(one, KeyRing.of(load_keys(one))).client_share == share


def test_invalid_settings_are_refused_by_name() -> None:
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="client_share"):
            config(client_share=share)
    for proxy in ("proxy.example", "10.0.0.0/33"):
        with pytest.raises(ValueError, match=f"trusted_proxy .*{proxy}"):
            guard_policy(config(trusted_proxy=(proxy,)), KeyRing.of(()))
