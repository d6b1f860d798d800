"""Check a model whose chat template does not end."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
import time
from pathlib import Path

from harness import Check, Finding, Lab, Server, milliseconds, polled, quantile
from wires import JSON, Reply

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
CHATS = "/v1/chat/completions"
TIMEOUT_S = 10
BOMBS = {
    "slow": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
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


async def while_bombs_run(server: Server) -> tuple[list[Reply], list[float]]:
    """Send bombs and, until they end, completions; return the bombs' replies and the seconds of each completion."""
    bombs = asyncio.gather(*(server.ask(CHATS, chat(name)) for name in BOMBS))
    seconds = []
    while not bombs.done():
        reply = await server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        seconds.append(reply.seconds if reply.status == 200 else float("inf"))
    return await bombs, seconds


async def t34(lab: Lab) -> Finding:
    """Templates that loop beside /health, completions and honest chats; SIGTERM while they loop."""
    options = {"--kv-cache-bytes": str(8 << 20), "--max-model-len": "", "--num-threads": "1"}
    options["--request-timeout"] = str(TIMEOUT_S)
    async with lab.server(options, model=str(model(lab, "bomb", fused()))) as server:
        await server.ask(CHATS, chat("hello"))
        async with polled(server, "/health") as health:
            late, completions = await while_bombs_run(server)
        honest = await server.ask(CHATS, chat("hello"))
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        code = await server.exit()
        seconds = time.monotonic() - began
    is_named = all("--request-timeout" in reply.json["error"]["message"] for reply in late)
    waited = max(reply.seconds for reply in late)
    figures = {
        "ended with 503": f"{sum(reply.status == 503 for reply in late)} of {len(late)}",
        "after s": round(waited, 1),
        "/health worst ms": milliseconds(max(health)),
        "completion p50 ms": milliseconds(quantile(completions, 0.5)),
        "completion worst ms": milliseconds(max(completions)),
        "honest chat": honest.status,
        "s from SIGTERM to the end": round(seconds, 2),
        "exit code": code,
    }
    is_late = is_named and all(reply.status == 503 for reply in late) and waited <= TIMEOUT_S + 1
    is_ok = is_late and max(health) <= 1 and max(completions) <= TIMEOUT_S and honest.status == 200
    return Finding(figures=figures, is_ok=is_ok and code == 0 and seconds <= 5)


CHECKS = (
    Check(
        "T34", "chat templates that never end", "503 by --request-timeout; /health ≤ 1 s; SIGTERM ends it ≤ 5 s", t34
    ),
)
