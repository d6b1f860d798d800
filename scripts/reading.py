"""Write the line counts of docs/reading.md: `python scripts/reading.py` after a listed file has changed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reading.md"
END = "    # ---- pause and sleep"  # in engine.py: the first evening ends here
ROW = re.compile(r"^(\| \d+ \| `([\w/.]+\.py)` \| )(\d+)( \|)", re.MULTILINE)
SUM = re.compile(r"^\S+ files, \S+ lines", re.MULTILINE)


def counted(text: str) -> str:
    """Return the page with the present line counts and their sum."""
    lengths: list[int] = []

    def with_count(row: re.Match[str]) -> str:
        lines = (ROOT / "src" / "nano_inference" / row[2]).read_text(encoding="utf-8").splitlines()
        lengths.append(next((index for index, line in enumerate(lines) if line.startswith(END)), len(lines)))
        return f"{row[1]}{lengths[-1]}{row[4]}"

    text = ROW.sub(with_count, text)
    return SUM.sub(f"{len(lengths)} files, {sum(lengths):,} lines", text, count=1)


if __name__ == "__main__":
    PAGE.write_text(counted(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
