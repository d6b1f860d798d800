"""Convert messages to token ids, and an answer's tokens to a message and to displayed text.

`TemplateDialogue` does so with a chat template; the rows of the tokenizer table may provide other implementations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from nano_inference.text import stream
from nano_inference.text.chat import ChatTemplate, chat_text, encode_chat, load_chat_template
from nano_inference.text.kinds import ANSWER as ANSWER
from nano_inference.text.kinds import Dialogue as Dialogue
from nano_inference.text.kinds import Message, Tokenizer, TokenizerKind, TokenizerSource, Tool
from nano_inference.text.kinds import Rendering as Rendering
from nano_inference.text.tokenizer import installed_tokenizers
from nano_inference.types import BadRequest, TrainingSample

PartKind = Literal["text", "python", "python_output"]
"""Kinds of an answer's parts: text, a tool call, and the result of a call."""

_CALL, _RESULT, _RETURN, _NOTHING, _CUT = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
_SPELLED = str.maketrans({_CALL: "[", _RESULT: " → ", _RETURN: "] ", _NOTHING: " → no result] ", _CUT: " …]"})
_ENDS_IN: Mapping[str, PartKind] = {
    _CALL: "python",
    _RESULT: "python_output",
    _RETURN: "text",
    _NOTHING: "text",
    _CUT: "text",
}
"""Maps each mark to the kind of the text after it."""
_MARK = re.compile(f"([{_CALL}{_RESULT}{_RETURN}{_NOTHING}{_CUT}])")


class Part(NamedTuple):
    """A part of an answer: text, the expression of a tool call, or its result."""

    type: PartKind
    text: str


@dataclass(frozen=True, slots=True)
class TemplateDialogue:
    """Implements `Dialogue` with a chat template."""

    template: ChatTemplate
    tokenizer: Tokenizer
    tool: Tool | None = None
    variables: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The template's variables where a rendering names no other value."""
    has_dates: bool = False  # whether the variables include today's date (`template_dates`)

    @property
    def tool_template(self) -> str | None:
        """Return the source of the template named "tool_use", else of the only one."""
        return self.template.tool_source or self.template.source

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the token ids of the rendered messages."""
        return encode_chat(self.template, self.tokenizer, messages, self._filled(rendering))

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return the rendered messages as text."""
        return chat_text(self.template, self.tokenizer, messages, self._filled(rendering))

    def _filled(self, rendering: Rendering) -> Rendering:
        variables = {**(dates() if self.has_dates else {}), **self.variables, **rendering.extra}
        return replace(rendering, extra=variables)

    def knows(self, name: str) -> bool:
        """Return True if the template mentions a variable of that name."""
        return name in self.template.source or name in (self.template.tool_source or "")

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return an assistant message with that text."""
        return {"role": "assistant", "content": text}


def load_dialogue(
    source: TokenizerSource, tokenizer: Tokenizer, kinds: Mapping[str, TokenizerKind] | None = None
) -> Dialogue | None:
    """Return a model's dialogue: of the last of `kinds` that knows its tokens, else of its chat template, else None.

    `kinds` defaults to the installed ones. Raises `ModelError`.
    """
    kinds = installed_tokenizers() if kinds is None else kinds
    for kind in reversed([*kinds.values()]):
        if (dialogue := kind.dialogue(tokenizer)) is not None:
            return dialogue
    template = load_chat_template(source, tokenizer)
    return None if template is None else TemplateDialogue(template, tokenizer)


def shown(
    tokenizer: Tokenizer,
    tool: Tool | None,
    tokens: Sequence[int],
    *,
    is_cut: bool = False,
    skip_special: bool = True,
) -> bytes:
    """Return the displayed UTF-8 bytes of a run of tokens: without special tokens, tool calls between marks.

    `spelled` and `parts_of` replace the marks. `skip_special=False` keeps special tokens. A call's forced
    result is always in the same run as the end of the call, unless the answer was truncated there (`is_cut`).
    """
    pieces = []
    for index, token in enumerate(tokens):
        mark = None if tool is None else mark_of(tool, tokens, index, is_cut)
        if mark is not None:
            pieces.append(mark.encode())
        elif token < tokenizer.vocab_size and not (skip_special and token in tokenizer.special_ids):
            pieces.append(tokenizer.token_bytes(token))
    return b"".join(pieces)


def text_of(
    tokenizer: Tokenizer, tool: Tool | None, sample: TrainingSample, stops: tuple[str, ...], *, raw: bool
) -> str:
    """Return a finished sample's text: without special tokens, the token that ended it, and what follows a stop string.

    A call of `tool` is [expression → result]. `raw`: the sample continues a text instead of answering a message.
    """
    ended_by_token = sample.finish_reason == "stop" and not isinstance(sample.stop_reason, str)
    tokens = sample.completion_tokens[:-1] if ended_by_token else sample.completion_tokens
    state = stream.start(stops=stops, drop_space=tokenizer.drops_space and not raw)
    state, text = stream.push(state, shown(tokenizer, tool, tokens, is_cut=sample.finish_reason != "stop"))
    return spelled(text + stream.finish(state)[1])


def spelled(text: str) -> str:
    """Replace the marks in a text: a call becomes [expression → result].

    A mark is a Unicode noncharacter, so that no stop string matches the brackets, which the model did not write.
    """
    return text.translate(_SPELLED)


def parts_of(text: str, inside: PartKind = "text", *, with_marks: bool = False) -> tuple[tuple[Part, ...], PartKind]:
    """Return the parts of a text and the kind at its end; `inside` is the kind at its beginning.

    The text's marks are dropped or, with `with_marks`, spelled out as parts of kind "text".
    """
    parts: list[Part] = []
    for piece in _MARK.split(text):
        if piece in _ENDS_IN:
            inside = _ENDS_IN[piece]
            if with_marks:
                parts.append(Part("text", spelled(piece)))
        elif piece:
            parts.append(Part(inside, piece))
    return tuple(parts), inside


def mark_of(tool: Tool, tokens: Sequence[int], index: int, is_cut: bool) -> str | None:
    """Return the mark to display for a tool's special token (may be empty); None for any other token."""
    after = tokens[index + 1] if index + 1 < len(tokens) else None
    without = _CUT if after is None and is_cut else _NOTHING
    (call_start, call_end), (result_start, result_end) = tool.call, tool.result
    marks = {call_start: _CALL, call_end: "" if after == result_start else without}
    marks |= {result_start: _RESULT, result_end: _RETURN}
    return marks.get(tokens[index])


def require(dialogue: Dialogue | None) -> Dialogue:
    """Return the dialogue; raise `BadRequest` if it is None."""
    if dialogue is None:
        raise BadRequest("", "the model has no chat template; `generate --raw` continues a text")
    return dialogue


def dates() -> Mapping[str, str]:
    """Return `date_string`, such as 05 Jan 2026, and `datetime`, such as Jan 05 2026, in local time."""
    now = datetime.now()
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
