"""Print a comparison: rows as they come, then a Markdown table of ours beside the fastest peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from peers.roster import FLOAT, QUANTISED, Plan

LOWER_IS_BETTER = ("sharedprefix", "serve TTFT", "serve ready")
KINDS: dict[str, tuple[str, ...]] = {"float": (FLOAT,), "any": (FLOAT, QUANTISED)}
"""Which peers a ratio is to: those in floating point, or those of any precision."""
ABOUT = {
    "decode1": "32 in, 128 out",
    "prefill": "2048 in",
    "rollout": "8 prompts, 8 samples each, 128 out, logprobs",
    "ragged": "64 requests, 16-256 in, 8-256 out",
    "longctx": "4096 in, 64 out",
    "sharedprefix": "time to first token, 2nd request on",
    "serve": "32 streaming chats, 64 tokens each, over HTTP",
    "serve TTFT": "time to first words, median",
    "serve ready": "from start to ready",
}
Cells = dict[str, dict[str, Any]]
"""Each engine's figures on one workload: unit, median, min, max, values, or an error, or both if it failed later."""


def cell(unit: str, values: list[float]) -> dict[str, Any]:
    """Return the figures of one engine on one workload."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {"unit": unit, **found, "values": list(values)}


def factor(workload: str, ours: float, other: float) -> float:
    """Return how many times better ours is."""
    return other / ours if workload in LOWER_IS_BETTER else ours / other


def fastest(workload: str, cells: Cells, plans: list[Plan], precisions: Iterable[str]) -> str | None:
    """Return the best peer of these precisions."""
    able = [
        plan.name
        for plan in plans
        if not plan.is_ours and plan.precision in precisions and "median" in cells.get(plan.name, {})
    ]
    sign = -1 if workload in LOWER_IS_BETTER else 1
    return max(able, key=lambda name: sign * cells[name]["median"], default=None)


def print_cells(workload: str, cells: Cells) -> None:
    """Print one workload's rows: a median with its range and the number of runs, or why there is none."""
    for engine, one in cells.items():
        shown = f"failed: {one['error']}" if "error" in one else ""
        if "median" in one:
            spread = f"{one['median']:.1f} [{one['min']:.1f}-{one['max']:.1f}]"
            shown = f"{spread} x{len(one['values'])} {one['unit']}  {shown}"
        print(f"{workload:13} {engine:30} {shown}".rstrip(), flush=True)


def ratios(table: dict[str, Cells], plans: list[Plan]) -> list[dict[str, Any]]:
    """Return, for each workload and row of ours, its ratios to the fastest peers.

    A ratio's `low` is our worst against the peer's best, its `high` our best against the peer's worst.
    """
    rows = []
    for workload, cells in table.items():
        for ours, mine in ((plan.name, cells.get(plan.name, {})) for plan in plans if plan.is_ours):
            if "median" not in mine:
                continue
            row: dict[str, Any] = {"workload": workload, "ours": ours, **mine}
            for key, precisions in KINDS.items():
                if peer := fastest(workload, cells, plans, precisions):
                    other = cells[peer]
                    ends = [factor(workload, mine[a], other[b]) for a, b in (("min", "max"), ("max", "min"))]
                    ratio = factor(workload, mine["median"], other["median"])
                    row[key] = {"peer": peer, **other, "ratio": ratio, "low": min(ends), "high": max(ends)}
            rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]], ours: list[str]) -> str:
    """Return a table for a page: our rows, and the fastest peers with each of our rows' ratio to them."""
    found = {(row["workload"], row["ours"]): row for row in rows}
    heads = ["workload", *(name.removeprefix("nano-inference ") for name in ours)]
    lines = [[*heads, "fastest peer, floating point", "fastest peer, any precision"], ["---"] * (len(ours) + 3)]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = {name: found[workload, name] for name in ours if (workload, name) in found}
        cells = [f"`{workload}`: {ABOUT[workload]}"]
        for name in ours:
            unit = mine[name]["unit"].partition(",")[0].split()[-1] if name in mine else ""
            cells.append(f"{_short(mine[name]['median'])} {unit}" if name in mine else "-")
        for key in KINDS:
            against = [row[key] for row in mine.values() if key in row]
            factors = ", ".join(f"{one['ratio']:.2f}x" for one in against)
            cells.append(f"{_short(against[0]['median'])} {against[0]['peer']} ({factors})" if against else "-")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
