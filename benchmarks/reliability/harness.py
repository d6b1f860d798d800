"""What the checks drive a server with: a process of its own, connections that may misbehave, and what /proc says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wires import JSON, WAIT_S, Closed, Reply, Stream, Wire, take_event

HERE = Path(__file__).resolve().parent
FAULTY = HERE / "faulty.py"
POLLER = HERE / "poller.py"
INNARDS = re.compile(r"0x[0-9a-fA-F]{4,}|/(?:usr|home|root)/|site-packages|\.py\b|Traceback")
"""What errors must not reveal."""
PROSE = (
    "The lighthouse stood at the end of the island, and nobody had climbed "  # quoted
    "its {} steps since the keeper left for the "
    "mainland. When the storm came in the autumn, the people of the village gathered in the small church on the hill "
    "and waited for the boats. One after another they came home, with torn sails and tired crews, until only one was "
    "missing. Then somebody looked out of the window and saw a light where "  # quoted
    "there had been none for {} years. They took "
    "their lamps and went down to the shore together, and at the foot of the tower they found an old man who"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check came to."""

    figures: Mapping[str, object]
    is_ok: bool | None
    """None: it does not apply here."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    id: str
    done: str
    bar: str
    run: Callable[[Lab], Awaitable[Finding]]
    is_slow: bool = False
    """It takes over a minute at any size."""


class Server:
    """A server process; its stderr is read as it comes."""

    def __init__(self, process: asyncio.subprocess.Process, began: float) -> None:
        self.process = process
        self.began = began
        self.lines: list[str] = []
        self.port = 0
        self._news = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))
            self._news.set()
        self._news.set()

    async def line(self, pattern: str, timeout: float = WAIT_S) -> re.Match[str]:
        """Return the match in the first line that has one. Raises `RuntimeError` when the process ends without."""
        seen = 0
        async with asyncio.timeout(timeout):
            while True:
                for text in self.lines[seen:]:
                    if found := re.search(pattern, text):
                        return found
                seen = len(self.lines)
                if self._reading.done():
                    raise RuntimeError(f"the server ended without {pattern!r}: {self.lines[-3:]}")
                self._news.clear()
                if seen == len(self.lines) and not self._reading.done():
                    await self._news.wait()

    async def listening(self) -> None:
        """Wait until connections are taken."""
        self.port = int((await self.line(r"listening on http://[^,]*:(\d+)[,/]"))[1])

    async def ready(self) -> None:
        """Wait until the model is there."""
        await self.listening()
        await self.line(r"^ready: ")

    async def exit(self, timeout: float = 60.0) -> int:
        """Return the exit code. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            code = await self.process.wait()
            await self._reading
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    @property
    def has_traceback(self) -> bool:
        """Whether any was written."""
        return any("Traceback" in line for line in self.lines)

    def log(self) -> list[JSON]:
        """The lines of requests so far."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def ask(
        self, path: str, body: object = None, headers: Iterable[str] = (), method: str = "", timeout: float = WAIT_S
    ) -> Reply:
        """Send one request on a connection of its own; the time is counted from before it connects."""
        began = time.monotonic()
        async with asyncio.timeout(timeout):
            wire = await Wire.open(self.port)
            try:
                await wire.request(path, body, headers, method)
                reply = await wire.reply()
            finally:
                wire.close()
        return Reply(status=reply.status, headers=reply.headers, body=reply.body, seconds=time.monotonic() - began)

    async def stream(
        self,
        body: JSON,
        headers: Iterable[str] = (),
        path: str = "/v1/completions",
        on_token: Callable[[Stream], None] | None = None,
    ) -> Stream:
        """Read a streamed answer to its end. Raises `RuntimeError` when it is refused."""
        out = Stream()
        wire = await Wire.open(self.port)
        try:
            async with asyncio.timeout(WAIT_S):
                await wire.request(path, {**body, "stream": True, "return_token_ids": True}, headers)
                async for event in wire.events():
                    take_event(out, event)
                    if on_token is not None and out.times:
                        on_token(out)
        except Closed:
            out.is_cut = True
        finally:
            out.ended = time.monotonic()
            wire.close()
        return out

    async def health(self) -> int:
        """Return the status of /health."""
        return (await self.ask("/health")).status

    async def load(self) -> tuple[int, int, int]:
        """Return open requests, running and waiting samples."""
        value = (await self.ask("/load")).json
        return value["server_load"], value["running"], value["waiting"]

    async def until_load(self, expected: tuple[int, int, int] = (0, 0, 0), timeout: float = 30.0) -> float:
        """Wait until the load is as expected; return the seconds, infinity when it never was."""
        began = time.monotonic()
        while await self.load() != expected:
            if time.monotonic() - began > timeout:
                return float("inf")
            await asyncio.sleep(0.005)
        return time.monotonic() - began

    async def metrics(self) -> Metrics:
        """Read /metrics."""
        return Metrics((await self.ask("/metrics")).body.decode())

    # ---- the process ------------------------------------------------------------------------------------------------

    @property
    def rss(self) -> int:
        """Bytes of resident memory."""
        return self._status("VmRSS")

    @property
    def virtual(self) -> int:
        """Bytes of address space."""
        return self._status("VmSize")

    @property
    def peak_rss(self) -> int:
        """Most bytes of resident memory since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Start the peak anew; the kernel's name for that is 5 (proc_pid_clear_refs(5))."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def num_files(self) -> int:
        """Open files."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def num_threads(self) -> int:
        """Threads."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc has no {name}")


class Metrics:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, name: str, label: str = "") -> float:
        """Return the sum of a name's series, of those that have the label text when there is one."""
        found = re.findall(rf"(?m)^{re.escape(name)}(\{{[^}}]*\}})? (\S+)$", self.text)
        return sum(float(value) for labels, value in found if label in labels)

    @property
    def held(self) -> tuple[float, float, float]:
        """Running and waiting samples, and the part of the KV cache that is held."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        running, waiting, used = (self.value(name) for name in names)
        return running, waiting, used


class Lab:
    """Owns the settings of a run, a directory for its files, and the server that checks share."""

    def __init__(
        self, scratch: Path, *, model: str, token_bytes: int, threads: int | None, is_slow: bool, minutes: float
    ) -> None:
        self.scratch = scratch
        self.model = model
        self.token_bytes = token_bytes
        self.threads = threads
        self.is_slow = is_slow
        self.minutes = minutes
        self.vocab_size = 0
        self._shared: Server | None = None
        self._random = random.Random(7)

    def size(self, quick: int, full: int) -> int:
        """Return how many: the full number behind --slow."""
        return full if self.is_slow else quick

    def prompt(self, num_tokens: int) -> list[int]:
        """Return random token ids, never twice the same; none of them is a special token."""
        low, high = self.vocab_size // 10, self.vocab_size * 9 // 10
        return [self._random.randrange(low, high) for _ in range(num_tokens)]

    def command(self, options: Mapping[str, str], model: str | None = None) -> list[str]:
        """Return the arguments of a server; `options` stand in for the usual ones."""
        usual = {
            "--host": "127.0.0.1",
            "--port": "0",
            "--model": model or self.model,
            "--max-model-len": "2048",
            "--max-batch-size": "8",
            "--kv-cache-bytes": str(8192 * self.token_bytes),
        }
        if self.threads is not None:
            usual["--num-threads"] = str(self.threads)
        pairs = [(name, value) for name, value in (usual | dict(options)).items() if value != ""]
        return ["serve", *itertools.chain.from_iterable(pairs)]

    @asynccontextmanager
    async def server(
        self,
        options: Mapping[str, str] | None = None,
        *,
        fault: str = "",
        waits: bool = True,
        model: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> AsyncIterator[Server]:
        """A server of its own, gone when the block ends; `fault` is one of faulty.py's."""
        start = [str(FAULTY), fault] if fault else ["-m", "nano_inference"]
        arguments = [*start, *self.command(options or {}, model)]
        server = await launch(arguments, env=env, cwd=cwd)
        try:
            if waits:
                await server.ready()
                await self._learn(server)
            yield server
        finally:
            server.signal(signal.SIGKILL)
            await server.exit()

    async def shared(self) -> Server:
        """Return the server with the usual options; a new one when it is none any more."""
        if self._shared is None or self._shared.process.returncode is not None:
            self._shared = await launch(["-m", "nano_inference", *self.command({})])
            await self._shared.ready()
            await self._learn(self._shared)
            await self._shared.ask("/v1/completions", {"prompt": self.prompt(64), "max_tokens": 8})
        await self._shared.until_load()
        return self._shared

    async def prepare(self) -> None:
        """Learn what prompts may be made of. Raises `RuntimeError` when the model cannot be served."""
        async with self.server():
            pass

    async def close(self) -> None:
        """End the shared server."""
        if self._shared is not None:
            self._shared.signal(signal.SIGKILL)
            await self._shared.exit()

    async def drop(self) -> None:
        """Forget the shared server: a check failed while it had it."""
        await self.close()
        self._shared = None

    async def _learn(self, server: Server) -> None:
        if not self.vocab_size:
            self.vocab_size = (await server.ask("/tokenizer_info")).json["model_vocab_size"]


async def launch(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Server:
    """Start a process of this Python."""

    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
        env=dict(os.environ if env is None else env),
        cwd=cwd,
    )
    return Server(process, began)


def greedy(prompt: Sequence[int] | str, max_tokens: int, salt: str = "") -> JSON:
    """Return the body of a completion that always takes the likeliest token and runs to its end."""
    body: JSON = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return {**body, "cache_salt": salt} if salt else body


def prose(number: int) -> str:
    """Return a text to continue, of about 130 tokens.

    What follows random tokens is anybody's guess: there the last bits of a sum, which depend on the batch on a CPU,
    decide a draw about once in a hundred tokens. What follows a text is not.
    """
    return PROSE.format(number + 100, number + 20)


def quantile(values: Iterable[float], part: float) -> float:
    """Return the value that so large a part does not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def milliseconds(seconds: float) -> float:
    """Return milliseconds, rounded for the table."""
    return round(seconds * 1e3, 1)


def megabytes(num_bytes: float) -> float:
    """Return MB, rounded for the table."""
    return round(num_bytes / 1e6, 1)


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


@asynccontextmanager
async def polled(server: Server, path: str) -> AsyncIterator[list[float]]:
    """Ask every 10 ms while the block runs; when it has ended, the list holds how late each answer was, in seconds."""
    arguments = (sys.executable, "-P", str(POLLER), str(server.port), path)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, limit=1 << 24)
    late: list[float] = []
    try:
        yield late
        async with asyncio.timeout(70):
            out, _ = await process.communicate(b"")
        late += json.loads(out)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def in_background(work: Iterable[Awaitable[Any]]) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Run something meanwhile; what is left of it ends with the block."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool], timeout: float = WAIT_S) -> None:
    """Wait until it is so. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
