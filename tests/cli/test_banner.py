"""The banner of `serve` in a narrow terminal."""

from __future__ import annotations

import pytest

pytest.importorskip("pty", reason="needs a Unix terminal")

from tests.cli.screen import terminal
from tests.warm import Forker


def test_banner_wraps_facts_but_not_the_command(forker: Forker) -> None:
    """A wrapped command could not be copied."""
    with terminal("serve", "--model", "calculator", "--port", "0", forker=forker, rows=40, columns=60) as screen:
        screen.wait_raw('"calculator": true}\'\r\n')
        rows = screen.text().splitlines()
        assert max(map(len, rows)) <= 60 and "  http://127.0.0.1:" in screen.text()
        (command,) = [line for line in screen.raw.decode().split("\r\n") if line.startswith("  curl -N ")]
        assert len(command) > 120 and command.endswith("}'") and '"temperature": 0' in command
        screen.send("\x03")
        assert screen.leave() == 0
