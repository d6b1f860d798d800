"""`ReplyShape`: what a reply contains of each sample; used by the detokenizer and by replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nano_inference.server.tools import ToolUse
from nano_inference.text.kinds import Tool


class ReasoningStart(NamedTuple):
    """How an answer, whose reasoning is returned separately, begins."""

    is_inside: bool
    """True if the prompt ends with the mark that opens reasoning."""
    prefix: str
    """The beginning of the answer, if the client gave it."""
    is_hidden: bool
    """True if the reasoning is not returned at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What a reply contains of each sample."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    drop_space: bool = False
    """Drop the space that SentencePiece puts before the first word."""
    logprobs: int | None = None
    """Alternatives per token; None: no log-probabilities."""
    named: tuple[int, ...] = ()
    """Tokens to report in place of the most probable ones; `logprobs` is their number."""
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    """For each prompt the text put before its answers; empty without echo."""
    echo_logprobs: bool = False
    token_ids: bool = False
    """Return token ids with their loss mask and weight versions."""
    tokens_as_ids: bool = False
    versions: bool = False
    """Return the weight versions of tokens even without ids."""
    functions: ToolUse | None = None
    """Tools whose calls are parsed in the text."""
    markers: frozenset[int] = frozenset()
    """Special tokens that stay visible because they mark tool calls or reasoning."""
    reasoning: ReasoningStart | None = None
    """None: reasoning is part of the text."""
    tool: Tool | None = None
    """The calculator that runs during generation."""
    prefix_bytes: bytes = b""
    """Visible bytes of the answer's prefix (`answer_token_ids`), calculator marks included."""
    prefix_ids: tuple[int, ...] = ()
    raw_logprobs: bool = False
    sampling_masks: bool = False
    timings: bool = False
    """Return the times of each sample."""
    progress: bool = False
    """Report the prefill of a stream as llama.cpp does."""
    forces_usage: bool = False
    """Send the usage with each chunk of a stream, whatever its `stream_options` are."""
    metrics: bool = False
    """Return vLLM's metrics of the request."""
