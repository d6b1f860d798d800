"""A server process for the checks: requests, connections that misbehave, and what /proc says of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import events, percentile, random_ids

JSON = dict[str, Any]
Finding = tuple[JSON, bool]
"""A check's figures, and whether its limits were met."""
COMPLETIONS = "/v1/completions"
NOTHING = (0, 0, 0)
"""What an idle server holds: running and waiting samples, KV cache."""
WAIT_S = 600.0
"""Longest wait for anything; a check that needs it has failed."""
LONG_PROMPT = 1500
TOKEN_BYTES = 46_080
"""Of the KV cache of the default model."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP reply."""

    status: int
    head: str
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Stream:
    """A streamed answer."""

    times: list[float] = field(default_factory=list)
    """When each event with tokens came."""
    error: JSON | None = None
    is_done: bool = False
    """The last token came; if not, the connection was cut."""

    @property
    def gaps(self) -> list[float]:
        """Seconds between its events."""
        return [b - a for a, b in itertools.pairwise(self.times)]


class Wire:
    """One connection to the server, with what clients may do wrong."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int, receive_buffer: int | None = None) -> Wire:
        """Connect; `receive_buffer` bounds what the kernel takes for a client that does not read."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 16 if receive_buffer is None else 1024))

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def request(self, path: str, body: object = None, headers: Iterable[str] = ()) -> None:
        """Send a request: a POST with a JSON body, or a GET."""
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: 127.0.0.1", *headers]
        data = b"" if body is None else json.dumps(body).encode()
        lines += [] if body is None else ["content-type: application/json", f"content-length: {len(data)}"]
        await self.send("\r\n".join([*lines, "", ""]).encode() + data)

    def close(self, *, reset: bool = False) -> None:
        """Close with FIN, or with RST."""
        if reset:
            with contextlib.suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.writer.transport.abort()
        else:
            self.writer.close()


class Server:
    """A server process; its stderr is read as it comes."""

    def __init__(self, process: asyncio.subprocess.Process, began: float) -> None:
        self.process, self.began = process, began
        self.lines: list[str] = []
        self.port = 0
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    async def line(self, pattern: str) -> re.Match[str]:
        """Wait for a line and return the match. Raises `RuntimeError` if the process ends without one."""
        while True:
            for text in self.lines:
                if found := re.search(pattern, text):
                    return found
            if self._reading.done():
                raise RuntimeError(f"the server ended without {pattern!r}: {self.lines[-3:]}")
            await asyncio.sleep(0.005)

    async def listening(self) -> None:
        """Wait until connections are accepted."""
        self.port = int((await self.line(r"listening on http://[^,]*:(\d+)[,/]"))[1])

    async def end(self) -> None:
        """Kill the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reading

    def log(self) -> list[JSON]:
        """Return the log's lines of requests so far."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    async def ask(self, path: str, body: object = None, headers: Iterable[str] = (), timeout: float = WAIT_S) -> Reply:
        """Send one request on a connection of its own; its seconds include the connecting."""
        began = time.monotonic()
        async with asyncio.timeout(timeout):
            wire = await Wire.open(self.port)
            try:
                await wire.request(path, body, [*headers, "connection: close"])
                head, _, data = (await wire.reader.read()).partition(b"\r\n\r\n")
            finally:
                wire.close()
        if not head:
            raise ConnectionError("closed without a reply")
        return Reply(int(head.split()[1]), head.decode("latin-1").lower(), data, time.monotonic() - began)

    async def stream(self, body: JSON, headers: Iterable[str] = (), out: Stream | None = None) -> Stream:
        """Read a streamed completion to its end, into `out`. Raises `RuntimeError` if it is refused."""
        out = Stream() if out is None else out
        async with asyncio.timeout(WAIT_S):
            async for event in events(self.port, COMPLETIONS, {**body, "stream": True}, headers):
                out.error = event.get("error", out.error)
                for choice in event.get("choices", ()):
                    out.times += [time.monotonic()] if choice.get("token_ids") else []
                    out.is_done |= choice.get("finish_reason") is not None
        return out

    async def load(self) -> tuple[int, int, int]:
        """Return open requests, running and waiting samples."""
        value = (await self.ask("/load")).json
        return value["server_load"], value["running"], value["waiting"]

    async def until_load(self, expected: tuple[int, int, int] = (0, 0, 0), timeout: float = 30.0) -> float:
        """Wait until the load is as expected; return the seconds, infinity past the timeout."""
        began = time.monotonic()
        while await self.load() != expected:
            if time.monotonic() - began > timeout:
                return float("inf")
            await asyncio.sleep(0.005)
        return time.monotonic() - began

    async def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric's series, of those with the label."""
        text = (await self.ask("/metrics")).body.decode()
        found = re.findall(rf"(?m)^{re.escape(name)}(\{{[^}}]*\}})? (\S+)$", text)
        return sum(float(value) for labels, value in found if label in labels)

    async def held(self) -> tuple[float, ...]:
        """Return running and waiting samples, and the part of the KV cache that is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return tuple([await self.metric(f"vllm:{name}") for name in names])

    def memory(self, name: str = "VmRSS") -> int:
        """Return a size of the process in bytes: VmRSS, or VmHWM (the peak since `forget_peak`)."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"(?m)^{name}:\s+(\d+) kB$", text)[0]) * 1024

    def forget_peak(self) -> None:
        """Start the peak anew: proc_pid_clear_refs(5)."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def count(self, what: str) -> int:
        """Return the number of open files ("fd") or threads ("task")."""
        return len(list(Path(f"/proc/{self.process.pid}/{what}").iterdir()))


@dataclass
class Lab:
    """Settings of a run, and the server that checks share."""

    scratch: Path
    is_slow: bool
    minutes: float
    random: random.Random = field(default_factory=lambda: random.Random(7))
    _shared: Server | None = None

    def size(self, quick: int, full: int) -> int:
        """Return the full count with --slow, else the quick one."""
        return full if self.is_slow else quick

    def prompt(self, num_tokens: int) -> list[int]:
        """Return random token ids, never the same twice."""
        return random_ids(self.random, num_tokens)

    async def launch(self, options: Mapping[str, str]) -> Server:
        """Start a server process; `options` replace the usual ones, and a switch has the value ""."""
        usual = {"--port": "0", "--model": "default", "--max-model-len": "2048", "--max-batch-size": "8"}
        usual["--kv-cache-bytes"] = str(8192 * TOKEN_BYTES)
        words = [word for pair in (usual | dict(options)).items() for word in pair if word]
        command = (sys.executable, "-P", "-m", "nano_inference", "serve", *words)
        began, none, pipe = time.monotonic(), asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=none, stderr=pipe, limit=1 << 20)
        return Server(process, began)

    @asynccontextmanager
    async def server(self, options: Mapping[str, str] | None = None, *, is_ready: bool = True) -> AsyncIterator[Server]:
        """A server of its own, killed when the block ends; it begins when the server listens, or `is_ready`."""
        server = await self.launch(options or {})
        try:
            await server.listening()
            if is_ready:
                await server.line(r"^ready: ")
            yield server
        finally:
            await server.end()

    async def shared(self) -> Server:
        """Return the idle server with the usual options; a new one if it has ended."""
        if self._shared is None or self._shared.process.returncode is not None:
            self._shared = await self.launch({})
            await self._shared.listening()
            await self._shared.line(r"^ready: ")
            await self._shared.ask(COMPLETIONS, greedy(self.prompt(64), 8))
        await self._shared.until_load()
        return self._shared

    async def drop(self) -> None:
        """End the shared server."""
        if self._shared is not None:
            await self._shared.end()
        self._shared = None

    async def fill(self, server: Server) -> list[asyncio.Task[Stream]]:
        """Start eight streams, and wait until all of them run."""
        tasks = [asyncio.create_task(server.stream(greedy(self.prompt(10), 1900))) for _ in range(8)]
        await server.until_load((8, 8, 0))
        return tasks


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """End requests by closing their connections."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def in_background(work: Iterable[Awaitable[Any]]) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Run work meanwhile; what is left of it is cancelled with the block."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield tasks
    finally:
        await cancel(tasks)


POLLER = """
import http.client, json, select, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
late, began = [], time.monotonic()
while not select.select([sys.stdin], [], [], max(0.0, began + 0.01 * len(late) - time.monotonic()))[0]:
    connection.request("GET", sys.argv[2])
    reply = connection.getresponse()
    reply.read()
    assert reply.status == 200, reply.status
    now = time.monotonic()
    while (due := began + 0.01 * len(late)) <= now:  # what was due while an answer was awaited came with it
        late.append(now - due)
print(json.dumps(late))
"""
"""A process of its own, so that only the server is measured."""


@asynccontextmanager
async def polled(server: Server, path: str) -> AsyncIterator[list[float]]:
    """Ask every 10 ms while the block runs; then the list has the seconds by which each answer was late."""
    pipe, late = asyncio.subprocess.PIPE, list[float]()
    words = (sys.executable, "-P", "-c", POLLER, str(server.port), path)
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, limit=1 << 24)
    yield late
    out, _ = await process.communicate(b"")
    late += json.loads(out)


def greedy(prompt: Sequence[int], max_tokens: int) -> JSON:
    """Return the body of a completion that takes the most likely token and runs to its end."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": max_tokens, **fixed}


def quantile(values: Iterable[float], part: float) -> float:
    """Return the value below which this part of them lies; NaN of nothing."""
    found = list(values)
    return percentile(found, part) if found else float("nan")


def ms(seconds: float) -> float:
    """Return milliseconds, rounded for the table."""
    return round(seconds * 1e3, 1)


def megabytes(num_bytes: float) -> float:
    """Return MB, rounded for the table."""
    return round(num_bytes / 1e6, 1)
