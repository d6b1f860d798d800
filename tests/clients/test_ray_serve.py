"""Ray Serve with two replicas: OpenAI's client, a killed replica, a new version under load."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import psutil
import pytest

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.ray_serve import application, deployment
from tests.clients.process import NEEDED

serve: Any = pytest.importorskip("ray.serve", reason=f"Ray Serve: {NEEDED}", exc_type=ImportError)

PATIENCE = 120.0
REQUESTS = 500
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    from tests.server.tiny import make_tiny  # imports Transformers

    directory = make_tiny(tmp_path_factory.mktemp("ray_served"), positions=32768)
    return EngineConfig(str(directory), device="cpu", num_threads=1, kv_cache_bytes=32 << 20)


def two_replicas(engine: EngineConfig, version: str) -> Any:
    """The application with its replicas; a new version makes Serve replace them one by one."""
    server = ServerConfig(served_model_name=(version, "tiny"))
    options = {"num_replicas": 2, "health_check_period_s": 1, "graceful_shutdown_wait_loop_s": 0.2}
    return deployment(engine, server).options(**options, ray_actor_options={"num_cpus": 0.5}).bind()


@pytest.fixture(scope="module")
def url(engine: EngineConfig) -> Iterator[str]:
    import ray

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=temporary,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(two_replicas(engine, "first"))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


def replica_pids() -> list[int]:
    return [
        one.pid for one in psutil.process_iter(["cmdline"]) if "ServeReplica:" in " ".join(one.info["cmdline"] or ())
    ]


def test_openais_client_gets_completions_streams_and_tools(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    whole = client.chat.completions.create(**options, max_tokens=16)
    chunks = client.chat.completions.create(**options, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    called = client.chat.completions.create(**options, tools=[TOOL], tool_choice="required", max_tokens=200)
    assert called.choices[0].message.tool_calls[0].function.name == "look_up"


def test_a_killed_replica_harms_only_its_own_streams_and_is_replaced(url: str) -> None:
    killed = replica_pids()
    assert len(killed) == 2

    async def read(client: httpx2.AsyncClient, index: int, started: asyncio.Semaphore) -> str:
        body = {"prompt": f"{index:02} is a stream", "max_tokens": 600, "ignore_eos": True, "stream": True}
        text = ""
        try:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                assert reply.status_code == 200
                async for piece in reply.aiter_text():
                    if not text:
                        started.release()
                    text += piece
        except httpx2.RemoteProtocolError:
            return text + " cut"
        return text

    async def run() -> list[str]:
        started = asyncio.Semaphore(0)
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            streams = [asyncio.create_task(read(client, index, started)) for index in range(32)]
            for _ in streams:
                await started.acquire()
            os.kill(killed[0], signal.SIGKILL)
            return list(await asyncio.gather(*streams))

    texts = asyncio.run(run())
    whole = [text for text in texts if text.rstrip().endswith("[DONE]")]
    assert 0 < len(whole) < 32
    assert all("error" not in text for text in whole)
    assert all(text.endswith(" cut") for text in texts if text not in whole), "a lost stream does not look whole"
    while len(set(replica_pids()) - {killed[0]}) < 2:
        time.sleep(0.1)
    assert httpx2.get(f"{url}/health", timeout=PATIENCE).status_code == 200


def test_a_new_version_replaces_replicas_without_a_failed_request(url: str, engine: EngineConfig) -> None:
    before = set(replica_pids())

    async def ask(client: httpx2.AsyncClient, statuses: list[int], replaced: asyncio.Event) -> None:
        while not replaced.is_set() or len(statuses) < REQUESTS:
            body = {"model": "tiny", "prompt": f"{len(statuses)}", "max_tokens": 4}
            statuses.append((await client.post("/v1/completions", json=body)).status_code)

    async def run() -> list[int]:
        statuses: list[int] = []
        replaced = asyncio.Event()
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            asking = [asyncio.create_task(ask(client, statuses, replaced)) for _ in range(4)]
            await asyncio.to_thread(serve.run, two_replicas(engine, "second"))
            replaced.set()
            await asyncio.gather(*asking)
        return statuses

    statuses = asyncio.run(run())
    assert len(statuses) >= REQUESTS and set(statuses) == {200}
    assert not before & set(replica_pids())
    names = {one["id"] for one in httpx2.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"]}
    assert "second" in names and "first" not in names


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"modell": "default"}, "modell is no argument"),
        ({"engine": "x"}, "engine must be an object"),
        ({"engine": {"blocks": 3}}, "blocks"),
        ({"server": {"port": -1}}, "port"),
        ({"server": {"replicas": 2}}, "replicas"),
        ({"server": {"enable_rl": True}}, "enable_rl"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        application(args)
