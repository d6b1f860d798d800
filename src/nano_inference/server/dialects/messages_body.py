"""What clients of Anthropic's Messages API may send: POST /v1/messages and /v1/messages/count_tokens.

Fields as in platform.claude.com/docs/en/api/messages. What this server does not do is refused in `messages`.
"""

from __future__ import annotations

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
)

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+$")]
BlockId = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(Body):
    """Text. `cache_control` and `citations` change nothing."""

    type: Literal["text"]
    text: str


class OtherBlock(Body):
    """A block of any other kind: refused by name."""

    type: str


def _block_tag(value: Any) -> str:
    """Return which of the classes of blocks a value belongs to."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"block-{kind}" if kind in ("text", "tool_use", "tool_result", *_THOUGHTS) else "block-other"


def _text_tag(value: Any) -> str:
    """Return the same where only text can stand."""
    return "block-text" if _block_tag(value) == "block-text" else "block-other"


TextOnly = Annotated[
    Annotated[TextBlock, Tag("block-text")] | Annotated[OtherBlock, Tag("block-other")], Discriminator(_text_tag)
]
Texts = str | Annotated[list[TextOnly], Field(max_length=MAX_MESSAGES, fail_fast=True)]
_THOUGHTS = ("thinking", "redacted_thinking")


class ToolUseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: BlockId
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Body):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: Texts | None = None
    is_error: bool | None = None


class ThinkingBlock(Body):
    """What the assistant thought in an earlier turn: left out, as Anthropic does."""

    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[
    Annotated[TextBlock, Tag("block-text")]
    | Annotated[ToolUseBlock, Tag("block-tool_use")]
    | Annotated[ToolResultBlock, Tag("block-tool_result")]
    | Annotated[ThinkingBlock, Tag("block-thinking")]
    | Annotated[ThinkingBlock, Tag("block-redacted_thinking")]
    | Annotated[OtherBlock, Tag("block-other")],
    Discriminator(_block_tag),
]


class MessageParam(Body):
    """One message; those of one role that follow each other are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ToolParam(Body):
    """A function that the model may call, or a tool that is told by its type."""

    type: Annotated[str, Field(max_length=64)] | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(Body):
    """Whether tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers; only that it does not is done here."""

    type: Annotated[str, Field(max_length=64)]


class OutputFormat(Body):
    """What the answer's text must be."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is to be."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens: what decides on what the model reads."""

    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """`output_config.format` as older clients have it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Ours, as in a chat completion."""

    cache_control: dict[str, Any] | None = None
    """Taken and left out: whatever was computed is kept anyway."""
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Samples
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    """Anthropic's ends at 1."""
    top_p: PositiveShare | None = None
    top_k: Count | None = None
    seed: Seed | None = None
    """Ours."""
    return_token_ids: bool | None = None
    """Ours: also the ids of prompt and answer, with what is known of each token."""
    cache_salt: Salt | None = None
    """Ours."""

    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
