"""Checks of how long requests wait beside others."""

from __future__ import annotations

import asyncio
import time

from harness import Check, Finding, Lab, Server, greedy, in_background, milliseconds, quantile, until
from queueing import COMPLETIONS, LONG_PROMPT
from wires import Stream

# ---- fairness -------------------------------------------------------------------------------------------------------


async def gaps_beside(lab: Lab, server: Server, num_prompt: int) -> tuple[float, float, float]:
    """Return the longest gap of four decoders alone and beside a long prefill, and the prefill's seconds."""
    enough = asyncio.Event()
    streams: list[Stream] = []

    def note(stream: Stream) -> None:
        if stream not in streams:
            streams.append(stream)
        if len(streams) == 4 and all(len(one.times) >= 20 for one in streams):
            enough.set()

    async with in_background([server.stream(greedy(lab.prompt(10), 1000), on_token=note) for _ in range(4)]):
        await asyncio.wait_for(enough.wait(), 300)
        began = time.monotonic()
        await server.stream(greedy(lab.prompt(num_prompt), 1))
        ended = time.monotonic()
        have = [len(one.times) for one in streams]
        await until(lambda: all(len(one.times) > n + 1 for one, n in zip(streams, have, strict=True)), 120)
    alone = max(b - a for one in streams for a, b in pairs_of(one) if b < began)
    beside = max(b - a for one in streams for a, b in pairs_of(one) if b > began and a < ended)
    return alone, beside, ended - began


def pairs_of(stream: Stream) -> list[tuple[float, float]]:
    """Return the ends of a stream's gaps."""
    return list(zip(stream.times, stream.times[1:], strict=False))


async def r43(lab: Lab) -> Finding:
    """A long prefill beside four decoders, with steps of 64, 256 (the default on a CPU) and 2048 tokens."""
    figures: dict[str, float | int | str] = {}
    for budget in ("64", "256", "2048"):
        async with lab.server({"--max-tokens-per-batch": budget}) as server:
            alone, beside, seconds = await gaps_beside(lab, server, 1900)
        figures |= {
            f"steps of {budget}: longest gap ms": milliseconds(beside),
            f"{budget}: alone ms": milliseconds(alone),
            f"{budget}: prefill s": round(seconds, 2),
        }
    return Finding(figures=figures, is_ok=float(figures["steps of 256: longest gap ms"]) <= 300)


async def r57(lab: Lab) -> Finding:
    """Requests of three tokens, one after another, while one long prompt is computed."""
    async with lab.server({"--max-tokens-per-batch": "256"}) as server:
        await server.ask(COMPLETIONS, greedy(lab.prompt(10), 2))
        began = time.monotonic()
        long = asyncio.ensure_future(server.stream(greedy(lab.prompt(1900), 1)))
        await server.until_load((1, 1, 0))
        waits: list[float] = []
        while not long.done():
            waits.append((await server.ask(COMPLETIONS, greedy(lab.prompt(3), 1))).seconds)
        prefill = (await long).times[0] - began
    figures = {
        "short requests": len(waits),
        "median ms": milliseconds(quantile(waits, 0.5)),
        "longest ms": milliseconds(max(waits)),
        "long prompt s": round(prefill, 2),
    }
    return Finding(figures=figures, is_ok=len(waits) > 4 and max(waits) <= prefill / 4)


async def r44(lab: Lab) -> Finding:
    """One long request among short ones that never end coming."""
    server = await lab.shared()
    ends = time.monotonic() + lab.size(15, 60)

    async def visitor(number: int) -> None:
        for turn in range(10_000):
            if time.monotonic() > ends:
                return
            name = [f"x-request-id: r44-short-{number}-{turn}"]
            await server.ask(COMPLETIONS, greedy(lab.prompt(20), 12), name)

    async with in_background([visitor(number) for number in range(24)]) as visitors:
        await asyncio.sleep(lab.size(5, 15))
        began = time.time()
        await server.ask(COMPLETIONS, greedy(lab.prompt(LONG_PROMPT), 8), ["x-request-id: r44-long"])
        ended = time.time()
        await asyncio.gather(*visitors)
    await server.until_load()
    await asyncio.sleep(0.2)
    lines = {line["request_id"]: line for line in server.log() if line.get("request_id", "").startswith("r44-")}
    short = [line["queue_ms"] for name, line in lines.items() if name != "r44-long" and "queue_ms" in line]
    waited = lines["r44-long"]["queue_ms"]
    fair = max(quantile(short, 0.5), 1.0)
    figures = {
        "long waited ms": waited,
        "median short waited ms": fair,
        "ratio": round(waited / fair, 2),
        "short requests": len(short),
        "long took s": round(ended - began, 2),
    }
    return Finding(figures=figures, is_ok=waited <= 2 * fair)


CHECKS = (
    Check("R43", "1900-token prefill beside 4 decoders", "longest gap ≤ 300 ms with steps of 256 tokens", r43),
    Check("R44", "one long request among short ones", "waits ≤ 2 × the median of the short ones", r44),
    Check("R57", "3-token requests beside a 1900-token prefill", "each ≤ a quarter of the prefill's time", r57),
)
