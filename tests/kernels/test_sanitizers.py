"""Runs every kernel with the address sanitizer and the undefined-behaviour sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nano_inference.executors.cpu.compile import CannotCompile, best_isa, compile_library, cpu_flags, find_compiler
from nano_inference.loading.catalog import default_cache

pytestmark = pytest.mark.slow

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O0", "-g1")
"""Without optimisation the sanitizers check every access, and compiling takes a third of the time of -O1."""


def test_kernels_pass_sanitizers() -> None:
    compiler = find_compiler(os.environ)
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip("this compiler has no address sanitizer to be loaded first")
    try:
        library = compile_library(best_isa(cpu_flags()), default_cache(os.environ), os.environ, SANITIZE)
    except CannotCompile as error:
        pytest.skip(f"no sanitizers: {error}")
    environ = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.kernels.everything", str(library)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "everything was checked" in done.stdout
    assert "runtime error" not in done.stderr
