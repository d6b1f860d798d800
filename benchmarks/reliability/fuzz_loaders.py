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
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.security.mutants import Seed, lay_out, mutant, seeds
from tests.security.opening import attempt

MUTANTS = 110_000
MAX_SECONDS = 2.0
SPARE_BYTES = 8 << 20
HANG_SECONDS = 60.0
"""Without a word from the process that opens the files."""
ROOM_BYTES = 4 << 30
"""Of address space beyond what the process has when it starts: what asks for more gets an error, not the machine."""
REPORT_EVERY = 50
SHOWN_FAILURES = 20
WARM_UP = 200
SHARES = {
    "GGUF": 36,
    "GGUF (SentencePiece)": 18,
    "safetensors": 24,
    "config.json": 12,
    "tokenizer.json": 5,
    "tokenizer.json (SentencePiece)": 4,
    "tokenizer_config.json": 3,
    "tiktoken": 2,
    "tokenizer.pkl": 2,
    "nanochat .pt": 1,
    "nanochat .pt (G1)": 1,
    "nanochat meta": 1,
    "nanochat config.json": 1,
}
"""Of a hundred and ten; every other format has half a share."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One mutant that was neither opened nor refused as it should be."""

    name: str
    index: int
    what: str


@dataclass(slots=True)
class Tally:
    """What came of one format's mutants so far."""

    name: str
    mutants: int = 0
    accepted: int = 0
    refused: int = 0
    worst_ms: float = 0.0
    worst_bytes: int = 0
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One mutant's."""

    index: int
    is_refused: bool
    seconds: float
    num_bytes: int
    failure: str | None


def share(name: str, total: int) -> int:
    """Return how many of all mutants are of one format."""
    shares = {known: SHARES.get(known, 0.5) for known in seeds()}
    return max(1, round(total * shares[name] / sum(shares.values())))


def status_bytes(name: str) -> int:
    """Return a size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def open_one(seed: Seed, path: Path, run: int, index: int) -> Outcome:
    """Open one mutant and judge it."""
    data = mutant(seed, run, index)
    path.write_bytes(data)
    # Forget the peak so far; the kernel's name for that is 5 (proc_pid_clear_refs(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status_bytes("VmRSS"), time.thread_time()
    is_refused, failure = False, None
    try:
        is_refused = attempt(seed, path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust code is no `Exception`
        failure = described(error)
    seconds, num_bytes = time.thread_time() - start, max(0, status_bytes("VmHWM") - before)
    if failure is None and seconds > MAX_SECONDS:
        failure = f"took {seconds:.1f} s"
    if failure is None and num_bytes > 2 * len(data) + SPARE_BYTES:
        failure = f"took {num_bytes} bytes of memory for a file of {len(data)}"
    return Outcome(index, is_refused, seconds, num_bytes, failure)


def described(error: BaseException) -> str:
    """Return what came out, and the last line of the package's that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "nano_inference" in f.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the test"
    return f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}"


def work(name: str, run: int, indices: range, directory: str, pipe: Connection) -> None:
    """Open mutants in a process of their own and send what came of them, a list at a time."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["RUST_BACKTRACE"] = "0"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic writes to it before it can be caught
    seed = seeds()[name]
    path = lay_out(seed, Path(directory))
    for index in range(WARM_UP):  # what the libraries keep for good belongs to no mutant
        try:
            attempt(seed, path)
            path.write_bytes(mutant(seed, -1, index))
        except BaseException:
            continue
    gc.collect()
    limit = status_bytes("VmSize") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for start in range(0, len(indices), REPORT_EVERY):
        part = indices[start : start + REPORT_EVERY]
        pipe.send(part[0])
        pipe.send([open_one(seed, path, run, index) for index in part])
    pipe.send(None)


def outcomes(name: str, run: int, indices: range) -> Iterator[Outcome]:
    """Yield every mutant's outcome; a process that dies or hangs is started again, mutant by mutant, to find it."""
    os.environ["PYTHONSAFEPATH"] = "1"  # a spawned Python would look for modules in the current directory first
    context = multiprocessing.get_context("spawn")
    while indices:
        with tempfile.TemporaryDirectory() as directory:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(name, run, indices, directory, theirs))
            process.start()
            theirs.close()
            at, why = indices.start, "hung"
            try:
                while ours.poll(HANG_SECONDS):
                    message = ours.recv()
                    if message is None:
                        process.join()
                        return
                    if isinstance(message, int):
                        at = message
                    else:
                        yield from message
                        at += len(message)
            except EOFError:
                process.join()
                why = f"died (exit status {process.exitcode})"
            finally:
                process.kill()
                process.join()
        end = min(at + REPORT_EVERY, indices.stop)
        if end - at > 1:
            for index in range(at, end):
                yield from outcomes(name, run, range(index, index + 1))
        else:
            yield Outcome(at, False, 0.0, 0, f"the process {why}")
        indices = range(end, indices.stop)


def fuzz(name: str, run: int, indices: range) -> Tally:
    """Open one format's mutants."""
    tally = Tally(name)
    for outcome in outcomes(name, run, indices):
        tally.mutants += 1
        tally.refused += outcome.is_refused
        tally.accepted += outcome.failure is None and not outcome.is_refused
        tally.worst_ms = max(tally.worst_ms, outcome.seconds * 1e3)
        tally.worst_bytes = max(tally.worst_bytes, outcome.num_bytes)
        if outcome.failure is not None:
            tally.failures.append(Failure(name, outcome.index, outcome.failure))
    return tally


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Open damaged model files of every format.")
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="of all formats together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(seeds()), help="one format")
    parser.add_argument("--index", type=int, help="one mutant of that format")
    return parser.parse_args()


def main() -> int:
    """Run the command line."""
    given = arguments()
    print(f"{'format':32} {'mutants':>8} {'accepted':>8} {'refused':>8} {'failed':>6} {'worst ms':>9} {'worst B':>9}")
    tallies = []
    for name in [given.only] if given.only else seeds():
        count = given.mutants if given.only else share(name, given.mutants)
        indices = range(count) if given.index is None else range(given.index, given.index + 1)
        row = fuzz(name, given.seed, indices)
        tallies.append(row)
        counts = f"{row.mutants:8d} {row.accepted:8d} {row.refused:8d} {len(row.failures):6d}"
        print(f"{name:32} {counts} {row.worst_ms:9.1f} {row.worst_bytes:9d}", flush=True)
        for failure in row.failures[:SHOWN_FAILURES]:
            print(f"  --seed {given.seed} --only {name!r} --index {failure.index}: {failure.what}", flush=True)
    passed = not any(row.failures for row in tallies)
    totals = {"mutants": sum(row.mutants for row in tallies), "failed": sum(len(row.failures) for row in tallies)}
    rows = [{**asdict(row), "failures": len(row.failures)} for row in tallies]
    print(json.dumps({"passed": passed, "seed": given.seed, **totals, "formats": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
