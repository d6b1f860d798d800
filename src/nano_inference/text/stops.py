"""Matchers that stop a sample when its text contains a stop string."""

from __future__ import annotations

from collections.abc import Callable

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import Matcher, StopReason


def stop_matcher(
    tokenizer: Tokenizer, stops: tuple[str, ...], *, skip_special: bool = True, drop_space: bool = False
) -> Callable[[], Matcher]:
    """Return a factory of matchers, one per sample, that stop a sample once its text contains one of `stops`.

    With `skip_special` the text does not include special tokens, but a special token whose own text contains a stop
    string stops the sample, too, so that `stop="<|im_end|>"` works. Of several stop strings the one that ends first
    applies, then the longest, as in `stream`. `drop_space` drops a leading space. Raises `ValueError` for an empty stop
    string.
    """
    if "" in stops:
        raise ValueError("stop must not hold an empty string")
    hidden = tokenizer.special_ids if skip_special else frozenset()
    return lambda: StopStrings(tokenizer, stops, hidden, drop_space)


class StopStrings:
    """Matcher of one sample; keeps one byte less than the longest stop string has."""

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], hidden: frozenset[int], drop_space: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden  # tokens that are not part of the text; each is searched for stop strings by itself
        self._drop_space = drop_space  # True if the next byte of text is to be dropped when it is a space
        self._stops = tuple((stop.encode("utf-8", "surrogatepass"), stop) for stop in stops)
        self._keep = max((len(data) for data, _ in self._stops), default=1) - 1
        self._tail = b""

    def advance(self, token: int) -> StopReason | None:
        """Add the next token; return the stop string that it completes, or None."""
        if token >= self._tokenizer.vocab_size:  # a padding row of the model's vocabulary, without text
            return None
        piece = self._tokenizer.token_bytes(token)
        if token in self._hidden:
            return self._first(piece, 0)
        if piece and self._drop_space:
            piece, self._drop_space = piece.removeprefix(b" "), False
        text, known = self._tail + piece, len(self._tail)
        self._tail = text[max(0, len(text) - self._keep) :]
        return self._first(text, known)

    def mask(self) -> bytes | None:
        """Return None: every token is allowed."""
        return None

    def _first(self, text: bytes, known: int) -> str | None:
        """Return the stop string that ends first after the first `known` bytes."""
        starts = ((max(0, known - len(data) + 1), data, stop) for data, stop in self._stops)
        found = [(at + len(data), at, stop) for start, data, stop in starts if (at := text.find(data, start)) >= 0]
        return min(found)[2] if found else None
