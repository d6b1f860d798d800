"""How a model is talked with: messages to ids, what it wrote back to a message, and what a reader sees of it.

Here is the kind with a chat template; others come with the table of tokenizers. Callers need not know which it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from nano_inference.text.chat import ChatTemplate, encode_chat, load_chat_template, render
from nano_inference.text.kinds import ANSWER as ANSWER
from nano_inference.text.kinds import Dialogue as Dialogue
from nano_inference.text.kinds import Message, Tokenizer, TokenizerKind, TokenizerSource, Tool
from nano_inference.text.kinds import Rendering as Rendering
from nano_inference.text.tokenizer import installed_tokenizers
from nano_inference.types import BadRequest

PartKind = Literal["text", "python", "python_output"]
"""What a part of an answer is: text, a tool's call, or the result of one."""

_CALL, _RESULT, _RETURN, _NOTHING, _CUT = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
_SPELLED = str.maketrans({_CALL: "[", _RESULT: " → ", _RETURN: "] ", _NOTHING: " → no result] ", _CUT: " …]"})
_ENDS_IN: Mapping[str, PartKind] = MappingProxyType(
    {_CALL: "python", _RESULT: "python_output", _RETURN: "text", _NOTHING: "text", _CUT: "text"}
)
"""What the text behind a mark is."""
_MARK = re.compile(f"([{_CALL}{_RESULT}{_RETURN}{_NOTHING}{_CUT}])")


class Part(NamedTuple):
    """A piece of an answer: text, the expression that a tool is called with, or its result."""

    type: PartKind
    text: str


@dataclass(frozen=True, slots=True)
class TemplateDialogue:
    """A model with a chat template."""

    template: ChatTemplate
    tokenizer: Tokenizer
    tool: Tool | None = None

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


def load_dialogue(
    source: TokenizerSource, tokenizer: Tokenizer, kinds: Mapping[str, TokenizerKind] | None = None
) -> Dialogue | None:
    """Return how a model is talked with, None when neither its tokens nor its template tell. Raises `ModelError`.

    `kinds` are asked about the tokens, the last first; by default they are the installed ones.
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


def mark_of(tool: Tool, tokens: Sequence[int], index: int, is_cut: bool) -> str | None:
    """Return what stands for a token of the tool's, None for any other."""
    after = tokens[index + 1] if index + 1 < len(tokens) else None
    without = _CUT if after is None and is_cut else _NOTHING
    (call_start, call_end), (result_start, result_end) = tool.call, tool.result
    marks = {call_start: _CALL, call_end: "" if after == result_start else without}
    marks |= {result_start: _RESULT, result_end: _RETURN}
    return marks.get(tokens[index])


def require(dialogue: Dialogue | None) -> Dialogue:
    """Return the dialogue. Raises `BadRequest` for a model that has none."""
    if dialogue is None:
        raise BadRequest("the model has no chat template; `generate --raw` continues a text")
    return dialogue
