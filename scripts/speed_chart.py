"""Draw docs/images/speed-light.svg and speed-dark.svg from the first table of docs/performance.md.

Two bars for each workload: this engine with exact arithmetic, its default, and the fastest peer of any precision. The
faster of the two has the longest bar, also where the figures are milliseconds.

    python scripts/speed_chart.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
ROW = re.compile(
    r"^\| (`\w+`[^|]*) \| ([\d.,]+)[^|]*? (tok/s|ms|s) \| [^|]+ \| [^|]+ \| [^|]+ \| ([\d.,]+) ([^|]+) \|$", re.M
)
NAMES = {
    "decode1": "decode, one request",
    "prefill": "prefill, 2,048 tokens",
    "rollout": "rollout, 64 samples",
    "ragged": "64 ragged requests",
    "longctx": "decode after 4,096 tokens",
    "sharedprefix": "first token, shared prefix",
    "serve": "32 chats over HTTP",
}
WIDTH, LEFT, LONGEST, STEP, TOP = 760, 190, 330, 46, 56


@dataclass(frozen=True, slots=True)
class Colours:
    """The colours of one variant."""

    ours: str
    peer: str
    text: str
    page: str


VARIANTS = {
    "light": Colours(ours="#1f6feb", peer="#afb8c1", text="#1f2328", page="#ffffff"),
    "dark": Colours(ours="#58a6ff", peer="#57606a", text="#e6edf3", page="#0d1117"),
}


def rows(page: str) -> list[tuple[str, float, float, str, str]]:
    """Return each workload's name, both figures, their unit and the peer."""
    found = []
    for title, ours, unit, peer, who in ROW.findall(page):
        name = title.split("`")[1]
        if name in NAMES and (name != "serve" or unit == "tok/s"):
            found.append((NAMES[name], float(ours.replace(",", "")), float(peer.replace(",", "")), unit, who.strip()))
    return found


def drawn(page: str, colours: Colours) -> str:
    """Return the chart as SVG."""
    table = rows(page)
    height = TOP + STEP * len(table)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="{colours.page}"/>',
        f'<rect x="{LEFT}" y="16" width="14" height="14" fill="{colours.ours}"/>',
        f'<text x="{LEFT + 20}" y="28" fill="{colours.text}">this engine, exact (default)</text>',
        f'<rect x="{LEFT + 220}" y="16" width="14" height="14" fill="{colours.peer}"/>',
        f'<text x="{LEFT + 240}" y="28" fill="{colours.text}">fastest peer, any precision</text>',
    ]
    for number, (name, ours, peer, unit, who) in enumerate(table):
        y = TOP + STEP * number
        speeds = (ours, peer) if unit == "tok/s" else (1 / ours, 1 / peer)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 20}" fill="{colours.text}" text-anchor="end">{name}</text>')
        labels = (f"{ours:g} {unit}", f"{peer:g} {unit}, {who}")
        for index, (speed, label, colour) in enumerate(zip(speeds, labels, (colours.ours, colours.peer), strict=True)):
            length, top = LONGEST * speed / max(speeds), y + 17 * index
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="15" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{top + 12}" fill="{colours.text}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    for variant, colours in VARIANTS.items():
        (DOCS / "images" / f"speed-{variant}.svg").write_text(drawn(text, colours), encoding="utf-8")
