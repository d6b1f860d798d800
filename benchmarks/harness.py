"""What the benchmarks share: random prompts, alternating rounds, a server process, percentiles, tables."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nano_inference import InferenceEngine


def options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring, with the options of most benchmarks."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="what EngineConfig.model_path takes")
    parser.add_argument("--threads", type=int, help="CPU threads of an engine")
    return parser


def numbers(text: str) -> list[int]:
    """Read an option: numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return ordinary tokens of the default model (its special ones have lower ids): no two texts share a prefix."""
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def alternate(contenders: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Return what each contender measured in each round after round 0, which warms up.

    The contenders take turns, so a drift of the machine's speed affects all equally.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, measure in contenders.items():
            value = measure(number)
            found[name] += [value] if number else []
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def print_row(name: str, *cells: float | str) -> None:
    """Print a row of a table, its name and columns of equal width."""
    shown = (cell if isinstance(cell, str) else f"{cell:.{1 if abs(cell) >= 10 else 3}f}" for cell in cells)
    print(f"{name:<28}" + "".join(f"{cell:>14}" for cell in shown), flush=True)


def processor() -> str:
    """Return the processor's name."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"(?m)^model name\s*: (.*)$", path.read_text() if path.is_file() else "")
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor()


def wait_for_pages(engine: InferenceEngine) -> None:
    """Wait until the KV cache on the CPU has its memory, which takes a core for seconds."""
    store = getattr(engine.parts.runner, "store", None)
    if hasattr(store, "wait_for_pages"):
        store.wait_for_pages(60)


@contextmanager
def serving(model: str, words: Sequence[str]) -> Iterator[tuple[int, float]]:
    """Serve a model while the block runs; yield the port, and the seconds until requests were accepted."""
    started, port = time.perf_counter(), 0
    command = (sys.executable, "-P", "-m", "nano_inference", "serve", "--model", model, "--port", "0")
    with subprocess.Popen([*command, "--no-log-requests", *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                found = re.search(r"listening on http://127.0.0.1:(\d+)", line)
                port = int(found[1]) if found else port
                if line.startswith("ready:"):
                    yield port, time.perf_counter() - started
                    return
            raise SystemExit("the server did not start")
        finally:
            process.terminate()


async def events(
    port: int, path: str, asked: Mapping[str, Any], more: Iterable[str] = ()
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed reply. A cheap client, because it runs on the server's cores."""
    body = json.dumps(asked).encode()
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", "connection: close", *more]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status!r}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        writer.close()
