"""Print a comparison: rows, ratios, a Markdown table, a chart."""

from __future__ import annotations

import math
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
Cells = dict[str, dict[str, Any]]
"""What each engine did on one workload: unit, median, min, max, values, or an error, or both when it failed later."""


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


def fastest(workload: str, cells: Cells, plans: list[Plan], precisions: Iterable[str]) -> str | None:
    """Return the peer that did best among those of some precisions that did all that was asked."""
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
    """Write a median with its spread."""
    return f"{one['median']:.1f} [{one['min']:.1f}-{one['max']:.1f}]"


def print_cells(workload: str, cells: Cells, plans: list[Plan]) -> None:
    """Print one workload's rows."""
    lacking = {plan.name for plan in plans if workload in plan.lacks}
    for engine, one in cells.items():
        notes = ["not compared: does less than is asked"] if engine in lacking else []
        notes += [f"failed: {one['error']}"] if "error" in one else []
        shown = f"{spread(one):28} x{len(one['values'])} {one['unit']}" if "median" in one else ""
        print(f"{workload:13} {engine:30} {shown:45} {'; '.join(notes)}".rstrip(), flush=True)


def ratios(table: dict[str, Cells], plans: list[Plan]) -> list[dict[str, Any]]:
    """Return, for each workload and row of ours, its ratios to the fastest peers.

    A ratio's `low` is our worst against the peer's best, its `high` our best against the peer's worst.
    """
    rows = []
    for workload, cells in table.items():
        for name in (plan.name for plan in plans if plan.is_ours and "median" in cells.get(plan.name, {})):
            row: dict[str, Any] = {"workload": workload, "ours": name, **_figures(cells[name])}
            for key, precisions in KINDS.items():
                best = fastest(workload, cells, plans, precisions)
                if best:
                    row[key] = {"peer": best, **_figures(cells[best]), **_ratio(workload, cells[name], cells[best])}
            rows.append(row)
    return rows


def _figures(one: dict[str, Any]) -> dict[str, Any]:
    return {key: one[key] for key in ("unit", "median", "min", "max")} | {"runs": len(one["values"])}


def _ratio(workload: str, ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    ends = [factor(workload, ours["min"], other["max"]), factor(workload, ours["max"], other["min"])]
    return {"ratio": factor(workload, ours["median"], other["median"]), "low": min(ends), "high": max(ends)}


def print_ratios(rows: list[dict[str, Any]]) -> None:
    """Print how often ours is better than the fastest floating-point peer, and than the fastest of any precision."""
    print("\nratios to the fastest peer: in floating point, and of any precision; above 1 ours is better")
    for row in rows:
        print(f"{row['workload']:13} {row['ours']:26} {spread(row)} x{row['runs']} {row['unit']}")
        for key in (key for key in KINDS if key in row):
            one = row[key]
            ratio = f"{one['ratio']:.2f}x [{one['low']:.2f}-{one['high']:.2f}]"
            print(f"{'':13}   {key:6} {ratio:20} {one['peer']}: {spread(one)} x{one['runs']}")


def markdown(table: dict[str, Cells], plans: list[Plan]) -> str:
    """Return a table for a page: our rows, and the fastest peers with each of our rows' ratio to them."""
    ours = [plan for plan in plans if plan.is_ours]
    found = {(row["workload"], row["ours"]): row for row in ratios(table, plans)}
    heads = ["workload", *(plan.name.removeprefix("nano-inference ") for plan in ours)]
    lines = [
        _line([*heads, "fastest peer, floating point", "fastest peer, any precision"]),
        "|---" * (len(ours) + 3) + "|",
    ]
    for workload in table:
        rows = [row for plan in ours if (row := found.get((workload, plan.name)))]
        shown = [_amount(found.get((workload, plan.name))) for plan in ours]
        lines.append(_line([f"`{workload}`: {ABOUT[workload]}", *shown, *(_rival(rows, key) for key in KINDS)]))
    return "\n".join(lines)


def _line(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _amount(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{_short(row['median'])} {row['unit'].partition(',')[0].split()[-1]}"


def _rival(rows: list[dict[str, Any]], key: str) -> str:
    """Write the fastest peer, and the ratio of each of our rows to it."""
    against = [row[key] for row in rows if key in row]
    if not against:
        return "-"
    factors = ", ".join(f"{one['ratio']:.2f}x" for one in against)
    return f"{_short(against[0]['median'])} {against[0]['peer']} ({factors})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def relative(table: dict[str, Cells], plans: list[Plan]) -> dict[str, dict[str, float]]:
    """Return, for each workload and engine, how many times better it is than the first of our rows that has figures."""
    found = {}
    for workload, cells in table.items():
        able = {name: one for name, one in cells.items() if "median" in one}
        base = next((plan.name for plan in plans if plan.is_ours and plan.name in able), None)
        if base:
            found[workload] = {
                name: factor(workload, one["median"], able[base]["median"]) for name, one in able.items()
            }
    return found


def draw(table: dict[str, Cells], plans: list[Plan], path: Path) -> None:
    """Draw a group of bars for each workload, a bar for each engine, relative to the first of our rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = relative(table, plans)
    names = [plan.name for plan in plans if any(plan.name in one for one in heights.values())]
    colours = dict(zip(names, _colours(names), strict=True))
    rows = 2 if len(heights) > 4 else 1
    columns = max(1, math.ceil(len(heights) / rows))
    figure, panels = pyplot.subplots(rows, 1, figsize=(2.5 * columns + 1, 3.4 * rows + 1), squeeze=False)
    for index, panel in enumerate(panels.flat):
        groups = list(heights)[index * columns : (index + 1) * columns]
        _draw_groups(panel, {workload: heights[workload] for workload in groups}, names, colours)
    lacking = {plan.name for plan in plans if plan.lacks}
    handles = [Patch(color=colours[name]) for name in names]
    labels = [f"{name} (not compared)" if name in lacking else name for name in names]
    figure.legend(handles, labels, loc="upper center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.25 * math.ceil(len(names) / 4) / figure.get_figheight() - 0.01))
    figure.savefig(path, dpi=100)


def _draw_groups(panel: Any, groups: dict[str, dict[str, float]], names: list[str], colours: dict[str, Any]) -> None:
    """Draw some workloads' bars side by side, each with its figure above it."""
    for place, heights in enumerate(groups.values()):
        able = [name for name in names if name in heights]
        width = 0.9 / max(1, len(able))
        for index, name in enumerate(able):
            x = place - 0.45 + (index + 0.5) * width
            panel.bar(x, heights[name], width, color=colours[name])
            panel.text(x, heights[name], f" {heights[name]:.2g}", rotation=90, ha="center", va="bottom", fontsize=6)
    panel.axhline(1.0, color="black", linewidth=0.6)
    panel.set_xticks(range(len(groups)), list(groups), fontsize=9)
    panel.set_ylabel(f"times {names[0]} (higher is better)", fontsize=8)
    panel.margins(y=0.12)
    panel.tick_params(axis="y", labelsize=8)


def _colours(names: list[str]) -> list[Any]:
    """Return a colour for each engine: ours warm, peers from a palette without reds."""
    from matplotlib import colormaps

    warm, cold = colormaps["autumn"], colormaps["tab20"]
    colours, ours, peers = [], 0, 0
    for name in names:
        if name.startswith("nano-inference"):
            colours.append(warm(0.15 + 0.3 * ours))
            ours += 1
        else:
            colours.append(cold([0, 1, 4, 5, 8, 9, 10, 11, 14, 15, 18, 19][peers % 12]))
            peers += 1
    return colours
