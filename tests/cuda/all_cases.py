"""The cases that every implementation of the launchers passes."""

from __future__ import annotations

from collections.abc import Iterator

from tests.cuda import (
    adapter_cases,
    attention_cases,
    fused_cases,
    linear_cases,
    pointwise_cases,
    refusal_cases,
    sampler_cases,
    state_cases,
)
from tests.cuda.case import Case


def all_cases() -> Iterator[Case]:
    """Yield the cases of every launcher."""
    yield from adapter_cases.cases()
    yield from attention_cases.cases()
    yield from fused_cases.cases()
    yield from linear_cases.cases()
    yield from pointwise_cases.cases()
    yield from refusal_cases.cases()
    yield from sampler_cases.cases()
    yield from state_cases.cases()
