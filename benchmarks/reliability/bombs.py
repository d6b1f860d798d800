"""Check hostile models: chat templates and tokenizers that use unbounded time or memory."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from harness import Check, Finding, Lab, Server, milliseconds, polled, quantile
from wires import JSON, Reply

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
CHATS = "/v1/chat/completions"
BOMBS = {
    "slow": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "text": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "membership": "{% set l = range(9999)|list %}{% for i in range(99999) %}{% if 'x' in l %}{% endif %}{% endfor %}",
    "sort": "{% set l = range(99999)|list %}{% for i in range(99999) %}{% if l|sort|first %}{% endif %}{% endfor %}",
}
HONEST = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"


def fused() -> str:
    """Return a template that is a bomb for a message with a bomb's name."""
    branches = "".join(
        f"{{% if messages[-1].content == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items()
    )
    return branches + HONEST


def model(lab: Lab, name: str, template: str) -> Path:
    """Write a small random model with this chat template."""
    directory: Path = lab.scratch / name
    directory.mkdir(exist_ok=True)
    importlib.import_module("tests.server.tiny").make_tiny(directory, template=template)
    return directory


def chat(content: str) -> JSON:
    """Return the body of a chat with one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


async def while_bombs_run(server: Server, num_bombs: int) -> tuple[list[Reply], list[float]]:
    """Send bombs and, until all are refused, completions; return the refusals and the seconds of each completion."""
    names = [*BOMBS] * num_bombs
    bombs = asyncio.gather(*(server.ask(CHATS, chat(name)) for name in names))
    seconds = []
    while not bombs.done():
        reply = await server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        seconds.append(reply.seconds if reply.status == 200 else float("inf"))
    return await bombs, seconds


async def t34(lab: Lab) -> Finding:
    """Template bombs beside /health, completions and honest chats; SIGTERM amid a bomb."""
    options = {"--kv-cache-bytes": str(8 << 20), "--max-model-len": "", "--num-threads": "1"}
    async with lab.server(options, model=str(model(lab, "bomb", fused()))) as server:
        await server.ask(CHATS, chat("hello"))
        files = server.num_files
        async with polled(server, "/health") as health:
            refused, completions = await while_bombs_run(server, lab.size(2, 10))
        honest = await server.ask(CHATS, chat("hello"))
        leaked = server.num_files - files
        last = asyncio.ensure_future(server.ask(CHATS, chat("slow")))
        await asyncio.sleep(0.5)  # it is being rendered
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        code = await server.exit()
        seconds = time.monotonic() - began
        await asyncio.gather(last, return_exceptions=True)
    messages = {reply.json["error"]["message"] for reply in refused}
    figures = {
        "bombs refused with 400": f"{sum(reply.status == 400 for reply in refused)} of {len(refused)}",
        "/health p99 ms": milliseconds(quantile(health, 0.99)),
        "/health worst ms": milliseconds(max(health)),
        "completion p99 ms": milliseconds(quantile(completions, 0.99)),
        "honest chat": honest.status,
        "files more": leaked,
        "s from SIGTERM to the end": round(seconds, 2),
        "exit code": code,
    }
    names = ("CPU time", "too much text")
    is_named = all(any(name in text for name in names) for text in messages)
    is_refused = all(reply.status == 400 for reply in refused) and is_named
    is_ok = is_refused and quantile(health, 0.99) <= 0.1 and honest.status == 200 and code == 0 and seconds <= 5
    return Finding(figures=figures, is_ok=is_ok and leaked <= 8)


CHECKS = (
    Check("T34", "chat templates that never end", "400 each; /health p99 ≤ 100 ms; SIGTERM ends it ≤ 5 s", t34),
)
