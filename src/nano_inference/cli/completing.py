"""Shell completion of options and arguments that name a model. Imported by every command: no torch."""

from __future__ import annotations

import os
from typing import Any, Protocol

from cyclopts import Argument

from nano_inference.catalog import WHEELS, default_cache, installed_builtins, list_models
from nano_inference.files import path_of

_NAMING = ("model_path", "model", "name")  # fields that name a model; all fields of a configuration share one completer


class CompletionContext(Protocol):
    """Context that cyclopts passes to a completer."""

    @property
    def argument(self) -> Argument:
        """The argument to complete."""
        ...

    def get(self, name: str, default: Any = None) -> Any:
        """Return another argument as typed so far."""
        ...


def cached_names(context: CompletionContext) -> list[tuple[str, str]]:
    """Return the models on this machine with their sources; for an option that names no model, its choices."""
    if context.argument.field_info.name not in _NAMING:
        return [(choice, "") for choice in context.argument.get_choices(force=True) or ()]
    cache = context.get("--cache")
    place = path_of(cache.raw, "--cache") if cache is not None and cache.raw else default_cache(os.environ)
    return [(entry.name, entry.source) for entry in list_models(place)]


def removable_names(context: CompletionContext) -> list[tuple[str, str]]:
    """Return the models that can be deleted."""
    return [(name, source) for name, source in cached_names(context) if source != "package"]


def known_names(_context: CompletionContext) -> list[tuple[str, str]]:
    """Return the models that can be fetched by a built-in name."""
    wheels = [(name, wheel.requirement) for wheel in WHEELS for name in (wheel.name, *wheel.aliases[:1])]
    return wheels + [(one.name, "comes with the package") for one in installed_builtins()]
