"""Fields of requests that have no effect: each is logged once, or refused with `--strict`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body
from nano_inference.server.unsupported import hinting_fields, is_one_of, unknown_fields

_MAX_LOGGED = 1000

_log = logging.getLogger("nano_inference.server")


@dataclass(slots=True)
class IgnoredFields:
    """Owns the names that were logged already; accessed only on the event loop."""

    strict: bool
    logged: set[str] = field(default_factory=set)

    def report(self, body: Body, model: ServedModel) -> None:
        """Log each unknown field and each hint without effect once; with `strict`, raise `ApiError`."""
        dialogue = model.dialogue
        hints = [
            *found_in(body, hints_of),
            *body.hints(lambda name: dialogue is not None and dialogue.knows(name)),
        ]
        for kind, names in (("unknown fields", found_in(body, unknown_in)), ("fields without effect", hints)):
            if names and self.strict:
                shown = ", ".join(repr(name[:64]) for name in names[:8])
                raise ApiError(400, f"{kind}: {shown}", param=names[0][:64], code="unknown_field")
            new = sorted({name[:64] for name in names} - self.logged)[: _MAX_LOGGED - len(self.logged)]
            self.logged.update(new)
            if new:
                shown = ", ".join(map(repr, new[:8]))
                _log.warning("%s are ignored: %s%s", kind, shown, f" and {len(new) - 8} more" if new[8:] else "")


def unknown_in(body: Body) -> list[str]:
    """Return the names of a body's unknown fields."""
    return [name for name in unknown_fields(body.model_extra or {}) if name not in body.neutral_names]


def hints_of(body: Body) -> list[str]:
    """Return the names of a body's hints whose value is not neutral: undeclared ones, then declared ones."""
    names = [name for name in hinting_fields(body.model_extra or {}) if name not in body.neutral_names]
    given = (name for name, neutral in body.idle_values.items() if not is_one_of(getattr(body, name, None), neutral))
    return [*names, *given]


def found_in(body: Body, find: Callable[[Body], list[str]]) -> list[str]:
    """Return the names that `find` returns of a body and of its `reported_parts`, each once."""
    names = find(body)
    for part in body.reported_parts:
        value = getattr(body, part, None)
        for one in value if isinstance(value, list) else [value]:
            names += [f"{part}.{name}" for name in found_in(one, find)] if isinstance(one, Body) else []
    return list(dict.fromkeys(names))
