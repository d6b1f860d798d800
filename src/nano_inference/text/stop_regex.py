"""Matchers that stop a sample when its text contains a match of a regular expression."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from nano_inference.text.kinds import Tokenizer
from nano_inference.text.regex import MAX_STATES, Regex, Search, compile_regex
from nano_inference.types import BadRequest, Matcher, StopReason

FIELD = "stop_regex"  # the request's field, which begins the messages of errors


def stop_regex_matcher(
    tokenizer: Tokenizer, patterns: Sequence[str], *, skip_special: bool = True
) -> Callable[[], Matcher]:
    """Return a factory of matchers, one per sample, that stop a sample at the first end of a match.

    The stop reason is the expression. With `skip_special` the text does not include special tokens. Raises `BadRequest`
    as `compile_regex` does, and for expressions that together have too many states.
    """
    try:
        compiled = [(pattern, compile_regex(pattern)) for pattern in patterns]
    except BadRequest as error:
        raise BadRequest(FIELD, f"{error}") from None
    if sum(regex.num_states for _, regex in compiled) > MAX_STATES:
        raise BadRequest(FIELD, f"the expressions have more than {MAX_STATES} states")
    hidden = tokenizer.special_ids if skip_special else frozenset()
    return lambda: StopRegex(tokenizer, compiled, hidden)


class StopRegex:
    """Matcher of one sample."""

    def __init__(self, tokenizer: Tokenizer, compiled: Sequence[tuple[str, Regex]], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._searches = [(pattern, Search(regex)) for pattern, regex in compiled]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, token: int) -> StopReason | None:
        """Add the next token; return the expression of which it completes a match, or None."""
        if token >= self._tokenizer.vocab_size or token in self._hidden:
            return None
        for char in self._decoder.decode(self._tokenizer.token_bytes(token)):
            matched = [pattern for pattern, search in self._searches if search.push(char)]
            if matched:
                return matched[0]
        return None

    def mask(self) -> bytes | None:
        """Return None: every token is allowed."""
        return None
