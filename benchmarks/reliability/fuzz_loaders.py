"""Opens a hundred thousand damaged model files in full: each must load, or be refused in one line.

    python benchmarks/reliability/fuzz_loaders.py [--mutants N] [--seed N] [--only FORMAT [--index N]]

Each mutant's header, configuration, tokenizer and chat template are read and used, and every weight is unpacked. It
fails when anything but a `ModelError` comes out (a warning counts), when it takes more than 2 seconds of CPU time or
more memory than twice its bytes and 8 MB (VmHWM, reset before each), or when the process dies or hangs. One line for
each format; the last line is one JSON object. A failure is printed with the options that repeat it, and makes the exit
status 1. Linux only. The seeds and the mutator are those of tests/security. About six minutes on one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.security.mutants import Seed, lay_out, mutant, seeds
from tests.security.opening import attempt

MAX_SECONDS, SPARE_BYTES = 2.0, 8 << 20
HANG_SECONDS = 120.0
"""For a part of the mutants, which take less than a second."""
ROOM_BYTES = 4 << 30
"""Of address space beyond what the process has when it starts: what asks for more gets an error, not the machine."""
PART, WARM_UP = 50, 200
SHARES = {
    **{"GGUF": 36, "GGUF (SentencePiece)": 18, "safetensors": 24, "config.json": 12, "tokenizer.json": 5},
    **{"tokenizer.json (SentencePiece)": 4, "tokenizer_config.json": 3, "tiktoken": 2, "tokenizer.pkl": 2},
    **dict.fromkeys(("nanochat .pt", "nanochat .pt (G1)", "nanochat meta", "nanochat config.json"), 1),
}
"""Of a hundred and ten; every other format has half a share."""


class Outcome(NamedTuple):
    """Result of one mutant."""

    index: int
    is_refused: bool = False
    seconds: float = 0.0
    num_bytes: int = 0
    failure: str = ""


def status_bytes(name: str) -> int:
    """Return a size from /proc/self/status."""
    return 1024 * int(re.findall(rf"(?m)^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text())[0])


def open_one(seed: Seed, path: Path, run: int, index: int) -> Outcome:
    """Open one mutant and judge it."""
    data = mutant(seed, run, index)
    path.write_bytes(data)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far: proc_pid_clear_refs(5)
    before, start = status_bytes("VmRSS"), time.thread_time()
    is_refused, failure = False, ""
    try:
        is_refused = attempt(seed, path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust code is no `Exception`
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "nano_inference" in f.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the test"
        failure = f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}"
    seconds, num_bytes = time.thread_time() - start, max(0, status_bytes("VmHWM") - before)
    if not failure and seconds > MAX_SECONDS:
        failure = f"took {seconds:.1f} s"
    if not failure and num_bytes > 2 * len(data) + SPARE_BYTES:
        failure = f"took {num_bytes} bytes of memory for a file of {len(data)}"
    return Outcome(index, is_refused, seconds, num_bytes, failure)


OPENED: dict[str, tuple[Seed, Path]] = {}
"""Of a process that opens mutants: the format's name, its seed and the file that is written."""


def prepare(name: str, directory: str) -> None:
    """Prepare a process: warnings are errors, a panic is not printed before it can be caught, memory is limited."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["RUST_BACKTRACE"] = "0"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    seed = seeds()[name]
    path = lay_out(seed, Path(directory))
    OPENED[name] = seed, path
    for index in range(WARM_UP):  # what the libraries keep for good belongs to no mutant
        with suppress(BaseException):
            attempt(seed, path)
            path.write_bytes(mutant(seed, -1, index))
    gc.collect()
    limit = status_bytes("VmSize") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def open_part(name: str, run: int, indices: range) -> list[Outcome]:
    """Open some mutants."""
    return [open_one(*OPENED[name], run, index) for index in indices]


def outcomes(name: str, run: int, indices: range) -> list[Outcome]:
    """Return every mutant's outcome; after a part whose process died or hung, its mutants are opened one by one."""
    found: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        multiprocessing.get_context("spawn").Pool(1, prepare, (name, directory)) as pool,
    ):
        while indices:
            part, indices = indices[:PART], indices[PART:]
            try:
                found += pool.apply_async(open_part, (name, run, part)).get(HANG_SECONDS)
            except multiprocessing.TimeoutError:
                if len(part) == 1:
                    return [Outcome(part[0], failure="the process died or hung")]
                break
        else:
            return found
    for index in part:
        found += outcomes(name, run, range(index, index + 1))
    return found + outcomes(name, run, indices)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=110_000, help="of all formats together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(seeds()), help="one format")
    parser.add_argument("--index", type=int, help="one mutant of that format")
    given = parser.parse_args()
    os.environ["PYTHONSAFEPATH"] = "1"  # a spawned Python would look for modules in the current directory first
    shares = {name: SHARES.get(name, 0.5) for name in seeds()}
    rows, num_failed = [], 0
    print(f"{'format':32} {'mutants':>8} {'accepted':>8} {'refused':>8} {'failed':>8} {'worst ms':>9} {'worst B':>9}")
    for name in [given.only] if given.only else shares:
        count = given.mutants if given.only else max(1, round(given.mutants * shares[name] / sum(shares.values())))
        indices = range(count) if given.index is None else range(given.index, given.index + 1)
        found = outcomes(name, given.seed, indices)
        failures = [one for one in found if one.failure]
        num_refused, worst_ms = sum(one.is_refused for one in found), 1e3 * max(one.seconds for one in found)
        counts = (len(found), len(found) - num_refused - len(failures), num_refused, len(failures))
        worst_bytes = max(one.num_bytes for one in found)
        print(
            f"{name:32}" + "".join(f" {count:8}" for count in counts) + f" {worst_ms:9.1f} {worst_bytes:9}", flush=True
        )
        for one in failures[:20]:
            print(f"  --seed {given.seed} --only {name!r} --index {one.index}: {one.failure}", flush=True)
        num_failed += len(failures)
        rows.append({"name": name, "counts": counts, "worst_ms": worst_ms, "worst_bytes": worst_bytes})
    num_mutants = sum(row["counts"][0] for row in rows)
    print(json.dumps({"passed": not num_failed, "seed": given.seed, "mutants": num_mutants, "formats": rows}))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
