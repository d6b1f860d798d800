"""Checks of what one client may take from the others, and of a process that lacks descriptors, stderr or a terminal."""

from __future__ import annotations

import asyncio
import importlib
import json
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from harness import Check, Finding, Lab, Server, greedy, in_background, megabytes
from wires import JSON, Closed, Wire

COMPLETIONS = "/v1/completions"
GREEDY_CLIENT, OTHER_CLIENT = "key-of-the-greedy-client", "key-of-the-other-client"
MAX_UNREAD_BYTES = 1e6
NUM_STREAMS = 64
REPOSITORY = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def two_keys(lab: Lab, options: dict[str, str]) -> AsyncIterator[Server]:
    """A server with two API keys."""
    path = lab.scratch / "keys"
    path.touch(mode=0o600)
    path.write_text(f"{GREEDY_CLIENT}\n{OTHER_CLIENT}\n")
    async with lab.server({"--api-key-file": str(path), **options}, waits=False) as server:
        await server.ready()
        yield server


def with_key(key: str) -> list[str]:
    """Return the header of a key."""
    return [f"authorization: Bearer {key}"]


async def keep_asking(server: Server, body: JSON, refusals: list[JSON]) -> None:
    """Send a request over and over; note refusals."""
    while True:
        reply = await server.ask(COMPLETIONS, body, with_key(GREEDY_CLIENT), timeout=3600)
        if reply.status != 200:
            refusals.append({"status": reply.status, **reply.json["error"]})
            await asyncio.sleep(1)


async def first_token(server: Server, body: JSON) -> float:
    """Return the seconds from sending a request with the other key to its first token."""
    began = time.monotonic()
    stream = await server.stream(body, with_key(OTHER_CLIENT))
    return stream.times[0] - began


async def busy_samples(server: Server) -> int:
    """Return how many samples run, once that number does not grow any more."""
    before = -1
    while True:
        running: int = (await server.ask("/load", headers=with_key(OTHER_CLIENT))).json["running"]
        if 0 < running <= before:
            return running
        before = running
        await asyncio.sleep(3)


async def q1(lab: Lab) -> Finding:
    """One client keeps 64 connections busy with n=4; another asks for 3 tokens, a few times."""
    options = {"--max-batch-size": str(lab.size(32, 256)), "--kv-cache-bytes": str(24576 * lab.token_bytes)}
    async with two_keys(lab, options) as server:
        other = greedy(lab.prompt(20), 3)
        alone = [await first_token(server, other) for _ in range(3)]
        body = {"prompt": "Once upon a time", "n": 4, "max_tokens": lab.size(60, 400), "ignore_eos": True}
        refusals: list[JSON] = []
        async with in_background([keep_asking(server, body, refusals) for _ in range(64)]):
            busy = await busy_samples(server)
            waits = [await first_token(server, greedy(lab.prompt(20), 3)) for _ in range(lab.size(2, 5))]
    figures = {
        "alone s": round(max(alone), 2),
        "samples running": busy,
        "first tokens s": ", ".join(f"{wait:.1f}" for wait in waits),
        "worst s": round(max(waits), 1),
        "refused": json.dumps(sorted({f"{one['status']} {one['code']}" for one in refusals})),
    }
    return Finding(figures=figures, is_ok=max(waits) <= 10)


async def q2(lab: Lab) -> Finding:
    """64 streams whose clients do not read, and 64 that are read: a tiny model, each time in a new process."""
    sys.path.insert(0, str(REPOSITORY))
    tiny = importlib.import_module("tests.server.tiny")
    model = tiny.make_tiny(lab.scratch / "tiny", positions=8192)
    read, _ = await resident_more(lab, str(model), is_read=True)
    unread, status = await resident_more(lab, str(model), is_read=False)
    each = (unread - read) / NUM_STREAMS
    figures = {
        "read MB more": megabytes(read),
        "unread MB more": megabytes(unread),
        "each MB": round(each / 1e6, 3),
        "next request": status,
    }
    return Finding(figures=figures, is_ok=each <= MAX_UNREAD_BYTES and status == 200)


async def resident_more(lab: Lab, model: str, *, is_read: bool) -> tuple[int, int]:
    """Return by how many bytes 64 streams made the process grow, and the status of the next request."""
    options = {"--max-batch-size": "64", "--write-timeout": "600", "--max-model-len": "8192"}
    options["--kv-cache-bytes"] = str(128 << 20)
    async with lab.server(options, model=model) as server:
        await server.ask(COMPLETIONS, {"prompt": [5], "max_tokens": 8})
        before = await settled(server)
        body = {**greedy([5, 6, 7], lab.size(1500, 4000)), "stream": True, "logprobs": 5}
        wires = [await Wire.open(server.port, receive_buffer=2048) for _ in range(NUM_STREAMS)]
        for wire in wires:
            await wire.request(COMPLETIONS, body)
        async with in_background([drained(wire) for wire in wires] if is_read else []):
            grown = 0
            while (await server.metrics()).value("vllm:request_success_total") < NUM_STREAMS + 1:
                grown = max(grown, server.rss - before)
                await asyncio.sleep(0.5)
        for wire in wires:
            wire.reset()
        status = (await server.ask(COMPLETIONS, {"prompt": [5], "max_tokens": 3})).status
    return grown, status


async def settled(server: Server) -> int:
    """Return the resident bytes once they stay the same: a thread brings in the pages of the KV cache."""
    before = 0
    while abs(server.rss - before) > 1 << 20:
        before = server.rss
        await asyncio.sleep(2)
    return before


async def drained(wire: Wire) -> None:
    """Read a stream to its end."""
    try:
        async for _ in wire.events():
            pass
    except (Closed, RuntimeError):
        pass


async def q4(lab: Lab) -> Finding:
    """Start with a stdout or stderr that cannot be written."""
    figures: dict[str, float | int | str] = {}
    for name, redirection in UNWRITABLE.items():
        figures[name] = await starts(lab, redirection)
    return Finding(figures=figures, is_ok=set(figures.values()) == {"200, exit 0"})


UNWRITABLE = {
    "2>/dev/full": "2>/dev/full",
    "2>&-": "2>&-",
    "broken pipe": "2> >(exit 0)",
    ">/dev/full": ">/dev/full",
    "0<&- >&- 2>&-": "0<&- >&- 2>&-",
}


async def starts(lab: Lab, redirection: str) -> str:
    """Start a server that cannot write; return how it answers and ends."""
    port = free_port()
    words = [sys.executable, "-P", "-m", "nano_inference", *lab.command({"--port": str(port)})]
    command = shlex.join(words)
    process = await asyncio.create_subprocess_exec("bash", "-c", f"exec {command} {redirection}")
    try:
        status = 0
        for _ in range(600):
            status = await status_of(port)
            if status == 200 or process.returncode is not None:
                break
            await asyncio.sleep(0.1)
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            return f"{status}, exit {await process.wait()}"
    finally:
        if process.returncode is None:
            process.kill()


async def status_of(port: int) -> int:
    """Return the status of a small completion; 0 when nothing answers."""
    try:
        wire = await Wire.open(port)
        await wire.request(COMPLETIONS, greedy([5, 6, 7], 2))
        status = (await wire.reply()).status
    except (OSError, Closed):
        return 0
    wire.close()
    return status


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


async def q5(lab: Lab) -> Finding:
    """SIGHUP while streams are open."""
    async with lab.server() as server:
        streams = [asyncio.ensure_future(server.stream(greedy(lab.prompt(10), 200))) for _ in range(4)]
        await server.until_load((4, 4, 0))
        server.signal(signal.SIGHUP)
        await asyncio.sleep(0.1)
        server.signal(signal.SIGHUP)
        done = await asyncio.gather(*streams)
        code = await server.exit()
    whole = [len(one.tokens) == 200 and one.is_done for one in done]
    return Finding(figures={"whole": whole.count(True), "exit": code}, is_ok=all(whole) and code == 0)


CHECKS: tuple[Check, ...] = (
    Check("Q1", "64 connections with n=4 of one key; another key asks", "first token within 10 s", q1),
    Check("Q2", "64 streams that are not read", "1 MB each", q2),
    Check("Q4", "stdout or stderr cannot be written", "starts, serves, ends with 0", q4),
    Check("Q5", "SIGHUP, twice, with open streams", "drained; exit 0", q5),
)
