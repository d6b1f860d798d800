"""Draw the package's rooms and their imports as docs/images/architecture.svg.

    python scripts/architecture.py [--check]

A room is a folder or a top-level module. Bands are the nine floors of pyproject.toml, listed from the bottom up; a room
imports only from bands below its own or from rooms of its own band. An arrow is an import that no chain of other
imports implies. `--check` writes nothing and fails if the picture on disk differs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "nano_inference"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
BANDS = {
    "1 Records": "support types config",
    "2 A step, a model, text": "core models text",
    "3 Files": "loading",
    "4 Devices": "executors weights",
    "5 Ranks": "parallel",
    "6 Engine": "build engine async_engine llm compat",
    "7 Uses of engines": "nanochat rl",
    "8 HTTP": "server",
    "9 Commands": "cli",
}
WIDTH, BOX, BAND, LEFT = 1180, 30, 84, 185
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2430 }
.band { font-weight: 600 }
rect.room { fill: #fff; stroke: #55607a }
rect.strip { fill: #eef1f7 }
path { fill: none; stroke: #8894b0; stroke-width: 1.1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9f0 }
  rect.room { fill: #20242e; stroke: #8894b0 }
  rect.strip { fill: #171a21 }
  path { stroke: #5f6b88 }
}
"""


class Box(NamedTuple):
    """A room's place in the picture; pixels."""

    x: float
    y: float
    width: float


def room_of(path: Path) -> str:
    """Return the room of a source file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(rooms: Iterable[str]) -> dict[str, set[str]]:
    """Return which rooms each room imports."""
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        for node in ast.walk(ast.parse(path.read_text())) if room in found else ():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            parts = (name.split(".") for name in names if name.startswith("nano_inference."))
            found[room] |= {part[1] for part in parts if part[1] != room and part[1] in found}
    return found


def reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return the rooms that a room needs, directly or through others."""
    seen: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting += imports[room]
    return seen


def arrows(imports: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Return the imports that no chain of other imports implies."""
    below = {room: reachable(room, imports) for room in imports}
    return sorted(
        (room, used) for room, direct in imports.items() for used in direct if not any(used in below[o] for o in direct)
    )


def placed(imports: Mapping[str, set[str]]) -> dict[str, Box]:
    """Return where each room is drawn: bands from the bottom up, a room near the rooms that it imports."""
    boxes: dict[str, Box] = {}
    for level, names in enumerate(BANDS.values()):
        rooms = sorted(names.split(), key=lambda room: mean_x(imports[room], boxes))
        top = (len(BANDS) - 1 - level) * BAND + (BAND - BOX) // 2
        widths = [7.4 * len(room) + 14 for room in rooms]
        gap = (WIDTH - LEFT - sum(widths)) / (len(rooms) + 1)
        for at, room in enumerate(rooms):
            boxes[room] = Box(LEFT + gap * (at + 1) + sum(widths[:at]), top, widths[at])
    return boxes


def mean_x(rooms: Iterable[str], boxes: Mapping[str, Box]) -> float:
    """Return the middle of the rooms that are placed already; in one order, because sums of floats depend on it."""
    middles = [boxes[room].x + boxes[room].width / 2 for room in sorted(rooms) if room in boxes]
    return sum(middles) / len(middles) if middles else WIDTH / 2


def drawn() -> str:
    """Return the picture."""
    rooms = [room for names in BANDS.values() for room in names.split()]
    imports = imports_of(rooms)
    boxes = placed(imports)
    height = BAND * len(BANDS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The rooms of nano_inference, and which imports which</title>",
        f"<style>{STYLE}</style>",
    ]
    for level, name in enumerate(reversed(BANDS)):
        parts.append(f'<rect class="strip" x="0" y="{level * BAND + 4}" width="{WIDTH}" height="{BAND - 8}" rx="6"/>')
        parts.append(f'<text class="band" x="12" y="{level * BAND + 26}">{escape(name)}</text>')
    parts += [arrow(boxes[room], boxes[used]) for room, used in arrows(imports)]
    for room, box in boxes.items():
        middle = box.x + box.width / 2
        parts.append(f'<rect class="room" x="{box.x:.0f}" y="{box.y}" width="{box.width:.0f}" height="{BOX}" rx="4"/>')
        parts.append(f'<text x="{middle:.0f}" y="{box.y + 20}" text-anchor="middle">{room}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def arrow(above: Box, below: Box) -> str:
    """Return the line of an import: from the lower edge of the room that imports."""
    x, y = above.x + above.width / 2, above.y + BOX
    end_x, end_y = below.x + below.width / 2, below.y
    if end_y <= above.y:  # in the same row: around the lower edges
        end_y = below.y + BOX
        return f'<path d="M{x:.0f} {y}Q{(x + end_x) / 2:.0f} {y + 16} {end_x:.0f} {end_y}"/>'
    bend = (end_y - y) / 2
    return f'<path d="M{x:.0f} {y}C{x:.0f} {y + bend:.0f} {end_x:.0f} {end_y - bend:.0f} {end_x:.0f} {end_y}"/>'


def main(arguments: list[str]) -> int:
    """Write the picture, or compare it."""
    picture = drawn()
    if "--check" in arguments:
        is_same = PICTURE.is_file() and PICTURE.read_text() == picture
        print("" if is_same else f"{PICTURE.relative_to(ROOT)} is out of date: run scripts/architecture.py")
        return int(not is_same)
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
