"""Many quick cases in one test: a test for each costs milliseconds in every process that collects it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def failures(check: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> list[str]:
    """Call `check` with the values of each case; return the cases in which it fails, with their errors.

    There must be cases: a table that has become empty is a failure.
    """
    found = []
    tried = list(cases)
    assert tried, "no cases"
    for case in tried:
        try:
            check(*case)
        except (Exception, pytest.fail.Exception) as error:
            found.append(f"{reprlib.repr(case)}: {type(error).__name__}: {error}")
    return found
