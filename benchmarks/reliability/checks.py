"""Check a server's reliability on real processes: what needs time, load, memory or hundreds of sockets.

    python benchmarks/reliability/checks.py [--only R2,R3] [--slow] [--minutes 30]

Serves the default model on 127.0.0.1 (2048 tokens of context, 8 samples at once, a KV cache of 8192 tokens) and
subjects it to clients and clocks. Prints one line per check: the action, the figures, the limit, and whether it was
met; the last line is one JSON object. Exit status 1 if a check fails. Without --slow the counts are small and the soak,
R40, is omitted unless --only names it. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import clients
import load
import soak
from lab import Finding, Lab

Check = Callable[[Lab], Awaitable[Finding]]
CHECKS: dict[str, Check] = {one.__name__.upper(): one for one in (*clients.CHECKS, *load.CHECKS, soak.r40)}
"""By name; a check's docstring is "what is done: the limit"."""


async def run_all(lab: Lab, names: list[str]) -> dict[str, dict[str, object]]:
    """Run checks one after another; one that raises fails."""
    rows = {}
    try:
        for name in names:
            began = time.monotonic()
            try:
                figures, is_ok = await CHECKS[name](lab)
            except Exception as error:
                traceback.print_exc()
                figures, is_ok = {"the check failed": f"{type(error).__name__}: {error}"}, False
                await lab.drop()
            shown = ", ".join(f"{key} {value}" for key, value in figures.items())
            what, _, limit = " ".join((inspect.getdoc(CHECKS[name]) or "").split()).partition(": ")
            print(f"{name:4} {'ok' if is_ok else 'MISSED':6} {what} | {shown} | {limit}", flush=True)
            rows[name] = {"ok": is_ok, "seconds": round(time.monotonic() - began, 1), **figures}
    finally:
        await lab.drop()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="checks to run, such as R2,R3")
    parser.add_argument("--slow", action="store_true", help="full counts, and the soak")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the soak, R40")
    given = parser.parse_args()
    names = given.only.upper().split(",") if given.only else [name for name in CHECKS if given.slow or name != "R40"]
    if unknown := set(names) - set(CHECKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch), given.slow, given.minutes)
        rows = asyncio.run(run_all(lab, names))
    missed = [name for name, row in rows.items() if not row["ok"]]
    print(json.dumps({"missed": missed, "is_slow": given.slow, "checks": rows}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
