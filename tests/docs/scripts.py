"""Check the options of scripts that take minutes with the scripts' own parsers, without running them."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

import pytest

_UNKNOWN = "--an-option-that-no-script-has"


def parse_only(script: Path, words: Sequence[str]) -> None:
    """Run a script until it has read its options. Raises `AssertionError` when it refuses them."""
    assert script.is_file(), f"there is no {script.name}"
    if "argparse" not in script.read_text(encoding="utf-8"):
        assert not words, f"{script.name} reads no options"
        compile(script.read_bytes(), script, "exec")
        return
    before, errors = set(sys.modules), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(errors):
        # argparse refuses an unknown option last: after a wrong value, and after an option that is missing.
        patch.setattr(sys, "argv", [str(script), *words, _UNKNOWN])
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            said = errors.getvalue().rstrip()
            assert said.endswith(f"error: unrecognized arguments: {_UNKNOWN}"), (
                f"{script.name} refuses {' '.join(words)} (exit code {leaving.code}): {said}"
            )
            return
        finally:
            for name in set(sys.modules) - before:
                _forget(name, script.parent)
    raise AssertionError(f"{script.name} has not read its options")


def _forget(name: str, directory: Path) -> None:
    """Take a script's own modules away again: another one may have others of these names."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None and Path(file).is_relative_to(directory):
        del sys.modules[name]
