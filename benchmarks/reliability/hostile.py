"""Checks of what single requests and odd connections can do to the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time

from harness import (
    Check,
    Finding,
    Lab,
    Server,
    greedy,
    in_background,
    megabytes,
    milliseconds,
    polled,
    quantile,
)
from queueing import COMPLETIONS, empty, fill
from wires import JSON, Closed, Reply, Wire

MIB = 1 << 20
JSON_HEAD = "content-type: application/json\r\n"


async def raw(server: Server, data: bytes, timeout: float = 10.0) -> bytes:
    """Send bytes and return all that comes until the server closes, or falls silent for a while."""
    wire = await Wire.open(server.port)
    out = bytearray()
    with contextlib.suppress(ConnectionError, TimeoutError):
        await wire.send(data)
        async with asyncio.timeout(timeout):
            while piece := await asyncio.wait_for(wire.reader.read(65536), 0.7 if out else timeout):
                out += piece
    wire.reset()
    return bytes(out)


def statuses(data: bytes) -> list[int]:
    """Return the status codes in what a server sent."""
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


async def r18(lab: Lab) -> Finding:
    """Bodies that are no request, and bodies that are too large."""
    server = await lab.shared()
    small = {"empty": b"", "[]": b"[]", '"x"': b'"x"', "null": b"null", "truncated": b'{"prompt": "a", "max'}
    server.forget_peak()
    before = server.rss
    figures: dict[str, float | int | str] = {}
    slowest, wrong = 0.0, 0
    for name, body in small.items():
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{JSON_HEAD}content-length: {len(body)}\r\n\r\n"
        reply = await exchange(server, head.encode() + body)
        figures[name] = reply.status
        slowest, wrong = max(slowest, reply.seconds), wrong + (reply.status != 400)
    for name, framing in (
        ("33 MiB announced", f"content-length: {33 * MIB}"),
        ("33 MiB", "transfer-encoding: chunked"),
    ):
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{JSON_HEAD}{framing}\r\n\r\n"
        status, sent, seconds = await flood(server, head.encode(), 33 * MIB, is_chunked="chunked" in framing)
        figures[name] = f"{status} after {megabytes(sent)} MB"
        slowest, wrong = max(slowest, seconds), wrong + (status != 413)
    grown = max(server.peak_rss - before, 0)
    figures |= {"slowest ms": milliseconds(slowest), "RSS MB more": megabytes(grown)}
    note = "the time of a flood is counted from its first byte over the limit"
    return Finding(figures=figures, is_ok=wrong == 0 and slowest <= 0.05 and grown <= 16 * MIB, note=note)


async def exchange(server: Server, data: bytes) -> Reply:
    """Send bytes, read one reply."""
    wire = await Wire.open(server.port)
    try:
        await wire.send(data)
        return await wire.reply()
    finally:
        wire.close()


async def flood(server: Server, head: bytes, most: int, *, is_chunked: bool) -> tuple[int, int, float]:
    """Send a body without end; return the status, the bytes that were taken, and how late the answer came.

    The delay is measured from the byte that exceeds the limit of a body (4 MiB), or from a head that announces more.
    """
    wire = await Wire.open(server.port)
    block = b"x" * 65536
    data = b"10000\r\n" + block + b"\r\n" if is_chunked else block
    sent, limit = 0, 4 * MIB if is_chunked else 0
    over: float | None = None
    ends: list[float] = []
    await wire.send(head)
    answer = asyncio.ensure_future(wire.reply())
    answer.add_done_callback(lambda _: ends.append(time.monotonic()))
    with contextlib.suppress(ConnectionError):
        while sent < most and not wire.reader.at_eof():
            over = time.monotonic() if over is None and sent >= limit else over
            await wire.send(data)
            sent += len(block)
            await asyncio.sleep(0)
    status = 0
    with contextlib.suppress(Closed, TimeoutError):
        status = (await asyncio.wait_for(answer, 10)).status
    wire.reset()
    return status, sent, max(0.0, ends[0] - over) if ends and over else float("inf")


# ---- slow clients ---------------------------------------------------------------------------------------------------


async def latencies(server: Server, body: JSON, count: int) -> list[float]:
    """Return how long so many small requests take, one after another."""
    return [(await server.ask(COMPLETIONS, body)).seconds for _ in range(count)]


async def drip(server: Server, dropped: list[float]) -> None:
    """Send a head at one byte a second; note when the server has enough of it."""
    wire = await Wire.open(server.port)
    began = time.monotonic()
    end = asyncio.ensure_future(wire.reader.read())
    try:
        for byte in b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: " + b"a" * 60:
            await wire.send(bytes([byte]))
            if (await asyncio.wait({end}, timeout=1))[0]:
                break
        dropped.append(time.monotonic() - began)
    except ConnectionError:
        dropped.append(time.monotonic() - began)
    finally:
        end.cancel()
        wire.reset()


async def r20(lab: Lab) -> Finding:
    """200 sockets that send their headers a byte a second."""
    server = await lab.shared()
    body = greedy(lab.prompt(8), 1)
    await latencies(server, body, 5)
    base = await latencies(server, body, 40)
    dropped: list[float] = []
    beside: list[float] = []
    async with in_background([drip(server, dropped) for _ in range(200)]) as tasks:
        await asyncio.sleep(1)
        ends = time.monotonic() + 32
        while not all(task.done() for task in tasks) and time.monotonic() < ends:
            beside += await latencies(server, body, 5)
            await asyncio.sleep(0.1)
    before, after = quantile(base, 0.95), quantile(beside, 0.95)
    figures = {
        "p95 alone ms": milliseconds(before),
        "p95 beside ms": milliseconds(after),
        "ratio": round(after / before, 2),
        "dropped": len(dropped),
        "last dropped s": round(max(dropped, default=0.0), 1),
    }
    is_ok = after <= 2 * before and len(dropped) == 200 and max(dropped) <= 30
    return Finding(figures=figures, is_ok=is_ok)


async def crawl(server: Server, body: JSON) -> None:
    """Ask for a stream and read it a byte a second."""
    wire = await Wire.open(server.port, receive_buffer=2048)
    try:
        await wire.request(COMPLETIONS, {**body, "stream": True})
        while await wire.reader.read(1):
            await asyncio.sleep(1)
    except ConnectionError:
        pass
    finally:
        wire.reset()


async def r21(lab: Lab) -> Finding:
    """Streams read at a byte a second, of a model with a long name: the kernel's own buffers are full soon."""
    count, timeout = lab.size(6, 32), lab.size(5, 60)
    options = {"--served-model-name": "m" * 32_000, "--write-timeout": str(timeout)}
    options["--kv-cache-bytes"] = str(2048 * lab.token_bytes)
    num_tokens = 240
    async with lab.server(options) as server:
        # The cache's memory counts only once it is used: here, not while the slow clients read.
        await server.ask(COMPLETIONS, greedy(lab.prompt(2016), 16))
        base = await asyncio.gather(*(server.stream(greedy(lab.prompt(8), 60)) for _ in range(8)))
        await server.until_load()
        files = server.num_files
        bodies = [greedy(lab.prompt(8), num_tokens) for _ in range(count)]
        reading = asyncio.ensure_future(server.stream(greedy(lab.prompt(8), num_tokens)))
        await server.until_load((1, 1, 0))
        server.forget_peak()
        before = server.rss
        async with in_background([crawl(server, body) for body in bodies]):
            beside = await reading
            seconds = 0.0
            began = time.monotonic()
            while (await server.load())[1:] != (0, 0) and time.monotonic() - began < 600:
                await asyncio.sleep(0.2)
            generated = time.monotonic()
            await server.until_load(timeout=timeout + 30)
            seconds = time.monotonic() - generated
        grown = max(0, server.peak_rss - before)
        await asyncio.sleep(0.3)
        cut = sum(bool(line.get("client_abort")) for line in server.log())
        left = server.num_files - files
    alone, slow = (quantile([gap for one in many for gap in one.gaps], 0.5) for many in (base, [beside]))
    figures = {
        "streams": count,
        "RSS MB more each": round(grown / count / MIB, 2),
        "median gap among 8 readers ms": milliseconds(alone),
        "beside slow ones ms": milliseconds(slow),
        "cut": cut,
        "last cut s after its last token": round(seconds, 1),
        "files more": left,
    }
    is_ok = grown <= count * MIB and slow <= 1.5 * alone and cut == count and seconds <= timeout + 5
    return Finding(figures=figures, is_ok=is_ok, note=f"--write-timeout {timeout}")


# ---- many connections -----------------------------------------------------------------------------------------------


async def r22(lab: Lab) -> Finding:
    """Connections that stay open after one request."""
    count = lab.size(200, 1000)
    server = await lab.shared()
    before, files = server.rss, server.num_files
    wires: list[Wire] = []
    replies: list[int] = []
    for _ in range(count):
        wire = await Wire.open(server.port)
        wires.append(wire)
        await wire.request("/health")
        replies.append((await wire.reply()).status)
    most, grown = server.num_files, server.rss - before
    for wire in wires:
        wire.close()
    await server.until_load()
    for _ in range(200):
        if server.num_files <= files:
            break
        await asyncio.sleep(0.01)
    figures = {
        "connections": count,
        "200": replies.count(200),
        "503": replies.count(503),
        "files": most,
        "RSS MB more": megabytes(grown),
        "files left": server.num_files - files,
    }
    is_clean = replies.count(200) + replies.count(503) == count and server.num_files <= files + 2
    return Finding(figures=figures, is_ok=is_clean and grown <= 50e6)


# ---- others meanwhile -----------------------------------------------------------------------------------------------


async def r24(lab: Lab) -> Finding:
    """Tokenise a text of 3.9 MB while a client polls /health."""
    server = await lab.shared()
    words = "The quick brown fox, número 42, jumps over the lazy dög; naïve 世界! "
    body = json.dumps({"prompt": words * (3_900_000 // len(json.dumps(words)))}).encode()
    async with polled(server, "/health") as late:
        await asyncio.sleep(0.5)
        reply = await server.ask("/tokenize", body)
        await asyncio.sleep(0.2)
    figures = {
        "/tokenize": reply.status,
        "MB": megabytes(len(body)),
        "took s": round(reply.seconds, 2),
        "tokens": reply.json.get("count", 0),
        "/health p99 ms": milliseconds(quantile(late, 0.99)),
        "worst ms": milliseconds(max(late)),
        "polls": len(late),
    }
    return Finding(figures=figures, is_ok=reply.status == 200 and quantile(late, 0.99) <= 0.1)


async def r25(lab: Lab) -> Finding:
    """/health and /metrics while everything is busy."""
    server = await lab.shared()
    running = await fill(lab, server)
    waiting = [asyncio.ensure_future(server.stream(greedy(lab.prompt(10), 50))) for _ in range(16)]
    await server.until_load((24, 8, 16))
    async with polled(server, "/health") as health, polled(server, "/metrics") as metrics:
        await asyncio.sleep(lab.size(5, 20))
    await empty(server, [*running, *waiting])
    p99s = [quantile(one, 0.99) for one in (health, metrics)]
    figures = {
        "/health p99 ms": milliseconds(p99s[0]),
        "/metrics p99 ms": milliseconds(p99s[1]),
        "polls": len(health) + len(metrics),
    }
    return Finding(figures=figures, is_ok=max(p99s) <= 0.1)


async def r50(lab: Lab) -> Finding:
    """Names of requests: in the answer, in the log, beside an error; odd ones are replaced."""
    server = await lab.shared()
    wrong: list[str] = []
    names: list[str] = []
    cases: tuple[tuple[str, object, int], ...] = (
        (COMPLETIONS, greedy(lab.prompt(5), 1), 200),
        (COMPLETIONS, {**greedy(lab.prompt(5), 2), "stream": True}, 200),
        (COMPLETIONS, {"prompt": 5}, 400),
        ("/nothing", None, 404),
        ("/v1/completions", None, 405),
        ("/v1/models", None, 200),
        ("/tokenize", {"prompt": "a"}, 200),
    )
    for number in range(lab.size(3, 30)):
        for path, body, status in cases:
            names.append(f"r50-{number}-{len(names)}")
            reply = await server.ask(path, body, [f"x-request-id: {names[-1]}"])
            if (reply.status, reply.headers.get("x-request-id")) != (status, names[-1]):
                wrong.append(f"{path}: {reply.status} {reply.headers.get('x-request-id')}")
    for odd in ("a b", "x" * 200, "é"):
        reply = await server.ask("/health", None, [f"x-request-id: {odd}"])
        if not re.fullmatch(r"[0-9a-f]{32}", reply.headers.get("x-request-id", "")):
            wrong.append(f"{odd[:8]!r} came back")
    await asyncio.sleep(0.3)
    logged = {line.get("request_id") for line in server.log()}
    missing = [name for name in names if name not in logged]
    figures = {"requests": len(names), "wrong": len(wrong), "not in the log": len(missing)}
    return Finding(figures=figures, is_ok=not wrong and not missing, note="; ".join(wrong[:3]))


CHECKS = (
    Check("R18", "bodies that are none, or too large", "400 / 413 ≤ 50 ms; RSS + ≤ 16 MiB", r18),
    Check("R20", "200 sockets send headers at 1 B/s", "p95 ≤ 2 × alone; dropped ≤ 30 s", r20),
    Check(
        "R21", "streams read at 1 B/s", "RSS ≤ 1 MiB each; gaps ≤ 1.5 ×; cut at the write timeout", r21, is_slow=True
    ),
    Check("R22", "idle keep-alive connections", "taken or 503; RSS + ≤ 50 MB", r22),
    Check("R24", "3.9 MB to /tokenize beside /health", "p99 ≤ 100 ms", r24),
    Check("R25", "/health and /metrics under full load", "p99 ≤ 100 ms", r25),
    Check("R50", "x-request-id in, out, logged, in errors", "100 %", r50),
)
