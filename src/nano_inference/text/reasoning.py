"""Split an answer into reasoning and content at the marks `<think>` and `</think>`, as a stream.

Reasoning comes first, if at all: later marks are content. The result does not depend on how the text was split into
pieces, except that reasoning and content may be split into other pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nano_inference.text.stream import held_back

OPEN_MARK: Final = "<think>"
CLOSE_MARK: Final = "</think>"
_CLOSE_BYTES = CLOSE_MARK.encode()


class ReasoningSplitter:
    """State of one answer.

    `starts_inside`: the prompt ends with the opening mark. `prefix`: the beginning of the answer, given by the client;
    it is not returned again.
    """

    def __init__(self, *, starts_inside: bool = False, prefix: str = "") -> None:
        self._mark: str | None = CLOSE_MARK if starts_inside else OPEN_MARK
        """The expected mark; None once all that follows is content."""
        self._held = ""
        self._num_given = 0  # characters of the prefix in `_held`
        self._drops_space = starts_inside
        self._num_tokens = 0
        self._tail = prefix.encode()[1 - len(_CLOSE_BYTES) :]
        """The last bytes of the answer: possibly the first ones of the closing mark; empty after the mark."""
        self._is_counting = True
        self._has_reasoned = starts_inside
        self.push(prefix)
        self._num_given = len(self._held)
        self._has_reasoned = self._mark == CLOSE_MARK

    @property
    def num_tokens(self) -> int:
        """Tokens of the reasoning so far, marks included; 0 for an answer without reasoning."""
        return self._num_tokens if self._has_reasoned else 0

    @property
    def is_undecided(self) -> bool:
        """True if the answer so far may be the beginning of a mark, or whitespace before one."""
        return self._mark == OPEN_MARK

    def count(self, pieces: Iterable[bytes]) -> None:
        """Count tokens, given by their bytes, up to the one that completes the closing mark."""
        for piece in pieces:
            if not self._is_counting:
                return
            self._num_tokens += 1
            data = self._tail + piece
            self._is_counting = _CLOSE_BYTES not in data
            self._tail = data[1 - len(_CLOSE_BYTES) :]

    def push(self, text: str, *, is_end: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that the text adds; a possible part of a mark is held back."""
        reasoning = ""
        self._held += text
        if self._mark == OPEN_MARK:
            start = self._held.lstrip()
            if start.startswith(OPEN_MARK):
                self._mark, self._held, self._num_given = CLOSE_MARK, start[len(OPEN_MARK) :], 0
                self._drops_space = self._has_reasoned = True
            elif is_end or not OPEN_MARK.startswith(start):
                self._mark = None
        if self._mark == CLOSE_MARK:
            before, mark, after = self._held.partition(CLOSE_MARK)
            kept = 0 if mark or is_end else held_back(before, (CLOSE_MARK,))
            self._held = before[len(before) - kept :]
            reasoning = self._released(before[: len(before) - kept])
            if mark:
                self._mark, self._held, self._num_given, self._drops_space = None, after, 0, True
        if self._mark is not None:
            return reasoning, ""
        content = self._released(self._held)
        self._held = ""
        return reasoning, content

    def _released(self, text: str) -> str:
        """Return a text without the part that the client gave, and without whitespace that directly follows a mark."""
        given = min(self._num_given, len(text))
        self._num_given -= given
        text = text[given:]
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return text
