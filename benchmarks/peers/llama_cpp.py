"""llama.cpp's server as a worker, over loopback HTTP: llama_cpp.py MODEL.gguf THREADS LLAMA-SERVER.

One server has one slot, another 64; samples of one prompt are asked for together (`n_cmpl`), so that their prompt is
computed once.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol import Request, serve, take_stdout

SLOTS = 64
SLOT_TOKENS = 640


def start(slots: int, context: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server and wait until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port, threads = int(probe.getsockname()[1]), sys.argv[2]
    command = [sys.argv[3], "-m", sys.argv[1], "--host", "127.0.0.1", "--port", str(port), "-t", threads]
    command += ["-tb", threads, "-np", str(slots), "-c", str(context), "-b", "2048", "-fa", "on"]
    command += ["--cache-ram", "0", "--no-webui"]
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, port
        except OSError:
            pass
        time.sleep(0.05)
    raise RuntimeError("llama-server ended before it was ready")


def complete(port: int, request: Request, seed: int) -> tuple[float | None, int]:
    """Stream a request's samples; return the moment of the first token, and how many came."""
    sampled = request["temperature"] > 0
    body: dict[str, Any] = {
        "prompt": request["prompt"],
        "n_predict": request["new_tokens"],
        "n_cmpl": request["num_samples"],
        "temperature": request["temperature"],
        "samplers": ["temperature"] if sampled else ["top_k"],
        "top_k": 0 if sampled else 1,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": True,
        "seed": seed,
        "return_tokens": True,
        "n_probs": int(sampled),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    first, total, left = None, 0, request["num_samples"]
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            first = first or time.perf_counter()
            if event.get("stop"):
                total += event["tokens_predicted"]
                left -= 1
                if not left:
                    break
    return first, total


def main() -> None:
    """Answer workloads; single requests and batches have servers of their own shape."""
    out = take_stdout()
    servers: dict[bool, tuple[subprocess.Popen[bytes], int]] = {}

    def run(requests: list[Request]) -> tuple[float | None, int]:
        single = len(requests) == 1 and requests[0]["num_samples"] == 1
        if single not in servers:
            servers[single] = start(1, 8192) if single else start(SLOTS, SLOTS * SLOT_TOKENS)
        with ThreadPoolExecutor(len(requests)) as pool:
            done = list(pool.map(lambda job: complete(servers[single][1], job[1], job[0]), enumerate(requests)))
        return min((first for first, _ in done if first), default=None), sum(count for _, count in done)

    output = subprocess.run([sys.argv[3], "--version"], capture_output=True, text=True)
    found = re.search(r"(?m)^version:\s*(.*)$", output.stdout + output.stderr)
    try:
        serve(run, found[1] if found else "unknown", out)
    finally:
        for process, _ in servers.values():
            process.terminate()


if __name__ == "__main__":
    main()
