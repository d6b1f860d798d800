"""Checks of how a server starts, what it will not start with, and how it ends."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness import Check, Finding, Lab, Server, greedy, launch, milliseconds, until
from queueing import COMPLETIONS, ONE_AT_A_TIME, fill
from wires import Stream

REPOSITORY = Path(__file__).resolve().parents[2]


async def first_ready(server: Server) -> tuple[float, float, set[int]]:
    """Wait until /health is 200; return when the port was open, when it was ready, and the statuses seen."""
    await server.listening()
    opened, seen = time.monotonic() - server.began, set()
    while 200 not in seen:
        seen.add(await server.health())
        await asyncio.sleep(0.01)
    return opened, time.monotonic() - server.began, seen


async def r1(lab: Lab) -> Finding:
    """A cold start."""
    starts = []
    for _ in range(lab.size(1, 5)):
        async with lab.server(waits=False) as server:
            starts.append(await first_ready(server))
    helps = []
    for _ in range(lab.size(3, 10)):
        page = await launch(["-m", "nano_inference", "serve", "--help"])
        await page.exit()
        helps.append(time.monotonic() - page.began)
    opened, ready, _ = min(starts, key=lambda one: one[1])
    seen = set().union(*(one[2] for one in starts))
    figures = {
        "port open s": round(opened, 2),
        "ready s": round(ready, 2),
        "statuses": str(sorted(seen)),
        "--help s": round(min(helps), 2),
    }
    return Finding(figures=figures, is_ok=ready <= 5 and min(helps) <= 0.3 and seen == {200, 503})


# ---- the end --------------------------------------------------------------------------------------------------------


async def ended(server: Server, number: signal.Signals = signal.SIGTERM) -> tuple[float, int]:
    """Send a signal; return how long the process took to end, and its exit code."""
    began = time.monotonic()
    server.signal(number)
    code = await server.exit(120)
    return time.monotonic() - began, code


async def r31(lab: Lab) -> Finding:
    """SIGTERM to a server that is idle, that answers, that loads."""
    async with lab.server() as server:
        idle, idle_code = await ended(server)
        tracebacks = server.has_traceback
    async with lab.server(waits=False) as server:
        await server.listening()
        loading, loading_code = await ended(server)
        tracebacks |= server.has_traceback
    async with lab.server() as server:
        tasks = await fill(lab, server, 4, 60)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        await until(lambda: True)
        refused = await refusal(lab, server)
        streams: list[Stream] = await asyncio.gather(*tasks)
        answered = time.monotonic() - began
        code = await server.exit(60)
        loaded = time.monotonic() - began
        tracebacks |= server.has_traceback
    whole = sum(one.finish_reason == "length" and one.is_done for one in streams)
    figures = {
        "idle s": round(idle, 2),
        "loading s": round(loading, 2),
        "answered s": round(answered, 2),
        "then ended s": round(loaded - answered, 2),
        "whole of 4": whole,
        "new request": refused,
        "exit codes": f"{idle_code} {loading_code} {code}",
        "traceback": str(tracebacks),
    }
    is_ok = idle <= 1 and loading <= 2 and whole == 4 and refused == 503 and not tracebacks and loaded <= 32
    return Finding(figures=figures, is_ok=is_ok and (idle_code, loading_code, code) == (0, 0, 0))


async def refusal(lab: Lab, server: Server) -> int:
    """Return what a new request gets once the server has understood that it is to end."""
    while (await server.ask("/ready")).status == 200:
        await asyncio.sleep(0.005)
    return (await server.ask(COMPLETIONS, greedy(lab.prompt(5), 2))).status


async def r32(lab: Lab) -> Finding:
    """A second signal."""
    figures: dict[str, float | int | str] = {}
    is_ok = True
    for first, second in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)):
        async with lab.server() as server:
            tasks = await fill(lab, server, 4, 1900)
            server.signal(first)
            await refusal(lab, server)
            seconds, code = await ended(server, second)
            streams = await asyncio.gather(*tasks)
            num_errors = sum(one.is_done and one.error is not None for one in streams)
            is_ok &= seconds <= 1 and code == 0 and num_errors == 4 and not server.has_traceback
        figures |= {f"{second.name} twice s": round(seconds, 2), f"{second.name} errors of 4": num_errors}
    note = "Ctrl-C in chat: tests/cli/test_cli.py"
    return Finding(figures=figures, is_ok=is_ok, note=note)


async def r33(lab: Lab) -> Finding:
    """kill -9 amid streams, and again on the same port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = {"--port": str(port)}
    async with lab.server(options, waits=False) as server:
        _, cold, _ = await first_ready(server)
        tasks = await fill(lab, server, 4, 1900)
        server.signal(signal.SIGKILL)
        await server.exit()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with lab.server(options, waits=False) as server:
        _, again, _ = await first_ready(server)
        reply = await server.ask(COMPLETIONS, greedy(lab.prompt(5), 2))
    figures = {"first start s": round(cold, 2), "after kill -9 s": round(again, 2), "request": reply.status}
    return Finding(figures=figures, is_ok=reply.status == 200 and again <= 1.25 * cold)


# ---- what it will not start with ------------------------------------------------------------------------------------


def damaged(scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield models that cannot be served."""
    sys.path.insert(0, str(REPOSITORY))
    tiny = importlib.import_module("tests.server.tiny")
    whole: Path = tiny.make_tiny(scratch / "whole")
    for name, file, change in (
        ("truncated safetensors", "model.safetensors", lambda data: data[:-100]),
        ("half a safetensors header", "model.safetensors", lambda data: data[:20]),
        ("tokenizer that is no JSON", "tokenizer.json", lambda data: b"{" + data),
        ("tokenizer of another kind", "tokenizer.json", lambda data: b'{"model": {"type": "Nothing"}}'),
        ("no config", "config.json", lambda data: None),
        ("config that is no JSON", "config.json", lambda data: data[:40]),
        ("no tokenizer", "tokenizer.json", lambda data: None),
    ):
        copy = scratch / name.replace(" ", "-")
        shutil.copytree(whole, copy)
        changed = change((copy / file).read_bytes())
        if changed is None:
            (copy / file).unlink()
        else:
            (copy / file).write_bytes(changed)
        yield name, copy
    yield "no such directory", scratch / "nowhere"
    (scratch / "empty").mkdir()
    yield "empty directory", scratch / "empty"
    (scratch / "text.gguf").write_bytes(b"GGUF" + bytes(10))
    yield "truncated GGUF", scratch / "text.gguf"
    (scratch / "pipe.gguf").mkdir()
    yield "a directory called .gguf", scratch / "pipe.gguf"


async def r34(lab: Lab) -> Finding:
    """Ports and models that cannot be used."""
    wrong: list[str] = []
    took: dict[str, float] = {}
    taken = socket.create_server(("127.0.0.1", 0))
    cases = [("port in use", lab.model, {"--port": str(taken.getsockname()[1])})]
    cases += [(name, str(path), {}) for name, path in damaged(lab.scratch)]
    for name, model, options in cases:
        async with lab.server(options, model=model, waits=False) as server:
            try:
                code = await server.exit(60)
            except TimeoutError:
                code = -1
            seconds = time.monotonic() - server.began
        took[name] = seconds
        lines = [line for line in server.lines if not line.startswith("listening on")]
        if code not in (1, 2) or len(lines) != 1 or server.has_traceback:
            wrong.append(f"{name}: exit {code}, {len(lines)} lines: {' / '.join(lines)[:150]}")
    taken.close()
    slowest = max(took.values())
    figures = {
        "cases": len(took),
        "wrong": len(wrong),
        "slowest s": round(slowest, 2),
        "it is": max(took, key=lambda one: took[one]),
    }
    return Finding(figures=figures, is_ok=not wrong and slowest <= 2, note="; ".join(wrong))


# ---- deadlines and surroundings -------------------------------------------------------------------------------------


async def r35(lab: Lab) -> Finding:
    """A long request where a second is allowed."""
    async with lab.server({"--request-timeout": "1"}) as server:
        await server.ask(COMPLETIONS, greedy(lab.prompt(5), 1))
        began = time.monotonic()
        stream = await server.stream(greedy(lab.prompt(10), 1900))
        streamed = time.monotonic() - began
        whole = await server.ask(COMPLETIONS, greedy(lab.prompt(10), 1900))
        idle = await server.until_load()
    choice = whole.json["choices"][0] if whole.status == 200 else {}
    figures = {
        "streamed s": round(streamed, 2),
        "ended as": f"{stream.finish_reason}, {stream.stop_reason}",
        "whole s": round(whole.seconds, 2),
        "whole ended as": f"{choice.get('finish_reason')}, {choice.get('stop_reason')}",
        "idle after ms": milliseconds(idle),
    }
    is_length = figures["ended as"] == figures["whole ended as"] == "length, timeout"
    return Finding(figures=figures, is_ok=is_length and all(1 <= one <= 1.3 for one in (streamed, whole.seconds)))


async def served_once(lab: Lab, env: Mapping[str, str], cwd: Path, options: dict[str, str]) -> str:
    """Start a server there and ask it once; return how that went."""
    async with lab.server(options, env=env, cwd=cwd, waits=False) as server:
        try:
            await server.ready()
            chat = {"messages": [{"role": "user", "content": "Grüße 世界"}], "max_tokens": 3}
            reply = await server.ask("/v1/chat/completions", chat)
            _, code = await ended(server)
            return f"{reply.status} {code}{' traceback' if server.has_traceback else ''}"
        except RuntimeError as error:
            return str(error)[-200:]


async def r47(lab: Lab) -> Finding:
    """No home, a directory that cannot be written, an old locale, an odd time zone, two servers with one cache."""
    locked = lab.scratch / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    usual = dict(os.environ)
    homeless = {name: value for name, value in usual.items() if name != "HOME" and not name.startswith("XDG_")}
    both = {"--cache": str(lab.scratch / "cache")}
    places: dict[str, tuple[Mapping[str, str], dict[str, str]]] = {
        "no $HOME": (homeless, {}),
        "HOME that is not there": ({**usual, "HOME": "/nonexistent"}, {}),
        "LC_ALL=C": ({**usual, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}),
        "TZ": ({**usual, "TZ": "Antarctica/Troll"}, {}),
        "TZ that is none": ({**usual, "TZ": ":/etc/passwd"}, {}),
    }
    figures: dict[str, float | int | str] = {}
    for name, (env, options) in places.items():
        figures[name] = await served_once(lab, env, locked, options)
    two = await asyncio.gather(*(served_once(lab, usual, locked, both) for _ in range(2)))
    figures |= {"two with one cache": ", ".join(two)}
    wrong = [one for one in figures.values() if one not in ("200 0", "200 0, 200 0")]
    note = "" if os.geteuid() else "run as root, for whom every directory can be written"
    return Finding(figures=figures, is_ok=not wrong, note=note)


async def r49(lab: Lab) -> Finding:
    """OpenAI's client before a full queue."""
    try:
        from openai import AsyncOpenAI
    except ImportError:
        return Finding(figures={}, is_ok=None, note="needs the package openai")
    async with lab.server(ONE_AT_A_TIME) as server:
        steady = await server.stream(greedy(lab.prompt(10), 20))
        per_token = (steady.times[-1] - steady.times[0]) / 19
        tokens = max(2, int(1.2 / per_token / 2))
        holders = [asyncio.ensure_future(server.stream(greedy(lab.prompt(10), tokens))) for _ in range(2)]
        await server.until_load((2, 1, 1))
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=2)
        began = time.monotonic()
        name = (await server.ask("/v1/models")).json["data"][0]["id"]
        try:
            reply = await client.completions.create(model=name, prompt="Hello", max_tokens=2)
            outcome = f"{reply.usage.completion_tokens if reply.usage else 0} tokens"
        except Exception as error:
            outcome = type(error).__name__
        seconds = time.monotonic() - began
        await client.close()
        await asyncio.gather(*holders)
        await asyncio.sleep(0.2)
        lines = [line for line in server.log() if line["path"] == COMPLETIONS]
    refused = sum(line.get("status") == 503 for line in lines)
    figures = {"outcome": outcome, "tries": refused + 1, "s": round(seconds, 2), "refused": refused}
    is_ok = "tokens" in outcome and 1 <= refused <= 2 and seconds >= refused * 1.0
    return Finding(
        figures=figures, is_ok=is_ok, note="Retry-After is 1 s; it can fail when the queue stays full for 2 s"
    )


CHECKS = (
    Check("R1", "cold start", "503 then 200; ready ≤ 5 s; --help ≤ 0.3 s", r1),
    Check("R31", "SIGTERM idle, loading, answering", "exit 0; idle ≤ 1 s, loading ≤ 2 s; answers whole; new 503", r31),
    Check("R32", "a second signal", "≤ 1 s, streams get an error", r32),
    Check("R33", "kill -9 and restart on the port", "≤ 1.25 × the first start", r33),
    Check("R34", "port in use, damaged models", "one line, exit 1 or 2, ≤ 2 s", r34),
    Check("R35", "1900 tokens where 1 s is allowed", "length, timeout after 1.0–1.3 s", r35),
    Check("R47", "no home, C locale, odd TZ, shared cache", "all work", r47),
    Check("R49", "openai client, queue full", "succeeds in ≤ 3 tries, waits Retry-After", r49),
)
