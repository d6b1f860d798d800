"""The options of a parsed command line: their sources, defaults and names in messages, and `--print-config`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cyclopts import App, Argument, ArgumentCollection, Group, Token

from nano_inference.server.config import SettingError
from nano_inference.text.generation_config import CHAT_FIELDS, MODELS_OWN
from nano_inference.types import BadRequest

ENV_PREFIX = "NANO_INFERENCE_"
BUILT_IN = "built-in"  # source of a value that was not set
FROM_FILE = "file "  # prefix of the source of a value from a file
NOT_IN_FILES = ("config", "print-config")
SECRETS = ("api_key", "admin_key")  # fields whose values are never printed
SIZES = ("kv_cache_bytes", "max_body_bytes", "max_stored_bytes", "models_memory")  # fields in bytes
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
        if option.field_info.name in SIZES:
            option.tokens[:] = [_in_bytes(option, token) for token in option.tokens]


def _in_bytes(option: Argument, token: Token) -> Token:
    if re.fullmatch(r"-?\d+|none", token.value, re.ASCII):
        return token  # the configuration checks the range
    size = size_of(token.value)
    if size is None:
        given = given_of(option)
        text = f"must be bytes, or a size such as 512MiB or 2GB, got {token.value[:40]!r}"
        raise BadRequest(given.name, f"{text} ({given.file})" if given.file else text)
    return token.evolve(value=str(size))


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
    """Format a value as TOML."""
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
