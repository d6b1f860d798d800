"""Queries on the application's commands and options, for help, configuration files and messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App, Argument, ArgumentCollection, Group, Token

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


ENV_PREFIX = "NANO_INFERENCE_"
BUILT_IN = "built-in"  # source of a value that was not set
DEFAULT = "default"  # alias of the default model in the catalog
SERVED = "(the only one that the server has)"  # value of --model in a chat with a server, if not given


def fill_defaults(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
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
    own = {} if builtin is None else {name: f"{value:g}" for name, value in builtin.sampling.items()}
    for name, value in own.items():
        argument = by_name.get(name)
        if argument is not None and not argument.tokens:
            fill(argument, value, "the model's own default")


def drop_inherited(arguments: Iterable[Argument]) -> None:
    """Drop values from the environment and files, for options of a mode that is off; typed ones stay errors."""
    for argument in arguments:
        argument.tokens[:] = [token for token in argument.tokens if token.source == "cli"]


def fill(argument: Argument, value: str, source: str) -> None:
    """Set an option; with another `source` than "built-in", it counts as given."""
    argument.append(Token(keyword=str(argument.name), value=value, source=source))


def is_on(argument: Argument) -> bool:
    """True if a flag was given, neither as --no-x nor as false in the environment."""
    if not argument.tokens:
        return False
    token = argument.tokens[-1]
    if token.implicit_value is not None and token.value == "":
        return bool(token.implicit_value)
    return str(token.value).lower() in ("1", "true", "yes", "y", "t")
