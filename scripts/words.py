"""Fail when a text of the project uses a word of `words.txt`: docstrings, comments, messages, test names, pages, docs.

A line that quotes a user, a model or a protocol ends in the comment `quoted`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("words.txt")
SUFFIXES = {".py", ".pyi", ".md", ".c", ".h", ".js", ".css", ".html", ".toml", ".yml"}
ELSEWHERE = (
    "src/nano_inference/server/web/vendor/",
    "benchmarks/data/",
    "benchmarks/recording/",
    "benchmarks/golden/",
    "tests/surface/",
)
OURS = {"scripts/words.txt", "scripts/words.py", "tests/docs/test_words.py"}
QUOTED = "quoted"


def words() -> dict[str, str]:
    """Return what not to write, and what to write instead."""
    lines = (line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
    return {word: instead.strip() for word, _, instead in (line.partition(":") for line in lines)}


def pattern(found: dict[str, str]) -> re.Pattern[str]:
    """Return an expression for any of the words, also inside names such as `test_nobody_waits`."""
    return re.compile(
        rf"(?<![A-Za-z])({'|'.join(map(re.escape, found)).replace(chr(92) + ' ', '[ _]')})(?![A-Za-z])", re.IGNORECASE
    )


def findings(text: str, listed: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of everything that is found in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.rstrip().rstrip("*/-> ").endswith(QUOTED):
            yield from ((number, found[0].lower().replace("_", " ")) for found in pattern(listed).finditer(line))


def main() -> int:
    """Print every finding; return 1 if there is one."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    listed, failed = words(), False
    for name in names:
        path = ROOT / name
        if path.suffix not in SUFFIXES or name in OURS or name.startswith(ELSEWHERE) or not path.is_file():
            continue
        for number, word in findings(path.read_text(), listed):
            failed = True
            print(f"{name}:{number}: {word!r}: write {listed[word]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
