"""How a comparison is told: rows as they come, ratios, a chart."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from peers.roster import FLOAT, Plan

LOWER_IS_BETTER = ("sharedprefix", "serve TTFT", "serve ready")
Cells = dict[str, dict[str, Any]]
"""What each engine did on one workload: unit, median, min, max, values, or an error."""


def cell(unit: str, values: list[float]) -> dict[str, Any]:
    """Return the figures of one engine on one workload."""
    return {
        "unit": unit,
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def factor(workload: str, ours: float, other: float) -> float:
    """Return how many times better ours is."""
    return other / ours if workload in LOWER_IS_BETTER else ours / other


def fastest(workload: str, cells: Cells, plans: list[Plan], precisions: tuple[str, ...]) -> str | None:
    """Return the peer that did best among those of some precisions."""
    able = [p.name for p in plans if not p.is_ours and p.precision in precisions and "median" in cells.get(p.name, {})]
    sign = -1 if workload in LOWER_IS_BETTER else 1
    return max(able, key=lambda name: sign * cells[name]["median"], default=None)


def print_cells(workload: str, cells: Cells) -> None:
    """Print one workload's rows."""
    for engine, one in cells.items():
        if "error" in one:
            print(f"{workload:13} {engine:30} failed: {one['error'][:90]}", flush=True)
            continue
        spread = f"[{one['min']:.1f}-{one['max']:.1f}] x{len(one['values'])}"
        print(f"{workload:13} {engine:30} {one['median']:9.1f} {spread:22} {one['unit']}", flush=True)


def ratios(table: dict[str, Cells], plans: list[Plan]) -> list[dict[str, Any]]:
    """Return, for each workload and row of ours, how it stands against the fastest peers."""
    rows = []
    for workload, cells in table.items():
        for ours in (plan.name for plan in plans if plan.is_ours and "median" in cells.get(plan.name, {})):
            row: dict[str, Any] = {"workload": workload, "ours": ours}
            for key, precisions in (("float", (FLOAT,)), ("any", tuple({plan.precision for plan in plans}))):
                best = fastest(workload, cells, plans, precisions)
                if best:
                    ratio = factor(workload, cells[ours]["median"], cells[best]["median"])
                    row[key] = {"peer": best, "ratio": ratio}
            rows.append(row)
    return rows


def print_ratios(rows: list[dict[str, Any]]) -> None:
    """Print how often ours is better than the fastest floating-point peer, and than the fastest of any precision."""
    print(f"\n{'workload':13} {'ours':26} {'x fastest floating-point peer':40} x fastest of any precision")
    for row in rows:
        told = [f"{row[key]['ratio']:.2f} ({row[key]['peer']})" if key in row else "-" for key in ("float", "any")]
        print(f"{row['workload']:13} {row['ours']:26} {told[0]:40} {told[1]}")


def draw(table: dict[str, Cells], path: Path) -> None:
    """Draw a bar for each engine, a panel for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 3
    rows = math.ceil(len(table) / columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(5.5 * columns, 3.2 * rows), squeeze=False)
    for panel in panels.flat[len(table) :]:
        panel.axis("off")
    for panel, (workload, cells) in zip(panels.flat, table.items(), strict=False):
        able = {name: one for name, one in cells.items() if "median" in one}
        middle = [one["median"] for one in able.values()]
        low = [one["median"] - one["min"] for one in able.values()]
        high = [one["max"] - one["median"] for one in able.values()]
        colours = ["tab:orange" if name.startswith("nano-inference") else "tab:blue" for name in able]
        panel.barh(list(able), middle, xerr=[low, high], color=colours)
        panel.invert_yaxis()
        unit = next(iter(able.values()))["unit"] if able else ""
        panel.set_title(
            f"{workload}: {unit}" + (" (less is better)" if workload in LOWER_IS_BETTER else ""), fontsize=9
        )
        panel.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
