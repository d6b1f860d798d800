"""The `serve` workload: concurrent streaming chats over HTTP against a server of each engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from harness import events
from peers.process import Peer, launch
from peers.roster import Plan

CHATS, TOKENS = 32, 64
TOPICS = (
    *("the sea", "bicycles", "photosynthesis", "Roman roads", "sourdough bread", "jazz", "glaciers", "chess"),
    *("volcanoes", "tea", "satellites", "honey bees", "lighthouses", "origami", "coral reefs", "railways"),
)
KINDS = ("Write a short paragraph about {}.", "Explain {} to a ten year old, step by step.")


def chat_prompts(repetition: int) -> list[str]:
    """Return the questions; the first words differ, so that no cached prefix answers."""
    asked = [kind.format(topic) for topic in TOPICS for kind in KINDS]
    return [f"(Request {repetition}-{i}) {text}" for i, text in enumerate(asked[:CHATS])]


@dataclass
class ChatServer(Peer):
    """Owns a server's process group."""

    port: int = 0
    ready_seconds: float = 0.0
    """From the start of the process to the first 200 of /health."""
    model: str = ""

    def wait(self, started: float) -> None:
        """Wait until /health says 200, and ask for the model's name. Raises `RuntimeError` if it ends or hangs."""
        while self._get("/health") is None:
            if self.process.poll() is not None:
                raise self.failure("the server ended before it was ready")
            if time.perf_counter() - started > self.limit:
                raise self.failure(f"the server was not ready after {self.limit:.0f} s")
            time.sleep(0.02)
        self.ready_seconds = time.perf_counter() - started
        reply = self._get("/v1/models")
        if reply is None:
            raise self.failure("the server lists no model")
        self.model = json.loads(reply)["data"][0]["id"]

    def _get(self, path: str) -> bytes | None:
        """Return the body of a reply with status 200, or None."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return body if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def chats(self, prompts: list[str], tokens: int) -> list[tuple[float, int]]:
        """Run chats together; return each one's seconds to its first words, and its tokens. Raises `RuntimeError`."""

        async def all_chats() -> list[tuple[float, int]]:
            return await asyncio.gather(*(_chat(self, prompt, tokens) for prompt in prompts))

        try:
            return asyncio.run(asyncio.wait_for(all_chats(), self.limit))
        except TimeoutError:
            self.end()
            raise self.failure(f"chats not answered after {self.limit:.0f} s") from None
        except (OSError, RuntimeError, ValueError) as error:
            raise self.failure(f"{type(error).__name__}: {error}") from None

    def warm_up(self) -> None:
        """Run two short chats."""
        self.chats(["Hello", "Good morning"], 4)

    def measure(self, repetition: int) -> tuple[float, float]:
        """Run the chats; return output tokens a second, and the median seconds to first words."""
        started = time.perf_counter()
        done = self.chats(chat_prompts(repetition), TOKENS)
        seconds = time.perf_counter() - started
        total = sum(count for _, count in done)
        if total != CHATS * TOKENS:
            raise self.failure(f"{total} tokens came, {CHATS * TOKENS} were asked for")
        return total / seconds, statistics.median(first for first, _ in done)


def start(plan: Plan, log: Path, limit: float) -> ChatServer:
    """Start a server and wait until it is ready. Raises `RuntimeError` if it is not in time."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [part.replace("{port}", str(port)) for part in plan.server]
    started = time.perf_counter()
    server = ChatServer(launch(command, plan.environment, log, has_pipes=False), log, limit, port)
    try:
        server.wait(started)
    except BaseException:
        server.end()
        raise
    return server


async def _chat(server: ChatServer, prompt: str, tokens: int) -> tuple[float, int]:
    """Ask for one chat; return the seconds to its first words, and the number of tokens that the server reports."""
    asked = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, count = time.perf_counter(), 0.0, 0
    async for event in events(server.port, "/v1/chat/completions", asked):
        if not first and any(choice["delta"].get("content") for choice in event["choices"]):
            first = time.perf_counter() - started
        count = (event.get("usage") or {}).get("completion_tokens", count)
    if not first:
        raise ValueError("no words came")
    return first, count
