"""Matchers that stop a sample when its text contains a stop string, and that keep words out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, Matcher, StopReason


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
