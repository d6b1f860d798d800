"""Dispatch of commands, their exit codes, and errors as one line on stderr."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Env

import nano_inference
from nano_inference.cli.arguments import ENV_PREFIX, ParsedCommand, apply_files, apply_sizes, error_text, fill_defaults
from nano_inference.cli.command import installed_commands
from nano_inference.support.packages import needed
from nano_inference.types import BadRequest, ModelError

BAD_USAGE, ENGINE_FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141

_ASKED = "__complete"  # first argument when a shell's completion script requests candidates
_SOURCES = (
    "Every option can be set by an environment variable (--model: NANO_INFERENCE_MODEL) and in a file (--config); "
    "--print-config prints the values. NANO_INFERENCE_TRACEBACK=1 prints the traceback of an error."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default `sys.argv`, and return its exit code."""
    prepare()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # text that the terminal cannot encode must not fail
    try:
        with needed("this command"):
            code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # To the null device, because the flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if os.environ.get(f"{ENV_PREFIX}TRACEBACK"):
            raise
        return report(error)
    return code if isinstance(code, int) else 0


def run(argv: list[str]) -> object:
    """Run a command and return its result."""
    parsed = ParsedCommand()
    app = build_app(parsed)
    if argv[:1] == [_ASKED]:
        app.config = ()  # candidates do not depend on other options' values, which are slow to read
        return app(argv)
    try:
        command, bound, unparsed = app.parse_args(argv)
        if parsed.wants_print:
            bound.apply_defaults()
            print(parsed.as_toml(bound.arguments))
            return 0
        return command(*bound.args, **bound.kwargs, **({"typed": parsed.typed} if "typed" in unparsed else {}))
    except ModelError:
        raise  # names fields of the model's files, not options
    except (ValueError, CycloptsError) as error:
        raise BadRequest("", error_text(error, parsed.typed.names)) from error


def build_app(parsed: ParsedCommand | None = None) -> App:
    """Return the application with the installed commands, without importing them."""
    app = App(
        name="nano-inference",
        usage="Usage: nano-inference COMMAND",
        help="An exact, fast and readable LLM inference engine.",
        version=nano_inference.__version__,
        help_format="plaintext",
        help_epilogue=_SOURCES,
        group_parameters=Group("Options", sort_key=0),
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
        # The last of repeated options counts; defaults that are False, None or empty are not shown.
        default_parameter=Parameter(allow_repeating=True, show_default=lambda one: one or None),
    )
    models = App(
        name="models", usage="Usage: nano-inference models COMMAND", help="List, fetch, inspect and delete models."
    )
    rows = installed_commands()
    for row in rows:
        *group, name = row.words.split()
        usage = f"Usage: nano-inference {row.words} [OPTIONS]{row.arguments}"
        above = models if group else app
        above.command(row.target, name=name, help=row.text or None, usage=usage)
        if not row.text:
            above[name]  # imports the function, whose docstring is the text
    app.command(models)
    sources = (Env(ENV_PREFIX, command=False, show=False), partial(apply_files, app), apply_sizes)
    fills = tuple(row.fill for row in rows if row.fill is not None)
    app.config = (*sources, *fills, fill_defaults, parsed or ParsedCommand())
    return app


def report(error: Exception) -> int:
    """Print an error as one line on stderr and return its exit code: 2 for user errors, 1 otherwise."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, ValueError | CycloptsError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    print(f"nano-inference: {' '.join(text.split())}", file=sys.stderr)
    # BadRequest, ModelError and SettingError are ValueErrors.
    return BAD_USAGE if isinstance(error, ValueError | CycloptsError | OSError) else ENGINE_FAILED


class LossyFile(io.FileIO):
    """Writes to a descriptor and ignores errors (full disk, closed pipe or terminal).

    Used for stderr only; failed writes to stdout end the command.
    """

    def write(self, data: Any) -> int:
        """Write bytes; return how many were written or dropped."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def prepare() -> None:
    """Open closed standard streams on the null device, and make stderr drop failed writes.

    Otherwise the next file or socket would get a standard descriptor's number and receive output meant for the stream.
    Streams that were replaced in this process are unchanged.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # the lower ones are open, so this opens the descriptor
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        file = io.BufferedWriter(LossyFile(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=True)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector while the block runs; re-enable it if it was enabled.

    Almost no object made while a server starts is garbage, and collections would take a tenth of that time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
