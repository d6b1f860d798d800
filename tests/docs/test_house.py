"""What the pages say of the code's own places: every room is in the house, every file that is named is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import LINKING, ROOT, name_of, spans_in
from tests.test_rooms import HOME, LEVEL

HOUSE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
ROOTS = (ROOT, HOME, HOME / "kernels", HOME / "nanochat", ROOT / "docs", ROOT / "benchmarks" / "reliability")
_FILE = re.compile(r"(?<![\w$/.~-])(?:[\w.-]+/)*[\w-]+\.(?:py|pyi|js|h|c|md|toml|html|css)\b")
NOT_OURS = {"config.toml", "my.toml", "serve.toml", "typo.toml", "generation_config.json"}
"""Files of a reader, not of the repository."""


def rooms_in(text: str) -> dict[str, int]:
    """Return the rooms of the house's table with their levels."""
    table = text.partition("## Rooms, bottom up")[2].partition("\n## ")[0]
    rooms: dict[str, int] = {}
    for level, named in re.findall(r"^\| (\d+) \| (.+?) \|", table, re.MULTILINE):
        plain = re.sub(r"\([^()]*\)", "", named)  # what stands in brackets explains
        rooms |= {name: int(level) for name in re.findall(r"`([a-z_]+)`", plain)}
    return rooms


def test_the_house_has_every_room_and_no_other() -> None:
    code = {path.stem for path in HOME.glob("*.py")} | {path.parent.name for path in HOME.glob("*/__init__.py")}
    assert set(rooms_in(HOUSE)) == code - {"__init__", "__main__"}


def test_its_levels_are_those_that_the_imports_are_held_to() -> None:
    rooms = rooms_in(HOUSE)
    for lower in rooms:
        for higher in rooms:
            if rooms[lower] < rooms[higher]:
                assert LEVEL[lower] < LEVEL[higher], f"{lower} below {higher}"


def missing(text: str) -> list[str]:
    """Return the files that a page names and that are not there."""
    named = {name for span in spans_in(text) for name in _FILE.findall(span)}
    return [name for name in sorted(named - NOT_OURS) if not is_there(name)]


def is_there(name: str) -> bool:
    if any((root / name).exists() for root in ROOTS):
        return True
    return "/" not in name and any(next(root.rglob(name), None) for root in (HOME, ROOT / "docs", ROOT / "tests"))


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_files_that_are_named_are_there(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_the_check_sees_a_file_that_is_gone() -> None:
    text = "`cli/app.py` and `cli/gone.py`, `tests/no.py`, `python benchmarks/none.py --x`, `rl.md`, `my.toml`"
    assert missing(text) == ["benchmarks/none.py", "cli/gone.py", "tests/no.py"]
