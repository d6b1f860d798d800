"""What an engine gave for one sample, score or embedding, and where two of them differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Tokens and all numbers that came with them, each list flat."""

    label: str
    ids: Mapping[str, Sequence[int]]
    """`tokens`, ids of alternatives, ranks, masks."""
    floats: Mapping[str, Sequence[float]]
    """`logprobs` and the others."""
    finish: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Results of one case."""

    case: str
    streams: Sequence[Stream] = ()
    error: str | None = None
    """Why nothing was recorded, such as a dtype that the model does not have."""
    code: str = ""
    """What computed: torch, or the instruction set."""
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens drawn."""
        return sum(len(stream.ids["tokens"]) for stream in self.streams)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """Build from `asdict`'s form after a trip through JSON."""
        return cls(**{**data, "streams": [Stream(**stream) for stream in data["streams"]]})


def first_difference(here: Recording, there: Recording, tolerance: float) -> str | None:
    """Return what differs first, or None. With a tolerance of 0 floats must have the same bits."""
    if here.error or there.error:
        text = f"here: {here.error or 'computed'}; there: {there.error or 'computed'}"
        return None if here.error == there.error else text
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
    """Return the first place where tokens or their log-probabilities differ, else another difference.

    With a tolerance other ids are not compared: neighbours of almost the same probability may exchange their places.
    """
    found = [] if here.finish == there.finish else [(True, 0, f"ended with {here.finish} here, {there.finish} there")]
    pairs = [(name, here.ids.get(name, ()), there.ids.get(name, ())) for name in {**here.ids, **there.ids}]
    pairs = [pair for pair in pairs if pair[0] == "tokens" or not tolerance]
    pairs += [(name, here.floats.get(name, ()), there.floats.get(name, ())) for name in {**here.floats, **there.floats}]
    for name, mine, others in pairs:
        finite = [abs(value) for value in (*mine, *others) if math.isfinite(value)]
        bound = tolerance * max([1.0, *finite])
        for at, (a, b) in enumerate(zip_longest(mine, others)):
            if shown(a) != shown(b) and not (
                tolerance and isinstance(a, float) and b is not None and abs(a - b) <= bound
            ):
                is_late = name not in ("tokens", "logprobs")
                found.append((is_late, at, f"{name}[{at}]: {shown(a)} here, {shown(b)} there"))
                break
    return min(found)[2] if found else None


def shown(value: float | None) -> str:
    """Return a number as text, floats with all bits."""
    return value.hex() if isinstance(value, float) else str(value)
