"""Ollama's POST /api/embed and /api/embeddings: calls and replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialects.ollama_body import OllamaEmbedBody, OllamaEmbeddingsBody
from nano_inference.server.dialects.ollama_reply import durations
from nano_inference.server.embedding import EmbeddingBody, embedding_call, embedding_reply
from nano_inference.server.model import ServedModel
from nano_inference.server.refusals import api_errors
from nano_inference.server.translating import as_body, refuse_foreign, renamed_errors
from nano_inference.text.tokenizer import Tokenizer

_SPARE_TOKENS = 64  # tokens read beyond the limit, because a text that is cut inside a word has other tokens at its end


def embed_call(body: OllamaEmbedBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/embed. Raises `ApiError` naming the invalid field."""
    refuse_foreign(body, {})
    given: Any = body.input
    if body.truncate is not False:
        given = _cut(given, model) if isinstance(given, str) else [_cut(text, model) for text in given]
    fields: JSON = {"model": body.model, "input": given, "dimensions": body.dimensions}
    with renamed_errors({"truncate_prompt_tokens": "truncate"}):
        return _call(as_body(fields, EmbeddingBody), model, config, salt, is_list=True)


def embeddings_call(body: OllamaEmbeddingsBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/embeddings. Raises `ApiError` naming the invalid field."""
    refuse_foreign(body, {})
    with renamed_errors({"input": "prompt"}):
        fields: JSON = {"model": body.model, "input": _cut(body.prompt, model), "normalize": False}
        return _call(as_body(fields, EmbeddingBody), model, config, salt, is_list=False)


def _call(body: EmbeddingBody, model: ServedModel, config: ServerConfig, salt: str, *, is_list: bool) -> Call:
    call = embedding_call(body, model, config, salt)
    return replace(call, make_reply=partial(OllamaEmbedReply, body=body, is_list=is_list))


def _cut(text: str, model: ServedModel) -> list[int]:
    """Return a text's token ids without those behind the context, as Ollama does."""
    limits = model.limits
    limit = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    with api_errors("input"):
        return model.tokenizer.encode(text[: (limit + _SPARE_TOKENS) * model.longest_token])[:limit]


class OllamaEmbedReply(Reply):
    """The vectors as a list, or the only one."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int, *, body: EmbeddingBody, is_list: bool) -> None:
        self._call = call
        self._body = body
        self._is_list = is_list

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
