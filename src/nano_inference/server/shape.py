"""`ReplyShape`: what a reply contains of each sample; used by the detokenizer and by replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nano_inference.server.tools import ToolUse
from nano_inference.text.kinds import Tool


class ReasoningStart(NamedTuple):
    """How an answer, whose reasoning is returned separately, begins."""

    is_inside: bool  # True if the prompt ends with the mark that opens reasoning
    prefix: str  # the beginning of the answer, if the client gave it
    is_hidden: bool  # True if the reasoning is not returned at all


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What a reply contains of each sample."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    drop_space: bool = False  # drop the space that SentencePiece puts before the first word
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    named: tuple[int, ...] = ()  # tokens to report in place of the most probable ones; `logprobs` is their number
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()  # for each prompt the text put before its answers; empty without echo
    echo_logprobs: bool = False
    token_ids: bool = False  # return token ids with their loss mask and weight versions
    tokens_as_ids: bool = False
    versions: bool = False  # return the weight versions of tokens even without ids
    functions: ToolUse | None = None  # tools whose calls are parsed in the text
    markers: frozenset[int] = frozenset()  # special tokens that stay visible because they mark tool calls or reasoning
    reasoning: ReasoningStart | None = None  # None: reasoning is part of the text
    tool: Tool | None = None  # the calculator that runs during generation
    prefix_bytes: bytes = b""  # visible bytes of the answer's prefix (`answer_token_ids`), calculator marks included
    prefix_ids: tuple[int, ...] = ()
    raw_logprobs: bool = False
    sampling_masks: bool = False
    timings: bool = False  # return the times of each sample
    progress: bool = False  # report the prefill of a stream as llama.cpp does
    forces_usage: bool = False  # send the usage with each chunk of a stream, whatever its `stream_options` are
    metrics: bool = False  # return vLLM's metrics of the request
