"""Commands whose stdin, stdout or stderr is closed or full, or whose reader has exited."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest


def python(text: str, redirection: str) -> subprocess.CompletedProcess[str]:
    words = shlex.join([sys.executable, "-c", text])
    return subprocess.run(["bash", "-c", f"exec {words} {redirection}"], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("redirection", ["2>&-", "<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_not_reused(redirection: str) -> None:
    text = (
        "import os, sys\n"
        "from nano_inference.cli.app import prepare\n"
        "prepare()\n"
        "opened = os.open(os.devnull, os.O_RDONLY)\n"
        "print('hello', file=sys.stderr); print('hello'); sys.stdin.read()\n"
        "sys.exit(7 if opened > 2 and all(os.get_inheritable(one) for one in range(3)) else 8)\n"
    )
    assert python(text, redirection).returncode == 7


def test_stderr_drops_failed_writes_and_stdout_does_not() -> None:
    prepared = "import sys; from nano_inference.cli.app import prepare; prepare();"
    lost = python(f"{prepared} print('x' * 100_000, file=sys.stderr, flush=True); print('whole')", "2>/dev/full")
    assert (lost.returncode, lost.stdout) == (0, "whole\n")
    kept = python(f"{prepared} print('caf\\u00e9 \\udcff', file=sys.stderr)", "")
    assert kept.stderr == "café \\udcff\n"
    assert python(f"{prepared} print('x', flush=True)", ">/dev/full").returncode != 0
