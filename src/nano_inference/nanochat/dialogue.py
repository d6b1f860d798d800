"""`NanochatDialogue`: a conversation in nanochat's fixed layout, with its calculator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nano_inference.nanochat.rendering import (
    ASSISTANT_START,
    USER_START,
    answer_message,
    render_conversation,
    render_for_completion,
)
from nano_inference.nanochat.tool import PythonTool, python_tool
from nano_inference.text.kinds import ANSWER, Message, Rendering, Tokenizer
from nano_inference.text.tools import special_tokens
from nano_inference.types import BadRequest

_NO_TEXT: Message = {"role": "assistant", "content": ""}


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


def nanochat_dialogue(tokenizer: Tokenizer) -> NanochatDialogue | None:
    """Return the dialogue of a tokenizer with nanochat's tokens of users and assistants, None for any other."""
    if not {USER_START, ASSISTANT_START} <= special_tokens(tokenizer).keys():
        return None
    return NanochatDialogue(tokenizer, python_tool(tokenizer))
