"""The `serve` workload: concurrent streaming chats over HTTP against a server of each engine.

Uses the standard library only: a cheap client, because it runs on the server's cores.
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
from pathlib import Path

from peers.roster import Plan
from peers.worker import end_group, signal_group

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
class ChatServer:
    """Owns a server's process group."""

    plan: Plan
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    limit: float
    """Seconds after which a start or a round of chats counts as hung."""
    ready_seconds: float = 0.0
    """From the start of the process to the first 200 of /health."""
    model: str = ""

    def wait(self, started: float) -> None:
        """Wait until /health says 200, and ask for the model's name. Raises `RuntimeError` when it ends or hangs."""
        while self._get("/health") is None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended before it was ready; it wrote to {self.log}")
            if time.perf_counter() - started > self.limit:
                raise RuntimeError(f"the server was not ready after {self.limit:.0f} s; it wrote to {self.log}")
            time.sleep(0.02)
        self.ready_seconds = time.perf_counter() - started
        reply = self._get("/v1/models")
        if reply is None:
            raise RuntimeError(f"the server lists no model; it wrote to {self.log}")
        self.model = json.loads(reply)["data"][0]["id"]

    def _get(self, path: str) -> bytes | None:
        """Return what the server answers with status 200, or None."""
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
        """Run chats together; return each one's seconds to its first words, and its tokens.

        A server that ends or hangs raises `RuntimeError`.
        """
        try:
            return asyncio.run(asyncio.wait_for(_chats(self, prompts, tokens), self.limit))
        except TimeoutError:
            self.end()
            raise RuntimeError(f"chats not answered after {self.limit:.0f} s; it wrote to {self.log}") from None
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}; the server wrote to {self.log}") from None

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
            raise RuntimeError(f"{total} tokens came, {CHATS * TOKENS} were asked for; it wrote to {self.log}")
        return total / seconds, statistics.median(first for first, _ in done)

    def pause(self) -> None:
        """Stop every thread of the server."""
        signal_group(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the server run."""
        signal_group(self.process, signal.SIGCONT)

    def end(self) -> None:
        """End the server and what it started."""
        end_group(self.process)


def start(plan: Plan, log: Path, limit: float) -> ChatServer:
    """Start a server and wait until it is ready. Raises `RuntimeError` when it is not in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [part.replace("{port}", str(port)) for part in plan.server]
    started = time.perf_counter()
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | plan.environment,
            start_new_session=True,
        )
    server = ChatServer(plan, process, port, log, limit)
    try:
        server.wait(started)
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
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write("\r\n".join(("POST /v1/chat/completions HTTP/1.1", *headers, "", "")).encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status!r}; it wrote to {server.log}")
        return await _read_words(server, reader, started)
    finally:
        writer.close()


async def _read_words(server: ChatServer, reader: asyncio.StreamReader, started: float) -> tuple[float, int]:
    """Read a stream to its end; return the seconds to its first words, and how many tokens it says that it had."""
    first, count = 0.0, 0
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if not first and any(choice["delta"].get("content") for choice in event["choices"]):
            first = time.perf_counter() - started
        count = (event.get("usage") or {}).get("completion_tokens", count)
    if not first:
        raise RuntimeError(f"no words came; the server wrote to {server.log}")
    return first, count


async def _chats(server: ChatServer, prompts: list[str], tokens: int) -> list[tuple[float, int]]:
    return await asyncio.gather(*(_chat(server, prompt, tokens) for prompt in prompts))
