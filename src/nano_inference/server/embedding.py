"""Embeddings: requests to the engine from OpenAI's body, and OpenAI's reply from samples. Pure.

Format: https://platform.openai.com/docs/api-reference/embeddings; `truncate_prompt_tokens`, `add_special_tokens`,
`normalize` and `cache_salt` as in vLLM; `pooling` is an extension.
"""

from __future__ import annotations

import struct
import uuid
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nano_inference.core.admission import checked
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import api_errors, kept_tokens, too_long
from nano_inference.server.replies import Reply
from nano_inference.server.schema import MAX_PROMPTS, Body, CountOrOff, Salt, Samples, TokenId, TokenIds
from nano_inference.support.checks import unit_vector
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import BadRequest, EngineRequest, SamplingParams, TrainingSample


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    input: Inputs
    model: Annotated[str, Field(max_length=512)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Samples | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: CountOrOff | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None


def ask_embedding(body: EmbeddingBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body asks for: one request for each text. Raises `ApiError` naming the invalid field."""
    model.name_for(body.model)
    adapter, size = model.adapter_for(body.model), model.limits.hidden_size
    if body.dimensions is not None and size and body.dimensions > size:
        message = f"dimensions must be at most {size}, the size of this model's embeddings, got {body.dimensions}"
        raise ApiError(400, message, param="dimensions")
    if body.truncate_prompt_tokens == 0:
        raise ApiError(400, "truncate_prompt_tokens leaves no token", param="truncate_prompt_tokens")
    params = SamplingParams(max_tokens=0, pooling=body.pooling or config.pooling, logprobs_mode=config.logprobs_mode)
    given: Any = body.input
    is_single = isinstance(given, str) or any(isinstance(one, int) for one in given)
    inputs = [("input", given)] if is_single else [(f"input.{index}", one) for index, one in enumerate(given)]
    requests = tuple(
        EngineRequest(prompt=_prompt(text, field, body, model, params), params=params, salt=salt, adapter=adapter)
        for field, text in inputs
    )
    return Generation(
        requests=requests,
        num_samples=1,
        num_tokens=sum(len(request.prompt) for request in requests),
        kind="completion",
        id=f"embd-{uuid.uuid4().hex}",
        model=model.name_for(body.model),
        tokenizer=model.tokenizer,
        versions=config.enable_rl,
        options=body,
    )


class EmbeddingReply(Reply[EmbeddingBody]):
    """The reply to a request for embeddings; it is never streamed."""

    def whole(self) -> JSON:
        samples = [transcript.sample for transcript in self.transcripts if transcript.sample is not None]
        reply = embedding_reply(self.options, self.generation.model, samples)
        if self.generation.versions:
            reply["weight_versions"] = [sample.weight_version for sample in samples]
            reply["lineage"] = next((sample.lineage for sample in samples), None)
        return reply


def embedding_reply(body: EmbeddingBody, model_name: str, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for index, sample in enumerate(samples):
        vector = _vector(body, index, sample)
        shown: str | list[float] = list(vector)
        if body.encoding_format == "base64":  # of little-endian float32
            shown = b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
        data.append({"object": "embedding", "index": index, "embedding": shown})
    num_tokens = sum(len(sample.prompt_tokens) for sample in samples)
    return {
        "object": "list",
        "data": data,
        "model": model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _prompt(text: Any, field: str, body: EmbeddingBody, model: ServedModel, params: SamplingParams) -> tuple[int, ...]:
    """Return the token ids of one input, truncated if requested and checked against the engine's limits."""
    limits, keep = model.limits, body.truncate_prompt_tokens
    limit = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    pieces = [text] if isinstance(text, str) else [piece for piece in text if isinstance(piece, str)]
    fewest = sum(map(len, pieces)) // model.longest_token  # encoding megabytes only to reject them takes seconds
    if keep is None and fewest > limit:
        raise too_long(fewest, f"at least {fewest} tokens", field, model, answered=False)
    with api_errors(field):
        ids = _ids_of(text, model.tokenizer, add_special=body.add_special_tokens is not False)
    if keep is not None:
        ids = kept_tokens(ids, keep if keep > 0 else limit, body.truncation_side)
    if len(ids) > limit:
        raise too_long(len(ids), f"{len(ids)} tokens", field, model, answered=False)
    try:
        return tuple(checked(EngineRequest(prompt=ids, params=params), limits)[0].prompt)
    except BadRequest as error:  # its message begins with "prompt"
        raise ApiError(400, f"{field}{str(error).removeprefix('prompt')}", param=field) from None


def _ids_of(given: str | Sequence[int | str], tokenizer: Tokenizer, *, add_special: bool) -> Sequence[int]:
    """Return the ids of an input; special tokens are added only to a text at its beginning."""
    ids: list[int] = []
    for index, piece in enumerate([given] if isinstance(given, str) else given):
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special=add_special and index == 0)
    return ids


def _vector(body: EmbeddingBody, index: int, sample: TrainingSample) -> Sequence[float]:
    """Return a sample's embedding, cut to `dimensions` and scaled to length 1 unless `normalize` is false."""
    if sample.embedding is None:
        if sample.stop_reason is None:
            raise ApiError(503, f"input.{index}: the request was aborted", code="aborted")
        reason = str(sample.stop_reason)
        if reason.startswith("out of memory"):
            raise ApiError(503, reason, code="out_of_memory", headers={"retry-after": "5"})
        raise ApiError(500, f"input.{index}: embedding failed: {reason}", headers={"x-should-retry": "false"})
    vector = sample.embedding[: body.dimensions]
    return vector if body.normalize is False else unit_vector(vector)


_MAX_PIECES = 1 << 20


def _plain(value: Any) -> Any:
    """Return the input with each object replaced by its text, before validation. Rejects too many inputs.

    The union below would report a mismatch of each of its members instead.
    """
    if not isinstance(value, list):
        return _text_of(value)
    is_single = any(isinstance(one, int) for one in value)
    if len(value) > MAX_PROMPTS and not is_single:
        raise PydanticCustomError("too_long", "must have at most {limit} entries", {"limit": MAX_PROMPTS})
    for index, one in enumerate(value if is_single and any(isinstance(one, str) for one in value) else ()):
        if isinstance(one, bool) or not isinstance(one, int | str):
            message = "entry {index} of an input of ids and texts must be one of them"
            raise PydanticCustomError("embedding_input", message, {"index": index})
    return [_text_of(one) for one in value] if any(isinstance(one, dict) for one in value) else value


def _text_of(value: Any) -> Any:
    """Return the text of llama.cpp's objects, and another value as it is. Rejects such objects with other contents."""
    if not isinstance(value, dict) or not {"prompt_string", "content"} & set(value):
        return value
    if set(value) == {"prompt_string"}:
        return value["prompt_string"]
    if set(value) != {"content"}:
        raise PydanticCustomError("embedding_input", "an object must have prompt_string or content, and nothing else")
    parts = value["content"] if isinstance(value["content"], list) else [None]
    texts = [one.get("text") for one in parts if isinstance(one, dict) and one.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("embedding_input", "content must be a list of parts of type text, each with a text")
    return "".join(map(str, texts))


Text = str  # may be empty for a model whose tokenizer adds tokens to it
Pieces = Annotated[list[TokenId | Text], Field(min_length=1, max_length=_MAX_PIECES, fail_fast=True)]
"""One input made of token ids and texts."""
Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Pieces
    | Annotated[list[Text | TokenIds | Pieces], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    BeforeValidator(_plain),
]
