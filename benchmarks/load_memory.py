"""Measure the memory and the time of loading a model's weights, each in a fresh process.

    python benchmarks/load_memory.py MODEL [MODEL …] [--dtype float32]

MODEL is a directory or a .gguf file. Prints a table and, as the last line, one JSON object. The ratio is the peak of
resident memory while opening and loading, less what was resident after `import torch`, over the parameters' bytes in
the target precision; the limit is 1.3 (exit status 1 above it). Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 1.3
DTYPES = ("float32", "bfloat16", "float16")


def status_bytes(field: str) -> int:
    """Return a size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(model: str, dtype: str) -> dict[str, Any]:
    """Load in this process, which must have done nothing yet."""
    # Imported here because what is resident before and after each import is what is measured.
    import torch

    torch.set_num_threads(1)
    # Forget the peak so far; the kernel's name for that is 5 (proc_pid_clear_refs(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    from nano_inference.loading.checkpoint import open_checkpoint

    start = time.perf_counter()
    checkpoint = open_checkpoint(model)
    opened = time.perf_counter()
    # The names come from the file, so extras that a built model would ignore are counted as parameters.
    slots = {name: torch.empty(source.shape, dtype=getattr(torch, dtype)) for name, source in checkpoint.tensors()}
    for name, source in checkpoint.tensors():
        source.read_into(slots[name])
    written = [slot.nbytes for slot in slots.values()]
    loaded = time.perf_counter()
    peak, largest = status_bytes("VmHWM") - before, max(written)
    return {
        "model": Path(model).name,
        "stored": checkpoint.dtype,
        "dtype": dtype,
        "parameter_bytes": sum(written),
        "largest_share": round(largest / sum(written), 3),
        "peak_bytes": peak,
        "ratio": round(peak / sum(written), 3),
        "open_seconds": round(opened - start, 3),
        "load_seconds": round(loaded - opened, 3),
    }


def measured_apart(model: str, dtype: str) -> dict[str, Any]:
    """Measure in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), model, "--dtype", dtype, "--here"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Memory and time of loading weights.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="precision in memory")
    parser.add_argument("--here", action="store_true", help="measure in this process (used by the command itself)")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.models[0], arguments.dtype)))
        return 0
    results = [measured_apart(model, arguments.dtype) for model in arguments.models]
    print(f"{'model':40} {'stored':>9} {'params MB':>10} {'peak MB':>9} {'ratio':>6} {'open s':>7} {'load s':>7}")
    for row in results:
        sizes = f"{row['parameter_bytes'] / 1e6:10.1f} {row['peak_bytes'] / 1e6:9.1f} {row['ratio']:6.3f}"
        print(f"{row['model']:40} {row['stored']:>9} {sizes} {row['open_seconds']:7.3f} {row['load_seconds']:7.3f}")
    within = all(row["ratio"] <= LIMIT for row in results)
    print(json.dumps({"limit": LIMIT, "within": within, "results": results}))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
