"""Check a server's reliability on real processes: R1–R57, Q1–Q5 and some of T1–T36 of this project's list of incidents.

    python benchmarks/reliability/checks.py [--only R2,R3] [--slow] [--minutes 30]

Starts `nano-inference serve` on 127.0.0.1 (2048 tokens of context, 8 samples at once, a KV cache of 8192 tokens) and
subjects it to clients, clocks and signals. Prints one line per check: the action, the figures, the limit, and whether
it was met; the last line is one JSON object. Exit status 1 if a check fails. Without --slow the counts are small and
checks that take minutes are omitted, unless named by --only. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import answers
import bombs
import failures
import fairness
import files
import hostile
import lifecycle
import malformed
import queueing
import quotas
import soak
import waiting
from harness import Check, Finding, Lab, say

CHECKS: tuple[Check, ...] = (
    *lifecycle.CHECKS,
    *queueing.CHECKS,
    *waiting.CHECKS,
    *hostile.CHECKS,
    *malformed.CHECKS,
    *answers.CHECKS,
    *failures.CHECKS,
    *fairness.CHECKS,
    *files.CHECKS,
    *soak.CHECKS,
    *bombs.CHECKS,
    *quotas.CHECKS,
)
ELSEWHERE = {
    "R13": "elsewhere: tests/test_kv.py, tests/sim",
    "R16": "elsewhere: tests/server/test_openapi.py",
    "R17": "elsewhere: tests/server/test_body.py",
    "R19": "elsewhere: R45",
    "R36": "elsewhere: tests/server/test_detokenizer.py",
    "R37": "elsewhere: tests/server/test_app.py",
    "R42": "elsewhere: benchmarks/reliability/grammars.py, tests/text/test_grammar.py",
    "R46": "not applicable: no older flag or file exists",
    "R48": "elsewhere: tests/web/test_trouble.py",
    "T30": "not applicable: clients share the cache's room, and nothing else is claimed",
}
"""What is checked in another place, or cannot be."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    id: str
    done: str
    finding: Finding
    bar: str
    verdict: str
    seconds: float = 0.0


async def run(lab: Lab, check: Check) -> Row:
    """Run one check; one that raises misses."""
    say(f"{check.id}: {check.done} …")
    began = time.monotonic()
    try:
        async with asyncio.timeout(3600 + 60 * lab.minutes):
            finding = await check.run(lab)
    except Exception as error:
        say(traceback.format_exc())
        finding = Finding(figures={}, is_ok=False, note=f"the check failed: {type(error).__name__}: {error}")
        await lab.drop()
    verdict = {True: "ok", False: "MISSED", None: "not applicable"}[finding.is_ok]
    row = Row(check.id, check.done, finding, check.bar, verdict, time.monotonic() - began)
    say(line_of(row))
    return row


def line_of(row: Row) -> str:
    """Return a row as text."""
    figures = ", ".join(f"{name} {value}" for name, value in row.finding.figures.items())
    note = f"  ({row.finding.note})" if row.finding.note else ""
    return f"{row.id:4} {row.verdict:7} {row.done} | {figures} | {row.bar}{note}"


def elsewhere() -> list[Row]:
    """Return the rows that are not checked here; a test that is named and does not exist is not there yet."""
    root = Path(__file__).resolve().parents[2]
    rows = []
    for name, where in ELSEWHERE.items():
        paths = (
            where.removeprefix("elsewhere: ").split(", ") if where.startswith("elsewhere: ") and "/" in where else []
        )
        is_there = all((root / path).exists() for path in paths)
        verdict, _, what = (where if is_there else f"not yet: {', '.join(paths)}").partition(": ")
        rows.append(Row(name, what, Finding(figures={}, is_ok=None), "", verdict))
    return rows


async def run_all(lab: Lab, chosen: Sequence[Check]) -> list[Row]:
    """Run checks one after another."""
    try:
        await lab.prepare()
        return [await run(lab, check) for check in chosen]
    finally:
        await lab.close()


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="checks to run, such as R2,R3")
    parser.add_argument("--slow", action="store_true", help="full counts, and the checks that take minutes")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the soak, R40")
    parser.add_argument("--model", default="default", help="the model to serve")
    parser.add_argument("--token-bytes", type=int, default=46080, help="bytes of K/V of one token of that model")
    parser.add_argument("--threads", type=int, help="CPU threads of the server")
    return parser.parse_args()


def main() -> int:
    """Run the command line."""
    given = options()
    names = {name for name in given.only.upper().split(",") if name}
    known = {check.id for check in CHECKS}
    if unknown := names - known:
        print(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    chosen = [one for one in CHECKS if (one.id in names if names else given.slow or not one.is_slow)]
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(
            Path(scratch),
            model=given.model,
            token_bytes=given.token_bytes,
            threads=given.threads,
            is_slow=given.slow,
            minutes=given.minutes,
        )
        rows = asyncio.run(run_all(lab, chosen))
    rows += [] if names else elsewhere()
    rows.sort(key=lambda row: (row.id[0], int(row.id[1:])))
    for row in rows:
        print(line_of(row))
    missed = [row.id for row in rows if row.verdict == "MISSED"]
    checks = {row.id: {"verdict": row.verdict, "seconds": round(row.seconds, 1), **row.finding.figures} for row in rows}
    print(json.dumps({"missed": missed, "is_slow": given.slow, "model": given.model, "checks": checks}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
