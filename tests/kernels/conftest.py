"""Fixtures: the compiled library for every instruction set of this machine, with one, two and three threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from nano_inference.executors.cpu.compile import ISAS, Isa, best_isa, compile_library, cpu_flags, find_compiler
from nano_inference.executors.cpu.library import Library
from nano_inference.loading.catalog import default_cache

Team = dict[int, Library]
"""Libraries of one instruction set, by number of threads."""


WITHOUT = {"avx512": ("avx512_vnni", "-mno-avx512vnni"), "avx2": ("avx_vnni", "-mno-avxvnni")}
"""Optional instructions: the CPU's flag and the compiler option that disables them."""


BUILDS = (*ISAS, *(f"{isa} without vnni" for isa in WITHOUT))


def missing(name: str) -> str | None:
    """Return which instructions of a build this CPU lacks, or None."""
    isa = isa_of(name)
    if ISAS.index(isa) < ISAS.index(best_isa(cpu_flags())):
        return isa
    return WITHOUT[isa][0] if name != isa and WITHOUT[isa][0] not in cpu_flags() else None


def isa_of(name: str) -> Isa:
    """Return the instruction set of a build."""
    return next(isa for isa in ISAS if isa == name.partition(" ")[0])


@contextmanager
def open_team(name: str) -> Iterator[Team]:
    """Compile a build and yield its libraries."""
    isa = isa_of(name)
    options = () if name == isa else (WITHOUT[isa][1],)
    path = compile_library(isa, default_cache(os.environ), os.environ, options)
    libraries = {threads: Library(path, threads) for threads in (1, 2, 3)}
    yield libraries
    for library in libraries.values():
        library.close()


@pytest.fixture(scope="session", params=BUILDS)
def build(request: pytest.FixtureRequest) -> str:
    """Return the name of a build for this machine."""
    name = str(request.param)
    if missing(name):
        pytest.skip(f"this CPU has no {missing(name)}")
    find_compiler(os.environ)
    return name


@pytest.fixture(scope="session")
def isa(build: str) -> Isa:
    return isa_of(build)


@pytest.fixture(scope="session")
def team(build: str) -> Iterator[Team]:
    with open_team(build) as libraries:
        yield libraries


@pytest.fixture(scope="session")
def teams() -> Iterator[dict[str, Team]]:
    """Yield the libraries of all builds for this machine, for tests that compute what is expected once for all."""
    find_compiler(os.environ)
    with ExitStack() as stack:
        yield {name: stack.enter_context(open_team(name)) for name in BUILDS if not missing(name)}


@pytest.fixture(scope="session")
def library(team: Team) -> Library:
    return team[2]
