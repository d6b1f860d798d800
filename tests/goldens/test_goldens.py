"""What `python -m tests.goldens` compares. One test: counts of cached tokens depend on the order of the dialects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.goldens.cases import DIALECTS
from tests.goldens.replies import REPLIES, differences, replies_of
from tests.goldens.servers import served


@pytest.mark.slow
def test_replies_of_every_dialect_are_the_golden_ones(tmp_path: Path) -> None:
    lines: list[str] = []
    with served(tmp_path) as urls:
        for dialect in DIALECTS:
            stored = json.loads((REPLIES / f"{dialect}.json").read_text())
            lines += [f"{dialect}{line}" for line in differences(stored, replies_of(dialect, urls, tmp_path))]
    assert not lines
