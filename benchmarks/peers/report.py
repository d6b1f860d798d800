"""Print a comparison: rows, ratios, a Markdown table, a chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
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
THEMES = {"": ("#1f2328", "#0969da", "#9aa4ae"), "-dark": ("#e6edf3", "#58a6ff", "#6e7681")}
"""Of a chart's file names: colours of text, of this engine and of the peers."""
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
    """Return the best peer of these precisions that did all that was asked."""
    able = [
        plan.name
        for plan in plans
        if not plan.is_ours
        and workload not in plan.lacks
        and plan.precision in precisions
        and "median" in cells.get(plan.name, {})
    ]
    sign = -1 if workload in LOWER_IS_BETTER else 1
    return max(able, key=lambda name: sign * cells[name]["median"], default=None)


def spread(one: dict[str, Any]) -> str:
    """Return a median with its range and the number of runs."""
    return f"{one['median']:.1f} [{one['min']:.1f}-{one['max']:.1f}] x{len(one['values'])} {one['unit']}"


def print_cells(workload: str, cells: Cells, plans: list[Plan]) -> None:
    """Print one workload's rows."""
    lacking = {plan.name for plan in plans if workload in plan.lacks}
    for engine, one in cells.items():
        notes = ["not compared: does less than is asked"] if engine in lacking else []
        notes += [f"failed: {one['error']}"] if "error" in one else []
        shown = spread(one) if "median" in one else ""
        print(f"{workload:13} {engine:30} {shown:45} {'; '.join(notes)}".rstrip(), flush=True)


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


def print_ratios(rows: list[dict[str, Any]]) -> None:
    """Print how many times better ours is than the fastest peer in floating point, and of any precision."""
    print("\nratios to the fastest peer: in floating point, and of any precision; above 1 ours is better")
    for row in rows:
        print(f"{row['workload']:13} {row['ours']:26} {spread(row)}")
        for key, one in ((key, row[key]) for key in KINDS if key in row):
            ratio = f"{one['ratio']:.2f}x [{one['low']:.2f}-{one['high']:.2f}]"
            print(f"{'':13}   {key:6} {ratio:20} {one['peer']}: {spread(one)}")


def markdown(table: dict[str, Cells], plans: list[Plan]) -> str:
    """Return a table for a page: our rows, and the fastest peers with each of our rows' ratio to them."""
    ours = [plan.name for plan in plans if plan.is_ours]
    found = {(row["workload"], row["ours"]): row for row in ratios(table, plans)}
    heads = ["workload", *(name.removeprefix("nano-inference ") for name in ours)]
    lines = [[*heads, "fastest peer, floating point", "fastest peer, any precision"], ["---"] * (len(ours) + 3)]
    for workload in table:
        rows = {name: found[workload, name] for name in ours if (workload, name) in found}
        cells = [f"`{workload}`: {ABOUT[workload]}"]
        for name in ours:
            unit = rows[name]["unit"].partition(",")[0].split()[-1] if name in rows else ""
            cells.append(f"{_short(rows[name]['median'])} {unit}" if name in rows else "-")
        for key in KINDS:
            against = [row[key] for row in rows.values() if key in row]
            factors = ", ".join(f"{one['ratio']:.2f}x" for one in against)
            cells.append(f"{_short(against[0]['median'])} {against[0]['peer']} ({factors})" if against else "-")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def draw(table: dict[str, Cells], plans: list[Plan], path: Path) -> list[Path]:
    """Draw our first row and the fastest peer in floating point, one pair of bars a workload; return the files.

    The bars of a workload are relative to the better one; each has its figure. One file for light pages, one for dark.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours = next(plan.name for plan in plans if plan.is_ours)
    rows = [row for row in ratios(table, plans) if row["ours"] == ours and "float" in row]
    written = []
    for suffix, (text, blue, grey) in THEMES.items():
        figure, panel = pyplot.subplots(figsize=(8, 0.62 * len(rows) + 0.6))
        for place, row in enumerate(rows):
            peer = row["float"]
            for side, name, one, part, colour in (
                (-0.2, ours, row, min(1.0, peer["ratio"]), blue),
                (0.2, peer["peer"], peer, min(1.0, 1 / peer["ratio"]), grey),
            ):
                panel.barh(place + side, part, 0.36, color=colour)
                label = f"{name.removeprefix('nano-inference ')}  {_short(one['median'])} {one['unit']}"
                panel.text(part + 0.01, place + side, label, va="center", fontsize=8, color=text)
        panel.set_yticks(range(len(rows)), [row["workload"] for row in rows], color=text)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.5)
        panel.set_xticks([])
        panel.set_title("nano-inference (blue) and the fastest peer; longer is better", fontsize=9, color=text)
        panel.set_frame_on(False)
        panel.tick_params(length=0)
        figure.tight_layout()
        written.append(path.with_stem(path.stem + suffix))
        figure.savefig(written[-1], dpi=120, transparent=True)
        pyplot.close(figure)
    return written
