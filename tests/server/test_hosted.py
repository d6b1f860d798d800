"""`HostedApp` in a plain uvicorn, without this package's listener."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.run import HostedApp

pytestmark = pytest.mark.slow

PATIENCE = 60.0
MESSAGES = [{"role": "user", "content": "hello"}]


@contextmanager
def hosted(app: HostedApp, lifespan: str = "on") -> Iterator[str]:
    """Run uvicorn in a thread; yield its URL."""
    config = uvicorn.Config(app, port=0, lifespan=lifespan, log_level="critical", ws="none")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.started, "the application has not started"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> EngineConfig:
    return EngineConfig(str(tiny_directory), device="cpu", num_threads=1, kv_cache_bytes=32 << 20)


def test_openais_client_gets_what_the_engine_computes(engine: EngineConfig, tmp_path: Path) -> None:
    with (
        hosted(HostedApp(engine, ServerConfig(), tmp_path)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
    ):
        model = client.models.list().data[0].id
        assert model == Path(engine.model_path).name
        whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)  # type: ignore[call-overload]
        parts = client.chat.completions.create(  # type: ignore[call-overload]
            model=model, messages=MESSAGES, max_tokens=8, temperature=0, stream=True
        )
        assert whole.usage.completion_tokens > 0
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
        assert httpx2.get(f"{url}/health", timeout=60).json()["status"] == "ok"
        assert "<html" in httpx2.get(f"{url}/", timeout=60).text


def test_open_requests_end_before_the_engine_closes(engine: EngineConfig, tmp_path: Path) -> None:
    app = HostedApp(engine, ServerConfig(), tmp_path)
    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}

    async def run() -> httpx2.Response:
        await app.open()
        transport = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while not await is_running(client):
                await asyncio.sleep(0)
            await app.close()
            return await asking

    answer = asyncio.run(run())
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 300


async def is_running(client: httpx2.AsyncClient) -> bool:
    """Return True if a sample is running."""
    lines = (await client.get("/metrics")).text.splitlines()
    return any(line.startswith("vllm:num_requests_running{") and not line.endswith(" 0.0") for line in lines)


async def start_messages(app: HostedApp) -> list[dict[str, str]]:
    """Send the start of a lifespan; return what the application sends."""
    sent: list[dict[str, str]] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: object) -> None:
        assert isinstance(message, dict)
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)
    return sent


def test_a_model_that_cannot_be_loaded_ends_the_start_with_its_reason(engine: EngineConfig, tmp_path: Path) -> None:
    missing = replace(engine, model_path=str(tmp_path / "missing"))
    sent = asyncio.run(start_messages(HostedApp(missing, ServerConfig(), tmp_path)))
    assert [one["type"] for one in sent] == ["lifespan.startup.failed"]
    assert "missing" in sent[0]["message"] and "\n" not in sent[0]["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"further_model": ("a=b",)},
        {"uds": "x.sock"},
        {"port": 80},
        {"replicas": 2},
        {"workers": ("http://127.0.0.1:1",)},
        {"exit_on_failure": True},
        {"max_connections": 5},
    ],
    ids=lambda given: next(iter(given)),
)
def test_settings_of_a_listener_are_refused(engine: EngineConfig, tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))}: has no effect in another ASGI server"):
        HostedApp(engine, ServerConfig(**given), tmp_path)
