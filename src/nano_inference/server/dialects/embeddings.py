"""POST /v1/embeddings: a body to what the engine is asked for, and samples to OpenAI's reply. Pure.

Format: https://platform.openai.com/docs/api-reference/embeddings; `truncate_prompt_tokens`, `add_special_tokens`,
`normalize` and `cache_salt` as in vLLM, `pooling` is ours. Taken without effect: `user`.
"""

from __future__ import annotations

import struct
import uuid
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nano_inference.admission import checked
from nano_inference.checks import unit_vector
from nano_inference.config import ServerConfig
from nano_inference.server.call import JSON, Call, Transcript
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Dialect, Generating
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.refusals import api_errors
from nano_inference.server.schema import MAX_PROMPTS, Body, CountOrOff, Salt, Samples, TokenIds
from nano_inference.server.shape import ReplyShape
from nano_inference.server.ticket import PromptRequest
from nano_inference.server.unsupported import refuse_unsupported
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import BadRequest, EngineRequest, SamplingParams, TrainingSample


def _few(value: Any) -> Any:
    """Refuse too many texts by that name: none of the forms below would say so of what does not fit the others."""
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_long", "must have at most {limit} entries", {"limit": MAX_PROMPTS})
    return value


Text = Annotated[str, Field(min_length=1)]
Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    BeforeValidator(_few),
]
"""One text or several, each a string or its ids."""


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    input: Inputs
    model: Annotated[str, Field(max_length=512)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Samples | None = None
    user: str | None = None

    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: CountOrOff | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None


def embedding_requests(
    body: EmbeddingBody, model: ServedModel, config: ServerConfig, salt: str
) -> tuple[PromptRequest, ...]:
    """Return what the engine is asked for, one for each text. Raises `ApiError` naming the field that is wrong."""
    refuse_unsupported(body.model_extra or {})
    model.name_for(body.model)
    size = model.limits.hidden_size
    if body.dimensions is not None and size and body.dimensions > size:
        message = f"dimensions must be at most {size}, the size of this model's embeddings, got {body.dimensions}"
        raise ApiError(400, message, param="dimensions")
    if body.truncate_prompt_tokens == 0:
        raise ApiError(400, "truncate_prompt_tokens leaves no token", param="truncate_prompt_tokens")
    params = SamplingParams(max_tokens=0, pooling=body.pooling or "mean", logprobs_mode=config.logprobs_mode)
    return tuple(
        PromptRequest(prompt=_prompt(given, where, body, model, params), params=params, salt=salt)
        for where, given in _inputs(body)
    )


def embedding_call(body: EmbeddingBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /v1/embeddings. Raises as `embedding_requests`."""
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


class EmbeddingReply:
    """The reply to a call for embeddings; there is no stream of those."""

    def __init__(self, body: EmbeddingBody, call: Call, tokenizer: Tokenizer, created: int) -> None:
        self._body = body
        self._call = call

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return the reply's JSON. Raises `ApiError` for a text that failed."""
        samples = [transcript.sample for transcript in transcripts if transcript.sample is not None]
        reply = embedding_reply(self._body, self._call.model, samples)
        if self._call.shape.versions:
            reply["weight_versions"] = [sample.weight_version for sample in samples]
            reply["lineage"] = next((sample.lineage for sample in samples), None)
        return reply

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing."""
        return b""

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing."""
        return b""

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing."""
        return b""

    def error_events(self, error: ApiError) -> bytes:
        """Return nothing."""
        return b""


def embedding_reply(body: EmbeddingBody, model_name: str, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Return the reply, an entry for each sample in the order given. Raises `ApiError` for one that failed."""
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


def _inputs(body: EmbeddingBody) -> list[tuple[str, Any]]:
    """Return each text, or its ids, after the name that an error calls it by."""
    given: Any = body.input
    if isinstance(given, str) or isinstance(given[0], int):
        return [("input", given)]
    return [(f"input.{index}", one) for index, one in enumerate(given)]


def _prompt(given: Any, where: str, body: EmbeddingBody, model: ServedModel, params: SamplingParams) -> tuple[int, ...]:
    """Return the ids of one text, checked against the engine's limits."""
    ids: Sequence[int] = given
    if isinstance(given, str):
        _refuse_hopeless(given, where, body, model)
        with api_errors(where):
            ids = model.tokenizer.encode(given, add_special=body.add_special_tokens is not False)
    ids = _fitting(ids, where, body, model)
    try:
        return tuple(checked(EngineRequest(prompt=ids, params=params), model.limits)[0].prompt)
    except BadRequest as error:  # which calls it a prompt
        raise ApiError(400, f"{where}{str(error).removeprefix('prompt')}", param=where) from None


def _refuse_hopeless(text: str, where: str, body: EmbeddingBody, model: ServedModel) -> None:
    """Refuse a text that cannot fit whatever its tokens are: finding those out takes seconds for megabytes."""
    fewest = len(text) // model.longest_token
    if body.truncate_prompt_tokens is None and fewest > _longest(model):
        raise _too_long(fewest, f"at least {fewest} tokens", where, model)


def _fitting(ids: Sequence[int], where: str, body: EmbeddingBody, model: ServedModel) -> Sequence[int]:
    """Return the ids, cut from the left where that was asked for, as prompts are."""
    longest, keep = _longest(model), body.truncate_prompt_tokens
    if keep is not None:
        ids = ids[-(keep if keep > 0 else longest) :]
    if len(ids) > longest:
        raise _too_long(len(ids), f"{len(ids)} tokens", where, model)
    return ids


def _longest(model: ServedModel) -> int:
    """Return how many tokens a text may have: nothing is added to it."""
    limits = model.limits
    return min(limits.max_model_len, limits.num_blocks * limits.block_size)


def _too_long(num_tokens: int, shown: str, where: str, model: ServedModel) -> ApiError:
    longest = _longest(model)
    return ApiError(
        400,
        f"{where} has {shown}, which is longer than the context of {longest}; shorten it or set truncate_prompt_tokens",
        param=where,
        code="context_length_exceeded",
        extra={"n_prompt_tokens": num_tokens, "n_ctx": longest},
    )


def _vector(body: EmbeddingBody, index: int, sample: TrainingSample) -> Sequence[float]:
    """Return a sample's embedding, cut and of length 1 as the body wants it."""
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
    """Return the numbers, or the base64 text of their float32 bytes, lowest first."""
    if body.encoding_format == "base64":
        return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
    return list(vector)


DIALECT = Dialect(
    generating=(
        Generating(
            path="/v1/embeddings",
            body=EmbeddingBody,
            to_call=embedding_call,
            summary="Return what texts mean to the model, as vectors.",
            streams=False,
        ),
    ),
)
