"""What an option is when the command line does not say: its twin in the environment, and the default model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from cyclopts import App, Argument, ArgumentCollection, Token

from nano_inference.catalog import find_builtin

ENV_PREFIX = "NANO_INFERENCE_"
DEFAULT = "default"
"""The default model's alias in the catalog."""
NANOCHAT = "(nanochat's base directory)"
"""Stands for it where a model is named."""
SERVED = "(the only one that the server has)"
"""The same for a chat with a server."""
_NANOCHATS = ("source", "model_tag", "step", "device_type")


NANOCHATS_OWN: Mapping[str, str] = MappingProxyType(
    {"temperature": "0.6", "top_k": "50", "max_tokens": "256", "seed": "42"}
    | {"top_p": "1", "min_p": "0", "repetition_penalty": "1"}
)
"""How nanochat's chat draws when nothing is said: the same answer to the same words, whatever a model's files say."""


def name_model(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in what the command line leaves out: the default model, and what a model or mode samples with.

    An `EngineConfig`'s model has no default of its own; with --nanochat it is nanochat's base directory.
    """
    by_name = {argument.field_info.name: argument for argument in arguments}
    model = by_name.get("model_path")
    if model is None:
        return
    is_nanochat = "nanochat" in by_name and _is_on(by_name["nanochat"])
    is_served = "server" in by_name and bool(by_name["server"].tokens)
    if not is_nanochat:
        _forget_standing([by_name[name] for name in _NANOCHATS if name in by_name])
    if not model.tokens:
        _fill(model, NANOCHAT if is_nanochat else SERVED if is_served else DEFAULT, "built-in")
    if is_served:
        return  # it has defaults of its own
    builtin = find_builtin(str(model.tokens[0].value))
    own = {} if builtin is None else {name: f"{value:g}" for name, value in builtin.sampling.items()}
    wanted = NANOCHATS_OWN if is_nanochat else own
    for name, value in wanted.items():
        argument = by_name.get(name)
        if argument is not None and not argument.tokens:
            _fill(argument, value, "nanochat's own default" if is_nanochat else "the model's own default")


def _forget_standing(arguments: Iterable[Argument]) -> None:
    """Leave out what the environment or a file says of a mode that is off; typed, it would be a mistake."""
    for argument in arguments:
        argument.tokens[:] = [token for token in argument.tokens if token.source == "cli"]


def _fill(argument: Argument, value: str, source: str) -> None:
    argument.append(Token(keyword=str(argument.name), value=value, source=source))


def _is_on(argument: Argument) -> bool:
    """Whether a flag was given, and not as --no-x or as false in the environment."""
    if not argument.tokens:
        return False
    token = argument.tokens[-1]
    if token.implicit_value is not None and token.value == "":
        return bool(token.implicit_value)
    return str(token.value).lower() in ("1", "true", "yes", "y", "t")
