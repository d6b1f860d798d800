"""Runs commands in this process."""

from __future__ import annotations

import pytest

from nano_inference.cli import main

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: str, code: int = 0) -> tuple[str, str]:
    """Run a command that must exit with `code`; return stdout and stderr."""
    found = main(argv)
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


def refused(capsys: Capture, *argv: str) -> str:
    """Run a command that must fail with code 2; return its one line without the program's name."""
    out, err = run(capsys, *argv, code=2)
    assert out == "" and err.startswith("nano-inference: ") and err.count("\n") == 1, err
    return err.removeprefix("nano-inference: ").rstrip()
