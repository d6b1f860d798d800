"""Options in TOML files: the file of --config, and the user's configuration file.

A key applies to every command below its table that has the option; the innermost table takes precedence. Keys and
tables that no command has are errors, so that a misspelled option is not ignored.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyclopts import App, Argument, ArgumentCollection, Token
from cyclopts.config import Dict

from nano_inference.cli.arguments import (
    Kind,
    is_secret,
    key_of,
    kind_of,
    options_of,
    takes_list,
    takes_none,
    walk_commands,
)
from nano_inference.support.files import exists, path_of
from nano_inference.types import BadRequest

MAX_BYTES = 1 << 20  # size limit of a file, so that a wrong path does not read a model into memory
NOT_IN_FILES = ("config", "print-config")
FROM_FILE = "file "  # prefix of the source of a value from a file

_TYPES: Mapping[Kind, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
}
"""Types that TOML yields for each kind of value."""
_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")

Table = tuple[str, ...]  # parts of a table's header: the words of a command or of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A parsed configuration file."""

    path: Path
    text: str = field(repr=False)  # may contain an API key
    data: Mapping[str, Any] = field(repr=False)
    status: os.stat_result

    def refuse(self, table: Table, key: str, problem: str) -> BadRequest:
        """Return an error that names the file, the line if it can be found, and the key."""
        line = line_of(self.text, table, key)
        where = f"{self.path}: line {line}" if line else str(self.path)
        inside = f" in [{'.'.join(table)}]" if table else ""
        return BadRequest(where, f"{key}{inside} {problem}")


def default_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's file: below `XDG_CONFIG_HOME`, else below ~/.config."""
    xdg = environ.get("XDG_CONFIG_HOME", "")
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    # The XDG specification: a relative path is invalid and is ignored.
    base = Path(xdg) if Path(xdg).is_absolute() else home / ".config"
    return base / "nano-inference" / "config.toml"


def apply_files(root: App, app: App, commands: Table, arguments: ArgumentCollection) -> None:
    """Set options that neither the command line nor the environment sets. Raises `BadRequest`."""
    named = next((a for a in options_of(arguments) if key_of(a) == "config"), None)
    if named is None:
        return
    paths = [path_of(str(named.tokens[-1].value), "--config")] if named.tokens else []
    standard = default_file(os.environ)
    if exists(standard) and standard not in paths:
        paths.append(standard)
    if not paths:
        return
    known = {path: options_of(one.assemble_argument_collection()) for path, one in walk_commands(root)}
    for path in paths:
        file = read_file(path)
        check_table(file, known)
        for depth in range(len(commands), -1, -1):  # innermost table first
            table = _table(file, commands[:depth])
            plain: dict[str, Any] = {key: value for key, value in table.items() if not isinstance(value, dict)}
            for word in reversed(commands):  # cyclopts drops keys named like a command outside that command's table
                plain = {word: plain}
            Dict(plain, source=f"{FROM_FILE}{file.path}", allow_unknown=True)(app, commands, arguments)


def read_file(path: Path) -> ConfigFile:
    """Read and parse a file. Raises `BadRequest` naming the file."""
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
        text = raw.decode("utf-8-sig")
        return ConfigFile(path=path, text=text, data=tomllib.loads(text), status=status)
    except UnicodeDecodeError as error:
        raise BadRequest(str(path), f"is not UTF-8 (byte {error.start})") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadRequest(str(path), f"is not TOML: {error}") from None


def check_table(file: ConfigFile, known: Mapping[Table, list[Argument]], table: Table = ()) -> None:
    """Raise `BadRequest` for an unknown table or key, a duplicate key, or a secret in a file that others can read."""
    below = {path: options for path, options in known.items() if path[: len(table)] == table}
    names = {path[len(table)] for path in below if len(path) > len(table)}
    options = {key_of(option): option for one in below.values() for option in one}
    seen: set[str] = set()
    for written, value in _table(file, table).items():
        key = written.replace("_", "-")
        if isinstance(value, dict) and written in names:
            check_table(file, known, (*table, written))
        elif key not in options:
            raise file.refuse(table, written, _unknown(written, value, names, options))
        elif key in NOT_IN_FILES:
            raise file.refuse(table, written, "can only be set on the command line or in the environment")
        elif key in seen:
            raise file.refuse(table, written, "is given twice")
        else:
            _check_value(file, table, written, value, options[key])
        seen.add(key)


def _check_value(file: ConfigFile, table: Table, key: str, value: Any, option: Argument) -> None:
    """Raise `BadRequest` for a value of the wrong type, without quoting it, or a secret that others can read."""
    if is_secret(option):
        from nano_inference.server.keys import check_private

        check_private(file.path, file.status, f"{file.path}: {key}")
    kind, is_list = kind_of(option.hint), takes_list(option.hint)
    types, name = _TYPES[kind], _NAMES[_TYPES[kind][-1]]
    if is_size(option):
        types, name = (int, str), "a whole number, or a string such as '2GiB'"
    for one in value if is_list and isinstance(value, list) else [value]:
        is_none = one == "none" and takes_none(option.hint)
        if not is_none and (not isinstance(one, types) or (isinstance(one, bool) and kind != "boolean")):
            wanted = f"{name}, or a list of them" if is_list else name
            raise file.refuse(table, key, f"must be {wanted}, not {_NAMES.get(type(one), 'a date or time')}")


def _unknown(key: str, value: Any, names: Iterable[str], options: Iterable[str]) -> str:
    """Return the problem with an unknown key, and the most similar known one."""
    if key in names:
        return "is a command: put its options in a table of that name"
    known = names if isinstance(value, dict) else options
    near = difflib.get_close_matches(key.replace("_", "-"), list(known), 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return ("is not a command" if isinstance(value, dict) else "is not an option") + meant


def _table(file: ConfigFile, table: Table) -> Mapping[str, Any]:
    """Return a table's keys; empty if the file has no such table."""
    data: Any = file.data
    for name in table:
        data = data.get(name, {}) if isinstance(data, dict) else {}
    return data if isinstance(data, dict) else {}


def line_of(text: str, table: Table, key: str) -> int | None:
    """Return the line number of a key or table; None for TOML spellings that this search does not cover."""
    written = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*=""")
    here: Table = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.fullmatch(line)
        if header is not None:
            here = tuple(part.strip().strip("\"'") for part in header[1].split("."))
            if here == (*table, key):
                return number
        elif here == table and written.match(line):
            return number
    return None


SIZES = ("kv_cache_bytes", "max_body_bytes", "max_stored_bytes", "models_memory")  # fields in bytes
UNITS: Mapping[str, int] = (
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
)
_SIZE = re.compile(r"\s*(?P<whole>\d{1,18})(?:\.(?P<part>\d{1,9}))?\s*(?P<unit>[a-zA-Z]*)\s*", re.ASCII)
_PLAIN = re.compile(r"-?\d+|none", re.ASCII)


def is_size(option: Argument) -> bool:
    """True if an option is a number of bytes."""
    return option.field_info.name in SIZES


def apply_sizes(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Replace sizes with units by numbers of bytes. Raises `BadRequest` for other values."""
    for option in options_of(arguments):
        if is_size(option):
            option.tokens[:] = [_plain(option, token) for token in option.tokens]


def _plain(option: Argument, token: Token) -> Token:
    if _PLAIN.fullmatch(token.value):
        return token  # the configuration checks the range
    size = size_of(token.value)
    if size is None:
        where = token.keyword if token.source == "env" else option.name
        file = f" ({token.source})" if token.source.startswith("file ") else ""
        raise BadRequest(where or "", f"must be bytes, or a size such as 512MiB or 2GB, got {token.value[:40]!r}{file}")
    return token.evolve(value=str(size))


def size_of(text: str) -> int | None:
    """Parse a size such as `512MiB`, `1.5 GB` or `4096`; None if it is not a whole number of bytes."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else UNITS.get(match["unit"].lower())
    if match is None or unit is None:
        return None
    part = match["part"] or ""
    size, rest = divmod(int(match["whole"] + part) * unit, 10 ** len(part))
    return None if rest else size
