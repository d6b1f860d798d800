"""Values of options that are not given: the default model, and a built-in model's sampling."""

from __future__ import annotations

from collections.abc import Iterable

from cyclopts import App, Argument, ArgumentCollection, Token

from nano_inference.catalog import find_builtin

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
