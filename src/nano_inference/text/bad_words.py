"""A matcher for forbidden words: it bans a word's last token when the sample ends with the word's other tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, Matcher, StopReason

MAX_TOKENS = 1024  # limit on the tokens of all words of one request


def bad_words_matcher(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> Callable[[], Matcher]:
    """Return a factory of matchers, one per sample, that prevent `words`.

    As in vLLM, a word is prevented in its tokenizations at the start of a text and after a space; other tokenizations
    are not detected. Raises `BadRequest` for a word without tokens and for too many tokens.
    """
    spellings = {
        tuple(tokenizer.encode(text, add_special=False, parse_special=False))
        for word in words
        for text in (word.lstrip(" "), f" {word.lstrip(' ')}")
    }
    if () in spellings:
        raise BadRequest("bad_words", "a word has no tokens")
    if sum(map(len, spellings)) > MAX_TOKENS:
        raise BadRequest("bad_words", f"the words have more than {MAX_TOKENS} tokens")
    return lambda: BadWords(frozenset(spellings), vocab_size)


def both(first: Callable[[], Matcher] | None, second: Callable[[], Matcher] | None) -> Callable[[], Matcher] | None:
    """Return a factory of matchers that apply both; if one is None, the other."""
    if first is None or second is None:
        return first or second
    return lambda: Both(first(), second())


class BadWords:
    """Matcher of one sample; keeps one token less than the longest word has."""

    def __init__(self, spellings: frozenset[tuple[int, ...]], vocab_size: int) -> None:
        self._spellings = spellings
        self._vocab_size = vocab_size
        self._keep = max(map(len, spellings), default=1) - 1
        self._tail: tuple[int, ...] = ()

    def advance(self, token: int) -> StopReason | None:
        """Add the next token; never stops the sample."""
        self._tail = (*self._tail, token)[-self._keep :] if self._keep else ()
        return None

    def mask(self) -> bytes | None:
        """Return a bit mask of the tokens that do not complete a word; None if all are allowed."""
        tail = self._tail
        banned = [word[-1] for word in self._spellings if tail[len(tail) + 1 - len(word) :] == word[:-1]]
        if not banned:
            return None
        bits = bytearray(b"\xff" * -(-self._vocab_size // 8))
        for token in banned:
            bits[token // 8] &= ~(1 << token % 8) & 0xFF
        return bytes(bits)


class Both:
    """Combines two matchers: either stops the sample; a token must be allowed by both."""

    def __init__(self, first: Matcher, second: Matcher) -> None:
        self._first = first
        self._second = second

    def advance(self, token: int) -> StopReason | None:
        """Add the token to both; return the first stop reason."""
        reasons = (self._first.advance(token), self._second.advance(token))
        return next((reason for reason in reasons if reason is not None), None)

    def mask(self) -> bytes | None:
        """Return a bit mask of the tokens that both allow; None if all are."""
        first, second = self._first.mask(), self._second.mask()
        if first is None or second is None:
            return first if second is None else second
        return bytes(a & b for a, b in zip(first, second, strict=True))
