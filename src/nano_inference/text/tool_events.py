"""What a model's reply consists of: content, reasoning and function calls, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning before the answer, which `text.reasoning` splits off before calls are parsed."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call of a known function."""

    index: int
    name: str
    source: str = field(default="", compare=False)
    """The text so far from which the call was parsed, with the whitespace before it."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, as JSON."""

    index: int
    text: str
    source: str = field(default="", compare=False)
    """The text from which the piece was parsed, unless it is in the call's `CallStart`."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call that was valid as a whole; its arguments are one JSON object."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


def settled(events: Iterable[Event]) -> list[Event]:
    """Return a whole reply's events with the text of calls that have no end as content."""
    events = list(events)
    ended = {event.index: count for count, event in enumerate(one for one in events if isinstance(one, CallEnd))}
    result: list[Event] = []
    for event in events:
        if isinstance(event, Content | Reasoning):
            result.append(event)
        elif event.index in ended:
            result.append(replace(event, index=ended[event.index]))
        elif not isinstance(event, CallEnd):
            result.append(Content(event.source))
    return merged(result)


def merged(events: Iterable[Event]) -> list[Event]:
    """Return events without empty pieces, with adjacent pieces of content or of one call's arguments joined."""
    result: list[Event] = []
    # The key is a call's index for arguments, -1 for content, and None for events that are never joined.
    for key, group in groupby(
        events, lambda one: one.index if isinstance(one, CallArguments) else -1 if isinstance(one, Content) else None
    ):
        several = list(group)
        if key is None:
            result += several
            continue
        text = "".join(event.text for event in several if isinstance(event, Content | CallArguments))
        source = "".join(event.source for event in several if isinstance(event, CallArguments))
        if text:
            result.append(Content(text) if key < 0 else CallArguments(key, text, source))
    return result
