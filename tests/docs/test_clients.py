"""docs/clients.md names every file of tests/clients, counts its cases, and has the table of the client mutants."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest

from tests.cases import failures
from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from mutation.client_changes import CHANGES, Change

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| [^|]+ \| ([^|]+) \| `(tests/[\w/]+\.py)` \| [ctw] \| (?:(\d+) of )?(\d+) \| ", re.MULTILINE)
"""A client's row: version, file, cases of the client if other cases are in the file, cases of the file."""
ROWS = {file: (version, int(some or total), int(total)) for version, file, some, total in ROW.findall(PAGE)}
FILES = {path.name: path for path in sorted((ROOT / "tests" / "clients").glob("test_*.py"))}


@pytest.mark.parametrize("name", FILES)
def test_every_client_has_a_row_and_a_change_that_breaks_it(name: str) -> None:
    assert f"`tests/clients/{name}`" in PAGE
    assert f"tests/clients/{name}" in {change.test for change in CHANGES}


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> Counter[str]:
    """The cases of each file of this run, unless only some were chosen. Collecting again would take half a minute."""
    config = request.config
    if config.option.keyword or config.option.markexpr or any("::" in one for one in config.args):
        pytest.skip("only some tests of the files were chosen")
    return Counter(item.nodeid.partition("::")[0] for item in request.session.items)


@pytest.mark.parametrize("file", ROWS)
def test_number_of_cases_is_what_pytest_collects(file: str, collected: Counter[str]) -> None:
    if file not in collected:
        pytest.skip("not part of this run")
    assert collected[file] == ROWS[file][2] >= ROWS[file][1]


def test_versions_are_exact() -> None:
    assert len(ROWS) == PAGE.count("` | c | ") + PAGE.count("` | t | ") + PAGE.count("` | w | ")
    for version in {version for version, _, _ in ROWS.values()} - {"those of this table"}:
        assert re.search(r"\d+\.\d+\.\d+|\b0\.\d+\b|\b[0-9a-f]{7,8}\b", version), version


def test_changed_text_is_in_the_sources_once() -> None:
    def check(change: Change) -> None:
        text = (ROOT / "src" / "nano_inference" / "server" / change.path).read_text(encoding="utf-8")
        assert text.count(change.old) == 1 and change.new != change.old

    assert failures(check, zip(CHANGES)) == []


def test_printed_table_has_every_change_and_the_test_that_noticed_it() -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \| `(test_\w+)` \|$", PAGE, re.MULTILINE)
    shown = [(change.test.removeprefix("tests/clients/"), change.breaks) for change in CHANGES]
    assert [(file, broken) for file, broken, _ in rows] == shown
    for change, (_, _, test) in zip(CHANGES, rows, strict=True):
        assert f"def {test}(" in (ROOT / change.test).read_text(encoding="utf-8")
