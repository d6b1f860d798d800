"""Bodies of OpenAI's Responses API. `responses.py` rejects what this server does not support.

Fields as in openai/types/responses/response_create_params.py and `input_token_count_params.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field

from nano_inference.server.schema import MAX_MESSAGES, Alternatives, Body, Samples, Sampling, TextPart, effort_hints

MAX_TOOLS = 1024
LOCAL_SEARCH = "web_search"
"""Type of a tool that is left out if it may not access the web: this server has no pages to search."""


class InputItem(Body):
    """An item of `input`: a message (its type may be omitted), a function call, its output, or reasoning."""

    type: str | None = None
    role: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")] | None = None
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    parts: list[Any] | None = None
    """Extension: the parts of an assistant message with calculator calls, as in this server's reply."""
    call_id: str | None = None
    namespace: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    encrypted_content: str | None = None  # of reasoning: its text as this server returned it


Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionTool(Body):
    """A function in a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatTool(FunctionTool):
    """A function that the model may call, a namespace of functions, or the calculator."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The functions of a namespace."""
    external_web_access: bool | None = None  # of `web_search`: False if it may not access the web


class TextFormat(Body):
    """The format of the answer's text."""

    type: str
    name: str | None = None
    description: str | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options for the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """Reasoning effort, for models whose chat template uses it; replies have no summaries of the reasoning."""

    effort: str | None = None
    summary: Annotated[str, Field(max_length=64)] | None = None
    generate_summary: Annotated[str, Field(max_length=64)] | None = None


class InputTokensBody(Body):
    """POST /v1/responses/input_tokens: the fields that determine the prompt."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: str | Items
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def hints(self, knows: Callable[[str], bool]) -> Iterator[str]:
        """Yield the fields of this body that have no effect with this model."""
        if self.reasoning is not None:
            for name in ("summary", "generate_summary"):
                if getattr(self.reasoning, name) is not None:
                    yield f"reasoning.{name}"
            yield from effort_hints(self.reasoning.effort, "reasoning.effort", knows)
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            yield "text.verbosity"
        if any(is_left_out(tool) for tool in self.tools or ()):
            yield f"tools.{LOCAL_SEARCH}"


class ResponsesBody(Sampling, InputTokensBody):
    """POST /v1/responses."""

    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    max_output_tokens: Samples | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    top_logprobs: Alternatives | None = None
    continue_final_message: bool | None = None
    timings_per_token: bool | None = None
    """As in llama.cpp: return `timings`, in a stream with each piece of text and beside the last response."""
    return_progress: bool | None = None
    """As in llama.cpp: report in a stream how much of the prompt is computed, in events `response.in_progress`."""


def is_left_out(tool: FlatTool) -> bool:
    """Return True for a tool that can do nothing on this server, so that the prompt leaves it out."""
    return tool.type == LOCAL_SEARCH and tool.external_web_access is False
