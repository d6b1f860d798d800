"""Calls of matchers and token programs, with checks of what they return. All raise `ValueError` for invalid values."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

from nano_inference.types import Matcher, StopReason, TokenProgram


def mask_of(matcher: Matcher) -> bytes | None:
    """Return the matcher's mask: None or at least one byte."""
    mask: object = matcher.mask()
    if mask is None or (type(mask) is bytes and mask):
        return mask
    raise ValueError(f"the matcher's mask must be None or bytes, at least one, got {mask!r:.80}")


def advance_matcher(matcher: Matcher, token: int) -> StopReason | None:
    """Pass a token to the matcher; return why it stops the sample, or None."""
    reason: object = matcher.advance(token)
    if reason is None or isinstance(reason, str):
        return reason
    return _plain_int("the matcher's verdict is", reason)


def step_program(
    program: TokenProgram, state: object, token: int, vocab_size: int | None
) -> tuple[object, tuple[int, ...]]:
    """Return the program's next state and the tokens it forces, as Python integers inside the vocabulary."""
    answer: object = program.step(state, token)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ValueError(f"the token program's step must return (state, tokens), got {answer!r}")
    state, forced = answer
    if isinstance(forced, str | bytes) or not isinstance(forced, Iterable):
        raise ValueError(f"the token program must force a tuple of token ids, got {forced!r}")
    ids = tuple(_plain_int("the token program forced", one) for one in forced)
    outside = next((one for one in ids if one < 0 or (vocab_size is not None and one >= vocab_size)), None)
    if outside is not None:
        limit = "" if vocab_size is None else f" of {vocab_size}"
        raise ValueError(f"the token program forced {outside}, outside the vocabulary{limit}")
    return state, ids


def allows_one(mask: bytes | None) -> bool:
    """Return whether a mask allows exactly one token."""
    bits = int.from_bytes(mask or b"", "little")
    return bits != 0 and bits & (bits - 1) == 0


def allows_others(mask: bytes, tokens: frozenset[int]) -> bool:
    """Return whether a mask allows a token that is not one of these."""
    bits = bytearray(mask)
    for token in tokens:
        if token < 8 * len(bits):
            bits[token // 8] &= ~(1 << token % 8)
    return any(bits)


def _plain_int(what: str, value: object) -> int:
    """Return an integer of any library as Python's int; rejects bool. `what` begins the error message."""
    try:
        if not isinstance(value, bool) and isinstance(value, SupportsIndex):
            return operator.index(value)
    except TypeError:  # an array of several numbers
        pass
    raise ValueError(f"{what} {value!r}, which is not an integer")
