"""The command line: the only package that reads arguments, `NANO_INFERENCE_*` variables and the terminal.

`app` dispatches commands and formats errors, `commands` declares their options without importing torch, and the other
modules implement them. Generated text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nano_inference.support.packages import MissingPackage, needed

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default `sys.argv`, and return its exit code."""
    try:
        with needed("the command line"):
            from nano_inference.cli import app
    except MissingPackage as error:
        print(f"nano-inference: {error}", file=sys.stderr)
        return 2
    return app.main(argv)
