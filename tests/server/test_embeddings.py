"""POST /v1/embeddings: requests to the engine, refusals, the reply, and the route over HTTP."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from openai import OpenAI

from nano_inference import TrainingSample
from nano_inference.core.admission import Limits
from nano_inference.server.body import parse
from nano_inference.server.config import ServerConfig
from nano_inference.server.embedding import EmbeddingBody, ask_embedding, embedding_reply
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import MAX_PROMPTS
from nano_inference.support.checks import float32
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import EngineRequest
from tests.server.tiny import Running, served_model

LIMITS = Limits(vocab_size=260, max_model_len=512, num_blocks=100, block_size=16, hidden_size=32)


@pytest.fixture(scope="module")
def model(tiny_directory: Path) -> ServedModel:
    return served_model(tiny_directory, dialogue=None, limits=LIMITS)


def body_of(**fields: Any) -> EmbeddingBody:
    return parse(json.dumps({"input": "hi", **fields}).encode(), EmbeddingBody)


def requests_of(model: ServedModel, /, **fields: Any) -> tuple[EngineRequest, ...]:
    return ask_embedding(body_of(**fields), model, ServerConfig(), "salt").requests


def refusal(model: ServedModel, /, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        requests_of(model, **fields)
    assert caught.value.status in (400, 404)
    return caught.value


def sample(vector: tuple[float, ...] | None, size: int = 3, **changes: Any) -> TrainingSample:
    base: dict[str, Any] = {
        "request_id": 1, "sample_index": 0, "prompt_tokens": (5,) * size, "completion_tokens": (), "logprobs": (),
        "mask": (), "token_versions": (), "weight_version": 0, "finish_reason": "length", "embedding": vector,
    }  # fmt: skip
    return TrainingSample(**(base | changes))


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ([1, 2, "hi", 3], [[1, 2, "hi", 3]]),
        (["hi", 2], [["hi", 2]]),
        (["hi", [1, 2]], ["hi", [1, 2]]),
        ([[1, 2], [3, "hi"]], [[1, 2], [3, "hi"]]),
        ({"prompt_string": "hi"}, ["hi"]),
        ({"content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]}, ["hi there"]),
        (["hi", {"prompt_string": "a"}, {"content": [{"type": "text", "text": "b"}]}], ["hi", "a", "b"]),
    ],
)
def test_llamacpps_input_forms(model: ServedModel, given: Any, prompts: list[Any]) -> None:
    def encoded(one: Any) -> tuple[int, ...]:
        pieces = [one] if isinstance(one, str) else one
        ids = [[piece] if isinstance(piece, int) else model.tokenizer.encode(piece) for piece in pieces]
        return tuple(token for piece in ids for token in piece)

    assert [request.prompt for request in requests_of(model, input=given)] == [encoded(one) for one in prompts]


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({}, "input", "valid string"),
        ([{}], "input.0", "should be a valid"),
        ({"prompt_string": "a", "content": []}, "input", "must have prompt_string or content"),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, "input", "parts of type text"),
        ([1, "hi", 2.5], "input", "entry 2 of an input of ids and texts"),
        ([1, "hi", 260], "input", "token id 260 at position 3 is outside the vocabulary of 260"),
    ],
)
def test_refused_llamacpp_inputs(model: ServedModel, given: Any, param: str, message: str) -> None:
    error = refusal(model, input=given)
    assert error.param == param and message in error.message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "at least one token"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": ["a", ""]}, "input.1", "at least one token"),
        ({"input": [1, -1]}, "input.1", "greater than or equal to 0"),
        ({"input": [1, 260]}, "input", "input: token id 260 at position 1 is outside the vocabulary of 260"),
        ({"input": [[1], [2, 999]]}, "input.1", "input.1: token id 999 at position 1 is outside the vocabulary of 260"),
        ({"input": ["a"] * (MAX_PROMPTS + 1)}, "input", "must have at most 1024 entries"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"dimensions": 33}, "dimensions", "at most 32, the size of this model's embeddings, got 33"),
        ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"pooling": "cls"}, "pooling", "'mean' or 'last'"),
        ({"normalize": 1}, "normalize", "valid boolean"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no token"),
        ({"model": "gpt-5"}, "model", "does not exist"),
    ],
)
def test_refusals_name_the_field(model: ServedModel, fields: dict[str, Any], param: str, message: str) -> None:
    error = refusal(model, **fields)
    assert error.param == param and message in error.message


@pytest.mark.parametrize(
    ("given", "field", "found", "count"),
    [
        ([1] * 513, "input", "513 tokens", 513),
        (["ok", "x" * 600], "input.1", "600 tokens", 600),
        ("x" * 100_000, "input", "at least 8333 tokens", 8333),
    ],
)
def test_text_longer_than_the_context_is_refused(
    model: ServedModel, given: Any, field: str, found: str, count: int
) -> None:
    error = refusal(model, input=given)
    assert (error.code, error.param) == ("context_length_exceeded", field)
    assert error.message.startswith(f"{field} has {found}, too large for the context of 512")
    assert error.extra == {"n_prompt_tokens": count, "n_ctx": 512}


VECTOR = float32([0.5, -1.5, 2.25, 0.1])


def test_vectors_are_normalized_by_default() -> None:
    def vector(**fields: Any) -> list[float]:
        return embedding_reply(body_of(**fields), "tiny", [sample(VECTOR)])["data"][0]["embedding"]

    length = math.hypot(*VECTOR)
    assert vector() == vector(normalize=True) == pytest.approx([value / length for value in VECTOR], abs=1e-7)
    assert vector(normalize=False) == list(VECTOR)
    cut = vector(dimensions=2)
    assert cut == pytest.approx([0.5 / math.hypot(0.5, 1.5), -1.5 / math.hypot(0.5, 1.5)], abs=1e-7)
    assert vector(dimensions=2, normalize=False) == [0.5, -1.5]
    assert vector(dimensions=4) == vector()


@pytest.mark.parametrize(
    ("reason", "status", "message"),
    [
        ("the prompt's hidden states are not finite", 500, "input.1: embedding failed: the prompt's hidden states"),
        ("out of memory: a step", 503, "out of memory: a step"),
        (None, 503, "input.1: the request was aborted"),
    ],
)
def test_failed_sample_raises(reason: str | None, status: int, message: str) -> None:
    failed = sample(None, finish_reason="abort", stop_reason=reason)
    with pytest.raises(ApiError) as caught:
        embedding_reply(body_of(), "tiny", [sample(VECTOR), failed])
    assert caught.value.status == status and caught.value.message.startswith(message)


def last_hidden(directory: Path, text: bytes) -> torch.Tensor:
    """Return Transformers' hidden states after the last norm, [T, E]."""
    model = transformers.LlamaModel.from_pretrained(directory, dtype=torch.float32)
    tokens = load_tokenizer(TokenizerSource(str(directory))).encode(text.decode())
    with torch.no_grad():
        hidden: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden


@pytest.mark.slow
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("mean", False), ("last", True)])
def test_openai_client_returns_transformers_embeddings(
    server: Running, tiny_directory: Path, pooling: str, normalize: bool
) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    texts = ["Hello there", "x", "A longer text, of more than one block of the cache."]
    reply = client.embeddings.create(model="tiny", input=texts, extra_body={"pooling": pooling, "normalize": normalize})
    for text, one in zip(texts, reply.data, strict=True):
        hidden = last_hidden(tiny_directory, text.encode())
        expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
        expected = expected / expected.norm() if normalize else expected
        assert one.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    assert reply.usage.prompt_tokens == sum(map(len, texts)) == reply.usage.total_tokens
