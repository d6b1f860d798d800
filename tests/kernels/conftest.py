"""The compiled library in every instruction set that this machine has, with one, two and three threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nano_inference.catalog import default_cache
from nano_inference.kernels.compile import ISAS, Isa, best_isa, compile_library, cpu_flags, find_compiler
from nano_inference.kernels.library import Library

Team = dict[int, Library]
"""One instruction set's libraries by their number of threads."""


@pytest.fixture(scope="session", params=ISAS)
def isa(request: pytest.FixtureRequest) -> Isa:
    best = best_isa(cpu_flags())
    if ISAS.index(request.param) < ISAS.index(best):
        pytest.skip(f"this CPU has no {request.param}")
    find_compiler(os.environ)
    return request.param


@pytest.fixture(scope="session")
def team(isa: Isa) -> Iterator[Team]:
    path = compile_library(isa, default_cache(os.environ), os.environ)
    libraries = {threads: Library(path, threads) for threads in (1, 2, 3)}
    yield libraries
    for library in libraries.values():
        library.close()


@pytest.fixture(scope="session")
def library(team: Team) -> Library:
    return team[2]
