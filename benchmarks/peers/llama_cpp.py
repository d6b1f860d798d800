"""llama.cpp's server as a worker, over loopback HTTP: llama_cpp.py MODEL.gguf THREADS (llama-server on PATH)."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol import Request, serve

SLOTS = 64
SLOT_TOKENS = 640


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(slots: int, context: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server and wait until it is ready."""
    port, threads = free_port(), sys.argv[2]
    command = ["llama-server", "-m", sys.argv[1], "--host", "127.0.0.1", "--port", str(port), "-t", threads]
    command += ["-tb", threads, "-np", str(slots), "-c", str(context), "-b", "2048", "--no-webui"]
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, port
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("llama-server ended before it was ready")


def complete(port: int, request: Request, seed: int) -> tuple[float | None, int]:
    """Stream one sample; return the moment of its first token, and how many came."""
    sampled = request["temperature"] > 0
    body: dict[str, Any] = {
        "prompt": request["prompt"],
        "n_predict": request["new_tokens"],
        "temperature": request["temperature"],
        "samplers": ["temperature"] if sampled else ["top_k"],
        "top_k": 0 if sampled else 1,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": True,
        "seed": seed,
        "return_tokens": True,
        "n_probs": 1 if sampled else 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    first, total = None, 0
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            first = first or time.perf_counter()
            total = event.get("tokens_predicted", total)
            if event.get("stop"):
                break
    return first, total


def main() -> None:
    """Answer workloads; single requests and batches have servers of their own shape."""
    servers: dict[bool, tuple[subprocess.Popen[bytes], int]] = {}

    def run(requests: list[Request]) -> tuple[float | None, int]:
        jobs = [request for request in requests for _ in range(request["num_samples"])]
        single = len(jobs) == 1
        if single not in servers:
            servers[single] = start(1, 8192) if single else start(SLOTS, SLOTS * SLOT_TOKENS)
        with ThreadPoolExecutor(len(jobs)) as pool:
            done = list(pool.map(lambda job: complete(servers[single][1], job[1], job[0]), enumerate(jobs)))
        return min((first for first, _ in done if first), default=None), sum(count for _, count in done)

    try:
        serve(run, "llama-server")
    finally:
        for process, _ in servers.values():
            process.terminate()


main()
