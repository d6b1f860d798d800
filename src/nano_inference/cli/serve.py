"""`serve`: an OpenAI-compatible HTTP server of one model."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shlex
import socket
import sys
import threading

from nano_inference.cli.app import no_collection
from nano_inference.cli.arguments import Typed, error_text
from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch
from nano_inference.cli.terminal import note
from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import served_name
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.server.log import set_up_logs
from nano_inference.server.run import bind, serve
from nano_inference.server.security import is_loopback_name
from nano_inference.server.trainers.groups import JOINING
from nano_inference.server.worker_pool import has_stuck_threads
from nano_inference.text.generation_config import described, differing
from nano_inference.types import SamplingParams


def run(engine: EngineConfig, config: ServerConfig, common: Common, typed: Typed) -> int:
    """Serve until a signal; return the exit code."""
    set_up_logs(log_requests=config.log_requests, as_json=config.log_requests, level=logging.WARNING)
    warn(config)
    with bind(config) as listening:
        url = url_of(config, listening)
        if config.replicas is not None or config.workers or config.further_model:
            from nano_inference.cli import fleet

            return fleet.listen(engine, config, common, typed, listening, url)
        return listen(engine, config, common, typed, listening, url)


def listen(
    engine: EngineConfig, config: ServerConfig, common: Common, typed: Typed, listening: socket.socket, url: str
) -> int:
    """Serve one model on a bound socket; return the exit code."""

    def open_model() -> LoadedModel:
        path = fetch(engine.model_path, common)
        with no_collection():
            from nano_inference.server.load import open_model as load  # imports torch, after the port is open

            gc.freeze()  # excludes modules from the collection in `server.run`
            return load(engine, config, name=served_name(engine.model_path, path), path=path)

    def on_listening() -> None:
        note(f"listening on {config.uds or url}, loading {engine.model_path}", common.quiet)

    def on_ready(opened: LoadedModel) -> None:
        facts, _, command = banner(opened, config, url, wanted).rpartition("\n")
        note(facts, common.quiet, indent=2)
        note(command, common.quiet, has_command=True)

    wanted = engine.max_model_len if "max_model_len" in typed.fields else 0
    max_running = engine.max_batch_size
    serving = serve(
        config, listening, open_model, max_running=max_running, on_listening=on_listening, on_ready=on_ready
    )
    try:
        return end_process(asyncio.run(serving))
    except Exception as error:
        if engine_runs():
            note(f"nano-inference: {error_text(error, typed.names)}")
            end_process(1)
        raise


def end_process(code: int) -> int:
    """Return the exit code; if the engine thread still runs (loading, or a stuck step), end the process here.

    Finalizing the interpreter would crash a daemon thread in native code, and would wait for a stuck one.
    """
    if engine_runs() or has_stuck_threads():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def engine_runs() -> bool:
    """True if a thread is alive that drives an engine, stages weights or waits for a trainer."""
    names = ("engine", "weight-staging", JOINING)
    return any(thread.name in names and thread.is_alive() for thread in threading.enumerate())


def warn(config: ServerConfig) -> None:
    """Print warnings about insecure settings."""
    has_key = bool(config.api_key or config.api_key_file)
    if not is_loopback_name(config.host) and not has_key and config.insecure:
        note(f"WARNING: any client that reaches {config.host} can use this server: there is no API key (--insecure)")
    has_admin_key = bool(config.admin_key or config.admin_key_file)
    if config.takes_commands and not is_loopback_name(config.host) and not has_admin_key and config.insecure:
        note(f"WARNING: any client that reaches {config.host} can change weights: there is no admin key (--insecure)")
    if "*" in config.cors_origin:
        note("WARNING: every web page can call this server (--cors-origin *)")


def url_of(config: ServerConfig, listening: socket.socket) -> str:
    """Return the server's URL; for a Unix socket, that of requests over it."""
    if config.uds is not None:
        return f"http://localhost{config.root_path}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listening.getsockname()[1]}{config.root_path}"


def place_lines(config: ServerConfig, url: str) -> list[str]:
    """Return the line that says where the server's pages are, or its socket; none without both."""
    if config.uds is not None:
        return [f"  Unix socket {config.uds}"]
    return [f"  chat page {url}/, dashboard {url}/dashboard, API {url}/docs"] if config.pages else []


def banner(opened: LoadedModel, config: ServerConfig, url: str, wanted_context: int = 0) -> str:
    """Return the text printed when the server accepts requests; its last line is a command to copy."""
    model, limits = opened.model, opened.model.limits
    num_slots = limits.num_blocks * limits.block_size
    length, models_own = limits.max_model_len, model.max_positions
    context = f"{length} tokens" + ("" if length == models_own else f" of the model's {models_own}")
    if wanted_context > models_own:
        context = f"{length} tokens, the model's limit (--max-model-len {wanted_context} is more)"
    has_key = bool(config.api_key or config.api_key_file)
    own = "the model's generation_config.json"
    origin = own if model.generation else f"--generation-config {config.generation_config}"
    lines = [
        f"ready: {', '.join(model.all_names)}",
        *place_lines(config, url),
        f"  context {context}, KV cache {num_slots} tokens, " + ("API key required" if has_key else "no API key"),
        f"  default sampling of requests: {differing(model.generation) or 'temperature 1.0'} ({origin})",
    ]
    if config.pages:
        lines.append(f"  sampling of the chat page: {described(*model.chat_defaults)}")
    if num_slots < limits.max_model_len:
        lines.append(f"  a request has at most {num_slots} tokens, the size of the KV cache (--kv-cache-bytes sets it)")
    if model.calculates:
        lines.append('  the model\'s calculator answers in requests with "calculator": true')
    if config.enable_rl:
        source = (
            f"a process group, or a directory below {config.weights_dir}" if config.weights_dir else "a process group"
        )
        lines.append(
            f"  routes for trainers are enabled; weights come from {source}; logprobs are " + config.logprobs_mode
        )
    path, body = "completions", '"prompt": "Once upon a time", "stream": true'
    if model.dialogue is not None:
        path, sampling = "chat/completions", model.chat_defaults.sampling
        body = '"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "stream": true'
        shape = {name: value for name, value in sampling.items() if value != getattr(SamplingParams(), name)}
        body += "".join(f', "{name}": {value}' for name, value in shape.items() if name != "max_tokens")
        body += ', "calculator": true' if model.calculates else ""
    key = ' -H "authorization: Bearer $KEY"' if has_key else ""
    curl = "curl -N" if config.uds is None else f"curl --unix-socket {shlex.quote(config.uds)} -N"
    return "\n".join([*lines, f"  {curl} {url}/v1/{path}{key} -H 'content-type: application/json' -d '{{{body}}}'"])
