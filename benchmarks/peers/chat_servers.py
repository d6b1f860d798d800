"""The `serve` workload: concurrent streaming chats over HTTP against a server of each engine.

Standard library alone: a client that costs little, since it runs on the server's cores.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import time
from dataclasses import dataclass

from peers.roster import Plan

CHATS, TOKENS = 32, 64
TOPICS = (
    *("the sea", "bicycles", "photosynthesis", "Roman roads", "sourdough bread", "jazz", "glaciers", "chess"),
    *("volcanoes", "tea", "satellites", "honey bees", "lighthouses", "origami", "coral reefs", "railways"),
)
KINDS = ("Write a short paragraph about {}.", "Explain {} to a ten year old, step by step.")
PATIENCE = 600.0
"""Seconds until a server must be ready."""


def chat_prompts(repetition: int) -> list[str]:
    """Return the questions; the first words differ, so that no cached prefix answers."""
    asked = [kind.format(topic) for topic in TOPICS for kind in KINDS]
    return [f"(Request {repetition}-{i}) {text}" for i, text in enumerate(asked[:CHATS])]


@dataclass
class ChatServer:
    """Owns a server's process group."""

    plan: Plan
    process: subprocess.Popen[bytes]
    port: int
    ready_seconds: float = 0.0
    model: str = ""

    def wait(self, begun: float) -> None:
        """Wait until the server lists its model and answers a chat: some list it while they load."""
        while time.perf_counter() - begun < PATIENCE:
            if self.process.poll() is not None:
                raise RuntimeError("the server ended before it was ready")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/v1/models")
                answer = connection.getresponse()
                told = json.loads(answer.read())
                connection.request("GET", "/health")
                if answer.status == 200 and connection.getresponse().status == 200:
                    self.model = told["data"][0]["id"]
                    self.ready_seconds = time.perf_counter() - begun
                    return
            except (OSError, http.client.HTTPException, ValueError):
                pass
            time.sleep(0.02)
        raise RuntimeError("the server was not ready in time")

    def pause(self) -> None:
        """Stop every thread of the server."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the server run."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End the server and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(plan: Plan) -> ChatServer:
    """Start a server and wait until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    begun = time.perf_counter()
    command = [part.replace("{port}", str(port)) for part in plan.server]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | plan.environment,
        start_new_session=True,
    )
    server = ChatServer(plan, process, port)
    try:
        server.wait(begun)
    except BaseException:
        server.end()
        raise
    return server


async def _chat(server: ChatServer, prompt: str, tokens: int) -> tuple[float, int]:
    """Ask for one chat; return the seconds to its first words, and the tokens that came."""
    asked = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(asked).encode()
    headers = ("host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}", "connection: close")
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write("\r\n".join(("POST /v1/chat/completions HTTP/1.1", *headers, "", "")).encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server answered {status!r}")
    first, count = 0.0, 0
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if not first and any(choice["delta"].get("content") for choice in event["choices"]):
            first = time.perf_counter() - begun
        count = (event.get("usage") or {}).get("completion_tokens", count)
    writer.close()
    return first, count


async def _chats(server: ChatServer, prompts: list[str], tokens: int) -> list[tuple[float, int]]:
    return await asyncio.gather(*(_chat(server, prompt, tokens) for prompt in prompts))


def measure(server: ChatServer, repetition: int) -> tuple[float, float]:
    """Run the chats; return output tokens a second, and the median seconds to first words."""
    begun = time.perf_counter()
    done = asyncio.run(_chats(server, chat_prompts(repetition), TOKENS))
    seconds = time.perf_counter() - begun
    total = sum(count for _, count in done)
    if total != CHATS * TOKENS:
        raise RuntimeError(f"{total} tokens came, {CHATS * TOKENS} were asked for")
    return total / seconds, statistics.median(first for first, _ in done)


def warm_up(server: ChatServer) -> None:
    """Run two short chats."""
    asyncio.run(_chats(server, ["Hello", "Good morning"], 4))
