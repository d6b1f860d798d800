"""Fixtures: the compiled library for every instruction set of this machine, with one, two and three threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nano_inference.catalog import default_cache
from nano_inference.kernels.compile import ISAS, Isa, best_isa, compile_library, cpu_flags, find_compiler
from nano_inference.kernels.library import Library

Team = dict[int, Library]
"""Libraries of one instruction set, by number of threads."""


WITHOUT = {"avx512": ("avx512_vnni", "-mno-avx512vnni"), "avx2": ("avx_vnni", "-mno-avxvnni")}
"""Optional instructions: the CPU's flag and the compiler option that disables them."""


@pytest.fixture(scope="session", params=[*ISAS, *(f"{isa} without vnni" for isa in WITHOUT)])
def build(request: pytest.FixtureRequest) -> tuple[Isa, tuple[str, ...]]:
    """Return an instruction set of this machine, and further compiler options."""
    isa, _, is_without = request.param.partition(" ")
    if ISAS.index(isa) < ISAS.index(best_isa(cpu_flags())):
        pytest.skip(f"this CPU has no {isa}")
    find_compiler(os.environ)
    if not is_without:
        return isa, ()
    flag, option = WITHOUT[isa]
    if flag not in cpu_flags():
        pytest.skip(f"this CPU has no {flag}")
    return isa, (option,)


@pytest.fixture(scope="session")
def isa(build: tuple[Isa, tuple[str, ...]]) -> Isa:
    return build[0]


@pytest.fixture(scope="session")
def team(build: tuple[Isa, tuple[str, ...]]) -> Iterator[Team]:
    isa, options = build
    path = compile_library(isa, default_cache(os.environ), os.environ, options)
    libraries = {threads: Library(path, threads) for threads in (1, 2, 3)}
    yield libraries
    for library in libraries.values():
        library.close()


@pytest.fixture(scope="session")
def library(team: Team) -> Library:
    return team[2]
