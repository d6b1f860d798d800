"""Ollama's /api/embed and /api/embeddings, and the durations in its replies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Generating
from nano_inference.server.dialects.ollama_models import ModelName
from nano_inference.server.embedding import EmbeddingBody, embedding_call, embedding_reply
from nano_inference.server.errors import ApiError, renamed, reworded
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import api_errors
from nano_inference.server.schema import MAX_PROMPTS, Body, Samples
from nano_inference.server.translating import as_body
from nano_inference.text.tokenizer import Tokenizer

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


def embed_call(body: OllamaEmbedBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/embed. Raises `ApiError` naming the invalid field."""
    given: Any = body.input
    if body.truncate is not False:
        given = _cut(given, model) if isinstance(given, str) else [_cut(text, model) for text in given]
    asked = as_body({"model": body.model, "input": given, "dimensions": body.dimensions}, EmbeddingBody)
    try:
        call = embedding_call(asked, model, config, salt)
    except ApiError as error:
        raise reworded(error, lambda text: text.replace("truncate_prompt_tokens", "truncate")) from None
    return replace(call, make_reply=partial(EmbedReply, body=asked, is_list=True))


def embeddings_call(body: OllamaEmbeddingsBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/embeddings. Raises `ApiError` naming the invalid field."""
    try:
        fields: JSON = {"model": body.model, "input": _cut(body.prompt, model), "normalize": False}
        asked = as_body(fields, EmbeddingBody)
        call = embedding_call(asked, model, config, salt)
    except ApiError as error:
        raise renamed(error, {"input": "prompt"}) from None
    return replace(call, make_reply=partial(EmbedReply, body=asked, is_list=False))


def _cut(text: str, model: ServedModel) -> list[int]:
    """Return a text's token ids without those behind the context, as Ollama does."""
    limits = model.limits
    limit = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    with api_errors("input"):
        return model.tokenizer.encode(text[: (limit + _SPARE_TOKENS) * model.longest_token])[:limit]


class EmbedReply(Reply):
    """The vectors as a list, or the only one."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int, *, body: EmbeddingBody, is_list: bool) -> None:
        self._call, self._body, self._is_list = call, body, is_list

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return the reply's JSON. Raises `ApiError` if a text failed."""
        samples = [transcript.sample for transcript in transcripts if transcript.sample is not None]
        vectors = [entry["embedding"] for entry in embedding_reply(self._body, self._call.model, samples)["data"]]
        if not self._is_list:
            return {"embedding": vectors[0]}
        times = durations(transcripts)
        return {
            "model": self._call.model,
            "embeddings": vectors,
            "total_duration": times["total_duration"],
            "load_duration": times["load_duration"],
            "prompt_eval_count": sum(len(request.prompt) for request in self._call.requests),
        }

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        return b""


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
    Generating(
        path="/api/embed",
        body=OllamaEmbedBody,
        to_call=embed_call,
        summary="Return embedding vectors of texts; the interface of Ollama.",
        streams=False,
    ),
    Generating(
        path="/api/embeddings",
        body=OllamaEmbeddingsBody,
        to_call=embeddings_call,
        summary="Return the embedding vector of a text; an older interface of Ollama.",
        streams=False,
    ),
)
