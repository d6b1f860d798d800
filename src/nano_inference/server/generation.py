"""`Generation`: one request of a client, between its body and the engine, and between the engine and its reply."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nano_inference.server.structured import Structure
from nano_inference.server.tools import ToolUse
from nano_inference.text.kinds import Tool
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import EngineRequest

JSON = dict[str, Any]
Kind = Literal["chat", "completion"]  # input of the model: messages, or a text


class ReasoningStart(NamedTuple):
    """How an answer, whose reasoning is returned separately, begins."""

    is_inside: bool  # True if the prompt ends with the mark that opens reasoning
    prefix: str  # the beginning of the answer, if the client gave it
    is_hidden: bool  # True if the reasoning is not returned at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a client asks for: requests for the engine, and what the reply contains of each sample."""

    # ---- for the engine
    requests: tuple[EngineRequest, ...]
    structures: tuple[Structure | None, ...] = ()  # of each request, in their order; empty if no request has one
    num_samples: int  # samples per prompt, which each request has
    num_tokens: int  # upper bound of its tokens, prompts and outputs; they count against the server's limits
    names: frozenset[str] = frozenset()  # ids by which a client may abort it
    forbids_tokens: bool = False  # True if the client excludes tokens, possibly all of them
    reduced_max_tokens: int | None = None
    """Tokens of a sample that the context has room for, if fewer than `max_tokens`; else None."""

    # ---- of the reply as a whole
    kind: Kind
    id: str
    model: str  # the name that the reply has
    tokenizer: Tokenizer
    fingerprint: str | None = None  # OpenAI's `system_fingerprint`: changes with the program and the model
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    options: Any = None  # what else the dialect's reply reads: the body, or what was made of it
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    metrics: bool = False  # return vLLM's metrics of the request
    timings: bool = False  # return the times of each sample
    progress: bool = False  # report the prefill of a stream as llama.cpp does

    # ---- of the text of a sample
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    drop_space: bool = False  # drop the space that SentencePiece puts before the first word
    markers: frozenset[int] = frozenset()  # special tokens that stay visible because they mark tool calls or reasoning
    echo: tuple[str, ...] = ()  # for each prompt the text put before its answers; empty without echo
    prefix_ids: tuple[int, ...] = ()  # the answer's prefix (`answer_token_ids`), which is part of the prompt
    prefix_bytes: bytes = b""  # its visible bytes, calculator marks included
    functions: ToolUse | None = None  # tools whose calls are parsed in the text
    reasoning: ReasoningStart | None = None  # None: reasoning is part of the text
    tool: Tool | None = None  # the calculator that runs during generation

    # ---- of the tokens of a sample
    token_ids: bool = False  # return token ids with their loss mask and weight versions
    versions: bool = False  # return the weight versions of tokens even without ids
    tokens_as_ids: bool = False
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    named: tuple[int, ...] = ()  # tokens to report in place of the most probable ones; `logprobs` is their number
    prompt_logprobs: int | None = None
    echo_logprobs: bool = False

    def __post_init__(self) -> None:
        assert all(one.num_samples == self.num_samples for one in self.requests), "each request has `num_samples`"
        assert len(self.structures) in (0, len(self.requests)), "each request has its structure, or None"

    @property
    def total_samples(self) -> int:
        """Samples of all prompts."""
        return self.num_samples * len(self.requests)
