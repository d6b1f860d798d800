"""Words that must not be written, as a matcher: it forbids the last token of a word once the others stand there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, Matcher, StopReason

MAX_TOKENS = 1024
"""Tokens that all the words of one request may come to."""


def bad_words_matcher(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> Callable[[], Matcher]:
    """Return a maker of matchers, one for each sample, that keep `words` out of it.

    A word is kept out as it is spelled at the start of a text and behind a space, as vLLM does; other cuts of its
    letters into tokens are not seen. Raises `BadRequest` for a word without tokens and for too many tokens.
    """
    spellings = {
        tuple(tokenizer.encode(text, add_special=False, parse_special=False))
        for word in words
        for text in (word.lstrip(" "), f" {word.lstrip(' ')}")
    }
    if () in spellings:
        raise BadRequest("bad_words: a word has no tokens")
    if sum(map(len, spellings)) > MAX_TOKENS:
        raise BadRequest(f"bad_words: the words come to more than {MAX_TOKENS} tokens")
    return lambda: BadWords(frozenset(spellings), vocab_size)


def both(first: Callable[[], Matcher] | None, second: Callable[[], Matcher] | None) -> Callable[[], Matcher] | None:
    """Return a maker of matchers that do what two do; the other one when one is None."""
    if first is None or second is None:
        return first or second
    return lambda: Both(first(), second())


class BadWords:
    """Follows one sample; keeps as many tokens as the longest word has, less one."""

    def __init__(self, spellings: frozenset[tuple[int, ...]], vocab_size: int) -> None:
        self._spellings = spellings
        self._vocab_size = vocab_size
        self._keep = max(map(len, spellings), default=1) - 1
        self._tail: tuple[int, ...] = ()

    def advance(self, token: int) -> StopReason | None:
        """Take the next token; it never stops the sample."""
        self._tail = (*self._tail, token)[-self._keep :] if self._keep else ()
        return None

    def mask(self) -> bytes | None:
        """Return all tokens but those that would complete a word; None when none would."""
        banned = [word[-1] for word in self._spellings if self._ends_with(word[:-1])]
        if not banned:
            return None
        bits = bytearray(b"\xff" * -(-self._vocab_size // 8))
        for token in banned:
            bits[token // 8] &= ~(1 << token % 8) & 0xFF
        return bytes(bits)

    def _ends_with(self, beginning: tuple[int, ...]) -> bool:
        return not beginning or self._tail[-len(beginning) :] == beginning


class Both:
    """Two matchers as one: either stops the sample, and a token must be allowed by both."""

    def __init__(self, first: Matcher, second: Matcher) -> None:
        self._first = first
        self._second = second

    def advance(self, token: int) -> StopReason | None:
        """Let both take the token; return the first verdict."""
        verdicts = (self._first.advance(token), self._second.advance(token))
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def mask(self) -> bytes | None:
        """Return the tokens that both allow."""
        first, second = self._first.mask(), self._second.mask()
        if first is None or second is None:
            return first if second is None else second
        return bytes(a & b for a, b in zip(first, second, strict=True))
