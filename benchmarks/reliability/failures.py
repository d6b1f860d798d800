"""Checks of internal failures: those of the engine end all requests, others end one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from faulty import MARK
from lab import COMPLETIONS, INNARDS, JSON, Finding, Lab, Server, Stream, greedy

OTHERS = 3


def has_error(stream: Stream) -> bool:
    """Return True if a stream ended with an error event and [DONE]."""
    return stream.error is not None and stream.is_done


async def code_after_term(server: Server) -> int:
    """Ask the server to end; return its exit code."""
    server.signal(signal.SIGTERM)
    return await server.exit(20)


async def lost_engine(lab: Lab, fault: str, options: dict[str, str]) -> Finding:
    """Let the engine fail amid four streams and a whole answer: all get errors, and the server ends with 1."""
    async with lab.server(options, fault=fault) as server:
        whole = asyncio.create_task(server.ask(COMPLETIONS, greedy(lab.prompt(12), 1000)))
        others = [asyncio.create_task(server.stream(greedy(lab.prompt(12), 1000))) for _ in range(OTHERS)]
        await server.until_load((OTHERS + 1, OTHERS + 1, 0))
        streams = await asyncio.gather(*others, server.stream(greedy(lab.prompt(12), MARK)))
        reply = await whole
        health, late = await server.ask("/health"), await server.ask(COMPLETIONS, greedy(lab.prompt(5), 2))
        is_up, code = await server.metric("nano_inference_engine_up"), await code_after_term(server)
        has_dump = any(line.startswith(("Thread 0x", "Current thread 0x")) for line in server.lines)
    seconds = max(one.ended for one in streams) - max(one.times[-1] for one in streams if one.times)
    errors = sum(map(has_error, streams))
    statuses = (reply.status, health.status, late.status)
    leaks = INNARDS.search(f"{reply.body!r} {[one.error for one in streams]}")
    figures = {"errors of 4": errors, "whole answer, /health, next request": statuses, "exit code": code}
    figures |= {"s after the last token": round(seconds, 2), "stack dump": has_dump}
    return figures, errors == 4 and statuses == (500, 503, 503) and not leaks and is_up == 0 and code == 1


async def r26(lab: Lab) -> Finding:
    """A step raises amid streams: error and [DONE] ≤ 1 s; 500; /health 503; exit 1."""
    figures, is_ok = await lost_engine(lab, "raise", {})
    return figures, is_ok and figures["s after the last token"] <= 1


async def r28(lab: Lab) -> Finding:
    """A step hangs; the thread ends: errors ≤ step timeout (5 s) + 5 s; stack dump; /health 503."""
    figures, is_ok = await lost_engine(lab, "stuck", {"--step-timeout": "5"})
    killed, is_noticed = await lost_engine(lab, "exit", {})
    is_ok &= is_noticed and figures["s after the last token"] <= 10 and figures["stack dump"]
    return {**figures, "thread ended, s": killed["s after the last token"]}, is_ok


async def streams_of(server: Server, bodies: Sequence[JSON]) -> list[Stream]:
    """Stream all at once, the last one when the others run."""
    first = [asyncio.create_task(server.stream(body)) for body in bodies[:-1]]
    await server.until_load((len(first), len(first), 0))
    last = await server.stream(bodies[-1])
    return [*await asyncio.gather(*first), last]


async def one_victim(lab: Lab, fault: str, extra: JSON) -> tuple[JSON, bool, JSON]:
    """Let one request of four fail; return the figures, whether the others were unaffected, and its error."""
    bodies = [greedy(lab.prompt(12), 120) for _ in range(OTHERS)]
    async with lab.server(fault=fault) as server:
        alone = await streams_of(server, [*bodies, greedy(lab.prompt(12), 30)])
        *others, struck = await streams_of(server, [*bodies, {**greedy(lab.prompt(12), MARK), **extra}])
        following = await server.ask(COMPLETIONS, greedy(lab.prompt(5), 5))
        await server.until_load()
        counted = await server.metric("vllm:request_success_total", 'finished_reason="error"')
        held, code = await server.held(), await code_after_term(server)
    same = sum(a.tokens == b.tokens for a, b in zip(alone, others, strict=False))
    figures = {"others whole": sum(one.finish_reason == "length" and one.is_done for one in others), "same": same}
    figures |= {"error": (struck.error or {}).get("message"), "next request": following.status, "held": held}
    figures |= {"counted as error": counted, "exit code": code}
    is_ok = figures["others whole"] == OTHERS and has_error(struck) and following.status == 200
    return figures, is_ok and held == (0, 0, 0) and code == 0, struck.error or {}


async def r27(lab: Lab) -> Finding:
    """Writing one answer raises: only it fails; others' tokens are the same."""
    figures, is_ok, _ = await one_victim(lab, "detok", {"stop": [f"mark{MARK}"]})
    return figures, is_ok and figures["same"] == OTHERS


async def r29(lab: Lab) -> Finding:
    """MemoryError in a step: one error without innards, the server goes on."""
    figures, is_ok, error = await one_victim(lab, "memory", {})
    return figures, is_ok and error.get("code") == "out_of_memory" and not INNARDS.search(str(error))


async def r30(lab: Lab) -> Finding:
    """NaN logits of one sample: one error, counted, no crash."""
    figures, is_ok, _ = await one_victim(lab, "nan", {})
    return figures, is_ok and figures["counted as error"] == 1


CHECKS = (r26, r27, r28, r29, r30)
