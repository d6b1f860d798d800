"""Measure time and memory of refused attacks: calculator expressions, tokenizer.pkl and .pt files that run code.

    python benchmarks/attacks.py

Prints one line for each attack: the outcome, the least time of seven tries in milliseconds, the largest memory of
Python's own objects (tracemalloc) and of the process (VmHWM, reset before each try). The last line is one JSON object.
Exit status 1 when an attack is not refused, runs code, takes over 5 ms or over 1 MB. Linux only. The attacks on the
calculator and on tokenizer.pkl are those of tests/text/nanochat_attacks.py.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import json
import os
import pickle
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nano_inference.loading.pt_file import read_pt
from nano_inference.nanochat.calculator import calculate, evaluate
from nano_inference.nanochat.pickled import read_encoding
from nano_inference.types import ModelError

MAX_MS = 5.0
MAX_BYTES = 1_000_000
TRIES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one attack came to."""

    kind: str
    name: str
    result: str
    is_refused: bool
    milliseconds: float
    python_bytes: int
    resident_bytes: int

    @property
    def is_within(self) -> bool:
        """Whether it was refused, quickly and in little memory."""
        memory = max(self.python_bytes, self.resident_bytes)
        return self.is_refused and self.milliseconds <= MAX_MS and memory <= MAX_BYTES


def corpus() -> ModuleType:
    """Import the attacks of the tests."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "text"))
    return importlib.import_module("nanochat_attacks")


def pt_files(attacks: ModuleType, marker: Path) -> dict[str, bytes]:
    """Return .pt files that would make the file `marker`, or ask for much."""
    opened = attacks.Runs(builtins.open, str(marker), "w")
    zipped = {
        "open": opened,
        "open beside a tensor": {"a": torch.ones(2), "b": opened},
        "os.system": {"a": attacks.Runs(os.system, f"touch {marker}")},
        "eval in a list": {"a": [attacks.Runs(eval, f"open({str(marker)!r}, 'w').close()")]},
        "numbers": {"a": 5},
        "a list": [torch.ones(2)],
    }
    out = {f"{name}, zip": saved(value) for name, value in zipped.items()}
    out |= {f"{name}, bare pickle": pickle.dumps(value) for name, value in list(zipped.items())[:1]}
    good = saved({"a": torch.ones(64)})
    out["truncated"] = good[: len(good) // 2]
    out["an inflated record"] = inflated()
    out["nested lists"] = b"\x80\x02" + b"]" * 2_000 + b"a" * 1_999 + b"."
    out["text of 2^32-1"] = b"\x80\x02X\xff\xff\xff\xffabc."
    out["empty"] = b""
    out["nested lists, zip"] = rezipped(good, out["nested lists"])
    out["bytearray of 2^40, zip"] = rezipped(
        good, b"\x80\x02c__builtin__\nbytearray\n(\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"tR."
    )
    out["text of 2^32-1, zip"] = rezipped(good, out["text of 2^32-1"])
    return out


def rezipped(good: bytes, pickled: bytes) -> bytes:
    """Return what torch.save wrote with another pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as new:
        for record in old.infolist():
            new.writestr(record.filename, pickled if record.filename.endswith("data.pkl") else old.read(record))
    return file.getvalue()


def saved(value: object) -> bytes:
    """Return what torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def inflated() -> bytes:
    """Return a small zip file with a record of 64 MB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))
    return file.getvalue()


def attempts(directory: Path) -> Iterator[tuple[str, str, Callable[[], object], Callable[[object], str | None]]]:
    """Yield every attack: its kind, its name, what tries it, and what says how it was refused (None: it was not)."""
    attacks = corpus()
    warm_up(attacks, directory / "good")
    for expression in attacks.EXPRESSIONS:
        name = repr(expression if len(expression) < 50 else f"{expression[:40]}… ({len(expression)})")
        both = (("calculate", calculate), ("evaluate", evaluate))
        for kind, function in both:
            yield (
                kind,
                name,
                lambda f=function, e=expression: f(e),
                lambda value: "no result" if value is None else None,
            )
    marker = directory / "marker"
    wrong = {name: attacks.with_state(content) for name, (content, _) in attacks.wrong_states().items()}
    pickles = attacks.calls(marker) | attacks.bombs() | wrong
    readers: tuple[tuple[str, Callable[[Path], object], dict[str, bytes]], ...] = (
        ("tokenizer.pkl", read_encoding, pickles),
        (".pt", read_pt, pt_files(attacks, marker)),
    )
    for kind, reader, files in readers:
        for name, data in files.items():
            path = directory / "file"
            path.write_bytes(data)
            yield kind, name, lambda r=reader, p=path: refusal(r, p), lambda value: None if marker.exists() else value


def warm_up(attacks: ModuleType, path: Path) -> None:
    """Use everything once as it is meant to be used: what stays in memory of that belongs to no attack."""
    for _ in range(3):
        for expression in ("(1+2)*3/4//5-6", "'strawberry'.upper().count('R')", "1/0", "'a'.zfill(3).count('0')", "("):
            calculate(expression)
            evaluate(expression)
        path.write_bytes(attacks.with_state(attacks.state()))
        read_encoding(path)
        path.write_bytes(saved({"a": torch.ones(64)}))
        read_pt(path)
        path.write_bytes(b"damaged")
        refusal(read_encoding, path)
        refusal(read_pt, path)


def refusal(reader: Callable[[Path], object], path: Path) -> str | None:
    """Return why a reader refuses a file, None when it does not."""
    try:
        reader(path)
    except ModelError as error:
        return str(error).partition(": ")[2]
    return None


def measure(kind: str, name: str, attack: Callable[[], Any], judge: Callable[[Any], str | None]) -> Outcome:
    """Try an attack once for the process's memory, seven times for time and once for Python's memory."""
    gc.collect()
    # Forget the peak so far; the kernel's name for that is 5 (proc_pid_clear_refs(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    reason = judge(attack())
    resident = max(0, status_bytes("VmHWM") - before)
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        attack()
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    attack()
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Outcome(
        kind=kind,
        name=name,
        result=reason or "NOT REFUSED",
        is_refused=reason is not None,
        milliseconds=min(seconds) * 1e3,
        python_bytes=traced,
        resident_bytes=resident,
    )


def status_bytes(field: str) -> int:
    """Return a size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        outcomes = [measure(*attempt) for attempt in attempts(Path(directory))]
    print(f"{'kind':14} {'attack':58} {'ms':>7} {'python B':>9} {'resident B':>10}  result")
    for row in outcomes:
        mark = "" if row.is_within else "  <-- "
        sizes = f"{row.milliseconds:7.3f} {row.python_bytes:9d} {row.resident_bytes:10d}"
        print(f"{row.kind:14} {row.name:58} {sizes}  {row.result[:70]}{mark}")
    within = all(row.is_within for row in outcomes)
    worst = {
        "milliseconds": max(row.milliseconds for row in outcomes),
        "python_bytes": max(row.python_bytes for row in outcomes),
        "resident_bytes": max(row.resident_bytes for row in outcomes),
    }
    limits = {"milliseconds": MAX_MS, "bytes": MAX_BYTES}
    print(
        json.dumps({"within": within, "limits": limits, "worst": worst, "attacks": [asdict(row) for row in outcomes]})
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
