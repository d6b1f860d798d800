"""`benchmarks/windows.py` measures windows whose results have the wanted tokens and top tokens."""

from __future__ import annotations

import pytest

from benchmarks.windows import main


def test_a_line_is_printed_for_each_number_of_tops(capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark itself checks what the windows return."""
    main(["--rows", "3", "--tokens", "2", "--tops", "0,4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "3 rows, 2 tokens a window, 0 tops", "3 rows, 2 tokens a window, 4 tops"
    ]  # fmt: skip
    assert all(float(line.split()[-4]) > 0 for line in lines)
