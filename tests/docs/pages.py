"""Parse headings, links and code of the documentation's Markdown pages."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
"""The pages whose code is executed."""
LINKING = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_PICTURE = re.compile(r"<(?:img|source)[^>]* src(?:set)?=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    """Where its text begins, counted from 1."""
    language: str
    text: str

    @property
    def name(self) -> str:
        """Page and line, as an editor opens them."""
        return f"{self.page}:{self.line}"


def name_of(path: Path) -> str:
    """Return a page's path in the repository."""
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path) -> list[Block]:
    """Return a page's blocks, in order."""
    return blocks_in(path.read_text(encoding="utf-8"), name_of(path))


def blocks_in(text: str, page: str) -> list[Block]:
    """Return the blocks of a text, in order. A fence that is not closed runs to the end, as it does on the page."""
    found: list[Block] = []
    opening: re.Match[str] | None = None
    start, lines = 0, text.splitlines()
    for number, line in enumerate([*lines, ""], start=1):
        fence = _FENCE.match(line)
        if opening is None:
            opening, start = fence, number + 1
            continue
        is_closing = fence is not None and not fence["info"].strip() and fence["fence"].startswith(opening["fence"])
        if is_closing or number > len(lines):
            body = textwrap.dedent("\n".join(lines[start - 1 : number - 1])) + "\n"
            found.append(Block(page=page, line=start, language=opening["info"].strip(), text=body))
            opening = None
    return found


def prose_of(text: str) -> str:
    """Return a page's text without its blocks of code: what links and headings stand in."""
    kept: list[str] = []
    opening: re.Match[str] | None = None
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if opening is None and fence is None:
            kept.append(line)
        elif opening is None:
            opening = fence
        elif fence is not None and not fence["info"].strip() and fence["fence"].startswith(opening["fence"]):
            opening = None
    return "\n".join(kept)


def links_in(text: str) -> list[str]:
    """Return where a page's links and images lead, as they are written."""
    return _LINK.findall(_CODE_SPAN.sub("", prose_of(text)))


def images_in(text: str) -> list[str]:
    """Return the pictures of a page that are written as HTML."""
    return _PICTURE.findall(prose_of(text))


def spans_in(text: str) -> list[str]:
    """Return the code within a page's sentences, each on one line."""
    return [" ".join(found[0].strip("`").split()) for found in _CODE_SPAN.finditer(prose_of(text))]


def anchors_in(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(prose_of(text)):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        later = (f"{plain}-{number}" for number in range(1, 99))
        anchors.add(next(one for one in (plain, *later) if one not in anchors))
    return anchors
