"""Bodies of Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Fields as in platform.claude.com/docs/en/api/messages. `messages.py` rejects those that this server does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from nano_inference.server.schema import (
    MAX_MESSAGES,
    MAX_STOPS,
    Body,
    Count,
    PositiveShare,
    Salt,
    Samples,
    Seed,
    StopText,
    Temperature,
    effort_hints,
)

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+$")]
BlockId = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(Body):
    """Text. `cache_control` and `citations` are ignored."""

    type: Literal["text"]
    text: str


class OtherBlock(Body):
    """A block of an unsupported type, which is named in the error."""

    type: str


def _tag(value: Any) -> str:
    """Return the tag of the `Block` class that validates a value."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"block-{kind}" if kind in ("text", "tool_use", "tool_result", *_THOUGHTS) else "block-other"


TextOnly = Annotated[
    Annotated[TextBlock, Tag("block-text")] | Annotated[OtherBlock, Tag("block-other")],
    Discriminator(lambda value: "block-text" if _tag(value) == "block-text" else "block-other"),
]
Texts = str | Annotated[list[TextOnly], Field(max_length=MAX_MESSAGES, fail_fast=True)]
_THOUGHTS = ("thinking", "redacted_thinking")


class ToolUseBlock(Body):
    """A tool call by the assistant."""

    type: Literal["tool_use"]
    id: BlockId
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: Texts | None = None
    is_error: bool | None = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; in the prompt only between calls of the current turn, as Anthropic does."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("block-text")]
    | Annotated[ToolUseBlock, Tag("block-tool_use")]
    | Annotated[ToolResultBlock, Tag("block-tool_result")]
    | Annotated[ThinkingBlock, Tag("block-thinking")]
    | Annotated[ThinkingBlock, Tag("block-redacted_thinking")]
    | Annotated[OtherBlock, Tag("block-other")],
    Discriminator(_tag),
]


class MessageParam(Body):
    """One message; consecutive messages of one role form one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ToolParam(Body):
    """A function that the model may call, or a built-in tool named by `type`."""

    type: Annotated[str, Field(max_length=64)] | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(Body):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before it answers, for models whose chat template can switch it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Samples | None = None  # ignored: `max_tokens` limits reasoning and answer together
    display: Literal["summarized", "omitted"] | None = None
    """"omitted" leaves the text of reasoning out; "summarized" is all of it, because nothing is summarized here."""


class ContextEdit(Body):
    """A change of the conversation before it is answered; only those without effect here are accepted."""

    type: Annotated[str, Field(max_length=64)]


class ContextManagement(Body):
    """Changes of the conversation before it is answered."""

    edits: Annotated[list[ContextEdit], Field(max_length=64)] | None = None


class OutputFormat(Body):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """Reasoning effort and output format."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens: the fields that determine the prompt."""

    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the name of `output_config.format` in older clients
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # extension: as in a chat completion

    cache_control: dict[str, Any] | None = None
    """All prefixes are cached; here or in any block, it only decides how `usage` counts what is new in the cache."""

    def hints(self, knows: Callable[[str], bool]) -> Iterator[str]:
        """Yield the fields of this body that have no effect with this model."""
        if self.thinking is not None:
            if not knows("enable_thinking") and self.thinking.type != "disabled":
                yield "thinking"
            if self.thinking.budget_tokens is not None:
                yield "thinking.budget_tokens"
        if self.context_management is not None and self.context_management.edits:
            yield "context_management"
        if self.output_config is not None:
            yield from effort_hints(self.output_config.effort, "output_config.effort", knows)


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Samples
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None  # at most 1 in Anthropic's API
    top_p: PositiveShare | None = None
    top_k: Count | None = None
    seed: Seed | None = None  # extension
    return_token_ids: bool | None = None
    """Extension: the ids of prompt and answer, the loss mask and the weight versions."""
    cache_salt: Salt | None = None  # extension


def marks_cache(body: CountTokensBody) -> bool:
    """Return True if a body asks to cache a part of its prompt, by `cache_control` anywhere."""
    contents = (body.system, *(message.content for message in body.messages))
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    results = [one.content for one in blocks if isinstance(one, ToolResultBlock) and isinstance(one.content, list)]
    parts: list[Body] = [*(body.tools or ()), *blocks, *(part for result in results for part in result)]
    return body.cache_control is not None or any(
        (one.model_extra or {}).get("cache_control") is not None for one in parts
    )
