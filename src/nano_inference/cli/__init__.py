"""The command line. The only room that reads arguments, the environment and the terminal; it decides nothing else.

`app` names the commands and turns errors into one line, `commands` holds their options (nothing heavy is imported
until one runs), every other file is what a command does. Text goes to stdout; all the rest goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nano_inference.packages import MissingPackage, needed

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (this process's own by default) and return its exit code; see `app.main`."""
    try:
        with needed("the command line"):
            from nano_inference.cli import app
    except MissingPackage as error:
        print(f"nano-inference: {error}", file=sys.stderr)
        return 2
    return app.main(argv)
