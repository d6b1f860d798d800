"""Ollama's /api/embed and /api/embeddings, and the durations in its replies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Route
from nano_inference.server.dialects.ollama_models import ModelName
from nano_inference.server.embedding import EmbeddingBody, EmbeddingReply, ask_embedding
from nano_inference.server.errors import ApiError, renamed, reworded
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import api_errors
from nano_inference.server.schema import MAX_PROMPTS, Body, Samples
from nano_inference.server.transcript import Transcript
from nano_inference.server.translated import as_body

_SPARE_TOKENS = 64  # tokens read beyond the limit, because a text that is cut inside a word has other tokens at its end
Text = Annotated[str, Field(min_length=1)]


class OllamaEmbedBody(Body):
    """POST /api/embed."""

    model: ModelName | None = None
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    truncate: bool | None = None  # False: a text longer than the context is refused, not cut at its end
    dimensions: Samples | None = None


class OllamaEmbeddingsBody(Body):
    """POST /api/embeddings, the older form: one text, and a vector that is not normalised."""

    model: ModelName | None = None
    prompt: Text


def ask_embed(body: OllamaEmbedBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /api/embed asks for. Raises `ApiError` naming the invalid field."""
    given: Any = body.input
    if body.truncate is not False:
        given = _cut(given, model) if isinstance(given, str) else [_cut(text, model) for text in given]
    asked = as_body({"model": body.model, "input": given, "dimensions": body.dimensions}, EmbeddingBody)
    try:
        return ask_embedding(asked, model, config, salt)
    except ApiError as error:
        raise reworded(error, lambda text: text.replace("truncate_prompt_tokens", "truncate")) from None


def ask_embeddings(body: OllamaEmbeddingsBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /api/embeddings asks for. Raises `ApiError` naming the invalid field."""
    try:
        fields: JSON = {"model": body.model, "input": _cut(body.prompt, model), "normalize": False}
        return ask_embedding(as_body(fields, EmbeddingBody), model, config, salt)
    except ApiError as error:
        raise renamed(error, {"input": "prompt"}) from None


def _cut(text: str, model: ServedModel) -> list[int]:
    """Return a text's token ids without those behind the context, as Ollama does."""
    limits = model.limits
    limit = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    with api_errors("input"):
        return model.tokenizer.encode(text[: (limit + _SPARE_TOKENS) * model.longest_token])[:limit]


class EmbedReply(EmbeddingReply):
    """The vectors of /api/embed, as a list."""

    def whole(self) -> JSON:
        times = durations(self.transcripts)
        return {
            "model": self.generation.model,
            "embeddings": [entry["embedding"] for entry in super().whole()["data"]],
            **{name: times[name] for name in ("total_duration", "load_duration")},
            "prompt_eval_count": sum(len(request.prompt) for request in self.generation.requests),
        }


class EmbeddingsReply(EmbeddingReply):
    """The only vector of /api/embeddings."""

    def whole(self) -> JSON:
        return {"embedding": super().whole()["data"][0]["embedding"]}


def durations(transcripts: Sequence[Transcript]) -> dict[str, int]:
    """Return the durations of a reply in nanoseconds; 0 for what did not happen. No model is loaded on request."""
    times = [transcript.times for transcript in transcripts if transcript.times is not None]
    arrived = min((one.arrived for one in times), default=None)
    started = min((one.started for one in times if one.started is not None), default=None)
    first = min((one.first_token for one in times if one.first_token is not None), default=None)
    last = max((one.last_token for one in times if one.last_token is not None), default=None)
    spans = {
        "total_duration": (arrived, time.monotonic()),
        "load_duration": (None, None),
        "prompt_eval_duration": (started, first),
        "eval_duration": (first, last),
    }
    return {name: 0 if one is None or two is None else round((two - one) * 1e9) for name, (one, two) in spans.items()}


EMBEDDING_ROUTES = (
    Route(
        path="/api/embed",
        body=OllamaEmbedBody,
        ask=ask_embed,
        reply=EmbedReply,
        summary="Return embedding vectors of texts; the interface of Ollama.",
        streams=False,
    ),
    Route(
        path="/api/embeddings",
        body=OllamaEmbeddingsBody,
        ask=ask_embeddings,
        reply=EmbeddingsReply,
        summary="Return the embedding vector of a text; an older interface of Ollama.",
        streams=False,
    ),
)
