"""Checks of clients that leave, do not read, send slowly, come in crowds or guess at each other's prompts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from lab import (
    COMPLETIONS,
    JSON,
    LONG_PROMPT,
    MIB,
    NOTHING,
    TOKEN_BYTES,
    Finding,
    Lab,
    Server,
    Wire,
    cancel,
    greedy,
    in_background,
    megabytes,
    ms,
    quantile,
)

PHASES = ("before headers", "queued", "mid-prefill", "first token", "mid-decode", "final chunk")
KEYS = ("first-client-key-0001", "second-client-key-0002")


async def impatient(server: Server, body: JSON, seconds: float) -> bool:
    """Send a request and leave after so long; return whether that was before the reply."""
    wire = await Wire.open(server.port)
    try:
        async with asyncio.timeout(seconds):
            await wire.request(COMPLETIONS, body)
            await wire.reader.readuntil(b"\r\n\r\n")
            return False
    except TimeoutError:
        return True
    finally:
        wire.close()


async def r2(lab: Lab) -> Finding:
    """400 clients give up after 0.5 s: all time out; the next request ≤ 5 s; idle ≤ 2 s, nothing held."""
    server = await lab.shared()
    num_left = 0
    for _ in range(2):  # places that leak would be missed only by the second crowd
        crowd = [impatient(server, greedy(lab.prompt(10), 1900), 0.5) for _ in range(200)]
        num_left += sum(await asyncio.gather(*crowd))
        await asyncio.sleep(0.1)
    reply = await server.ask(COMPLETIONS, greedy(lab.prompt(10), 10), timeout=60)
    idle, held = await server.until_load(), await server.held()
    figures = {"timed out": num_left, "next request s": round(reply.seconds, 2), "then idle s": round(idle, 2)}
    is_ok = num_left == 400 and reply.status == 200 and reply.seconds <= 5 and idle <= 2 and held == NOTHING
    return {**figures, "running, waiting, kv": held}, is_ok


async def leave_at(lab: Lab, server: Server, phase: str, prefill: float, *, streams: bool, reset: bool) -> None:
    """Send a request and leave in that phase."""
    wire = await Wire.open(server.port)
    extra = {"stream": True} if streams else {}
    if phase == "before headers":
        await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-le")
        await asyncio.sleep(0.01)
    elif phase == "queued":
        before = await server.load()
        await wire.request(COMPLETIONS, {**greedy(lab.prompt(20), 50), **extra})
        await server.until_load((before[0] + 1, before[1], before[2] + 1))
    elif phase == "mid-prefill":
        await wire.request(COMPLETIONS, {**greedy(lab.prompt(LONG_PROMPT), 50), **extra})
        await asyncio.sleep(0.3 * prefill)
    else:
        await wire.request(COMPLETIONS, {**greedy(lab.prompt(20), 6 if phase == "final chunk" else 400), **extra})
        if not streams:
            await server.until_load((1, 1, 0))
            await asyncio.sleep(0.1)
        else:
            num_events = {"first token": 1, "mid-decode": 10, "final chunk": 6}[phase]
            while num_events > 0:
                num_events -= (await wire.reader.readline()).count(b'"token_ids":[')
    wire.close(reset=reset)


async def r3(lab: Lab) -> Finding:
    """Clients leave in six phases, by RST and FIN: streams stop ≤ 1 step + 100 ms, others ≤ 1 s; nothing held."""
    server = await lab.shared()
    began = time.monotonic()
    alone = await server.stream(greedy(lab.prompt(LONG_PROMPT), 20))
    prefill, decode = alone.times[0] - began, max(alone.gaps)
    late: dict[str, float] = {}
    over = num_left = 0
    cases = [(phase, True) for phase in PHASES] + [(phase, False) for phase in PHASES[1:3] + PHASES[4:5]]
    for phase, streams in cases:
        others = await lab.fill(server) if phase == "queued" else []
        # A step of eight rows takes as long as four of one.
        step = prefill if phase == "mid-prefill" else decode * (4 if others else 1)
        name = phase if streams else f"{phase}, whole"
        for number in range(2 * lab.size(2, 20)):
            await leave_at(lab, server, phase, prefill, streams=streams, reset=bool(number % 2))
            seconds = await server.until_load((len(others), len(others), 0))
            late[name] = max(late.get(name, 0.0), seconds)
            over += seconds > (step + 0.1 if streams else 1.0)
            num_left += 1
        await cancel(others)
        await server.until_load()
    held = await server.held()
    figures: JSON = {f"{name} ms": ms(value) for name, value in late.items()}
    figures |= {"prefill ms": ms(prefill), "decode ms": ms(decode), "left": num_left, "late": over}
    return {**figures, "running, waiting, kv": held}, over == 0 and held == NOTHING


async def r6(lab: Lab) -> Finding:
    """64 mixed requests, a queue of 16: 200 + 503 = 64, p99 of 503 ≤ 50 ms, nothing held."""
    chance, longest, most = random.Random(6), lab.size(200, 1500), lab.size(30, 200)
    async with lab.server({"--max-queued-requests": "16"}) as server:
        await server.ask(COMPLETIONS, greedy(lab.prompt(10), 2))
        bodies = [greedy(lab.prompt(chance.randint(1, longest)), chance.randint(1, most)) for _ in range(64)]
        replies = await asyncio.gather(*(server.ask(COMPLETIONS, body) for body in bodies))
        await server.until_load()
        held = await server.held()
    num_taken = sum(one.status == 200 for one in replies)
    full = [one.seconds for one in replies if one.status == 503 and "retry-after:" in one.head]
    figures = {"200": num_taken, "503 with Retry-After": len(full), "p99 of 503 ms": ms(quantile(full, 0.99))}
    return {**figures, "held": held}, num_taken + len(full) == 64 and quantile(full, 0.99) <= 0.05 and held == NOTHING


# ---- slow clients ---------------------------------------------------------------------------------------------------


async def latencies(lab: Lab, server: Server, count: int) -> list[float]:
    """Return the seconds of so many small requests, one after another."""
    return [(await server.ask(COMPLETIONS, greedy(lab.prompt(8), 1))).seconds for _ in range(count)]


async def drip(server: Server, dropped: list[float]) -> None:
    """Send a head at one byte a second; note when the server closes."""
    wire = await Wire.open(server.port)
    began, end = time.monotonic(), asyncio.ensure_future(wire.reader.read())
    with contextlib.suppress(ConnectionError):
        for byte in b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: " + b"a" * 60:
            await wire.send(bytes([byte]))
            if (await asyncio.wait({end}, timeout=1))[0]:
                break
    dropped.append(time.monotonic() - began)
    end.cancel()
    wire.close(reset=True)


async def r20(lab: Lab) -> Finding:
    """200 sockets send headers at 1 B/s: others' p95 ≤ 2 × alone; dropped ≤ 30 s."""
    server = await lab.shared()
    await latencies(lab, server, 5)
    alone = quantile(await latencies(lab, server, 40), 0.95)
    dropped: list[float] = []
    beside: list[float] = []
    async with in_background([drip(server, dropped) for _ in range(200)]) as tasks:
        await asyncio.sleep(1)
        ends = time.monotonic() + 32
        while not all(task.done() for task in tasks) and time.monotonic() < ends:
            beside += await latencies(lab, server, 5)
            await asyncio.sleep(0.1)
    p95, last = quantile(beside, 0.95), max(dropped, default=0.0)
    figures = {"p95 alone ms": ms(alone), "p95 beside ms": ms(p95), "dropped": len(dropped), "last s": round(last, 1)}
    return figures, p95 <= 2 * alone and len(dropped) == 200 and last <= 30


async def crawl(server: Server, body: JSON) -> None:
    """Ask for a stream and read it at a byte a second."""
    wire = await Wire.open(server.port, receive_buffer=2048)
    with contextlib.suppress(ConnectionError):
        await wire.request(COMPLETIONS, {**body, "stream": True})
        while await wire.reader.read(1):
            await asyncio.sleep(1)
    wire.close(reset=True)


async def r21(lab: Lab) -> Finding:
    """Streams read at 1 B/s: RSS ≤ 1 MiB each; others' gaps ≤ 1.5 ×; cut at the write timeout + 5 s."""
    count, timeout = lab.size(6, 32), lab.size(5, 60)
    # A long name fills the kernel's buffers soon.
    options = {"--served-model-name": "m" * 32_000, "--write-timeout": str(timeout)}
    async with lab.server({**options, "--kv-cache-bytes": str(2048 * TOKEN_BYTES)}) as server:
        await server.ask(COMPLETIONS, greedy(lab.prompt(2016), 16))  # the cache's memory counts from its first use
        base = await asyncio.gather(*(server.stream(greedy(lab.prompt(8), 60)) for _ in range(8)))
        files = server.count("fd")
        reading = asyncio.create_task(server.stream(greedy(lab.prompt(8), 240)))
        await server.until_load((1, 1, 0))
        server.forget_peak()
        before = server.memory()
        async with in_background([crawl(server, greedy(lab.prompt(8), 240)) for _ in range(count)]):
            beside = await reading
            while (await server.load())[1:] != (0, 0):
                await asyncio.sleep(0.2)
            seconds = await server.until_load(timeout=timeout + 30)
        grown = max(0, server.memory("VmHWM") - before)
        await asyncio.sleep(0.3)
        cut, left = sum(bool(line.get("client_abort")) for line in server.log()), server.count("fd") - files
    alone, slow = (quantile([gap for one in many for gap in one.gaps], 0.5) for many in (base, [beside]))
    figures = {"streams": count, "RSS MB more each": round(grown / count / MIB, 2), "cut": cut, "files more": left}
    figures |= {"gap among 8 readers ms": ms(alone), "beside slow ones ms": ms(slow), "last cut s": round(seconds, 1)}
    return figures, grown <= count * MIB and slow <= 1.5 * alone and cut == count and seconds <= timeout + 5


async def r22(lab: Lab) -> Finding:
    """Idle keep-alive connections: accepted or 503; RSS + ≤ 50 MB; no file left."""
    count, server = lab.size(200, 1000), await lab.shared()
    before, files = server.memory(), server.count("fd")
    wires, statuses = [], []
    for _ in range(count):
        wires.append(await Wire.open(server.port))
        await wires[-1].request("/health")
        statuses.append(int((await wires[-1].reader.readuntil(b"\r\n\r\n")).split()[1]))
    grown = server.memory() - before
    for wire in wires:
        wire.close()
    for _ in range(200):
        if (left := server.count("fd") - files) <= 0:
            break
        await asyncio.sleep(0.01)
    figures = {"connections": count, "200": statuses.count(200), "503": statuses.count(503), "files left": left}
    is_ok = figures["200"] + figures["503"] == count and left <= 2 and grown <= 50e6
    return {**figures, "RSS MB more": megabytes(grown)}, is_ok


# ---- two clients ----------------------------------------------------------------------------------------------------


async def q1(lab: Lab) -> Finding:
    """64 connections with n=4 of one key; another key asks: first token ≤ 10 s."""
    path = lab.scratch / "keys"
    path.touch(mode=0o600)
    path.write_text("\n".join(KEYS) + "\n")
    first, second = ([f"authorization: Bearer {key}"] for key in KEYS)
    options = {"--max-batch-size": str(lab.size(32, 256)), "--kv-cache-bytes": str(24576 * TOKEN_BYTES)}
    refused: set[str] = set()
    waits: list[float] = []
    async with lab.server({"--api-key-file": str(path), **options}) as server:

        async def keep_asking() -> None:
            body = {**greedy(lab.prompt(8), lab.size(60, 400)), "n": 4, "temperature": 1}
            while True:
                reply = await server.ask(COMPLETIONS, body, first, timeout=3600)
                if reply.status != 200:
                    refused.add(f"{reply.status} {reply.json['error']['code']}")
                    await asyncio.sleep(1)

        async with in_background([keep_asking() for _ in range(64)]):
            running, before = 0, -1
            while not 0 < running <= before:  # until the number of samples does not grow any more
                before = running
                await asyncio.sleep(3)
                running = (await server.ask("/load", None, second)).json["running"]
            for _ in range(lab.size(2, 5)):
                began = time.monotonic()
                waits.append((await server.stream(greedy(lab.prompt(20), 3), second)).times[0] - began)
    figures = {"samples running": running, "first tokens s": [round(wait, 1) for wait in waits]}
    return {**figures, "refused": sorted(refused)}, max(waits) <= 10


CHECKS = (r2, r3, r6, r20, r21, r22, q1)
