"""Splits an answer into reasoning and content at the marks `<think>` and `</think>`."""

from __future__ import annotations

from nano_inference.text.stream import held_back

_OPEN, _CLOSE = "<think>", "</think>"


class Thinking:
    """State of one answer. Reasoning comes first, if at all; later marks are content.

    `starts_inside`: True if the prompt ends with the opening mark.
    """

    def __init__(self, *, starts_inside: bool = False) -> None:
        self._mark: str | None = _CLOSE if starts_inside else _OPEN
        """The expected mark; None once all that follows is content."""
        self._held = ""
        self._drops_space = starts_inside

    def push(self, text: str, *, is_end: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that the text adds; a possible part of a mark is held back."""
        thinking = ""
        self._held += text
        if self._mark == _OPEN:
            start = self._held.lstrip()
            if start.startswith(_OPEN):
                self._mark, self._held, self._drops_space = _CLOSE, start[len(_OPEN) :], True
            elif is_end or not _OPEN.startswith(start):
                self._mark = None
        if self._mark == _CLOSE:
            thinking = self._reasoning(is_end)
        if self._mark is not None:
            return thinking, ""
        content = self._trimmed(self._held)
        self._held = ""
        return thinking, content

    def _reasoning(self, is_end: bool) -> str:
        """Return the reasoning that is certain, without whitespace at its start."""
        before, mark, after = self._held.partition(_CLOSE)
        if mark:
            thinking = self._trimmed(before)
            self._mark, self._held, self._drops_space = None, after, True
            return thinking
        kept = 0 if is_end else held_back(before, (_CLOSE,))
        self._held = before[len(before) - kept :]
        return self._trimmed(before[: len(before) - kept])

    def _trimmed(self, text: str) -> str:
        """Return the text without whitespace that directly follows a mark."""
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return text
