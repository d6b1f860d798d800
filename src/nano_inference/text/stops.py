"""Stop strings as matchers: they follow one sample over the bytes of its tokens and say when to stop."""

from __future__ import annotations

from collections.abc import Callable

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import Matcher, StopReason


def stop_matcher(
    tokenizer: Tokenizer, stops: tuple[str, ...], *, skip_special: bool = True, drop_space: bool = False
) -> Callable[[], Matcher]:
    """Return a maker of matchers, one for each sample, that stop once the sample's text contains one of `stops`.

    The text is what a reader sees: special tokens are not in it, unless `skip_special` is off. One that is not in it
    and whose own text contains a stop string stops too: that is what someone who writes `stop="<|im_end|>"` means. Of
    two stop strings the one that is complete first wins, then the longer, as in `stream`. With `drop_space` the text
    begins without a first space. An empty stop string is a `ValueError`.
    """
    if "" in stops:
        raise ValueError("stop must not hold an empty string")
    unseen = tokenizer.special_ids if skip_special else frozenset()
    return lambda: StopStrings(tokenizer, stops, unseen, drop_space)


class StopStrings:
    """Follows one sample; keeps only as many bytes as the longest stop string needs, less one."""

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], unseen: frozenset[int], drop_space: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._unseen = unseen
        """Tokens that are not in the text, but may stop it by themselves."""
        self._drop_space = drop_space
        """The next byte of text is dropped when it is a space."""
        self._stops = tuple((stop.encode("utf-8", "surrogatepass"), stop) for stop in stops)
        self._keep = max((len(data) for data, _ in self._stops), default=1) - 1
        self._tail = b""

    def advance(self, token: int) -> StopReason | None:
        """Take the next token; return the stop string that it completes, or None."""
        if token >= self._tokenizer.vocab_size:  # a padded vocabulary: the model has rows that spell nothing
            return None
        piece = self._tokenizer.token_bytes(token)
        if token in self._unseen:
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
        """Return the stop string that is complete first, among those that end behind the `known` bytes."""
        starts = ((max(0, known - len(data) + 1), data, stop) for data, stop in self._stops)
        found = [(at + len(data), at, stop) for start, data, stop in starts if (at := text.find(data, start)) >= 0]
        return min(found)[2] if found else None
