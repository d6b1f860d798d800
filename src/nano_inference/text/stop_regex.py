r"""Matchers that stop a sample when its text contains a match of a regular expression.

The package `regex` searches the text that may still become a match, within a limit of time. The syntax is the part of
Python's in which a match does not depend on the text around it: literals, `.`, classes, `\d \w \s` and their opposites,
groups, `|`, `* + ? {m,n}`, lazy or not, and `\n \t \r \f \v \xhh \uhhhh`.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Sequence
from typing import Final

import regex

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, Matcher, StopReason

FIELD = "stop_regex"  # the request's field, which begins the messages of errors
MAX_SIZE: Final = 1000
"""Limit on an expression's characters after its counts are written out, which `regex` does; a megabyte at most."""
MAX_SECONDS: Final = 0.1  # limit on the CPU time of a sample's searches together, beyond `_FREE_SECONDS` each
_FREE_SECONDS = 20e-6  # a search of a text without a beginning of a match takes 3 µs
_ESCAPE = r"\\(?:[dDwWsSntrfv]|0(?![0-9])|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^a-zA-Z0-9])"
_COUNT = re.compile(r"(\)?)\{([0-9]{0,9})(?:,([0-9]{0,9}))?\}")
_SUPPORTED = re.compile(
    rf"(?:{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|[^\\\]])*+\]|\((?:\?:|(?!\?))|[)|]|[^\\\[({{^$*+?]"
    r"|(?:[*+?]|\{(?:[0-9]{1,9}(?:,[0-9]{0,9})?|,[0-9]{1,9})\})\??(?![*+?{]))*+",
    re.S,
)
"""Matches the supported part of an expression; `regex` checks how the parts fit together."""


def stop_regex_matcher(
    tokenizer: Tokenizer, patterns: Sequence[str], *, skip_special: bool = True
) -> Callable[[], Matcher]:
    """Return a factory of matchers, one per sample, that stop a sample with the token that completes a match.

    The stop reason is the expression; of several that one token completes, the first. With `skip_special` the text does
    not include special tokens. Raises `BadRequest` as `compile_regex` does.
    """
    compiled = [(pattern, compile_regex(pattern)) for pattern in patterns]
    hidden = tokenizer.special_ids if skip_special else frozenset()
    return lambda: StopRegex(tokenizer, compiled, hidden)


def compile_regex(pattern: str) -> regex.Pattern[str]:
    """Return a compiled expression. Raises `BadRequest` for an invalid, unsupported, empty or too large one."""
    found = _SUPPORTED.match(pattern)
    end = found.end() if found is not None else 0
    if end < len(pattern):
        raise BadRequest(FIELD, f"{pattern[end : end + 8]!r} at position {end} is not supported")
    size, factor = len(pattern), 1
    for group, least, most in _COUNT.findall(pattern):
        count = max(int(least or 0), int(most or 0), 1)
        size, factor = (size, factor * count) if group else (size + count, factor)
    if size * factor > MAX_SIZE:
        raise BadRequest(
            FIELD, f"has {size * factor} characters after its counts are written out, more than {MAX_SIZE}"
        )
    try:
        compiled = regex.compile(pattern, flags=regex.V0, cache_pattern=False)
        is_empty = compiled.match("", timeout=MAX_SECONDS) is not None
    except (regex.error, RecursionError, TimeoutError) as error:
        raise BadRequest(FIELD, f"{pattern[:64]!r}: {error}") from None
    if is_empty:
        raise BadRequest(FIELD, "it matches the empty text")
    return compiled


class StopRegex:
    """Matcher of one sample; raises `ValueError` when its searches exceed `MAX_SECONDS`."""

    def __init__(
        self, tokenizer: Tokenizer, compiled: Sequence[tuple[str, regex.Pattern[str]]], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._compiled = compiled
        self._texts = [""] * len(compiled)  # for each expression, the end of the text that may begin a match
        self._seconds = MAX_SECONDS
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, token: int) -> StopReason | None:
        """Add the next token; return the expression of which it completes a match, or None."""
        if token >= self._tokenizer.vocab_size or token in self._hidden:
            return None
        text = self._decoder.decode(self._tokenizer.token_bytes(token))
        for index, (pattern, compiled) in enumerate(self._compiled):
            so_far = self._texts[index] + text
            match = self._search(pattern, compiled, so_far)
            if match is not None and not match.partial:
                return pattern
            self._texts[index] = "" if match is None else so_far[match.start() :]
        return None

    def mask(self) -> bytes | None:
        """Return None: every token is allowed."""
        return None

    def _search(self, pattern: str, compiled: regex.Pattern[str], text: str) -> regex.Match[str] | None:
        """Return a match, or else the first that more text may complete. Other threads run meanwhile."""
        start = time.thread_time()
        try:
            match = compiled.search(text, partial=True, concurrent=True, timeout=max(self._seconds, _FREE_SECONDS))
        except TimeoutError:
            self._seconds = -1.0
            match = None
        self._seconds -= max(0.0, time.thread_time() - start - _FREE_SECONDS)
        if self._seconds < 0:
            raise ValueError(f"{FIELD}: {pattern[:64]!r} needs more than {MAX_SECONDS} s to search this text")
        return match
