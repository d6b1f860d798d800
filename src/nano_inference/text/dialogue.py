"""How a model is talked with: messages to ids, what it wrote back to a message, and what a reader sees of it.

Two kinds: a chat template, and nanochat's fixed layout with its calculator. Whoever talks need not know which it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from nano_inference.text.chat import ChatTemplate, Message, encode_chat, load_chat_template, render
from nano_inference.text.nanochat_chat import (
    ASSISTANT_START,
    USER_START,
    answer_message,
    render_conversation,
    render_for_completion,
)
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tools import PythonTool, python_tool, special_tokens
from nano_inference.types import BadRequest, TokenizerSource

PartKind = Literal["text", "python", "python_output"]
"""What a part of an answer is: nanochat's names, as in its parts of a message."""

_CALL, _RESULT, _RETURN, _NOTHING, _CUT = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
_SPELLED = str.maketrans({_CALL: "[", _RESULT: " → ", _RETURN: "] ", _NOTHING: " → no result] ", _CUT: " …]"})
_ENDS_IN: Mapping[str, PartKind] = MappingProxyType(
    {_CALL: "python", _RESULT: "python_output", _RETURN: "text", _NOTHING: "text", _CUT: "text"}
)
"""What the text behind a mark is."""
_MARK = re.compile(f"([{_CALL}{_RESULT}{_RETURN}{_NOTHING}{_CUT}])")
_NO_TEXT: Message = {"role": "assistant", "content": ""}


class Part(NamedTuple):
    """A piece of an answer: text, an expression that the calculator is given, or what it gave back."""

    type: PartKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How messages are put before the model."""

    add_generation_prompt: bool = True
    """End with the beginning of the answer."""
    continue_final: bool = False
    """End inside the last message, which the model goes on with."""
    tools: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further variables of the chat template."""


ANSWER = Rendering()
"""The usual way: the model is to answer."""


class Dialogue(Protocol):
    """A way of talking with one model."""

    @property
    def tool(self) -> PythonTool | None:
        """What the model may call while it writes."""

    @property
    def tool_template(self) -> str | None:
        """The source of the template that tells the model of its functions; None without one."""

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the ids that the model reads before it answers. Raises `BadRequest` naming the wrong message."""

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return what `encode` encodes, as text. Raises as it does."""

    def knows(self, name: str) -> bool:
        """Whether a variable of that name in `Rendering.extra` could change anything."""

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return the message that the model's tokens make, for the next turn; `text` is what was shown of it."""

    def close(self) -> None:
        """End the processes that render, if there are any."""


@dataclass(frozen=True, slots=True)
class TemplateDialogue:
    """A model with a chat template."""

    template: ChatTemplate
    tokenizer: Tokenizer
    tool: PythonTool | None = None

    @property
    def tool_template(self) -> str | None:
        """Return the template named "tool_use", or else the only one."""
        return self.template.tool_source or self.template.source

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the rendered messages' ids."""
        return encode_chat(
            self.template,
            self.tokenizer,
            messages,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final=rendering.continue_final,
            tools=rendering.tools,
            extra=rendering.extra,
        )

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return the rendered messages."""
        return render(
            self.template,
            messages,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final=rendering.continue_final,
            tools=rendering.tools,
            extra=rendering.extra,
        )

    def knows(self, name: str) -> bool:
        """Whether the template speaks of a variable of that name."""
        return name in self.template.source or name in (self.template.tool_source or "")

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return the text as a message."""
        return {"role": "assistant", "content": text}

    def close(self) -> None:
        """End the processes that render."""
        self.template.close()


@dataclass(frozen=True, slots=True)
class NanochatDialogue:
    """A nanochat model: calls of its calculator stay parts of the message, and have their real tokens next time."""

    tokenizer: Tokenizer
    tool: PythonTool | None

    @property
    def tool_template(self) -> str | None:
        """There is none."""
        return None

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the ids of messages that take turns, in full length."""
        if rendering.tools or rendering.extra:
            raise BadRequest("nanochat's layout has no tools and no chat template variables")
        if rendering.add_generation_prompt:
            if rendering.continue_final:
                raise BadRequest("continue_final_message and add_generation_prompt exclude each other")
            return render_for_completion(self.tokenizer, [*messages, _NO_TEXT], None)
        if rendering.continue_final and messages[-1].get("role") != "assistant":
            raise BadRequest("continue_final_message needs a last message by the assistant")
        ids, _ = render_conversation(self.tokenizer, messages, None)
        return ids[:-1] if rendering.continue_final else ids

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return the text of the ids, special tokens spelled out."""
        return self.tokenizer.decode(self.encode(messages, rendering), skip_special=False)

    def knows(self, name: str) -> bool:
        """There are no variables."""
        return False

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return the answer's text, or its parts when the calculator was called."""
        return answer_message(self.tokenizer, tokens)

    def close(self) -> None:
        """There are no processes."""


def load_dialogue(source: TokenizerSource, tokenizer: Tokenizer) -> Dialogue | None:
    """Return how a model is talked with, None when neither its template nor its tokens tell. Raises `ModelError`."""
    if {USER_START, ASSISTANT_START} <= special_tokens(tokenizer).keys():
        return NanochatDialogue(tokenizer, python_tool(tokenizer))
    template = load_chat_template(source, tokenizer)
    return None if template is None else TemplateDialogue(template, tokenizer)


def shown(
    tokenizer: Tokenizer,
    tool: PythonTool | None,
    tokens: Sequence[int],
    *,
    is_cut: bool = False,
    skip_special: bool = True,
) -> bytes:
    """Return what a reader sees of tokens that came together: no special ones (unless asked for), a call between marks.

    The marks are for `spelled`.

    The tokens that a call forces come in one piece with its end, so what follows an end is always here, unless the
    answer was cut off there (`is_cut`).
    """
    pieces = []
    for index, token in enumerate(tokens):
        mark = None if tool is None else mark_of(tool, tokens, index, is_cut)
        if mark is not None:
            pieces.append(mark.encode())
        elif token < tokenizer.vocab_size and not (skip_special and token in tokenizer.special_ids):
            pieces.append(tokenizer.token_bytes(token))
    return b"".join(pieces)


def spelled(text: str) -> str:
    """Return a text with its marks spelled out: a call as [expression → result].

    Until here a mark is one of Unicode's noncharacters, so that no stop string is found in what the model never wrote.
    """
    return text.translate(_SPELLED)


def told_apart(text: str, inside: PartKind = "text") -> tuple[tuple[Part, ...], PartKind]:
    """Return `spelled`'s text of one that begins inside a part, cut where its kind changes; and what it ends in.

    The brackets and arrows around a call are text.
    """
    return _parts(text, inside, with_marks=True)


def parts_of(text: str, inside: PartKind = "text") -> tuple[tuple[Part, ...], PartKind]:
    """Return the parts of a text with marks that begins inside one, and what it ends in."""
    return _parts(text, inside, with_marks=False)


def _parts(text: str, inside: PartKind, *, with_marks: bool) -> tuple[tuple[Part, ...], PartKind]:
    parts: list[Part] = []
    for piece in _MARK.split(text):
        if piece in _ENDS_IN:
            inside = _ENDS_IN[piece]
            if with_marks:
                parts.append(Part("text", spelled(piece)))
        elif piece:
            parts.append(Part(inside, piece))
    return tuple(parts), inside


def mark_of(tool: PythonTool, tokens: Sequence[int], index: int, is_cut: bool) -> str | None:
    """Return what stands for a token of the tool's, None for any other."""
    after = tokens[index + 1] if index + 1 < len(tokens) else None
    without = _CUT if after is None and is_cut else _NOTHING
    marks = {tool.python_start: _CALL, tool.python_end: "" if after == tool.output_start else without}
    marks |= {tool.output_start: _RESULT, tool.output_end: _RETURN}
    return marks.get(tokens[index])


def require(dialogue: Dialogue | None) -> Dialogue:
    """Return the dialogue. Raises `BadRequest` for a model that has none."""
    if dialogue is None:
        raise BadRequest("the model has no chat template; `generate --raw` continues a text")
    return dialogue
