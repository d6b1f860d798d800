"""`NanochatDialogue`: encodes conversations in nanochat's fixed layout, with calculator calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nano_inference.nanochat.rendering import (
    ASSISTANT_START,
    USER_START,
    answer_message,
    render_conversation,
    render_for_completion,
    render_turns,
)
from nano_inference.nanochat.tool import PythonTool, python_tool
from nano_inference.text.chat import with_one_system_message
from nano_inference.text.kinds import ANSWER, Message, Rendering, Tokenizer
from nano_inference.text.tools import special_tokens
from nano_inference.types import BadRequest

_NO_TEXT: Message = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True)
class NanochatDialogue:
    """Dialogue of a nanochat model: calculator calls are parts of messages, and are encoded as special tokens."""

    tokenizer: Tokenizer
    tool: PythonTool | None
    any_order: bool = False  # accept user and assistant messages in any order, as nanochat's web server does

    @property
    def tool_template(self) -> str | None:
        """None: nanochat has no template."""
        return None

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the ids of messages, not truncated. Raises `BadRequest` for wrong messages or options.

        Messages must alternate unless `any_order`, which prompts for an answer and has no other options.
        """
        if rendering.tools or rendering.extra:
            raise BadRequest("", "nanochat's layout has no tools and no chat template variables")
        if len(messages) > 1 and messages[0].get("role") == "system":
            messages = with_one_system_message(messages) or messages
        if self.any_order:
            return render_turns(self.tokenizer, messages)
        if rendering.add_generation_prompt:
            if rendering.continue_final:
                raise BadRequest("", "continue_final_message and add_generation_prompt exclude each other")
            return render_for_completion(self.tokenizer, [*messages, _NO_TEXT], None)
        if rendering.continue_final and messages[-1].get("role") != "assistant":
            raise BadRequest("", "continue_final_message requires a last message of the assistant")
        ids, _ = render_conversation(self.tokenizer, messages, None)
        return ids[:-1] if rendering.continue_final else ids

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return the text of the ids, with special tokens."""
        return self.tokenizer.decode(self.encode(messages, rendering), skip_special=False)

    def knows(self, name: str) -> bool:
        """Return False: there are no template variables."""
        return False

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return the answer as a message: text, or parts if the calculator was called."""
        return answer_message(self.tokenizer, tokens)


def nanochat_dialogue(tokenizer: Tokenizer) -> NanochatDialogue | None:
    """Return the dialogue of a tokenizer with nanochat's user and assistant tokens, else None."""
    if not {USER_START, ASSISTANT_START} <= special_tokens(tokenizer).keys():
        return None
    return NanochatDialogue(tokenizer, python_tool(tokenizer))
