"""Check the effect of internal failures: on all requests if the engine fails, else on one."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

from faulty import MARK
from harness import INNARDS, Check, Finding, Lab, Server, greedy, milliseconds
from queueing import COMPLETIONS
from wires import JSON, Reply, Stream

OTHERS = 3


def marked(lab: Lab) -> JSON:
    """Return the body that a fault strikes."""
    return greedy(lab.prompt(12), MARK)


def has_error_event(stream: Stream) -> bool:
    """Whether a stream ended with an error object and [DONE]."""
    return stream.error is not None and stream.is_done and not stream.is_cut


async def code_after_term(server: Server) -> int:
    """Ask the server to end; return its exit code."""
    server.signal(signal.SIGTERM)
    try:
        return await server.exit(20)
    except TimeoutError:
        return -1


async def lost_engine(lab: Lab, fault: str, options: dict[str, str]) -> tuple[JSON, bool]:
    """Let the engine fail amid four streams and a whole answer; return what was seen, and if all got errors."""
    async with lab.server(options, fault=fault) as server:
        whole = asyncio.ensure_future(server.ask(COMPLETIONS, greedy(lab.prompt(12), 1000)))
        others = [asyncio.ensure_future(server.stream(greedy(lab.prompt(12), 1000))) for _ in range(OTHERS)]
        await server.until_load((OTHERS + 1, OTHERS + 1, 0))
        victim = asyncio.ensure_future(server.stream(marked(lab)))
        streams = await asyncio.wait_for(asyncio.gather(*others, victim), 120)
        reply: Reply = await asyncio.wait_for(whole, 120)
        health = await server.health()
        late = await server.ask(COMPLETIONS, greedy(lab.prompt(5), 2))
        up = (await server.metrics()).value("nano_inference_engine_up")
        code = await code_after_term(server)
        dump = any(line.startswith(("Thread 0x", "Current thread 0x")) for line in server.lines)
    last = max((stream.times[-1] for stream in streams if stream.times), default=0.0)
    seconds = max(stream.ended for stream in streams) - last
    num_errors = sum(has_error_event(stream) for stream in streams)
    figures = {
        "streams with an error, of 4": num_errors,
        "whole answer": reply.status,
        "s after the last token": round(seconds, 2),
        "/health": health,
        "next request": late.status,
        "engine_up": up,
        "exit code": code,
        "stack dump": str(dump),
    }
    leaks = [text for text in (reply.body.decode(), str([one.error for one in streams])) if INNARDS.search(text)]
    is_ok = num_errors == 4 and reply.status == 500 and health == 503 and late.status == 503 and not leaks
    return figures, is_ok and up == 0 and code == 1


async def r26(lab: Lab) -> Finding:
    """A step that raises."""
    figures, has_errors = await lost_engine(lab, "raise", {})
    return Finding(figures=figures, is_ok=has_errors and figures["s after the last token"] <= 1)


async def r28(lab: Lab) -> Finding:
    """A step that never ends, and a thread that does."""
    figures, has_errors = await lost_engine(lab, "stuck", {"--step-timeout": "5"})
    killed, is_noticed = await lost_engine(lab, "exit", {})
    figures |= {f"thread killed: {name}": killed[name] for name in ("s after the last token", "exit code")}
    is_ok = has_errors and is_noticed and figures["s after the last token"] <= 10 and figures["stack dump"] == "True"
    return Finding(figures=figures, is_ok=is_ok, note="--step-timeout 5")


async def one_victim(lab: Lab, fault: str, extra: JSON) -> tuple[JSON, Stream]:
    """Let one request of four fail; return what was seen of the others beside what they say without it."""
    bodies = [greedy(lab.prompt(12), 120) for _ in range(OTHERS)]
    victim = {**marked(lab), **extra}
    async with lab.server(fault=fault) as server:
        alone = await gathered(server, [*bodies, greedy(lab.prompt(12), 30)])
        before = (await server.metrics()).value("vllm:request_success_total", 'finished_reason="error"')
        *others, struck = await gathered(server, [*bodies, victim])
        following = await server.ask(COMPLETIONS, greedy(lab.prompt(5), 5))
        health = await server.health()
        await server.until_load()
        metrics = await server.metrics()
        code = await code_after_term(server)
    counted = metrics.value("vllm:request_success_total", 'finished_reason="error"') - before
    pairs = list(zip(alone, others, strict=False))
    figures = {
        "others whole": sum(one.finish_reason == "length" and one.is_done for one in others),
        "their tokens differing": sum(x != y for a, b in pairs for x, y in zip(a.tokens, b.tokens, strict=False)),
        "victim has an error": str(has_error_event(struck)),
        "what": str((struck.error or {}).get("message", struck.finish_reason))[:60],
        "next request": following.status,
        "/health": health,
        "counted as error": counted,
        "running, waiting, kv": str(metrics.held),
        "exit code": code,
    }
    return figures, struck


async def gathered(server: Server, bodies: Sequence[JSON]) -> list[Stream]:
    """Stream all at once, the last one when the others run; return what they came to, in order."""
    first = [asyncio.ensure_future(server.stream(body)) for body in bodies[:-1]]
    await server.until_load((len(first), len(first), 0), timeout=20)
    last = await server.stream(bodies[-1])
    return [*await asyncio.gather(*first), last]


def harmed_one(figures: JSON) -> bool:
    """Whether one request failed and nothing else did."""
    return bool(
        figures["others whole"] == OTHERS
        and figures["victim has an error"] == "True"
        and figures["next request"] == figures["/health"] == 200
        and figures["running, waiting, kv"] == "(0.0, 0.0, 0.0)"
        and figures["exit code"] == 0
    )


async def r27(lab: Lab) -> Finding:
    """Writing one request's text raises."""
    figures, _ = await one_victim(lab, "detok", {"stop": [f"mark{MARK}"]})
    is_ok = harmed_one(figures) and figures["their tokens differing"] == 0
    return Finding(figures=figures, is_ok=is_ok, note="the sampler's share is R30; grammars: not yet")


async def r29(lab: Lab) -> Finding:
    """A step that has too little memory."""
    figures, struck = await one_victim(lab, "memory", {})
    code = (struck.error or {}).get("code")
    is_ok = harmed_one(figures) and code == "out_of_memory" and not INNARDS.search(str(struck.error))
    return Finding(figures={**figures, "code": str(code)}, is_ok=is_ok)


async def r30(lab: Lab) -> Finding:
    """Logits of one sample that are no numbers."""
    figures, _ = await one_victim(lab, "nan", {})
    return Finding(figures=figures, is_ok=harmed_one(figures) and figures["counted as error"] == 1)


async def r41(lab: Lab) -> Finding:
    """A clock that goes back by an hour amid streams."""
    async with lab.server({"--request-timeout": "120"}, fault="clock") as server:
        before = asyncio.ensure_future(server.stream(greedy(lab.prompt(10), 60)))
        await server.until_load((1, 1, 0))
        server.signal(signal.SIGUSR1)
        streams = [await before, await server.stream(greedy(lab.prompt(10), 10))]
        reply = await server.ask(COMPLETIONS, greedy(lab.prompt(10), 3))
        await server.until_load()
        await asyncio.sleep(0.2)
        text = (await server.metrics()).text
        lines = server.log()
        code = await code_after_term(server)
    created = reply.json["created"] - time.time()
    sums = [line for line in text.splitlines() if "_seconds_sum" in line and float(line.split()[-1]) < 0]
    spans = [line[name] for line in lines for name in ("queue_ms", "ttft_ms", "total_ms") if name in line]
    figures = {
        "streams whole": sum(one.finish_reason == "length" and one.is_done for one in streams),
        "next request": reply.status,
        "its clock is behind by s": round(-created),
        "negative times": len(sums) + sum(one < 0 for one in spans),
        "longest logged ms": milliseconds(max(spans) / 1e3),
        "exit code": code,
    }
    is_ok = figures["streams whole"] == 2 and reply.status == 200 and created < -3000 and code == 0
    return Finding(figures=figures, is_ok=is_ok and figures["negative times"] == 0 and max(spans) < 600_000)


CHECKS = (
    Check("R26", "a step raises amid streams", "error + [DONE] ≤ 1 s; 500; /health 503; exit 1", r26),
    Check("R27", "writing one answer raises", "only it fails; others' tokens the same", r27),
    Check("R28", "a step hangs; the thread ends", "errors ≤ step timeout + 5 s; stack dump; /health 503", r28),
    Check("R29", "MemoryError in a step", "one 503 without innards, server alive", r29),
    Check("R30", "NaN logits of one sample", "one error, counted, no crash", r30),
    Check("R41", "time.time goes back by an hour", "no negative times, no timeouts", r41),
)
