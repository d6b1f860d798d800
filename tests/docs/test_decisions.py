"""The decision records: each has its number, its form and its place in the list, and what names one is right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.cases import failures
from tests.docs.pages import ROOT

HOME = ROOT / "docs" / "decisions"
RECORDS = sorted(path for path in HOME.glob("*.md") if path.name != "index.md")
SECTIONS = ("## Context", "## Decision", "## Consequences")
HOLDS_EVIDENCE = ("## Alternatives", "## Figures")
SOURCES = ("src", "tests", "benchmarks", "examples", "scripts")
ELSEWHERE = {"docs/gguf.md"}
"""Pages of other projects: ggml's description of its format."""


def title_of(record: Path) -> str:
    """Return a record's title without its number."""
    return re.sub(r"^# \d+\. ", "", record.read_text(encoding="utf-8").partition("\n")[0])


def pages_named_in(text: str) -> list[str]:
    """Return the pages below docs/ that a source file names."""
    return re.findall(r"\bdocs/[\w/-]+\.md\b", text)


def missing_pages() -> Iterator[str]:
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for name in pages_named_in(path.read_text(encoding="utf-8")):
                is_here = name in ELSEWHERE or (ROOT / name).is_file()
                if not is_here and path.parent != ROOT / "tests" / "docs":
                    yield f"{path.relative_to(ROOT)} names {name}"


def test_record_has_number_date_and_sections() -> None:
    def check(record: Path) -> None:
        lines = record.read_text(encoding="utf-8").splitlines()
        number = RECORDS.index(record) + 1
        assert record.name.startswith(f"{number:04}-") and lines[0] == f"# {number}. {title_of(record)}"
        assert re.match(r"\d{4}-\d\d-\d\d[^·]* · .+", lines[2]), f"{record.name}: date · state, got {lines[2]!r}"
        headings = [line for line in lines if line.startswith("## ")]
        assert set(SECTIONS) <= set(headings) and set(HOLDS_EVIDENCE) & set(headings), headings
        assert len(lines) <= 40, f"{record.name}: {len(lines)} lines; a record fits on a page"

    assert failures(check, zip(RECORDS)) == []


def test_index_lists_every_record_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d-]+) \| \[(.+)\]\((.+)\) \|$", (HOME / "index.md").read_text(), re.MULTILINE)
    expected = [
        (str(number), record.read_text().splitlines()[2][:10], title_of(record), record.name)
        for number, record in enumerate(RECORDS, start=1)
    ]
    assert rows == expected


def test_sources_name_only_pages_that_exist() -> None:
    assert list(missing_pages()) == []


def test_the_check_sees_a_named_page() -> None:
    assert pages_named_in("(docs/rl.md), docs/decisions/0004-a-b.md: x") == ["docs/rl.md", "docs/decisions/0004-a-b.md"]
