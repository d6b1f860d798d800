"""Options in TOML files: the file of --config, and the user's configuration file.

A key applies to every command below its table that has the option; the innermost table takes precedence. Keys and
tables that no command has are errors, so that a misspelled option is not ignored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict

from nano_inference.cli.arguments import FROM_FILE, NOT_IN_FILES, SECRETS, Words, key_of, options_of, walk_commands
from nano_inference.support.checks import did_you_mean
from nano_inference.support.files import exists, path_of
from nano_inference.types import BadRequest

MAX_BYTES = 1 << 20  # size limit of a file, so that a wrong path does not read a model into memory


def default_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's file: below `XDG_CONFIG_HOME`, else below ~/.config."""
    xdg = environ.get("XDG_CONFIG_HOME", "")
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    # The XDG specification: a relative path is invalid and is ignored.
    base = Path(xdg) if Path(xdg).is_absolute() else home / ".config"
    return base / "nano-inference" / "config.toml"


def apply_files(root: App, app: App, commands: Words, arguments: ArgumentCollection) -> None:
    """Set options that neither the command line nor the environment sets. Raises `BadRequest`."""
    named = next((a for a in options_of(arguments) if key_of(a) == "config"), None)
    if named is None:
        return
    paths = [path_of(str(named.tokens[-1].value), "--config")] if named.tokens else []
    standard = default_file(os.environ)
    if exists(standard) and standard not in paths:
        paths.append(standard)
    for path in paths:
        data, status = read_file(path)
        known = {words: one.assemble_argument_collection() for words, one in walk_commands(root)}
        check_table(path, status, known, data)
        for depth in range(len(commands), -1, -1):  # innermost table first
            table: Any = data
            for word in commands[:depth]:
                table = table.get(word, {})
            values: dict[str, Any] = {key: value for key, value in table.items() if not isinstance(value, dict)}
            for word in reversed(commands):  # cyclopts drops keys named like a command outside that command's table
                values = {word: values}
            Dict(values, source=f"{FROM_FILE}{path}", allow_unknown=True)(app, commands, arguments)


def read_file(path: Path) -> tuple[dict[str, Any], os.stat_result]:
    """Return the tables of a file, and its status. Raises `BadRequest` naming the file."""
    import tomllib

    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe would block
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) and str(path) != os.devnull:
                raise BadRequest(str(path), "is not a file")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadRequest(str(path), f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise BadRequest(str(path), f"is larger than {MAX_BYTES} bytes")
    try:
        return tomllib.loads(raw.decode("utf-8-sig")), status
    except (ValueError, RecursionError) as error:
        raise BadRequest(str(path), f"is not TOML in UTF-8: {error}") from None


def check_table(
    path: Path,
    status: os.stat_result,
    known: Mapping[Words, ArgumentCollection],
    table: Mapping[str, Any],
    words: Words = (),
) -> None:
    """Raise `BadRequest` for an unknown table or key, or a secret in a file that others can read."""
    below = {path: options for path, options in known.items() if path[: len(words)] == words}
    names = {path[len(words)] for path in below if len(path) > len(words)}
    options = {key_of(option): option for one in below.values() for option in options_of(one)}
    for key, value in table.items():
        name = ".".join((*words, key))
        option = options.get(key.replace("_", "-"))
        if isinstance(value, dict):
            if key not in names:
                raise BadRequest(str(path), f"{name} is not a command{did_you_mean(key, names)}")
            check_table(path, status, known, value, (*words, key))
        elif option is None:
            raise BadRequest(str(path), f"{name} is not an option{did_you_mean(key.replace('_', '-'), options)}")
        elif key_of(option) in NOT_IN_FILES:
            raise BadRequest(str(path), f"{name} can only be set on the command line or in the environment")
        elif option.field_info.name in SECRETS:
            from nano_inference.server.security import check_private

            check_private(path, status, f"{path}: {name}")
