"""Checks of how a server starts and ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from lab import COMPLETIONS, Finding, Lab, Server, greedy


async def first_ready(server: Server) -> tuple[float, set[int]]:
    """Wait until /health is 200; return the seconds since the start, and the statuses seen."""
    await server.listening()
    seen: set[int] = set()
    while 200 not in seen:
        seen.add((await server.ask("/health")).status)
        await asyncio.sleep(0.01)
    return time.monotonic() - server.began, seen


async def ended(server: Server, number: signal.Signals) -> tuple[float, int]:
    """Send a signal; return the seconds until the process ended, and its exit code."""
    began = time.monotonic()
    server.signal(number)
    code = await server.exit(120)
    return time.monotonic() - began, code


async def refusal(lab: Lab, server: Server) -> int:
    """Return the status of a new request once the server has noticed that it shall end."""
    while (await server.ask("/ready")).status == 200:
        await asyncio.sleep(0.005)
    return (await server.ask(COMPLETIONS, greedy(lab.prompt(5), 2))).status


async def r1(lab: Lab) -> Finding:
    """A cold start, and --help: 503 then 200; ready ≤ 5 s; --help ≤ 0.3 s."""
    starts, helps = [], []
    for _ in range(lab.size(1, 5)):
        async with lab.server(waits=False) as server:
            starts.append(await first_ready(server))
    for _ in range(lab.size(3, 10)):
        began, none = time.monotonic(), asyncio.subprocess.DEVNULL
        words = ("-P", "-m", "nano_inference", "serve", "--help")
        await (await asyncio.create_subprocess_exec(sys.executable, *words, stdout=none)).wait()
        helps.append(time.monotonic() - began)
    ready, seen = min(starts)
    figures = {"ready s": round(ready, 2), "statuses": sorted(seen), "--help s": round(min(helps), 2)}
    return figures, ready <= 5 and min(helps) <= 0.3 and seen == {200, 503}


async def r31(lab: Lab) -> Finding:
    """SIGTERM idle, loading, answering: exit 0; idle ≤ 1 s, loading ≤ 2 s; answers whole; a new request gets 503."""
    async with lab.server() as server:
        idle, idle_code = await ended(server, signal.SIGTERM)
    async with lab.server(waits=False) as server:
        await server.listening()
        loading, loading_code = await ended(server, signal.SIGTERM)
    async with lab.server() as server:
        tasks = await lab.fill(server, 4, 60)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        refused = await refusal(lab, server)
        streams = await asyncio.gather(*tasks)
        codes = (idle_code, loading_code, await server.exit(60))
        answering = time.monotonic() - began
        has_traceback = any("Traceback" in line for line in server.lines)
    whole = sum(one.finish_reason == "length" and one.is_done for one in streams)
    figures = {"idle s": round(idle, 2), "loading s": round(loading, 2), "answering s": round(answering, 2)}
    figures |= {"whole of 4": whole, "new request": refused, "exit codes": codes, "traceback": has_traceback}
    is_right = whole == 4 and refused == 503 and codes == (0, 0, 0) and not has_traceback
    return figures, is_right and idle <= 1 and loading <= 2 and answering <= 32


async def r32(lab: Lab) -> Finding:
    """A second signal: ≤ 1 s, streams end with an error."""
    figures, is_ok = {}, True
    for number in (signal.SIGTERM, signal.SIGINT):
        async with lab.server() as server:
            tasks = await lab.fill(server, 4)
            server.signal(number)
            await refusal(lab, server)
            seconds, code = await ended(server, number)
            errors = sum(one.is_done and one.error is not None for one in await asyncio.gather(*tasks))
        is_ok &= seconds <= 1 and code == 0 and errors == 4
        figures |= {f"{number.name} twice s": round(seconds, 2), f"{number.name} errors of 4": errors}
    return figures, is_ok


CHECKS = (r1, r31, r32)
