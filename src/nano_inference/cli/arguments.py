"""The options of a parsed command line: their sources, defaults and names in messages, and `--print-config`.

Options may be in TOML files: the file of --config, and the user's configuration file. A key applies to every command
below its table that has the option; the innermost table takes precedence. Keys and tables that no command has are
errors, so that a misspelled option is not ignored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cyclopts import App, Argument, ArgumentCollection, Group, Token
from cyclopts.config import Dict

from nano_inference.server.config import SettingError
from nano_inference.support.checks import did_you_mean
from nano_inference.support.files import exists, path_of, read_with_status, user_directory
from nano_inference.text.generation_config import CHAT_FIELDS, MODELS_OWN
from nano_inference.types import BadRequest

ENV_PREFIX = "NANO_INFERENCE_"
BUILT_IN = "built-in"  # source of a value that was not set
FROM_FILE = "file "  # prefix of the source of a value from a file
NOT_IN_FILES = ("config", "print-config")
SECRETS = ("api_key", "admin_key")  # fields whose values are never printed
SIZES = ("kv_cache_bytes", "adapter_memory", "max_body_bytes", "max_stored_bytes", "models_memory")  # fields in bytes
DEFAULT = "default"  # alias of the default model in the catalog
SERVED = "(the only one that the server has)"  # value of --model in a chat with a server, if not given

Words = tuple[str, ...]  # of a command or a group


def walk_commands(app: App, words: Words = ()) -> Iterator[tuple[Words, App]]:
    """Yield every command that can be run, with its words."""
    for name in app:
        if name.startswith("-"):
            continue  # cyclopts treats --help and --version as commands
        command = app[name]
        if command.default_command is None:
            yield from walk_commands(command, (*words, name))
        else:
            yield (*words, name), command


def options_of(arguments: Iterable[Argument]) -> list[Argument]:
    """Return the arguments that are flags: neither positional ones nor the parents of flattened fields."""
    return [argument for argument in arguments if argument.parse and argument.name.startswith("--")]


def key_of(argument: Argument) -> str:
    """Return an option's key in a configuration file: `max-tokens` for `--max-tokens`."""
    return argument.name.removeprefix("--")


def variable_of(argument: Argument) -> str:
    """Return an option's environment variable: `NANO_INFERENCE_MAX_TOKENS` for `--max-tokens`."""
    return ENV_PREFIX + key_of(argument).replace("-", "_").upper()


def source_of(argument: Argument) -> str:
    """Return the source of an option's value: "cli", "env", "file PATH", "built-in" or a text."""
    return argument.tokens[-1].source if argument.tokens else BUILT_IN


# ---- values of options that were not set


def fill_defaults(_app: App, _commands: Words, arguments: ArgumentCollection) -> None:
    """Set --model, which has no default in `EngineConfig`, and the sampling fields of a built-in model."""
    by_name = {argument.field_info.name: argument for argument in arguments}
    model = by_name.get("model_path")
    if model is None:
        return
    is_served = "server" in by_name and bool(by_name["server"].tokens)
    if not model.tokens:
        fill(model, SERVED if is_served else DEFAULT, BUILT_IN)
    if is_served:
        return  # the server has its own defaults
    from nano_inference.loading.catalog import find_builtin

    builtin = find_builtin(str(model.tokens[0].value))
    for name, value in {} if builtin is None else builtin.sampling.items():
        if name in by_name and not by_name[name].tokens:
            fill(by_name[name], f"{value:g}", "the model's own default")


def fill(argument: Argument, value: str, source: str) -> None:
    """Set an option; with another `source` than "built-in", it counts as given."""
    argument.append(Token(keyword=str(argument.name), value=value, source=source))


def apply_sizes(_app: App, _commands: Words, arguments: ArgumentCollection) -> None:
    """Replace sizes with units by numbers of bytes. Raises `BadRequest` for other values."""
    for option in options_of(arguments):
        for index, token in enumerate(option.tokens if option.field_info.name in SIZES else ()):
            if re.fullmatch(r"-?\d+|none", token.value, re.ASCII):
                continue  # the configuration checks the range
            size = size_of(token.value)
            if size is None:
                given = given_of(option)
                text = f"must be bytes, or a size such as 512MiB or 2GB, got {token.value[:40]!r}"
                raise BadRequest(given.name, f"{text} ({given.file})" if given.file else text)
            option.tokens[index] = token.evolve(value=str(size))


def size_of(text: str) -> int | None:
    """Parse a size such as `512MiB`, `1.5 GB` or `4096`; None if it is not a whole number of bytes."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*(?:([kmgt]?)(i?)b)?\s*", text.lower(), re.ASCII)
    if match is None or (match[3] and not match[2]):
        return None
    power = " kmgt".index(match[2]) if match[2] else 0
    size = Fraction(match[1]) * (1024 if match[3] else 1000) ** power
    return int(size) if size.denominator == 1 else None


# ---- what was given, under which name


class Given(NamedTuple):
    """Name under which the user gave a field's value."""

    name: str  # `--port`, `NANO_INFERENCE_PORT`, or `port` in a file
    file: str = ""  # `file PATH`, if the value is from a file


class Typed(NamedTuple):
    """Options that the user gave to a command."""

    fields: frozenset[str] = frozenset()  # fields whose values are not built-in
    names: Mapping[str, Given] = MappingProxyType({})
    """Maps each field to the name under which it was given, or can be given."""


def given_of(option: Argument) -> Given:
    """Return the name under which an option was given, or can be given."""
    source = source_of(option)
    if source.startswith(FROM_FILE):
        return Given(key_of(option), source)
    return Given(variable_of(option) if source == "env" else option.name)


@dataclass(slots=True)
class ParsedCommand:
    """The command line that was parsed last: the command's words, and its arguments with their tokens."""

    commands: Words = ()
    arguments: ArgumentCollection = field(default_factory=ArgumentCollection)

    def __call__(self, _app: App, commands: Words, arguments: ArgumentCollection) -> None:
        """Store the arguments; called by cyclopts after all other sources of values."""
        self.commands, self.arguments = commands, arguments
        if self.wants_print:
            for argument in arguments:
                if argument.is_positional_only() and argument.required and not argument.tokens:
                    argument.append(Token(value="-", source=BUILT_IN))  # not used

    @property
    def wants_print(self) -> bool:
        """True if --print-config was given."""
        option = next((a for a in options_of(self.arguments) if key_of(a) == "print-config"), None)
        return option is not None and bool(option.tokens) and option.convert() is True

    @property
    def typed(self) -> Typed:
        """The options that were given.

        Parameters of the command itself have no names: these (`prompt`) have other meanings in messages.
        """
        own = {child.field_info.name for parent in self.arguments for child in parent.children}
        options = options_of(self.arguments)
        return Typed(
            frozenset(one.field_info.name for one in options if source_of(one) != BUILT_IN),
            {one.field_info.name: given_of(one) for one in options if one.field_info.name in own},
        )

    def as_toml(self, bound: Mapping[str, Any]) -> str:
        """Return the values as a table of a configuration file; those that the user did not set are comments."""
        owner = {id(child): parent.field_info.name for parent in self.arguments for child in parent.children}
        open_fields = CHAT_FIELDS if self.commands == ("chat",) else MODELS_OWN
        lines, heading = [f"[{'.'.join(self.commands)}]"], ""
        for option in options_of(self.arguments):
            if key_of(option) in NOT_IN_FILES:
                continue
            groups = option.parameter.group
            first = next(iter(groups), None) if isinstance(groups, tuple) else None
            name = first.name if isinstance(first, Group) else "Options"
            if heading != name:
                heading = name
                lines += ["", f"# {heading}"]
            name, parent = option.field_info.name, owner.get(id(option))
            value = bound[name] if parent is None else getattr(bound[parent], name)
            lines.append(_line(option, value, is_open=name in open_fields))
        return "\n".join(lines)


def _line(option: Argument, value: Any, *, is_open: bool) -> str:
    """Return `key = value`; a comment for a secret and for a value that the user did not set.

    `is_open`: unless it is set, the value depends on the model.
    """
    key, source = key_of(option), source_of(option)
    is_set = source in ("cli", "env") or source.startswith(FROM_FILE)
    if option.field_info.name in SECRETS:
        return f"# {key} is {'set, and not shown' if value else 'not set'}"
    if is_open and not is_set:
        return f"# {key} depends on the model"
    if value is None:
        return f'{key} = "none"' if is_set else f"# {key} is not set"
    return f"{'' if is_set else '# '}{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value if isinstance(value, tuple | list) else sorted(value)))}]"
    if isinstance(value, str | Path):
        # TOML has JSON's escapes, and also forbids U+007F.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def error_text(error: Exception, known: Mapping[str, Given]) -> str:
    """Return an error's text on one line, with fields named as the user gave them.

    Replaces the first word, names with an underscore, and the fields that a `SettingError` lists.
    """
    left = list(error.fields) if isinstance(error, SettingError) else []
    file = ""

    def replace(match: re.Match[str]) -> str:
        nonlocal file
        word = match[0]
        if "_" not in word and word not in left and match.start():
            return word
        if word in left:
            left.remove(word)  # later occurrences may be values
        file = file or known[word].file
        return known[word].name

    text = re.sub(
        rf"(?<![\w/.\-'\"])(?:{'|'.join(known) or '(?!)'})(?![\w/.\-'\"])", replace, " ".join(str(error).split())
    )
    return f"{text} ({file})" if file else text


# ---- configuration files

MAX_BYTES = 1 << 20  # size limit of a file, so that a wrong path does not read a model into memory


def default_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's file: below `XDG_CONFIG_HOME`, else below ~/.config."""
    return user_directory(environ, environ.get("XDG_CONFIG_HOME"), ".config") / "config.toml"


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
        if str(path) == os.devnull:
            continue
        data, status = read_tables(path)
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


def read_tables(path: Path) -> tuple[dict[str, Any], os.stat_result]:
    """Return the tables of a file, and its status. Raises `ModelError` or `BadRequest` naming the file."""
    import tomllib

    data, status = read_with_status(path, MAX_BYTES, "a configuration file")
    try:
        return tomllib.loads(data.decode("utf-8-sig")), status
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
