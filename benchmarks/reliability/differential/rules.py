"""The rules of a completion without a model: what is forced, what is banned, when a sample ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from differential.asks import PlannedRequest
from nano_inference import TrainingSample
from nano_inference.types import Delta, FinishReason, SamplingMask, StopReason, TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What is reported of each token of a completion."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    mask: tuple[int, ...]
    versions: tuple[int, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None
    raw_logprobs: tuple[float, ...] | None
    sampling_masks: tuple[SamplingMask, ...] | None

    def first(self, count: int) -> Columns:
        """Return the first tokens' part."""
        cut = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: value[:count] for name, value in cut.items() if value is not None})

    def difference(self, other: Columns) -> str | None:
        """Return where two completions part, versions aside; None when they do not."""
        for f in fields(self):
            if f.name == "versions":
                continue
            ours, theirs = getattr(self, f.name), getattr(other, f.name)
            if ours != theirs:
                if ours is None or theirs is None or len(ours) != len(theirs):
                    return f"{f.name} differ in length"
                place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                return f"{f.name}[{place}] is {ours[place]!r}, alone {theirs[place]!r}"
        return None


NAMES = {
    "tokens": ("completion_tokens", "token_ids"),
    "logprobs": ("logprobs", "logprobs"),
    "mask": ("mask", "mask"),
    "versions": ("token_versions", "versions"),
    "top_logprobs": ("top_logprobs", "top_logprobs"),
    "raw_logprobs": ("raw_logprobs", "raw_logprobs"),
    "sampling_masks": ("sampling_masks", "sampling_masks"),
}
"""Names of each column in a sample and in a delta."""


def columns_of(sample: TrainingSample) -> Columns:
    """Return a sample's columns."""
    return Columns(**{name: getattr(sample, own) for name, (own, _) in NAMES.items()})


def joined(deltas: Sequence[Delta]) -> Columns:
    """Return the columns that deltas add up to."""
    found: dict[str, Any] = {}
    for name, (_, own) in NAMES.items():
        parts = [getattr(delta, own) for delta in deltas]
        found[name] = None if None in parts else tuple(one for part in parts for one in part)
    return Columns(**found)


class Reference:
    """Follows a completion token by token with matchers and programs of its own."""

    def __init__(self, ask: PlannedRequest, eos: frozenset[int]) -> None:
        self._ask = ask
        self._stops = frozenset(ask.params.stop_token_ids) | (frozenset() if ask.params.ignore_eos else eos)
        self.draws: list[int] = []
        """Places of tokens that the model drew."""
        self.masks: dict[int, bytes | None] = {}
        """What the matcher allowed at each place."""
        self.end: tuple[FinishReason | None, StopReason | None] = (None, None)

    def banned(self, place: int) -> frozenset[int]:
        """Return what `min_tokens` bans there."""
        if place >= self._ask.params.min_tokens:
            return frozenset()
        mask = self.masks[place]
        if mask is not None and allowed_ids(mask) <= self._stops:
            return frozenset()
        return self._stops

    def follow(self, tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """Follow a completion; return the mask that it must have, and what is wrong with it."""
        ask = self._ask
        matcher = ask.rules() if ask.rules is not None else None
        state = ask.tool.start() if ask.tool is not None else None
        found: list[int] = []
        due: list[int] = []
        if ask.params.max_tokens == 0:
            self.end = ("length", None)
        for place, token in enumerate(tokens):
            if self.end[0] is not None:
                return found, f"tokens after the end, {self.end[0]}, at {place}"
            is_forced = bool(due)
            if is_forced and due.pop(0) != token:
                return found, f"token {place} is not what the program forces"
            mask = self.masks[place] = matcher.mask() if matcher is not None else None
            is_only = not is_forced and mask is not None and len(allowed_ids(mask)) == 1
            if not is_forced and mask is not None and not mask[token // 8] >> token % 8 & 1:
                return found, f"token {place} is forbidden by the matcher"
            found.append(0 if is_forced or is_only else 1)
            if found[-1]:
                self.draws.append(place)
            verdict = matcher.advance(token) if matcher is not None else None
            self._note(token, place + 1, verdict, is_forced=is_forced)
            if not is_forced and ask.tool is not None and self.end[0] is None:
                state, forced = ask.tool.step(state, token)
                due = list(forced)
        return found, None

    def _note(self, token: int, num_new: int, verdict: StopReason | None, *, is_forced: bool) -> None:
        """Decide whether a token ends the sample; a stop outranks a length, a stop token a matcher's verdict."""
        params = self._ask.params
        if verdict is not None and num_new > params.min_tokens:
            self.end = ("stop", verdict)
        elif num_new >= (params.max_tokens or 0):
            self.end = ("length", None)
        if not is_forced and token in self._stops and self.end[0] != "stop":
            self.end = ("stop", token if token in frozenset(params.stop_token_ids) else None)


def allowed_ids(mask: bytes) -> frozenset[int]:
    """Return the ids whose bits are set."""
    return frozenset(8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)


def is_consistent(reference: Reference, columns: Columns) -> str | None:
    """Follow a completion with a fresh reference; return what is wrong with it."""
    found, problem = reference.follow(columns.tokens)
    if problem is not None:
        return problem
    if tuple(found) != columns.mask:
        return f"mask {columns.mask}, expected {tuple(found)}"
    for place, is_drawn in enumerate(found):
        if is_drawn:
            continue
        raw = columns.raw_logprobs[place] if columns.raw_logprobs is not None else 0.0
        if columns.logprobs[place] != 0.0 or raw != 0.0:
            return f"forced token {place} has the log-probability {columns.logprobs[place]}, raw {raw}"
        if place and columns.mask[place - 1] == 0 and columns.versions[place] < columns.versions[place - 1]:
            return f"forced token {place} has an older version than the one before it"
    return None
