"""The errors that callers may catch; `types` has them too. No imports."""

from __future__ import annotations


class BadRequest(ValueError):
    """A value that a caller gave is invalid. The only error that is the client's fault."""

    def __init__(self, field: str, text: str) -> None:
        """`field` is the argument or field, with its place in it (`messages[2].content`); "" if it is no single one.

        The message is "field: text", "field must …" for a text that begins with "must", and the text alone if it begins
        with the field.
        """
        self.field = field
        self.text = text
        begin = "" if not field or text.startswith(field) else f"{field} " if text.startswith("must ") else f"{field}: "
        super().__init__(begin + text)

    def __reduce__(self) -> tuple[type[BadRequest], tuple[str, str]]:
        return type(self), (self.field, self.text)


class EngineBusy(RuntimeError):
    """The call was refused and changed nothing: another thread uses the engine, or it came from inside a step."""


class EngineDead(RuntimeError):
    """The engine was shut down or its thread failed, and accepts no more work; the cause is chained."""


class EnginePaused(RuntimeError):
    """The call would wait forever: the engine is paused, asleep or without weights."""


class CacheFull(RuntimeError):
    """More KV blocks were requested than are free; nothing was taken."""


class ModelError(ValueError):
    """A model's files are missing, damaged or of an unknown architecture. The one-line message names the file."""


class MissingFile(ModelError, FileNotFoundError):
    """A checkpoint, or a file of one, does not exist."""


class WeightError(ValueError):
    """New weights were rejected: a wrong name, shape or value, or a failed sender. The old weights stay installed."""


class UpdateCancelled(WeightError):
    """The weight update was cancelled before it was installed."""


class UpdateBusy(RuntimeError):
    """Weights cannot be loaded now: another update is in progress, or requests use all memory for adapters."""
