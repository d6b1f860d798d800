"""`failures` names the cases that fail, and refuses a table without cases."""

from __future__ import annotations

import pytest

from tests.cases import failures


def check(number: int, text: str) -> None:
    if number > 1:
        pytest.fail("too many")
    assert str(number) == text


def test_cases_that_fail_are_named_with_their_errors() -> None:
    assert failures(check, [(1, "1")]) == []
    found = failures(check, [(1, "1"), (0, "x"), (2, "2")])
    assert len(found) == 2
    assert found[0].startswith("(0, 'x'): AssertionError: ") and found[1] == "(2, '2'): Failed: too many"


def test_an_empty_table_is_no_success() -> None:
    with pytest.raises(AssertionError, match="no cases"):
        failures(check, ())
