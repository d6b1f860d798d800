"""Parse a model's reply into content and function calls, as a stream.

The functions are pure, and each event is returned as soon as it is certain. The result does not depend on how the text
was split, except that content and arguments may be split into other pieces. Text that turns out not to be a call is
returned unchanged as content. `CallStart` is returned with the beginning of the arguments, which are then streamed. A
call that becomes invalid after its start, or is cut off, has no `CallEnd`, and the text from there on is content:
`settled` makes all of it content, in replies that are not streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event, merged
from nano_inference.text.tool_format import ToolFormat
from nano_inference.text.tool_json import SPACE, JsonState, as_object, escape_control, step

MAX_HELD: Final = 1 << 20
"""Limit on the characters withheld until they are known to be a call; a longer beginning is content."""
MAX_SPACES: Final = 256
"""Limit on the whitespace withheld before a possible call; a call removes at most this many characters before it."""

_BRACE: Final = "{"
_HEADER = re.compile(r"([\w.-]*)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])? *")
_HEADER_MARKS = ("[CALL_ID]", "[ARGS]")
_MAX_HEADER = 128  # limit on the characters between Mistral's marker and a call's arguments
_ARGUMENTS = ("arguments", "parameters")
_HARMLESS = frozenset({"name", "id", "type", "index", *_ARGUMENTS})
"""Keys allowed before "name" in a call without a marker; any other key shows that the reply is other JSON."""

Parts = tuple[str, ...]
"""A text that grows. Each part is shorter than the one before, so that appending many short pieces is cheap."""
Phase = Literal["open", "text", "json", "header", "other", "tail", "prose"]


class _Call(NamedTuple):
    """The call that is being parsed."""

    key: str = ""  # the key of the current or expected value
    word: Parts = ()  # the parsed part of the current string, a key or a value, with its quotes
    name: str | None = None
    arguments: Parts = ()  # the arguments so far, before `CallStart` is emitted
    stage: Literal["none", "open", "complete"] = "none"  # state of the arguments
    is_started: bool = False  # True once `CallStart` was emitted
    is_named: bool = False  # True if the name came before the JSON, which is the arguments alone


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsState:
    """State of parsing one reply."""

    format: ToolFormat
    names: frozenset[str]  # the known functions; a call of any other is content
    phase: Phase
    """open: the start of a reply that may be a call; text; json: inside calls; header: a call's name before its
    arguments; other: JSON that is no call; tail: after a call; prose: text that no call can follow."""
    is_free: bool = True  # True if calls without a marker may follow text
    index: int = 0  # index of the next call
    is_after_call: bool = False  # True if a call is the last that was emitted
    has_content: bool = False  # True after content that is not whitespace
    gap: str = ""  # the whitespace between the content and the call that followed it
    spaces: str = ""  # withheld whitespace, dropped if a call follows
    partial: str = ""  # the matched prefix of a marker
    held: Parts = ()  # withheld text, which becomes content if it turns out not to be a call
    num_held: int = 0  # characters in `held`
    json: JsonState = JsonState()
    base: int = 0  # number of brackets around a call: 1 in a list, else 0
    has_call: bool = False  # True if a call was parsed since the marker
    call: _Call | None = None


def start(fmt: ToolFormat, names: Iterable[str], *, is_free: bool = True) -> CallsState:
    """Return the initial state for a reply that may call the functions `names`.

    `is_free=False`: a grammar allows calls without a marker only in place of text.
    """
    phase: Phase = "open" if fmt.is_whole and not is_free else "text"
    return CallsState(format=fmt, names=frozenset(names), phase=phase, is_free=is_free)


def push(state: CallsState, text: str) -> tuple[CallsState, list[Event]]:
    """Add the next text; return the new state and the events that are now certain."""
    events: list[Event] = []
    at = 0
    while at < len(text):
        if state.phase == "text" and state.partial:
            # `partial`, which ends at `at`, is scanned again; the part that came with earlier text is put before.
            missing = len(state.partial) - at
            text, at = (state.partial[:missing] + text, 0) if missing > 0 else (text, -missing)
            state = replace(state, partial="")
        state, at = _STEPS[state.phase](state, text, at, events)
    return state, merged(events)


def finish(state: CallsState) -> list[Event]:
    """Return the last events: the end of a call that lacks only what follows its arguments, and withheld text.

    Text between and after calls is dropped.
    """
    events: list[Event] = []
    held = "".join(state.held) + state.partial
    is_called = state.call is not None and state.call.is_started
    if state.call is not None and is_called and state.call.stage == "complete" and not held.strip(SPACE):
        return [CallEnd(state.index - 1)]
    if state.phase == "tail" or (state.phase == "json" and state.call is None and state.has_call):
        return []
    state = _emit_content(replace(state, is_after_call=state.is_after_call and not is_called), held, events)
    return merged([*events, *([] if state.is_after_call else [Content(state.spaces)])])


# ---- text


def _text(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Consume text up to a marker, else all; a suffix that may be the start of a marker is withheld."""
    if state.phase == "prose":
        return _emit_content(state, text[at:], events), len(text)
    begin = state.format.begin
    found = text.find(begin, at)
    bare = text.find(_BRACE, at, None if found < 0 else found) if state.format.is_whole else -1
    if bare >= 0:
        return _opened(_emit_content(state, text[at:bare], events)), bare
    if found >= 0:
        state = _emit_content(state, text[at:found], events)
        return replace(_opened(state), held=(begin,), num_held=len(begin)), found + len(begin)
    keep = next((size for size in range(len(begin) - 1, 0, -1) if text.endswith(begin[:size], at)), 0)
    state = _emit_content(state, text[at : len(text) - keep], events)
    return replace(state, partial=text[len(text) - keep :]), len(text)


def _opened(state: CallsState) -> CallsState:
    return replace(state, phase="json", json=JsonState(), base=0, has_call=False, call=None)


def _emit_content(state: CallsState, text: str, events: list[Event]) -> CallsState:
    """Emit text as content, except for whitespace at its end and around calls.

    Whitespace around calls is emitted, once, between the texts before and after them: a line break if there is none.
    """
    if state.is_after_call:
        stripped = text.lstrip(SPACE)
        spaces = (state.spaces + text[: len(text) - len(stripped)])[:MAX_SPACES]
        if not stripped:
            return replace(state, spaces=spaces)
        text = (state.gap or spaces or "\n") * state.has_content + stripped
    elif text:
        text = state.spaces + text
    if not text:
        return state
    spaces = "" if state.phase in ("prose", "other") else text[max(len(text.rstrip(SPACE)), len(text) - MAX_SPACES) :]
    events.append(Content(text[: len(text) - len(spaces)]))
    has_content = state.has_content or len(spaces) < len(text)
    return replace(state, spaces=spaces, is_after_call=False, has_content=has_content)


def _reject_call(state: CallsState, events: list[Event]) -> CallsState:
    """Emit the withheld text as content, because it is not a call."""
    text = "".join(state.held) + state.partial
    phase: Phase = "prose" if state.format.is_whole and not state.is_free else "text"
    state = replace(state, phase=phase, held=(), num_held=0, partial="", call=None)
    return _emit_content(state, text, events)


def _other(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Consume JSON that is not a call: no call can be inside it."""
    reader, begin = state.json, at
    while at < len(text) and reader.due != "done":
        found = step(reader, text, at, len(text))
        if found is None:
            break
        reader, at = found
    is_over = at < len(text) or reader.due == "done"
    state = _emit_content(state, text[begin:at], events)
    return replace(state, json=reader, phase="text" if is_over else "other"), at


# ---- before and after calls


def _open(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Consume one character at the start of a reply: whitespace, then an optional marker, then a call or other text."""
    char, begin = text[at], state.format.begin
    if begin.startswith(state.partial + char):
        partial = state.partial + char
        state = replace(state, partial=partial)
        return (_hold(_opened(replace(state, partial="")), begin) if partial == begin else state), at + 1
    if not state.partial and char == "{":
        return _opened(state), at
    if not state.partial and char in SPACE and state.num_held < MAX_HELD:
        return _hold(state, char), at + 1
    return _reject_call(state, events), at


def _tail(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Consume one character after a call: whitespace, the end marker, or the semicolon before the next call."""
    char, end = text[at], state.format.end
    if state.format.is_whole and char == ";":
        return _hold(replace(_opened(_drop_held(state)), has_call=True), char), at + 1
    if not end and not state.format.is_whole:
        return replace(_drop_held(state), phase="text"), at
    if end and end.startswith(state.partial + char):
        partial = state.partial + char
        state = replace(state, partial=partial)
        return (replace(_drop_held(state), phase="text") if partial == end else state), at + 1
    if not state.partial and char in SPACE and state.num_held < MAX_HELD:
        return _hold(state, char), at + 1
    partial = state.partial  # may start the next call: both markers begin with the same character
    return replace(_reject_call(replace(state, partial=""), events), partial=partial), at


def _hold(state: CallsState, text: str) -> CallsState:
    return replace(state, held=_joined(state.held, text), num_held=state.num_held + len(text))


def _drop_held(state: CallsState) -> CallsState:
    """Drop the withheld text, which belongs to a call."""
    gap = state.gap if state.is_after_call else state.spaces
    return replace(state, held=(), num_held=0, partial="", spaces="", gap=gap, is_after_call=True)


# ---- calls


def _json(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Consume one step of the JSON of calls; text that is not a call becomes content, except for emitted arguments."""
    call = state.call
    if call is not None and call.is_started and call.stage == "open":
        return _stream_arguments(state, call, text, at, events)
    if state.format.is_list and call is None and not state.json.nest and text[at] not in "[{," + SPACE:
        return replace(state, phase="header"), at
    room = MAX_HELD - state.num_held
    found = step(state.json, text, at, min(len(text), at + room)) if room > 0 else None
    after = None if found is None else _after_step(state, found[0], text[at : found[1]], events)
    if after is None:
        is_broken = call is not None and call.is_started
        rejected = _reject_call(replace(state, is_after_call=state.is_after_call and not is_broken), events)
        is_other = state.format.is_whole and state.is_free and state.json.nest and (found or room <= 0)
        return replace(rejected, phase="other") if is_other else rejected, at
    assert found is not None, "`after` is None without a step"
    return after, found[1]


def _header(state: CallsState, text: str, at: int, events: list[Event]) -> tuple[CallsState, int]:
    """Consume one character of a call's name before its arguments: `[TOOL_CALLS]name{…}` and `…name[ARGS]{…}`."""
    char, header = text[at], state.partial + text[at]
    if char != _BRACE:
        cut = header.rfind("[")
        is_open = cut >= 0 and any(mark.startswith(header[cut:]) for mark in _HEADER_MARKS)
        matched = _HEADER.fullmatch(header[:cut] if is_open else header)
        if matched is None or len(header) > _MAX_HEADER or not any(n.startswith(matched[1]) for n in state.names):
            return _reject_call(state, events), at
        return replace(state, partial=header), at + 1
    matched = _HEADER.fullmatch(state.partial)
    if matched is None or matched[1] not in state.names:
        return _reject_call(state, events), at
    call = _Call(name=matched[1], arguments=(_BRACE,), stage="open", is_named=True)
    reader = JsonState("{{", "first")
    state = replace(_hold(state, header), phase="json", partial="", json=reader, call=call)
    return _start_call(state, events), at + 1


def _stream_arguments(
    state: CallsState, call: _Call, text: str, at: int, events: list[Event]
) -> tuple[CallsState, int]:
    """Consume and emit the available arguments of a call whose `CallStart` was emitted."""
    reader, pieces, depth, begin = state.json, [], state.base + 1, at
    is_invalid = False
    while at < len(text) and len(reader.nest) > depth:
        found = step(reader, text, at, len(text))
        if found is None:
            is_invalid = True
            break
        pieces.append(_argument_text(reader, text[at : found[1]]))
        reader, at = found
    events.append(CallArguments(state.index - 1, "".join(pieces), text[begin:at]))
    if is_invalid:
        return _reject_call(replace(state, is_after_call=False), events), at
    if len(reader.nest) == depth:
        call = call._replace(stage="complete")
        if call.is_named:
            events.append(CallEnd(state.index - 1))
            return replace(_drop_held(state), phase="text", call=None), at
    return replace(state, json=reader, call=call), at


def _argument_text(reader: JsonState, text: str) -> str:
    return escape_control(text) if reader.token == '"' else text


def _after_step(state: CallsState, reader: JsonState, text: str, events: list[Event]) -> CallsState | None:
    """Return the state after one JSON step; None if it cannot belong to a call."""
    before, after = len(state.json.nest) - state.base, len(reader.nest) - state.base
    held = _hold(state, text)
    if before <= 0:  # outside of calls: the brackets of a list, a comma, the start of a call
        if text == "{":
            held = _hold(_drop_held(state), text) if state.has_call else held
            return replace(held, json=reader, call=_Call())
        if text == "[" and not state.format.is_whole:
            return replace(held, json=reader, base=1)
        if reader.due == "done":  # the end of a list
            return replace(_drop_held(state), json=reader, phase="tail") if state.has_call else None
        return replace(held, json=reader) if state.json == reader or text == "," else None
    call: _Call | None = state.call
    if call is None:
        return None
    if after == 0:  # the end of a call, whose arguments default to an empty object
        if call.name is None:
            return None
        if call.stage == "none":
            call = call._replace(arguments=("{}",), stage="complete")
        state = _start_call(replace(held, json=reader, call=call), events)
        events.append(CallEnd(state.index - 1))
        return replace(_drop_held(state), call=None, has_call=True, phase="tail" if reader.due == "done" else "json")
    if before == 1:
        call = _field(state, call, reader, text)
    elif call.stage == "open":
        stage: Literal["open", "complete"] = "open" if after > 1 else "complete"
        call = call._replace(arguments=_joined(call.arguments, _argument_text(state.json, text)), stage=stage)
    return None if call is None else _start_call(replace(held, json=reader, call=call), events)


def _field(state: CallsState, call: _Call, reader: JsonState, text: str) -> _Call | None:
    """Add a step at the level of a call's keys and values; None if this is not a call."""
    before = state.json
    if before.is_in_string or text == '"':
        call = call._replace(word=_joined(call.word, text))
        if reader.is_in_string:
            return call
        word: str = json.loads("".join(call.word), strict=False)
        call = call._replace(word=())
        if before.is_key:  # a duplicate, or in a reply without a marker a foreign key, shows that this is no call
            is_repeated = (word == "name" and call.name is not None) or (word in _ARGUMENTS and call.stage != "none")
            is_foreign = state.format.is_whole and call.name is None and word not in _HARMLESS
            return None if is_repeated or is_foreign else call._replace(key=word)
        if call.key == "name":
            return call._replace(name=word) if word in state.names else None
        if call.key not in _ARGUMENTS:
            return call
        # arguments written as a string
        is_text = not any("\ud800" <= char <= "\udfff" for char in word)
        given = as_object(word.strip(SPACE) or "{}") if is_text else None
        return None if given is None else call._replace(arguments=(given,), stage="complete")
    if before.due not in ("value", "item") or state.json == reader:
        return call
    if call.key == "name":
        return None
    if call.key not in _ARGUMENTS:
        return call
    if before.token and not reader.token:  # the end of null
        return call._replace(stage="complete", arguments=("{}",))
    if text == _BRACE:
        return call._replace(stage="open", arguments=(_BRACE,))
    return call if reader.token and "null".startswith(reader.token) else None


def _start_call(state: CallsState, events: list[Event]) -> CallsState:
    """Emit `CallStart` once the name is known and the arguments have started."""
    call = state.call
    if call is None or call.is_started or call.name is None or call.stage == "none":
        return state
    source: list[Event] = []
    _emit_content(state, "".join(state.held), source)
    events.append(CallStart(state.index, call.name, "".join(one.text for one in source if isinstance(one, Content))))
    events.append(CallArguments(state.index, "".join(call.arguments)))
    return replace(_drop_held(state), call=call._replace(arguments=(), is_started=True), index=state.index + 1)


def _joined(parts: Parts, text: str) -> Parts:
    """Return a text with more appended; copies each character O(log n) times."""
    while parts and len(parts[-1]) <= len(text):
        parts, text = parts[:-1], parts[-1] + text
    return (*parts, text)


_STEPS: Final = {
    **{"open": _open, "text": _text, "json": _json, "header": _header},
    **{"other": _other, "tail": _tail, "prose": _text},
}
