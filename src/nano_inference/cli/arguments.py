"""Queries on the application's commands and options, for help, configuration files and messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App, Argument, Group

from nano_inference.cli.fallback import BUILT_IN, ENV_PREFIX

Kind = Literal["boolean", "integer", "number", "string"]  # type of a value in a configuration file

SECRETS = ("api_key", "admin_key")  # fields whose values are never printed


def walk_commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield every command that can be run, with its words."""
    for name in app:
        if name.startswith("-"):
            continue  # cyclopts treats --help and --version as commands
        command = app[name]
        if command.default_command is None:
            yield from walk_commands(command, (*path, name))
        else:
            yield (*path, name), command


def options_of(arguments: Iterable[Argument]) -> list[Argument]:
    """Return the arguments that are flags: neither positional ones nor the parents of flattened fields."""
    return [argument for argument in arguments if argument.parse and argument.name.startswith("--")]


def key_of(argument: Argument) -> str:
    """Return an option's key in a configuration file: `max-tokens` for `--max-tokens`."""
    return argument.name.removeprefix("--")


def variable_of(argument: Argument) -> str:
    """Return an option's environment variable: `NANO_INFERENCE_MAX_TOKENS` for `--max-tokens`."""
    return ENV_PREFIX + key_of(argument).replace("-", "_").upper()


def heading_of(argument: Argument) -> str:
    """Return the heading of an option in --help; "Options" if its command gives it none."""
    groups = argument.parameter.group
    first = next(iter(groups), None) if isinstance(groups, tuple | list) else groups
    name = first.name if isinstance(first, Group) else str(first or "Parameters")
    return "Options" if name == "Parameters" else name  # cyclopts' name of the group of all others


def source_of(argument: Argument) -> str:
    """Return the source of an option's value: "cli", "env", a file, "built-in" or a text."""
    return argument.tokens[-1].source if argument.tokens else BUILT_IN


def is_secret(argument: Argument) -> bool:
    """True if an option's value must never be printed."""
    return argument.field_info.name in SECRETS


def takes_none(hint: Any) -> bool:
    """True if an option accepts `none`."""
    return NoneType in _members(hint)


def takes_list(hint: Any) -> bool:
    """True if an option can be repeated."""
    return any(_is_list(member) for member in _members(hint))


def kind_of(hint: Any) -> Kind:
    """Return the type of one value of an option."""
    member = next(member for member in _members(hint) if member is not NoneType)
    if _is_list(member):
        member = get_args(member)[0]
    kinds: dict[Any, Kind] = {bool: "boolean", int: "integer", float: "number"}
    return kinds.get(member, "string")  # paths and choices are strings


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_list(hint: Any) -> bool:
    return get_origin(hint) not in (None, Literal)
