"""What an option is when the command line does not say: its environment variable, and the default model."""

from __future__ import annotations

from collections.abc import Iterable

from cyclopts import App, Argument, ArgumentCollection, Token

from nano_inference.catalog import find_builtin

ENV_PREFIX = "NANO_INFERENCE_"
DEFAULT = "default"
"""The default model's alias in the catalog."""
SERVED = "(the only one that the server has)"
"""The value of --model in a chat with a server."""


def name_model(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in what the command line leaves out: the default model, and what a model of the package samples with.

    An `EngineConfig`'s model has no default of its own.
    """
    by_name = {argument.field_info.name: argument for argument in arguments}
    model = by_name.get("model_path")
    if model is None:
        return
    is_served = "server" in by_name and bool(by_name["server"].tokens)
    if not model.tokens:
        fill(model, SERVED if is_served else DEFAULT, "built-in")
    if is_served:
        return  # it has defaults of its own
    builtin = find_builtin(str(model.tokens[0].value))
    own = {} if builtin is None else {name: f"{value:g}" for name, value in builtin.sampling.items()}
    for name, value in own.items():
        argument = by_name.get(name)
        if argument is not None and not argument.tokens:
            fill(argument, value, "the model's own default")


def forget_standing(arguments: Iterable[Argument]) -> None:
    """Leave out what the environment or a file says of a mode that is off; typed, it would be a mistake."""
    for argument in arguments:
        argument.tokens[:] = [token for token in argument.tokens if token.source == "cli"]


def fill(argument: Argument, value: str, source: str) -> None:
    """Give an option a value; `source` is what --print-config says of where it comes from."""
    argument.append(Token(keyword=str(argument.name), value=value, source=source))


def is_on(argument: Argument) -> bool:
    """Whether a flag was given, and not as --no-x or as false in the environment."""
    if not argument.tokens:
        return False
    token = argument.tokens[-1]
    if token.implicit_value is not None and token.value == "":
        return bool(token.implicit_value)
    return str(token.value).lower() in ("1", "true", "yes", "y", "t")
