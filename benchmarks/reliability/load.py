"""Checks of how long requests wait beside others."""

from __future__ import annotations

import asyncio
import json
import time

from lab import (
    COMPLETIONS,
    LONG_PROMPT,
    Finding,
    Lab,
    Stream,
    cancel,
    greedy,
    in_background,
    megabytes,
    ms,
    polled,
    quantile,
)


async def r24(lab: Lab) -> Finding:
    """A text of 3.9 MB to /tokenize beside /health: p99 ≤ 100 ms."""
    server = await lab.shared()
    words = "The quick brown fox, número 42, jumps over the lazy dög; naïve 世界! "
    body = json.dumps({"prompt": words * (3_900_000 // len(json.dumps(words)))}).encode()
    async with polled(server, "/health") as late:
        await asyncio.sleep(0.5)
        reply = await server.ask("/tokenize", body)
        await asyncio.sleep(0.2)
    figures = {"/tokenize": reply.status, "MB": megabytes(len(body)), "took s": round(reply.seconds, 2)}
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
        streams: list[Stream] = []
        warm = asyncio.Event()

        def note(stream: Stream, streams: list[Stream] = streams, warm: asyncio.Event = warm) -> None:
            if stream not in streams:
                streams.append(stream)
            if len(streams) == 4 and all(len(one.times) >= 20 for one in streams):
                warm.set()

        async with (
            lab.server({"--max-tokens-per-batch": budget}) as server,
            in_background([server.stream(greedy(lab.prompt(10), 1000), on_token=note) for _ in range(4)]),
        ):
            await warm.wait()
            began = time.monotonic()
            await server.stream(greedy(lab.prompt(1900), 1))
            ended = time.monotonic()
            while any(one.times[-1] < ended for one in streams):
                await asyncio.sleep(0.005)
        gaps = [(a, b) for one in streams for a, b in zip(one.times, one.times[1:], strict=False)]
        figures[f"steps of {budget}: alone ms"] = ms(max(b - a for a, b in gaps if b < began))
        figures[f"steps of {budget}: longest gap ms"] = ms(max(b - a for a, b in gaps if b > began and a < ended))
    return figures, figures["steps of 256: longest gap ms"] <= 300


async def r44(lab: Lab) -> Finding:
    """One long request among short ones: waits ≤ 2 × the median of the short ones."""
    server = await lab.shared()
    ends = time.monotonic() + lab.size(15, 60)

    async def visitor(number: int) -> None:
        turn = 0
        while time.monotonic() < ends:
            turn += 1
            await server.ask(COMPLETIONS, greedy(lab.prompt(20), 12), [f"x-request-id: r44-short-{number}-{turn}"])

    async with in_background([visitor(number) for number in range(24)]) as visitors:
        await asyncio.sleep(lab.size(5, 15))
        await server.ask(COMPLETIONS, greedy(lab.prompt(LONG_PROMPT), 8), ["x-request-id: r44-long"])
        await asyncio.gather(*visitors)
    await asyncio.sleep(0.2)
    waits = {line["request_id"]: line["queue_ms"] for line in server.log() if "queue_ms" in line}
    short = [waited for name, waited in waits.items() if name.startswith("r44-short")]
    median = max(quantile(short, 0.5), 1.0)
    figures = {"long waited ms": waits["r44-long"], "median of the short ms": median, "short requests": len(short)}
    return figures, waits["r44-long"] <= 2 * median


async def r57(lab: Lab) -> Finding:
    """Requests of 3 tokens beside a prompt of 1900: each ≤ a quarter of the prompt's time."""
    async with lab.server({"--max-tokens-per-batch": "256"}) as server:
        await server.ask(COMPLETIONS, greedy(lab.prompt(10), 2))
        began = time.monotonic()
        long = asyncio.create_task(server.stream(greedy(lab.prompt(1900), 1)))
        await server.until_load((1, 1, 0))
        waits: list[float] = []
        while not long.done():
            waits.append((await server.ask(COMPLETIONS, greedy(lab.prompt(3), 1))).seconds)
        prefill = (await long).times[0] - began
    figures = {"short requests": len(waits), "median ms": ms(quantile(waits, 0.5)), "longest ms": ms(max(waits))}
    return {**figures, "long prompt s": round(prefill, 2)}, len(waits) > 4 and max(waits) <= prefill / 4


CHECKS = (r24, r25, r43, r44, r57)
