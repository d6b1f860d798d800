"""docs/clients.md names every file of tests/clients and has the table of `benchmarks/client_mutants.py`."""

from __future__ import annotations

import re
import sys

import pytest

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from mutation.client_changes import CHANGES, Change

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
FILES = {path.name: path for path in sorted((ROOT / "tests" / "clients").glob("test_*.py"))}


@pytest.mark.parametrize("name", FILES)
def test_every_client_has_a_row_and_a_change_that_breaks_it(name: str) -> None:
    assert f"`tests/clients/{name}`" in PAGE
    assert name in {f"test_{change.client}.py" for change in CHANGES}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.client}-{change.path}")
def test_changed_text_is_in_the_sources_once(change: Change) -> None:
    text = (ROOT / "src" / "nano_inference" / "server" / change.path).read_text(encoding="utf-8")
    assert text.count(change.old) == 1 and change.new != change.old


def test_printed_table_has_every_change_and_the_test_that_noticed_it() -> None:
    rows = re.findall(r"^\| `(test_\w+\.py)` \| (.+) \| `(test_\w+)` \|$", PAGE, re.MULTILINE)
    assert [(file, broken) for file, broken, _ in rows] == [(f"test_{one.client}.py", one.breaks) for one in CHANGES]
    for file, _, test in rows:
        assert f"def {test}(" in FILES[file].read_text(encoding="utf-8")
