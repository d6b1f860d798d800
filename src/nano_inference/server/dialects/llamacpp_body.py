"""Bodies of llama.cpp's requests, and the fields of them that this server does not support."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nano_inference.server.schema import (
    INT32,
    MAX_BIAS,
    Alternatives,
    Body,
    CountOrOff,
    Factor,
    Penalty,
    PositiveShare,
    Samples,
    SeedOrRandom,
    Share,
    Stops,
    Temperature,
    TokenId,
    TokenIds,
)

_MAX_PIECES = 1 << 20

Pieces = Annotated[list[TokenId | str], Field(min_length=1, max_length=_MAX_PIECES, fail_fast=True)]
"""A prompt made of token ids and texts."""


class PromptText(Body):
    """llama.cpp's other form of a text prompt; the media that may go with it are not supported."""

    prompt_string: str


class LlamaBody(Body):
    """POST /completion."""

    prompt: (
        str
        | PromptText
        | TokenIds
        | Pieces
        | Annotated[list[str | PromptText | TokenIds | Pieces], Field(min_length=1, max_length=1024)]
    )
    """A text, a list of ids or a list of both; or a list of such prompts. A list of texts is several prompts."""

    model: Annotated[str, Field(max_length=512)] | None = None
    n_predict: Annotated[int, Field(ge=-2, le=INT32)] | None = None
    """Negative: up to the end of the context. 0: prefill only."""
    max_tokens: Annotated[int, Field(ge=-2, le=INT32)] | None = None
    """OpenAI's name of `n_predict`, which has precedence."""
    n_cmpl: Samples | None = 1
    temperature: Temperature | None = 0.8
    top_k: CountOrOff | None = 40
    top_p: PositiveShare | None = 0.95
    min_p: Share | None = 0.05
    repeat_penalty: Factor | None = 1.0
    repeat_last_n: CountOrOff | None = None  # -1: all tokens; 0: no penalty. Other windows are not supported.
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    seed: SeedOrRandom | None = -1
    stop: Stops | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Literal[False]
        | Annotated[list[list[int | float | str | bool]], Field(max_length=MAX_BIAS)]
        | Annotated[dict[str, float | bool], Field(max_length=MAX_BIAS)]
        | None
    ) = None
    """[[id or text, bias], …] or {id or text: bias}; the bias false forbids the token."""
    n_probs: Alternatives | None = 0
    grammar: str | None = None  # GBNF
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = True
    stream: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    post_sampling_probs: bool | None = None
    """Return the probabilities of tokens as they were sampled, after truncation and temperature."""
    response_fields: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=256)] | None = None
    """Paths of the reply's fields to send, such as `generation_settings/n_predict`; empty: all fields."""
