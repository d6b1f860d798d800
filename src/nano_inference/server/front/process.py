"""`ServerProcess`: a server on a free port in a process of its own, and what that process runs.

The parent writes the setup as a line of JSON to stdin and keeps the pipe open: at its end, also when the parent is
killed, the child drains and exits, so no process is left behind. The child writes one line of JSON to stdout: its URL,
or why it could not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import resolve
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.server.log import set_up_logs
from nano_inference.server.run import bind, serve
from nano_inference.support.processes import PYTHON, start_worker

COMMAND: tuple[str, ...] = (*PYTHON, "-m", "nano_inference.server.front.process")
_DIRECTORY = Path(sys.executable).anchor or "/"
_POLL_S = 0.1  # between two questions whether the process has ended
_LONGEST_REPLY = 1 << 20


class ServerFailed(Exception):
    """A server ended, or could not start. The message is one line."""


class ServerProcess:
    """Owns the process. Its methods are called on one event loop; see `servers.Process`."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._popen = start_worker(COMMAND, cwd=Path(_DIRECTORY), is_read=True)
        self.pid = self._popen.pid
        self._reading: asyncio.BaseTransport | None = None
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `ready` reports it
            self._popen.stdin.write(json.dumps(setup) + "\n")
            self._popen.stdin.flush()

    async def ready(self) -> str:
        reader = asyncio.StreamReader(_LONGEST_REPLY)
        loop = asyncio.get_running_loop()
        self._reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._popen.stdout
        )
        line = await reader.readline()
        reply = json.loads(line) if line.endswith(b"\n") else {"error": f"ended with code {await self.wait()}"}
        if "error" in reply:
            raise ServerFailed(str(reply["error"]))
        return str(reply["url"])

    async def wait(self) -> int:
        while (code := self._popen.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return code

    async def memory(self) -> int:
        return await asyncio.to_thread(resident_bytes, self.pid)

    async def stop(self, timeout: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout):
                await self.wait()
        except TimeoutError:
            self._popen.kill()
            await self.wait()
        for pipe in (self._popen.stdin, self._reading or self._popen.stdout):  # the transport owns the pipe
            assert pipe is not None
            with contextlib.suppress(OSError):  # a process that has ended before it read its setup
                pipe.close()


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; those that have ended count as 0."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(one.memory_info().rss)
    return total


def main() -> None:
    """Serve until stdin is closed or a signal comes.

    stdin is a line of JSON: `engine` and `server` (the configurations), `name` (the model's, for clients), `cache`
    (directory of fetched models).
    """
    setup = json.loads(sys.stdin.buffer.readline() or b"{}")
    threading.Thread(target=stop_at_end_of_input, name="parent", daemon=True).start()
    set_up_logs(log_requests=False, as_json=True, level=logging.WARNING)
    code = 1
    try:
        code = run(setup)
    except Exception as error:
        report({"error": " ".join(str(error).split()) or type(error).__name__})
    finally:
        sys.stderr.flush()
        os._exit(code)  # finalizing would wait for an engine thread that is stuck


def run(setup: Mapping[str, Any]) -> int:
    config, engine = ServerConfig.from_dict(setup["server"]), EngineConfig.from_dict(setup["engine"])

    def open_model() -> LoadedModel:
        from nano_inference.server.load import open_model as load  # imports torch, after the port is open

        return load(engine, config, name=setup["name"], path=resolve(engine.model_path, Path(setup["cache"])))

    with bind(config) as listening:
        host = f"[{config.host}]" if ":" in config.host else config.host
        url = f"http://{host}:{listening.getsockname()[1]}"
        serving = serve(
            config,
            listening,
            open_model,
            max_running=engine.max_batch_size,
            on_listening=lambda: None,
            on_ready=lambda _: report({"url": url}),
        )
        return asyncio.run(serving)


def report(reply: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def stop_at_end_of_input() -> None:
    """Wait until the parent has closed the pipe, then request shutdown."""
    while sys.stdin.buffer.read(1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
