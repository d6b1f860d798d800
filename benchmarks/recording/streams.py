"""What an engine gave for one sample, score or embedding, and where two of them differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Tokens and all numbers that came with them."""

    label: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    floats: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Further numbers by name, each list flat."""
    ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Further integers by name: ids of alternatives, ranks, masks. Compared only bit for bit, because neighbours of
    almost the same probability exchange their places within any tolerance."""
    finish: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, floats exact."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one case gave."""

    case: str
    streams: Sequence[Stream] = ()
    error: str | None = None
    """Why nothing was recorded, such as a dtype that the model does not have."""
    code: str = ""
    """What computed: torch, or the instruction set."""
    num_preemptions: int = 0
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens drawn."""
        return sum(len(stream.tokens) for stream in self.streams)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """Build from `asdict`'s form after a trip through JSON."""
        return cls(**{**data, "streams": [Stream(**stream) for stream in data["streams"]]})


def first_difference(here: Recording, there: Recording, tolerance: float) -> str | None:
    """Return what differs first, or None. With a tolerance of 0 floats must have the same bits."""
    if here.error or there.error:
        return (
            None
            if here.error == there.error
            else f"here: {here.error or 'computed'}; there: {there.error or 'computed'}"
        )
    if here.code != there.code:
        return f"computed by {here.code} here, by {there.code} there"
    for mine, other in zip_longest(here.streams, there.streams):
        if mine is None or other is None:
            return f"{len(here.streams)} streams here, {len(there.streams)} there"
        found = stream_difference(mine, other, tolerance)
        if found is not None:
            return f"{mine.label}: {found}"
    return None


def stream_difference(here: Stream, there: Stream, tolerance: float) -> str | None:
    """Return where two streams differ first: the first differing token before any number behind it."""
    at = _first(here.tokens, there.tokens)
    if at is not None:
        differing = _first_float(here.logprobs[:at], there.logprobs[:at], tolerance)
        return _token_text(here, there, at if differing is None else differing)
    at = _first_float(here.logprobs, there.logprobs, tolerance)
    if at is not None:
        return _token_text(here, there, at)
    if here.finish != there.finish:
        return f"ended with {here.finish} here, {there.finish} there"
    for name in sorted({*here.floats, *there.floats}):
        mine, other = here.floats.get(name, ()), there.floats.get(name, ())
        at = _first_float(mine, other, tolerance)
        if at is not None:
            return f"{name}[{at}]: {_hex(mine, at)} here, {_hex(other, at)} there"
    if tolerance:
        return None
    for name in sorted({*here.ids, *there.ids}):
        ids, others = here.ids.get(name, ()), there.ids.get(name, ())
        at = _first(ids, others)
        if at is not None:
            return f"{name}[{at}]: {_id(ids, at)} here, {_id(others, at)} there"
    return None


def worst_difference(here: Recording, there: Recording) -> float:
    """Return the largest relative difference of any float of two recordings of the same shape."""
    worst = 0.0
    for mine, other in zip(here.streams, there.streams, strict=False):
        pairs = [(mine.logprobs, other.logprobs), *((mine.floats[n], other.floats.get(n, ())) for n in mine.floats)]
        for a, b in pairs:
            scale = _scale(a, b)
            worst = max([worst, *(abs(x - y) / scale for x, y in zip(a, b, strict=False) if x != y)])
    return worst


def _first(here: Sequence[int], there: Sequence[int]) -> int | None:
    pairs = enumerate(zip_longest(here, there))
    return next((index for index, (a, b) in pairs if a != b), None)


def _first_float(here: Sequence[float], there: Sequence[float], tolerance: float) -> int | None:
    """Return the first index at which bits differ, or differ by more than the tolerance."""
    if len(here) != len(there):
        return min(len(here), len(there))
    bound = tolerance * _scale(here, there)
    for index, (a, b) in enumerate(zip(here, there, strict=True)):
        if a.hex() != b.hex() and not (tolerance and abs(a - b) <= bound):
            return index
    return None


def _scale(here: Sequence[float], there: Sequence[float]) -> float:
    """Return the largest finite absolute value of two lists, at least 1."""
    return max([1.0, *(abs(value) for value in (*here, *there) if math.isfinite(value))])


def _token_text(here: Stream, there: Stream, at: int) -> str:
    return (
        f"token {at}: id {_id(here.tokens, at)} ({_hex(here.logprobs, at)}) here, "
        f"id {_id(there.tokens, at)} ({_hex(there.logprobs, at)}) there"
    )


def _id(values: Sequence[int], at: int) -> str:
    return str(values[at]) if at < len(values) else "none"


def _hex(values: Sequence[float], at: int) -> str:
    return values[at].hex() if at < len(values) else "none"
