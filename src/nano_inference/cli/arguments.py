"""What the commands take, asked of the application itself: an option is written once, and everything walks it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App, Argument, Group

from nano_inference.cli.fallback import ENV_PREFIX

Kind = Literal["boolean", "integer", "number", "string"]
"""What a value can be in a file."""

SECRETS = ("api_key", "admin_key")
"""Fields whose values are never shown."""


def walk_commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Return every command that does something, with the words that call it."""
    for name in app:
        if name.startswith("-"):
            continue  # --help and --version are commands to cyclopts
        command = app[name]
        if command.default_command is None:
            yield from walk_commands(command, (*path, name))
        else:
            yield (*path, name), command


def options_of(arguments: Iterable[Argument]) -> list[Argument]:
    """Return those arguments that are options; what is positional, or no flag of its own, is left out."""
    return [argument for argument in arguments if argument.parse and argument.name.startswith("--")]


def key_of(argument: Argument) -> str:
    """Return an option's name in a file: `max-tokens` for `--max-tokens`."""
    return argument.name.removeprefix("--")


def variable_of(argument: Argument) -> str:
    """Return an option's name in the environment: `NANO_INFERENCE_MAX_TOKENS` for `--max-tokens`."""
    return ENV_PREFIX + key_of(argument).replace("-", "_").upper()


def heading_of(argument: Argument) -> str:
    """Return the heading under which an option stands."""
    groups = argument.parameter.group
    first = next(iter(groups), None) if isinstance(groups, tuple | list) else groups
    return first.name if isinstance(first, Group) else str(first or "")


def is_secret(argument: Argument) -> bool:
    """Whether an option's value must never be shown."""
    return argument.field_info.name in SECRETS


def takes_none(hint: Any) -> bool:
    """Whether an option has a value for "not set", which is written `none`."""
    return NoneType in _members(hint)


def takes_list(hint: Any) -> bool:
    """Whether an option can be given several times."""
    return any(_is_list(member) for member in _members(hint))


def kind_of(hint: Any) -> Kind:
    """Return what one value of an option is."""
    member = next(member for member in _members(hint) if member is not NoneType)
    if _is_list(member):
        member = get_args(member)[0]
    kinds: dict[Any, Kind] = {bool: "boolean", int: "integer", float: "number"}
    return kinds.get(member, "string")  # a path or a choice is a string, too


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_list(hint: Any) -> bool:
    return get_origin(hint) not in (None, Literal)
