"""What an option is when the command line does not say: its twin in the environment, and the default model."""

from __future__ import annotations

from cyclopts import App, ArgumentCollection, Token

ENV_PREFIX = "NANO_INFERENCE_"
DEFAULT = "default"
"""The default model's alias in the catalog."""


def name_model(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in the default model for a command that takes an `EngineConfig`, whose model has no default of its own."""
    for argument in arguments:
        if argument.field_info.name == "model_path" and not argument.tokens:
            argument.append(Token(keyword="--model", value=DEFAULT, source="default"))
