"""Checks of how long a start takes, and how long requests wait beside others."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from lab import (
    Finding,
    Lab,
    Stream,
    cancel,
    greedy,
    in_background,
    ms,
    polled,
    quantile,
)


async def r1(lab: Lab) -> Finding:
    """A cold start, and --help: 503 then 200; ready ≤ 5 s; --help ≤ 0.3 s."""
    starts, helps = [], []
    for _ in range(lab.size(1, 5)):
        seen: set[int] = set()
        async with lab.server(is_ready=False) as server:
            while 200 not in seen:
                seen.add((await server.ask("/health")).status)
                await asyncio.sleep(0.01)
            starts.append(time.monotonic() - server.began)
    for _ in range(lab.size(3, 10)):
        began, none = time.monotonic(), asyncio.subprocess.DEVNULL
        words = ("-P", "-m", "nano_inference", "serve", "--help")
        await (await asyncio.create_subprocess_exec(sys.executable, *words, stdout=none)).wait()
        helps.append(time.monotonic() - began)
    figures = {"ready s": round(min(starts), 2), "statuses": sorted(seen), "--help s": round(min(helps), 2)}
    return figures, min(starts) <= 5 and min(helps) <= 0.3 and seen == {200, 503}


async def r24(lab: Lab) -> Finding:
    """A text of 3.9 MB to /tokenize beside /health: p99 ≤ 100 ms."""
    server = await lab.shared()
    words = "The quick brown fox, número 42, jumps over the lazy dög; naïve 世界! "
    body = {"prompt": words * (3_900_000 // len(json.dumps(words)))}
    async with polled(server, "/health") as late:
        await asyncio.sleep(0.5)
        reply = await server.ask("/tokenize", body)
        await asyncio.sleep(0.2)
    figures = {"/tokenize": reply.status, "took s": round(reply.seconds, 2)}
    figures |= {"/health p99 ms": ms(quantile(late, 0.99)), "worst ms": ms(max(late)), "polls": len(late)}
    return figures, reply.status == 200 and quantile(late, 0.99) <= 0.1


async def r25(lab: Lab) -> Finding:
    """/health and /metrics under full load: p99 ≤ 100 ms."""
    server = await lab.shared()
    running = await lab.fill(server)
    waiting = [asyncio.create_task(server.stream(greedy(lab.prompt(10), 50))) for _ in range(16)]
    await server.until_load((24, 8, 16))
    async with polled(server, "/health") as health, polled(server, "/metrics") as metrics:
        await asyncio.sleep(lab.size(5, 20))
    await cancel([*running, *waiting])
    p99s = {f"{name} p99 ms": ms(quantile(late, 0.99)) for name, late in (("/health", health), ("/metrics", metrics))}
    return {**p99s, "polls": len(health) + len(metrics)}, max(p99s.values()) <= 100


async def r43(lab: Lab) -> Finding:
    """A prompt of 1900 tokens beside 4 streams: longest gap ≤ 300 ms with steps of 256 tokens (the default)."""
    figures: dict[str, float] = {}
    for budget in ("64", "256", "2048"):
        streams = [Stream() for _ in range(4)]
        async with (
            lab.server({"--max-tokens-per-batch": budget}) as server,
            in_background([server.stream(greedy(lab.prompt(10), 1000), out=one) for one in streams]),
        ):
            while min(len(one.times) for one in streams) < 20:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await server.stream(greedy(lab.prompt(1900), 1))
            ended = time.monotonic()
            while any(one.times[-1] < ended for one in streams):
                await asyncio.sleep(0.005)
        gaps = [(a, b) for one in streams for a, b in zip(one.times, one.times[1:], strict=False)]
        figures[f"steps of {budget}: alone ms"] = ms(max(b - a for a, b in gaps if b < began))
        figures[f"steps of {budget}: longest gap ms"] = ms(max(b - a for a, b in gaps if b > began and a < ended))
    return figures, figures["steps of 256: longest gap ms"] <= 300


CHECKS = (r1, r24, r25, r43)
