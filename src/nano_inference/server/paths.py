"""Every path that takes a body, written once: what is sent there, what becomes of it, what it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nano_inference.config import ServerConfig
from nano_inference.server import tokens
from nano_inference.server.call import JSON, Call
from nano_inference.server.calls import chat_call, completion_call
from nano_inference.server.embeddings import EmbeddingBody, embedding_call
from nano_inference.server.errors import ErrorBody
from nano_inference.server.generate import GenerateBody, generate_call
from nano_inference.server.llamacpp import LlamaBody, llama_call
from nano_inference.server.llamacpp_reply import error_body as llamacpp_error
from nano_inference.server.messages import count_tokens, messages_call
from nano_inference.server.messages_body import CountTokensBody, MessagesBody
from nano_inference.server.messages_reply import error_body as messages_error
from nano_inference.server.model import ServedModel
from nano_inference.server.nanochat_web import WebBody, web_call
from nano_inference.server.nanochat_web import error_body as nanochat_error
from nano_inference.server.responses import ResponsesBody, responses_call
from nano_inference.server.schema import (
    ApplyTemplateBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from nano_inference.server.sglang import SglangBody, sglang_call

ToCall = Callable[[Any, ServedModel, ServerConfig, str], Call]
"""Body, model, configuration and cache salt to a call. Raises `ApiError`."""
Work = Callable[[Any, ServedModel], JSON]
"""Body and model to a reply for which no engine is needed. Raises `ApiError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generating:
    """A path below which the engine writes."""

    path: str
    body: type[Body]
    to_call: ToCall
    summary: str
    streams: bool = True
    renders: bool = False
    """Whether messages go through the model's chat template, which may take seconds and has threads of its own."""
    error_body: ErrorBody | None = None
    """How this dialect tells of errors; None is OpenAI's way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converting:
    """A path where only texts and tokens are turned into one another."""

    path: str
    body: type[Body]
    work: Work
    summary: str
    renders: bool = False
    """As in `Generating`."""
    error_body: ErrorBody | None = None


GENERATING: tuple[Generating, ...] = (
    Generating(
        path="/v1/completions",
        body=CompletionBody,
        to_call=completion_call,
        summary="Continue a text or token ids.",
    ),
    Generating(path="/v1/chat/completions", body=ChatBody, to_call=chat_call, summary="Answer messages.", renders=True),
    Generating(
        path="/v1/responses",
        body=ResponsesBody,
        to_call=responses_call,
        summary="Answer items, as OpenAI's Responses API has them.",
        renders=True,
    ),
    Generating(
        path="/v1/messages",
        body=MessagesBody,
        to_call=messages_call,
        summary="Answer messages, as Anthropic's API has them.",
        renders=True,
        error_body=messages_error,
    ),
    Generating(
        path="/inference/v1/generate",
        body=GenerateBody,
        to_call=generate_call,
        summary="Continue token ids, as vLLM's route for trainers does.",
    ),
    Generating(
        path="/generate", body=SglangBody, to_call=sglang_call, summary="Continue texts or token ids, as SGLang does."
    ),
    Generating(
        path="/completion",
        body=LlamaBody,
        to_call=llama_call,
        summary="Continue a text or token ids, as llama.cpp's server does.",
        error_body=llamacpp_error,
    ),
    Generating(
        path="/chat/completions",
        body=WebBody,
        to_call=web_call,
        summary="Answer messages in the events of nanochat's web chat.",
        renders=True,
        error_body=nanochat_error,
    ),
    Generating(
        path="/v1/embeddings",
        body=EmbeddingBody,
        to_call=embedding_call,
        summary="Return what texts mean to the model, as vectors.",
        streams=False,
    ),
)
CONVERTING: tuple[Converting, ...] = (
    Converting(
        path="/v1/messages/count_tokens",
        body=CountTokensBody,
        work=count_tokens,
        summary="Count the tokens of messages, as Anthropic's API has them.",
        renders=True,
        error_body=messages_error,
    ),
    Converting(
        path="/tokenize",
        body=TokenizeBody,
        work=tokens.tokenize,
        summary="Turn a text or messages into token ids.",
        renders=True,
    ),
    Converting(path="/detokenize", body=DetokenizeBody, work=tokens.detokenize, summary="Turn token ids into text."),
    Converting(
        path="/apply-template",
        body=ApplyTemplateBody,
        work=tokens.apply_template,
        summary="Show what the model reads for messages.",
        renders=True,
    ),
)


def error_bodies() -> dict[str, ErrorBody]:
    """Return how errors are told below each path whose dialect has a way of its own."""
    posts: list[Generating | Converting] = [*GENERATING, *CONVERTING]
    return {one.path: one.error_body for one in posts if one.error_body is not None}
