"""Check the options of scripts that take minutes with the scripts' own parsers, without running them."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

_PARSE = argparse.ArgumentParser.parse_args


class OptionsRead(BaseException):
    """Raised in a script's place behind its parser. Not an `Exception`: a script may catch those."""


def parse_only(script: Path, words: Sequence[str]) -> None:
    """Run a script until it has read its options. Raises `AssertionError` when it refuses them."""
    assert script.is_file(), f"there is no {script.name}"
    if "argparse" not in script.read_text(encoding="utf-8"):
        assert not words, f"{script.name} reads no options"
        compile(script.read_bytes(), script, "exec")
        return
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", _parse_and_leave)
        patch.setattr(sys, "argv", [str(script), *words])
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except OptionsRead:
            return
        except SystemExit as leaving:
            raise AssertionError(f"{script.name} refuses {' '.join(words)} (exit code {leaving.code})") from None
        finally:
            for name in set(sys.modules) - before:
                _forget(name, script.parent)
    raise AssertionError(f"{script.name} has not read its options")


def _parse_and_leave(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> NoReturn:
    _PARSE(parser, *given, **named)
    raise OptionsRead


def _forget(name: str, directory: Path) -> None:
    """Take a script's own modules away again: another one may have others of these names."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None and Path(file).is_relative_to(directory):
        del sys.modules[name]
