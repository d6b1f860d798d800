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

_BLOCK = re.compile(
    r"^ *(?P<fence>`{3,})(?P<language>[^`\n]*)\n(?P<text>.*?)^ *(?P=fence) *$", re.DOTALL | re.MULTILINE
)
_CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[\w-]+\]: (\S+)$", re.MULTILINE)
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
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            page=name_of(path),
            line=text.count("\n", 0, found.start("text")) + 1,
            language=found["language"].strip(),
            text=textwrap.dedent(found["text"]),
        )
        for found in _BLOCK.finditer(text)
    ]


def links_in(text: str) -> list[str]:
    """Return where a page's links and images lead, as they are written."""
    prose = _CODE_SPAN.sub("", _BLOCK.sub("", text))
    return [one or other for one, other in _LINK.findall(prose)] + _PICTURE.findall(prose)


def spans_in(text: str) -> list[str]:
    """Return the code within a page's sentences, each on one line."""
    return [" ".join(found[0].strip("`").split()) for found in _CODE_SPAN.finditer(_BLOCK.sub("", text))]


def anchors_in(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_BLOCK.sub("", text)):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        later = (f"{plain}-{number}" for number in range(1, 99))
        anchors.add(next(one for one in (plain, *later) if one not in anchors))
    return anchors
