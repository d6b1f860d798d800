"""What the pages name exists: links, images, files, functions; the architecture's picture is that of the imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from scripts.architecture import PICTURE, drawn
from tests.docs.pages import DOCS, LINKING, PAGES, ROOT, anchors_in, links_in, name_of, spans_in

HOME = ROOT / "src" / "nano_inference"
ROOTS = (ROOT, HOME, HOME / "executors" / "cpu", HOME / "nanochat", ROOT / "docs", ROOT / "benchmarks" / "reliability")
SOURCES = ("src", "tests", "benchmarks", "examples", "scripts")
_FILE = re.compile(r"(?<![\w$/.~-])(?:[\w.-]+/)*[\w-]+\.(?:py|pyi|js|h|c|md|toml|html|css)\b")
_REFERENCE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|js))` · (`\w+`(?:, `\w+`(?!\.))*)")
"""`file.py` · `name`, `name`."""
_DEFINITION = re.compile(r"\b(?:class|function|const) (\w+)")
"""In JavaScript."""
ELSEWHERE = {"config.toml", "my.toml", "serve.toml", "typo.toml", "gguf.md", "docs/gguf.md"}
"""Files of the reader, and pages of other projects."""


def is_external(link: str) -> bool:
    return urlsplit(link).scheme in ("http", "https", "mailto")


def leads(link: str, text: str, page: Path) -> bool:
    """Whether a link's file is there, and the anchor in it. The site's pages link only what the site has."""
    parts = urlsplit(link)
    target = page.parent / unquote(parts.path) if parts.path else page
    home = ROOT / "docs" if page in DOCS else ROOT
    if parts.scheme or not target.resolve().is_relative_to(home) or not (target == page or target.exists()):
        return False
    if not parts.fragment:
        return True
    aimed = text if target == page else target.read_text(encoding="utf-8")
    return target.suffix == ".md" and parts.fragment in anchors_in(aimed)


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = [one for one in links_in(text) if not is_external(one) and not leads(one, text, page)]
    assert broken == []


def test_every_image_is_shown() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in LINKING}
    shown = {(page.parent / one).resolve() for page, text in texts.items() for one in links_in(text)}
    assert {path.resolve() for path in (ROOT / "docs" / "images").iterdir()} <= shown


@cache
def exists(name: str) -> bool:
    if any((root / name).exists() for root in ROOTS):
        return True
    return "/" not in name and any(next(root.rglob(name), None) for root in (HOME, ROOT / "docs", ROOT / "tests"))


@cache
def definitions(file: str) -> frozenset[str]:
    """Return a file's functions, methods, classes and assigned names. JavaScript may be named without its folder."""
    places = (HOME / file, ROOT / file)
    path = next((place for place in places if place.exists()), None) or next(HOME.rglob(file))
    text = path.read_text(encoding="utf-8")
    return frozenset(_DEFINITION.findall(text) if path.suffix == ".js" else defined_names(ast.parse(text)))


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_and_definitions_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {name for span in spans_in(text) for name in _FILE.findall(span)} - ELSEWHERE
    assert [name for name in sorted(named) if not exists(name)] == []
    references = _REFERENCE.findall(" ".join(text.split()))
    wanted = [(file, name) for file, names in references for name in re.findall(r"\w+", names)]
    assert [f"{file} · {name}" for file, name in wanted if name not in definitions(file)] == []


def test_sources_name_only_pages_that_exist() -> None:
    files = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if path.parent != Path(__file__).parent
    ]
    named = {
        (path, name) for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert [(path, name) for path, name in named if name not in ELSEWHERE and not (ROOT / name).is_file()] == []


@pytest.mark.slow
def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    assert PICTURE.read_text() == drawn(), "run scripts/architecture.py"
