"""The process of one replica: the unchanged server on a free port, with its setup from stdin (see `child`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import resolve
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.server.log import set_up_logs
from nano_inference.server.run import bind, serve


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
        config = ServerConfig.from_dict(setup["server"])
        engine = EngineConfig.from_dict(setup["engine"])
        with bind(config) as listening:
            code = run(engine, config, listening, setup["name"], Path(setup["cache"]))
    except Exception as error:
        report({"error": " ".join(str(error).split()) or type(error).__name__})
    finally:
        sys.stderr.flush()
        os._exit(code)  # finalizing would wait for an engine thread that is stuck


def run(engine: EngineConfig, config: ServerConfig, listening: socket.socket, name: str, cache: Path) -> int:
    """Serve on a bound socket; return the exit code."""

    def open_model() -> LoadedModel:
        from nano_inference.server.opening import open_model as load  # imports torch, after the port is open

        return load(engine, config, name=name, path=resolve(engine.model_path, cache))

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
    """Write a line of JSON to the parent."""
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def stop_at_end_of_input() -> None:
    """Wait until the parent has closed the pipe, then request shutdown."""
    while sys.stdin.buffer.read(1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
