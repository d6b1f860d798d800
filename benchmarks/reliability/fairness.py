"""Check that long prompts do not delay short requests, and that short requests do not starve long prompts."""

from __future__ import annotations

import time

from harness import Check, Finding, Lab, Server, greedy, in_background, quantile, until

COMPLETIONS = "/v1/completions"
CONTEXT = 8192
CACHE_TOKENS = 2 * CONTEXT
SHORT_PROMPT = 3
SHORT_ANSWER = 4
NUM_ALONE = 5
NUM_SHORT = 4
"""Short requests sent one after another behind each long prompt, as far as its prefill lasts."""
NUM_VISITORS = 7
"""Clients with short requests beside one long prompt: with it they fill the batch."""
MAX_RATIO = 3.0
SPARE_S = 1.0
SPARE_SHARE = 0.05
"""Of the long prompt's own prefill: a step that has started runs to its end, and its length depends on the machine."""
MAX_STARVED_RATIO = 5.0


async def first_token(lab: Lab, server: Server, num_prompt: int) -> float:
    """Return the seconds until the first token of a request."""
    began = time.monotonic()
    stream = await server.stream(greedy(lab.prompt(num_prompt), SHORT_ANSWER))
    return stream.times[0] - began


def limit(alone: float, prefill: float) -> float:
    """Return the longest TTFT of a short request behind a prefill that takes so long by itself."""
    return MAX_RATIO * alone + max(SPARE_S, SPARE_SHARE * prefill)


async def behind(lab: Lab, server: Server, num_prompt: int) -> tuple[list[float], float]:
    """Return the TTFTs of short requests sent during a long prefill, and the seconds of that prefill."""
    began = time.monotonic()
    async with in_background([server.stream(greedy(lab.prompt(num_prompt), 1))]) as (long,):
        await server.until_load((1, 1, 0))
        found = [await first_token(lab, server, SHORT_PROMPT)]
        while len(found) < NUM_SHORT and not long.done():
            found.append(await first_token(lab, server, SHORT_PROMPT))
        stream = await long
    return found, stream.times[0] - began


async def among_short(lab: Lab, server: Server, num_prompt: int) -> tuple[float, int]:
    """Return the TTFT of a long prompt while short requests keep coming until it has come, and how many ended."""
    num_ended = 0

    async def visitor() -> None:
        nonlocal num_ended
        while True:
            await server.ask(COMPLETIONS, greedy(lab.prompt(20), 8))
            num_ended += 1

    async with in_background([visitor() for _ in range(NUM_VISITORS)]):
        await until(lambda: num_ended >= NUM_VISITORS)
        num_before = num_ended
        began = time.monotonic()
        stream = await server.stream(greedy(lab.prompt(num_prompt), 1))
        return stream.times[0] - began, num_ended - num_before


async def r54(lab: Lab) -> Finding:
    """Short requests behind long prefills, then a long prompt among short requests."""
    figures: dict[str, object] = {}
    is_ok = True
    options = {"--max-model-len": str(CONTEXT), "--kv-cache-bytes": str(CACHE_TOKENS * lab.token_bytes)}
    async with lab.server(options) as server:
        await first_token(lab, server, 64)
        alone = quantile([await first_token(lab, server, SHORT_PROMPT) for _ in range(NUM_ALONE)], 0.5)
        figures["TTFT alone s"] = round(alone, 3)
        prefill_alone = 0.0
        for num_prompt in (6900, 1921) if lab.is_slow else (1921,):
            prefill_alone = await first_token(lab, server, num_prompt)
            found, seconds = await behind(lab, server, num_prompt)
            await server.until_load()
            figures[f"behind {num_prompt}: TTFT s"] = " ".join(f"{one:.2f}" for one in found)
            figures[f"{num_prompt}: prefill s, alone"] = f"{seconds:.2f}, {prefill_alone:.2f}"
            is_ok &= max(found) <= limit(alone, prefill_alone)
        starved, num_ended = await among_short(lab, server, 1921)
        await server.until_load()
        figures["1921 among short ones: TTFT s, alone"] = f"{starved:.2f}, {prefill_alone:.2f}"
        figures["short ones meanwhile"] = num_ended
        is_ok &= starved <= MAX_STARVED_RATIO * prefill_alone + SPARE_S
    return Finding(figures=figures, is_ok=is_ok)


CHECKS = (
    Check(
        "R54",
        "3-token requests behind long prefills; a long prompt among short ones",
        "TTFT ≤ 3 × alone + max(1 s, 5 % of the prefill); the long one ≤ 5 × alone + 1 s",
        r54,
    ),
)
