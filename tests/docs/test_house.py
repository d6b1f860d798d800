"""docs/house.md names every room with its floor, and only files, functions and classes that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.cases import failures
from tests.docs.pages import LINKING, ROOT, spans_in
from tests.test_rooms import HOME

HOUSE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
ROOTS = (ROOT, HOME, HOME / "executors" / "cpu", HOME / "nanochat", ROOT / "docs", ROOT / "benchmarks" / "reliability")
_FILE = re.compile(r"(?<![\w$/.~-])(?:[\w.-]+/)*[\w-]+\.(?:py|pyi|js|h|c|md|toml|html|css)\b")
_REFERENCE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|js))` · (`\w+`(?:, `\w+`(?!\.))*)")
"""`file.py` · `name`, `name`."""
_DEFINITION = re.compile(r"\b(?:class|function|const) (\w+)")
"""In JavaScript."""
USER_FILES = {"config.toml", "my.toml", "serve.toml", "typo.toml", "generation_config.json"}
"""Files of the reader, not of the repository."""


def rooms_in(text: str) -> dict[str, int]:
    """Return the rooms of the architecture page's table with their floors."""
    table = text.partition("## Floors, bottom up")[2].partition("\n## ")[0]
    rooms: dict[str, int] = {}
    for floor, named in re.findall(r"^\| (\d+) \| (.+?) \|", table, re.MULTILINE):
        plain = re.sub(r"\([^()]*\)", "", named)
        rooms |= {name: int(floor) for name in re.findall(r"`([a-z_]+)`", plain)}
    return rooms


def test_table_lists_every_room() -> None:
    code = {path.stem for path in HOME.glob("*.py")} | {path.parent.name for path in HOME.glob("*/__init__.py")}
    assert set(rooms_in(HOUSE)) == code - {"__init__", "__main__"}


def test_floors_are_those_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = settings["contracts"][0]["layers"][::-1]
    level = {room: number for number, layer in enumerate(layers) for room in re.findall(r"\w+", layer)}
    rooms = rooms_in(HOUSE)
    assert max(rooms.values()) == 9
    for lower in rooms:
        for higher in rooms:
            if rooms[lower] < rooms[higher]:
                assert level[lower] < level[higher], f"{lower} below {higher}"


def missing_files(text: str) -> list[str]:
    """Return the files that a page names and that do not exist."""
    named = {name for span in spans_in(text) for name in _FILE.findall(span)}
    return [name for name in sorted(named - USER_FILES) if not exists(name)]


def exists(name: str) -> bool:
    if any((root / name).exists() for root in ROOTS):
        return True
    return "/" not in name and any(next(root.rglob(name), None) for root in (HOME, ROOT / "docs", ROOT / "tests"))


def missing_definitions(text: str) -> list[str]:
    """Return "file · name" for each reference of a page whose file does not define the name."""
    return [
        f"{file} · {name}"
        for file, names in _REFERENCE.findall(" ".join(text.split()))
        for name in re.findall(r"\w+", names)
        if name not in definitions(path_of(file))
    ]


def path_of(name: str) -> Path:
    """Return the source file of a reference; a JavaScript file may be named without its folder."""
    places = (HOME / name, ROOT / name)
    return next((place for place in places if place.exists()), None) or next(HOME.rglob(name))


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the functions, methods, classes and assigned names of a source file."""
    text = path.read_text(encoding="utf-8")
    return frozenset(_DEFINITION.findall(text) if path.suffix == ".js" else defined_names(ast.parse(text)))


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def test_named_files_exist() -> None:
    def check(page: Path) -> None:
        assert missing_files(page.read_text(encoding="utf-8")) == []

    assert failures(check, zip(LINKING)) == []


def test_named_functions_and_classes_exist() -> None:
    def check(page: Path) -> None:
        assert missing_definitions(page.read_text(encoding="utf-8")) == []

    assert failures(check, zip(LINKING)) == []


def test_missing_file_is_found() -> None:
    text = "`cli/app.py` and `cli/gone.py`, `tests/no.py`, `python benchmarks/none.py --x`, `rl.md`, `my.toml`"
    assert missing_files(text) == ["benchmarks/none.py", "cli/gone.py", "tests/no.py"]


def test_missing_definition_is_found() -> None:
    text = "`engine.py` · `tick`, `gone`; `core.py` ·\n`Core`, and `chat.js` · `Chat`, `nanochat/format.py` · `FORMAT`"
    assert missing_definitions(text) == ["engine.py · gone"]
