"""Failed requests of `serve --replicas 2`, and of a pool, through updates, a killed replica and a rolling restart.

    python benchmarks/reliability/replicas.py [--streams 32]

Needs Ray; the model is tiny and random. Each phase prints what was sent and what failed; a stream of the killed replica
ends with an error event. The exit code is 1 if another request failed, or if replicas differ in version or weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from nano_inference import EngineConfig, RolloutPool, SamplingParams
from nano_inference.rl.pool.ray_workers import RayFleet

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.server.tiny import make_tiny
from tests.server.trainer import make_weights

READY = re.compile(r"replica (\d) accepts requests at (\S+), process (\d+)")
SMALL = {"kv_cache_bytes": 64 << 20, "num_threads": 1}


@dataclass
class Server:
    """The process in front, and the URLs and process ids of its replicas."""

    process: Process
    client: httpx2.AsyncClient
    text: str = ""
    """What it wrote to stderr."""

    async def read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.text += line.decode()

    async def until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            if self.process.returncode is not None:
                raise SystemExit(self.text)
            await asyncio.sleep(0.05)

    @property
    def replicas(self) -> dict[str, tuple[str, int]]:
        """Index -> URL and process id of the latest replica."""
        return {match[1]: (match[2], int(match[3])) for match in READY.finditer(self.text)}

    async def weights(self) -> set[tuple[int, str]]:
        """Return version and checksum of each replica: one pair if they are equal."""
        asked = [
            self.client.post(f"{url}/weight_checker", json={"action": "checksum"}) for url, _ in self.replicas.values()
        ]
        found = [(await one).json() for one in asked]
        return {(one["version"], one["checksum"]) for one in found}

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[Counter[int]]:
        """Send short completions, 8 at a time, until the block ends; yield the number of replies by status."""
        statuses, is_ending = Counter[int](), asyncio.Event()

        async def send(number: int) -> None:
            while not is_ending.is_set():
                body = {"prompt": f"{number} {statuses.total()}", "max_tokens": 8, "ignore_eos": True}
                statuses[(await self.client.post("/v1/completions", json=body)).status_code] += 1

        tasks = [asyncio.create_task(send(number)) for number in range(8)]
        await self.until(lambda: statuses.total() >= 8)
        yield statuses
        is_ending.set()
        await asyncio.gather(*tasks)


async def update(server: Server, name: str) -> int:
    """Update under load; return the number of failures."""
    async with server.under_load() as statuses:
        reply = await server.client.post("/update_weights_from_disk", json={"model_path": name})
    weights, failed = await server.weights(), statuses.total() - statuses[200]
    print(f"update: status {reply.status_code}; {failed} of {statuses.total()} requests failed; weights {weights}")
    return failed + (reply.status_code != 200) + (len(weights) > 1)


async def kill(server: Server, num_streams: int) -> int:
    """Kill a replica under streams; return the number of failures."""
    before, num_started = await server.weights(), 0

    async def read(number: int) -> str:
        nonlocal num_started
        body = {"prompt": f"{number:02} is a stream", "max_tokens": 600, "ignore_eos": True, "stream": True}
        headers, text = {"x-session-id": str(number)}, ""
        async with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            async for piece in reply.aiter_text():
                num_started += not text
                text += piece
        return text

    streams = [asyncio.create_task(read(number)) for number in range(num_streams)]
    await server.until(lambda: num_started == num_streams)
    opened = [one["open"] for one in (await server.client.get("/health")).json()["replicas"]]
    began, num_ready = time.monotonic(), len(READY.findall(server.text))
    os.kill(server.replicas["0"][1], signal.SIGKILL)
    texts = await asyncio.gather(*streams)
    await server.until(lambda: len(READY.findall(server.text)) > num_ready)
    seconds = time.monotonic() - began
    lost = sum("replica_died" in text for text in texts)
    failed = sum(not text.rstrip().endswith("[DONE]") for text in texts) + max(0, lost - opened[0])
    is_equal = await server.weights() == before
    print(f"killed replica: {lost} of {num_streams} streams ended with an error event ({opened[0]} were on it),")
    print(f"  {failed} failed otherwise; replaced after {seconds:.1f} s with the weights in force: {is_equal}")
    return failed + (not is_equal)


async def restart(server: Server) -> int:
    """Restart all replicas under load; return the number of failures."""
    before, pids = await server.weights(), {pid for _, pid in server.replicas.values()}
    async with server.under_load() as statuses:
        server.process.send_signal(signal.SIGUSR1)
        await server.until(lambda: "rolling restart: finished" in server.text)
    is_equal = await server.weights() == before
    is_new = not pids & {pid for _, pid in server.replicas.values()}
    failed = statuses.total() - statuses[200]
    print(
        f"rolling restart: {failed} of {statuses.total()} requests failed; new processes: {is_new}, weights: {is_equal}"
    )
    return failed + (not is_new) + (not is_equal)


def pool(model: Path, directory: Path) -> int:
    """Update a pool of two actors while it generates; return the number of failures."""
    samples: list[Any] = []
    params, prompts = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0), [[1, 2, n] for n in range(16)]
    with RolloutPool(RayFleet(EngineConfig(str(model), **SMALL), size=2), seed=0) as engines:
        is_ending = threading.Event()

        def load() -> None:
            while not is_ending.is_set():
                samples.extend(engines.generate(prompts, params))

        loading = threading.Thread(target=load)
        loading.start()
        version = engines.update_weights(directory, blocking=True, on_running="keep")
        is_ending.set()
        loading.join()
        samples.extend(engines.generate(prompts, params))
        engines.weights_checksum()  # raises if the workers differ
    failed = sum(sample.finish_reason != "length" for sample in samples)
    is_new = all(set(sample.token_versions) == {version} for sample in samples[-16:])
    print(f"pool through an update: {failed} of {len(samples)} samples failed; version {version} after it: {is_new}")
    return failed + (not is_new)


async def run(model: Path, shelf: Path, num_streams: int) -> int:
    """Run the phases of the server; return the number of failures."""
    options = ["--model", str(model), "--port", "0", "--replicas", "2", "--enable-rl", "--weights-dir", str(shelf)]
    options += [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-P", "-m", "nano_inference", "serve", *options, "--no-log-requests"]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
        server = Server(process, client)
        reading = asyncio.create_task(server.read())
        try:
            await server.until(lambda: "ready: 2 replicas behind" in server.text)
            client.base_url = re.findall(r"behind (\S+)", server.text)[0]
            return await update(server, "new") + await kill(server, num_streams) + await restart(server)
        finally:
            process.terminate()
            await process.wait()
            await reading


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model, shelf = make_tiny(Path(temporary, "model"), positions=32768), Path(temporary, "shelf")
        new = make_weights(model, shelf / "new", seed=1)
        (new / "STABLE").touch()
        failed = asyncio.run(run(model, shelf, given.streams)) + pool(model, new)
    print("no request failed" if not failed else f"{failed} failures")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
