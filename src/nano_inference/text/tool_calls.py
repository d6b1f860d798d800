"""What a model writes to calls of functions, as pure steps: text leaves as soon as it is known what it belongs to.

Where the text was cut makes no difference: the same characters give the same events, up to how content and arguments
are cut. What turns out to be no call comes out as content just as it was written. A call's name is told with the
beginning of its arguments, which are told as they come; a call that goes wrong after that has no `CallEnd`, and what
follows the place where it went wrong is content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal, NamedTuple

from nano_inference.text.tool_format import ToolFormat
from nano_inference.text.tool_json import SPACE, JsonState, is_object, step, without_bare

MAX_HELD: Final = 1 << 20
"""Characters that wait to be known as a call; a longer beginning is none."""
MAX_SPACES: Final = 256
"""Characters of space that wait for what comes behind; a call drops no more than these."""

_ARGUMENTS = ("arguments", "parameters")
_HARMLESS = frozenset({"name", "id", "type", "index", *_ARGUMENTS})
"""Keys before the name in a call without a marker: any other shows that the reply is JSON of its own."""

Parts = tuple[str, ...]
"""A text that grows: its parts at least halve in length, so that adding costs little however short the pieces are."""
Phase = Literal["open", "text", "json", "tail", "prose"]


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a known function; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, as JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are whole: one JSON object."""

    index: int


Event = Content | CallStart | CallArguments | CallEnd


class _Call(NamedTuple):
    """The call that is being read."""

    key: str = ""
    """Whose value is read or due."""
    word: Parts = ()
    """A key or value that is a string, as far as it was read, with its quotes."""
    name: str | None = None
    arguments: Parts = ()
    """The arguments, while the name is not known."""
    stage: Literal["none", "open", "whole"] = "none"
    """How far the arguments are read."""
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsState:
    """Where the reading of one reply stands."""

    format: ToolFormat
    names: frozenset[str]
    """The functions that there are; a call of any other is content."""
    phase: Phase
    """The beginning of a reply that may be a call, text, calls, behind a call, or text that no call can follow."""
    index: int = 0
    """Of the next call."""
    is_behind_call: bool = False
    """Space is dropped until other text comes."""
    spaces: str = ""
    """Space that is dropped if a call follows."""
    partial: str = ""
    """The beginning of a marker."""
    held: Parts = ()
    """What becomes content if this is no call."""
    num_held: int = 0
    json: JsonState = JsonState()
    base: int = 0
    """Brackets around a call: one in a list."""
    is_called: bool = False
    """A call was read since the marker."""
    call: _Call | None = None


def start(fmt: ToolFormat, names: Iterable[str]) -> CallsState:
    """Return the state before a reply by a model that may call these functions."""
    return CallsState(format=fmt, names=frozenset(names), phase="open" if fmt.is_whole else "text")


def push(state: CallsState, text: str) -> tuple[CallsState, list[Event]]:
    """Take the next text; return the new state and what is certain now."""
    events: list[Event] = []
    at = 0
    while at < len(text):
        if state.phase == "text" and state.partial:
            text, at = _rewound(text, at, state.partial)
            state = replace(state, partial="")
        state, at = _STEPS[state.phase](state, text, at, events)
    return state, _merged(events)


def finish(state: CallsState) -> list[Event]:
    """Return what was held back, now that no text follows: the beginning of a call is content, of its end nothing."""
    if state.phase == "tail" or (state.phase == "json" and _is_beyond(state)):
        return []
    text = state.spaces + "".join(state.held) + state.partial
    return [Content(text)] if text else []


def _is_beyond(state: CallsState) -> bool:
    """Whether what is held is only what stands between and behind calls."""
    return state.is_called if state.call is None else state.call.is_told


# ---- text


def _rewound(text: str, at: int, partial: str) -> tuple[str, int]:
    """Return the place where `partial` begins, which ends at `at`; in front of the text what an earlier one had."""
    missing = len(partial) - at
    return (partial[:missing] + text, 0) if missing > 0 else (text, -missing)


def _text(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Take text up to a marker, or all but what may become one."""
    begin = state.format.begin
    found = text.find(begin, at)
    if found >= 0:
        state = _say(state, text[at:found], events)
        return replace(_opened(state), held=(begin,), num_held=len(begin)), found + len(begin)
    keep = next((size for size in range(len(begin) - 1, 0, -1) if text.endswith(begin[:size], at)), 0)
    state = _say(state, text[at : len(text) - keep], events)
    return replace(state, partial=text[len(text) - keep :]), len(text)


def _opened(state: CallsState) -> CallsState:
    return replace(state, phase="json", json=JsonState(), base=0, is_called=False, call=None)


def _say(state: CallsState, text: str, events: list[Event]) -> CallsState:
    """Tell text as content, but for the space at its end; behind a call without the space before it."""
    if state.is_behind_call:
        text = text.lstrip(SPACE)
    if not text:
        return state
    text = state.spaces + text
    spaces = "" if state.phase == "prose" else text[max(len(text.rstrip(SPACE)), len(text) - MAX_SPACES) :]
    events.append(Content(text[: len(text) - len(spaces)]))
    return replace(state, spaces=spaces, is_behind_call=False)


def _prose(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    return _say(state, text[at:], events), len(text)


def _given_back(state: CallsState, events: list[Event]) -> CallsState:
    """Tell what was held back as content: it is no call."""
    text = "".join(state.held) + state.partial
    state = replace(
        state, phase="prose" if state.format.is_whole else "text", held=(), num_held=0, partial="", call=None
    )
    return _say(state, text, events)


# ---- before and behind calls


def _open(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Take the beginning of a reply: space and the marker, if it is there; then a call begins or there is none."""
    char, begin = text[at], state.format.begin
    if begin.startswith(state.partial + char):
        partial = state.partial + char
        state = replace(state, partial=partial)
        return (_holding(_opened(replace(state, partial="")), begin) if partial == begin else state), at + 1
    if not state.partial and char == "{":
        return _opened(state), at
    if not state.partial and char in SPACE and state.num_held < MAX_HELD:
        return _holding(state, char), at + 1
    return _given_back(state, events), at


def _tail(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Take what stands behind calls: space, and the end marker or the semicolon before the next call."""
    char, end = text[at], state.format.end
    if state.format.is_whole and char == ";":
        return _holding(replace(_opened(_released(state)), is_called=True), char), at + 1
    if not end and not state.format.is_whole:
        return replace(_released(state), phase="text"), at
    if end and end.startswith(state.partial + char):
        partial = state.partial + char
        state = replace(state, partial=partial)
        return (replace(_released(state), phase="text") if partial == end else state), at + 1
    if not state.partial and char in SPACE and state.num_held < MAX_HELD:
        return _holding(state, char), at + 1
    partial = state.partial  # may begin the next call: both markers start with the same character
    return replace(_given_back(replace(state, partial=""), events), partial=partial), at


def _holding(state: CallsState, text: str) -> CallsState:
    return replace(state, held=_joined(state.held, text), num_held=state.num_held + len(text))


def _released(state: CallsState) -> CallsState:
    """Drop what is held: it belongs to a call."""
    return replace(state, held=(), num_held=0, partial="", spaces="", is_behind_call=True)


# ---- calls


def _json(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Take one step of the JSON between the markers; what is no call is given back, but for what was told of it."""
    call = state.call
    if call is not None and call.is_told and call.stage == "open":
        return _told_arguments(state, call, text, at, events)
    room = MAX_HELD - state.num_held
    found = step(state.json, text, at, min(len(text), at + room)) if room > 0 else None
    after = None if found is None else _after_step(state, found[0], text[at : found[1]], events)
    if found is None or after is None:
        return _given_back(state, events), at
    return after, found[1]


def _told_arguments(state: CallsState, call: _Call, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Take and tell arguments of a call that is told, as far as they go."""
    reader, pieces, depth = state.json, [], state.base + 1
    is_wrong = False
    while at < len(text) and len(reader.nest) > depth:
        found = step(reader, text, at, len(text))
        if found is None:
            is_wrong = True
            break
        pieces.append(_argument_text(reader, text[at : found[1]]))
        reader, at = found
    events.append(CallArguments(state.index - 1, "".join(pieces)))
    if is_wrong:
        return _given_back(replace(state, is_behind_call=False), events), at
    if len(reader.nest) == depth:
        events.append(CallEnd(state.index - 1))
        call = call._replace(stage="whole")
    return replace(state, json=reader, call=call), at


def _argument_text(reader: JsonState, text: str) -> str:
    return without_bare(text) if reader.token == '"' else text


def _after_step(state: CallsState, reader: JsonState, text: str, events: list[Event]) -> CallsState | None:
    """Return the state behind one step; None when it cannot belong to a call."""
    before, after = len(state.json.nest) - state.base, len(reader.nest) - state.base
    if before <= 0:
        return _between(state, reader, text)
    if state.call is None:
        return None
    call: _Call | None = state.call
    if after == 0:
        return _closed(_holding(state, text), reader, state.call, events)
    if before == 1:
        call = _field(state, state.call, reader, text)
    elif state.call.stage == "open":
        piece = _argument_text(state.json, text)
        stage: Literal["open", "whole"] = "open" if after > 1 else "whole"
        call = state.call._replace(arguments=_joined(state.call.arguments, piece), stage=stage)
    if call is None:
        return None
    return _told(replace(_holding(state, text), json=reader, call=call), events)


def _between(state: CallsState, reader: JsonState, text: str) -> CallsState | None:
    """Take a mark around calls: the brackets of a list, commas, the beginning of a call."""
    if text == "{":
        state = _released(state) if state.is_called else state
        return replace(_holding(state, text), json=reader, call=_Call())
    if text == "[" and not state.format.is_whole:
        return replace(_holding(state, text), json=reader, base=1)
    if reader.due == "done":  # the end of a list
        return replace(_released(state), json=reader, phase="tail") if state.is_called else None
    is_space = state.json == reader
    return replace(_holding(state, text), json=reader) if is_space or text == "," else None


def _closed(state: CallsState, reader: JsonState, call: _Call, events: list[Event]) -> CallsState | None:
    """Take the end of a call; one without arguments has an empty object of them."""
    if call.name is None:
        return None
    if call.stage == "none":
        call = call._replace(arguments=("{}",), stage="whole")
    state = _told(replace(state, json=reader, call=call), events)
    return replace(_released(state), call=None, is_called=True, phase="tail" if reader.due == "done" else "json")


def _field(state: CallsState, call: _Call, reader: JsonState, text: str) -> _Call | None:
    """Take a step among a call's keys and values; None when it shows that this is no call."""
    before = state.json
    if before.is_in_string or text == '"':
        call = call._replace(word=_joined(call.word, text))
        return call if reader.is_in_string else _word(state, call._replace(word=()), before.is_key, call.word)
    if before.due not in ("value", "item") or state.json == reader:
        return call
    if call.key == "name":
        return None
    if call.key not in _ARGUMENTS:
        return call
    return call._replace(stage="open", arguments=("{",)) if text == "{" else None


def _word(state: CallsState, call: _Call, is_key: bool, spelled: Parts) -> _Call | None:
    """Take a string that is whole now: a key, the name, or arguments that were written as a string."""
    word: str = json.loads("".join(spelled), strict=False)
    if is_key:
        return _with_key(state, call, word)
    if call.key == "name":
        return call._replace(name=word) if word in state.names else None
    if call.key not in _ARGUMENTS:
        return call
    is_text = not any("\ud800" <= char <= "\udfff" for char in word)
    return call._replace(arguments=(word.strip(SPACE),), stage="whole") if is_text and is_object(word) else None


def _with_key(state: CallsState, call: _Call, key: str) -> _Call | None:
    """Begin a field; its key must not have been there before, and without a marker be one of a call's."""
    is_repeated = (key == "name" and call.name is not None) or (key in _ARGUMENTS and call.stage != "none")
    is_foreign = state.format.is_whole and call.name is None and key not in _HARMLESS
    return None if is_repeated or is_foreign else call._replace(key=key)


def _told(state: CallsState, events: list[Event]) -> CallsState:
    """Tell of the call, once its name is known and its arguments have begun."""
    call = state.call
    if call is None or call.is_told or call.name is None or call.stage == "none":
        return state
    events.append(CallStart(state.index, call.name))
    events.append(CallArguments(state.index, "".join(call.arguments)))
    if call.stage == "whole":
        events.append(CallEnd(state.index))
    return replace(_released(state), call=call._replace(arguments=(), is_told=True), index=state.index + 1)


# ---- helpers


def _merged(events: Iterable[Event]) -> list[Event]:
    """Return events without empty pieces, neighbours that are pieces of the same made one."""
    merged: list[Event] = []
    for key, group in groupby(events, key=_whole_of):
        several = list(group)
        if key is None:
            merged += several
            continue
        text = "".join(event.text for event in several if isinstance(event, Content | CallArguments))
        if text:
            merged.append(Content(text) if key < 0 else CallArguments(key, text))
    return merged


def _whole_of(event: Event) -> int | None:
    """Return what an event is a piece of: a call by its index, the content as -1, nothing as None."""
    if isinstance(event, CallArguments):
        return event.index
    return -1 if isinstance(event, Content) else None


def _joined(parts: Parts, text: str) -> Parts:
    """Return a text with more at its end; every character is copied about as often as the length can be halved."""
    while parts and len(parts[-1]) <= len(text):
        parts, text = parts[:-1], parts[-1] + text
    return (*parts, text)


_STEPS: Final = {"open": _open, "text": _text, "json": _json, "tail": _tail, "prose": _prose}
