"""The command line. The only room that reads arguments, the environment and the terminal; it decides nothing else.

`app` names the commands and turns errors into one line, `commands` holds their options (nothing heavy is imported
until one runs), every other file is what a command does. Text goes to stdout; all the rest goes to stderr.
"""

from __future__ import annotations

from nano_inference.cli.app import main

__all__ = ["main"]
