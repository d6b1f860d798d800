"""Embeddings: requests to the engine from OpenAI's body, and OpenAI's reply from samples. Pure.

Format: https://platform.openai.com/docs/api-reference/embeddings; `truncate_prompt_tokens`, `add_special_tokens`,
`normalize` and `cache_salt` as in vLLM; `pooling` is an extension. Accepted and ignored: `user`.
"""

from __future__ import annotations

import struct
import uuid
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nano_inference.admission import checked
from nano_inference.checks import unit_vector
from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.embedding_inputs import Inputs, ids_of, inputs_by_field
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import kept_tokens, too_long
from nano_inference.server.refusals import api_errors
from nano_inference.server.schema import Body, CountOrOff, Salt, Samples
from nano_inference.server.shape import ReplyShape
from nano_inference.server.ticket import PromptRequest
from nano_inference.server.unsupported import EMPTY, refuse_unsupported
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import BadRequest, EngineRequest, SamplingParams, TrainingSample


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    idle_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"user": EMPTY}

    input: Inputs
    model: Annotated[str, Field(max_length=512)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Samples | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: CountOrOff | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None


def embedding_requests(
    body: EmbeddingBody, model: ServedModel, config: ServerConfig, salt: str
) -> tuple[PromptRequest, ...]:
    """Return one request for each text. Raises `ApiError` naming the invalid field."""
    refuse_unsupported(body.model_extra or {})
    model.name_for(body.model)
    size = model.limits.hidden_size
    if body.dimensions is not None and size and body.dimensions > size:
        message = f"dimensions must be at most {size}, the size of this model's embeddings, got {body.dimensions}"
        raise ApiError(400, message, param="dimensions")
    if body.truncate_prompt_tokens == 0:
        raise ApiError(400, "truncate_prompt_tokens leaves no token", param="truncate_prompt_tokens")
    params = SamplingParams(max_tokens=0, pooling=body.pooling or config.pooling, logprobs_mode=config.logprobs_mode)
    return tuple(
        PromptRequest(prompt=_prompt(text, field, body, model, params), params=params, salt=salt)
        for field, text in inputs_by_field(body.input)
    )


def embedding_call(body: EmbeddingBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /v1/embeddings. Raises `ApiError` as `embedding_requests` does."""
    requests = embedding_requests(body, model, config, salt)
    return Call(
        kind="completion",
        id=f"embd-{uuid.uuid4().hex}",
        model=model.name_for(body.model),
        requests=requests,
        num_samples=1,
        num_tokens=sum(len(request.prompt) for request in requests),
        shape=ReplyShape(versions=config.enable_rl),
        make_reply=partial(EmbeddingReply, body),
    )


class EmbeddingReply(Reply):
    """The reply to a call for embeddings; it is never streamed."""

    def __init__(self, body: EmbeddingBody, call: Call, tokenizer: Tokenizer, created: int) -> None:
        self._body = body
        self._call = call

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return the reply's JSON. Raises `ApiError` if a text failed."""
        samples = [transcript.sample for transcript in transcripts if transcript.sample is not None]
        reply = embedding_reply(self._body, self._call.model, samples)
        if self._call.shape.versions:
            reply["weight_versions"] = [sample.weight_version for sample in samples]
            reply["lineage"] = next((sample.lineage for sample in samples), None)
        return reply

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        return b""


def embedding_reply(body: EmbeddingBody, model_name: str, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Return the reply with one entry for each sample, in order. Raises `ApiError` if a sample failed."""
    vectors = [_vector(body, index, sample) for index, sample in enumerate(samples)]
    num_tokens = sum(len(sample.prompt_tokens) for sample in samples)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(body, vector)}
            for index, vector in enumerate(vectors)
        ],
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
        ids = ids_of(text, model.tokenizer, add_special=body.add_special_tokens is not False)
    if keep is not None:
        ids = kept_tokens(ids, keep if keep > 0 else limit, body.truncation_side)
    if len(ids) > limit:
        raise too_long(len(ids), f"{len(ids)} tokens", field, model, answered=False)
    try:
        return tuple(checked(EngineRequest(prompt=ids, params=params), limits)[0].prompt)
    except BadRequest as error:  # its message begins with "prompt"
        raise ApiError(400, f"{field}{str(error).removeprefix('prompt')}", param=field) from None


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


def _encoded(body: EmbeddingBody, vector: Sequence[float]) -> str | list[float]:
    """Return a list of floats, or base64 of little-endian float32."""
    if body.encoding_format == "base64":
        return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
    return list(vector)
