"""`serve --replicas 2` on a real Ray: OpenAI's client, an update, a killed replica, a rolling restart."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from tests.parallel.test_processes import ranks_of
from tests.server.served import PATIENCE, Process
from tests.server.tiny import make_tiny
from tests.server.trainer import make_weights

KEYS = re.compile(r"replica (\d) accepts requests at (\S+), process (\d+)")
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("replicated"), positions=32768)


@pytest.fixture(scope="module")
def shelf(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server reads weights."""
    root = tmp_path_factory.mktemp("shelf")
    make_weights(directory, root / "one", seed=31)
    (root / "broken").mkdir()
    (root / "broken" / "model.safetensors").write_bytes(b"no weights")
    return root


def options(directory: Path) -> list[str]:
    return ["--model", str(directory), "--port", "0", "--num-threads", "1", "--kv-cache-bytes", "32MiB"]


@pytest.fixture(scope="module")
def server(cluster: str, directory: Path, shelf: Path) -> Iterator[tuple[Process, str]]:
    """The process and its URL."""
    trainers = ["--enable-rl", "--weights-dir", str(shelf)]
    process = Process([*options(directory), "--replicas", "2", *trainers], {"RAY_ADDRESS": cluster})
    try:
        (ready,) = process.wait_for(r"^ready: 2 replicas behind (\S+)")
        yield process, ready[1]
    finally:
        assert process.end() == 0
    assert not [pid for pid in pids(process).values() if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def client(server: tuple[Process, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


def pids(process: Process) -> dict[int, int]:
    """Return the process ids of the latest replicas."""
    return {int(match[1]): int(match[3]) for match in process.wait_for(KEYS.pattern)}


def weights_of(process: Process) -> list[tuple[int, str, str, list[int]]]:
    """Return version, label, checksum and greedy tokens of each replica."""
    found = []
    for url in {int(match[1]): match[2] for match in process.wait_for(KEYS.pattern)}.values():
        facts = httpx2.post(f"{url}/weight_checker", json={"action": "checksum"}, timeout=PATIENCE).json()
        body = {"token_ids": [5, 9, 30, 2, 44], "sampling_params": {"max_tokens": 8, "temperature": 0}}
        (choice,) = httpx2.post(f"{url}/inference/v1/generate", json=body, timeout=PATIENCE).json()["choices"]
        assert {span["number"] for span in choice["weight_versions"]} == {facts["version"]}
        found.append((facts["version"], facts["weight_version"], facts["checksum"], choice["token_ids"]))
    return found


def state_of(url: str) -> dict[str, Any]:
    return dict(httpx2.get(f"{url}/health", timeout=PATIENCE).json())


def test_openais_client_gets_completions_streams_and_tools(client: openai.OpenAI, server: tuple[Process, str]) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    model = client.models.list().data[0].id
    options: Any = {"model": model, "messages": messages, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**options, max_tokens=16)
    chunks = client.chat.completions.create(**options, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    completion = client.completions.create(model=model, prompt="abc", max_tokens=4, extra_body={"ignore_eos": True})
    assert completion.usage is not None and completion.usage.completion_tokens == 4
    called = client.chat.completions.create(**options, tools=[TOOL], tool_choice="required", max_tokens=200)
    assert called.choices[0].message.tool_calls[0].function.name == "look_up"
    page = httpx2.get(f"{server[1]}/", timeout=PATIENCE)
    assert page.status_code == 200 and "<html" in page.text.lower()
    text = httpx2.get(f"{server[1]}/metrics", timeout=PATIENCE).text
    assert all(f'nano_inference_engine_up{{engine="{index}"' in text for index in (0, 1))


@pytest.mark.nightly
def test_replicas_of_two_ranks_complete_like_undivided_ones(
    server: tuple[Process, str], cluster: str, directory: Path
) -> None:
    body = {"prompt": "a divided engine", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    arguments = [*options(directory), "--replicas", "2", "--tensor-parallel", "2"]
    process = Process(arguments, {"RAY_ADDRESS": cluster})
    try:
        (ready,) = process.wait_for(r"^ready: 2 replicas behind (\S+)")
        ranks = [rank for pid in pids(process).values() for rank in ranks_of(pid)]
        mine, right = (httpx2.post(f"{url}/v1/completions", json=body, timeout=60) for url in (ready[1], server[1]))
    finally:
        assert process.end() == 0
    assert mine.json()["choices"][0]["text"] == right.json()["choices"][0]["text"]
    assert mine.json()["usage"]["completion_tokens"] == right.json()["usage"]["completion_tokens"] == 12
    assert len(ranks) == 2 and not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


def test_an_update_reaches_both_replicas_or_none(server: tuple[Process, str], shelf: Path) -> None:
    process, url = server
    first, second = weights_of(process)
    assert first == second and first[0] == 0
    for path in ("broken", "nowhere"):
        reply = httpx2.post(f"{url}/update_weights_from_disk", json={"model_path": path}, timeout=PATIENCE)
        assert reply.status_code == 400 and weights_of(process) == [first, first]
    body = {"model_path": "one", "weight_version": "step"}
    assert httpx2.post(f"{url}/update_weights_from_disk", json=body, timeout=PATIENCE).json()["version"] == 1
    mine, others = weights_of(process)
    assert mine == others and mine[:2] == (1, "step") and mine[2] != first[2] and mine[3] != first[3]


def test_a_killed_replica_harms_only_its_own_streams_and_is_replaced(server: tuple[Process, str]) -> None:
    process, url = server
    killed, in_force = pids(process), weights_of(process)

    async def read(
        client: httpx2.AsyncClient, index: int, started: asyncio.Semaphore, over: asyncio.Event
    ) -> list[str]:
        body = {"prompt": f"{index:02} is a stream", "max_tokens": 600, "ignore_eos": True, "stream": True}
        headers = {"x-session-id": f"{index}"}
        texts: list[str] = []
        while not texts or not over.is_set():  # a fast replica's streams may end before the last one of another starts
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                assert reply.status_code == 200
                text = ""
                async for piece in reply.aiter_text():
                    if not text and not texts:
                        started.release()
                    text += piece
            texts.append(text)
        return texts

    async def run() -> tuple[list[str], list[int]]:
        started, over = asyncio.Semaphore(0), asyncio.Event()
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            streams = [asyncio.create_task(read(client, index, started, over)) for index in range(32)]
            for _ in streams:
                await started.acquire()
            opened = [one["open"] for one in (await client.get("/health")).json()["replicas"]]
            over.set()
            os.kill(killed[0], signal.SIGKILL)
            return list(chain.from_iterable(await asyncio.gather(*streams))), opened

    texts, opened = asyncio.run(run())
    whole = [text for text in texts if "replica_died" not in text]
    lost = [text for text in texts if "replica_died" in text]
    assert min(opened) > 0 and len(lost) > 0
    assert len(whole) + len(lost) >= 32 and len(whole) >= opened[1]
    assert all("error" not in text for text in whole)
    assert all(text.rstrip().endswith("[DONE]") for text in texts)
    for text in lost:
        blocks = [block for block in text.split("\n\n") if block]
        assert all(json.loads(block.partition("data: ")[2]) for block in blocks[:-1]), "each event is whole"
    process.wait_for(r"replica 0 ended with code -9")
    process.wait_for(r"replica 0 accepts requests", 2)
    assert state_of(url)["status"] == "ok" and weights_of(process) == in_force


@pytest.mark.nightly
def test_no_request_fails_during_a_rolling_restart(server: tuple[Process, str]) -> None:
    process, url = server
    before, in_force = pids(process), weights_of(process)
    num_ready = len(process.wait_for(KEYS.pattern))

    async def run() -> list[int]:
        finished, statuses = asyncio.Event(), []

        async def load(client: httpx2.AsyncClient, worker: int) -> None:
            number = 0
            while not finished.is_set() or len(statuses) < 500:
                body = {"prompt": f"{worker} {number}", "max_tokens": 2}
                reply = await client.post("/v1/completions", json=body)
                statuses.append(reply.status_code)
                number += 1

        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            loads = [asyncio.create_task(load(client, worker)) for worker in range(4)]
            process.signal(signal.SIGUSR1)
            await asyncio.to_thread(process.wait_for, "rolling restart: finished")
            finished.set()
            await asyncio.gather(*loads)
        return statuses

    statuses = asyncio.run(run())
    assert len(statuses) >= 500 and set(statuses) == {200}
    process.wait_for(KEYS.pattern, num_ready + 2)
    assert not set(before.values()) & set(pids(process).values()) and weights_of(process) == in_force


def refusal(arguments: list[str], *, before: str = "pass", **environment: str) -> str:
    """Run `serve` with these arguments and return the last line of stderr of the refused command."""
    code = f"import sys; {before}; from nano_inference.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **environment}, check=False
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    return ended.stderr.splitlines()[-1]


def test_refusals_of_replicas_are_one_line(server: tuple[Process, str], cluster: str, directory: Path) -> None:
    port, model = server[1].rpartition(":")[2], ["--model", str(directory), "--replicas"]
    said = refusal([*model, "2", "--port", port])
    assert said.startswith(f"nano-inference: --port {port}: another program listens on 127.0.0.1:{port}")
    said = refusal([*model, "99", "--port", "0"], RAY_ADDRESS=cluster)
    assert said.startswith("nano-inference: --replicas: 99 need 99 CPUs, Ray's cluster has ")
    said = refusal([*model, "2", "--port", "0"], before="sys.modules['ray'] = None")
    assert said == "nano-inference: --replicas needs Ray: pip install 'nano-inference[ray]'"


@pytest.mark.nightly
def test_without_an_address_a_server_has_a_ray_of_its_own_and_ends_with_it(cluster: str, directory: Path) -> None:
    """Another Ray of this machine is not joined, though it has no free CPU; the end of its own is not waited out."""
    import ray

    def ray_processes(name: str) -> dict[int, psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return {one.pid: one for one in children if one.is_running() and one.name() == name}

    foreign = ray_processes("gcs_server")
    occupant = ray.remote(num_cpus=int(ray.available_resources().get("CPU", 0)))(Occupant).remote()
    assert ray.get(occupant.ready.remote(), timeout=PATIENCE)
    process = Process([*options(directory), "--replicas", "1"], {"RAY_ADDRESS": ""})
    try:
        process.wait_for(r"^ready: 1 replicas behind (\S+)")
        (own,) = (one for pid, one in ray_processes("gcs_server").items() if pid not in foreign)
        own.kill()
        process.wait_for("^nano-inference: Ray has ended, and the replicas with it; start the server again")
        process.wait_for(r"^\Z")  # the end of its messages
    finally:
        assert process.end() == 1
        ray.kill(occupant)
    assert not [pid for pid in pids(process).values() if psutil.pid_exists(pid)]


class Occupant:
    """Holds CPUs of the test's cluster."""

    def ready(self) -> bool:
        return True


def test_workers_are_served_without_ray_and_without_a_model(server: tuple[Process, str]) -> None:
    process = Process(["--workers", server[1], "--port", "0"], {})
    try:
        (ready,) = process.wait_for(r"^ready: 1 workers behind (\S+)")
        assert httpx2.get(f"{ready[1]}/v1/models", timeout=PATIENCE).json()["data"]
    finally:
        assert process.end() == 0
