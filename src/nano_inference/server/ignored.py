"""Fields of requests that have no effect: each is logged once, or refused with `--strict`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body
from nano_inference.server.unsupported import unknown_fields

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
        hints = [*body.hints(lambda name: dialogue is not None and dialogue.knows(name))]
        for kind, names in (("unknown fields", _unknown(body)), ("fields without effect", hints)):
            if names and self.strict:
                shown = ", ".join(repr(name[:64]) for name in names[:8])
                raise ApiError(400, f"{kind}: {shown}", param=names[0][:64], code="unknown_field")
            self._log_new(kind, names)

    def _log_new(self, kind: str, names: list[str]) -> None:
        new = sorted({name[:64] for name in names} - self.logged)[: _MAX_LOGGED - len(self.logged)]
        self.logged.update(new)
        if new:
            shown = ", ".join(map(repr, new[:8]))
            _log.warning("%s are ignored: %s%s", kind, shown, f" and {len(new) - 8} more" if new[8:] else "")


def _unknown(body: Body) -> list[str]:
    """Return the names of a body's unknown fields."""
    options = getattr(body, "stream_options", None)
    inner = unknown_fields(options.model_extra or {}) if isinstance(options, Body) else []
    top = (name for name in unknown_fields(body.model_extra or {}) if name not in body.neutral_names)
    return [*top, *(f"stream_options.{name}" for name in inner)]
