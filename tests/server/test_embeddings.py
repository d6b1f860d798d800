"""POST /v1/embeddings: requests to the engine, refusals, the reply, and the route over HTTP."""

from __future__ import annotations

import base64
import json
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from openai import OpenAI
from openai.types import CreateEmbeddingResponse

from nano_inference import EngineConfig, InferenceEngine, TrainingSample
from nano_inference.core.admission import Limits
from nano_inference.server.body import parse
from nano_inference.server.config import ServerConfig
from nano_inference.server.embedding import EmbeddingBody, ask_embedding, embedding_reply
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import MAX_PROMPTS
from nano_inference.support.checks import float32
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.grammar import Grammars
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import EngineRequest
from tests.server.tiny import Running

LIMITS = Limits(vocab_size=260, max_model_len=512, num_blocks=100, block_size=16, hidden_size=32)
BOS = 258


@pytest.fixture(scope="module")
def model(tiny_directory: Path) -> ServedModel:
    return ServedModel(
        names=("tiny", "org/tiny-alias"),
        any_name=False,
        created=1,
        tokenizer=load_tokenizer(TokenizerSource(str(tiny_directory))),
        dialogue=None,
        grammars=Grammars(load_tokenizer(TokenizerSource(str(tiny_directory))), 260, (257,)),
        limits=LIMITS,
        generation=MappingProxyType({"temperature": 0.3}),
        chat_defaults=chat_defaults({}, {}),
        longest_token=12,
        max_positions=LIMITS.max_model_len,
    )


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


# ---- requests to the engine


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", ["hi"]),
        (["hi", "there", "hi"], ["hi", "there", "hi"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [259]], [(1, 2), (259,)]),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS),
    ],
)
def test_input_forms(model: ServedModel, given: Any, prompts: list[Any]) -> None:
    requests = requests_of(model, input=given, model="org/tiny-alias", user="me")
    expected = [tuple(model.tokenizer.encode(one)) if isinstance(one, str) else one for one in prompts]
    assert [request.prompt for request in requests] == expected
    for request in requests:
        assert (request.params.max_tokens, request.params.pooling, request.num_samples, request.salt) == (
            0,
            "mean",
            1,
            "salt",
        )


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


def test_only_a_text_at_the_beginning_gets_special_tokens(model: ServedModel) -> None:
    class Beginning:
        vocab_size = 260

        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return [BOS] * add_special + list(text.encode())

    tokenizer: Any = Beginning()
    begins = replace(model, tokenizer=tokenizer)
    prompts = [request.prompt for request in requests_of(begins, input=[["a", 1, "b"], [1, "a"]])]
    assert prompts == [(BOS, 97, 1, 98), (1, 97)]


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({}, "input", "valid string"),
        ([{}], "input.0", "should be a valid"),
        ({"prompt_string": "a", "content": []}, "input", "must have prompt_string or content"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "input", "and nothing else"),
        ({"content": "a"}, "input", "must be a list of parts of type text"),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, "input", "parts of type text"),
        ({"content": [{"type": "text", "text": 1}]}, "input", "parts of type text"),
        (["a", {"content": [{"type": "unknown"}]}], "input", "parts of type text"),
        ([1, "hi", 2.5], "input", "entry 2 of an input of ids and texts"),
        ([1, "hi", [2]], "input", "entry 2 of an input of ids and texts"),
        (["hi", 1, True], "input", "entry 2 of an input of ids and texts"),
        (["a", ""], "input.1", "at least one token"),
        ([1, "hi", 260], "input", "token id 260 at position 3 is outside the vocabulary of 260"),
    ],
)
def test_refused_llamacpp_inputs(model: ServedModel, given: Any, param: str, message: str) -> None:
    error = refusal(model, input=given)
    assert error.param == param and message in error.message


def test_pooling_and_truncation_fields(model: ServedModel) -> None:
    assert requests_of(model, pooling="last")[0].params.pooling == "last"
    ids = list(range(100)) * 6
    assert requests_of(model, input=ids, truncate_prompt_tokens=7)[0].prompt == tuple(ids[-7:])
    assert requests_of(model, input=ids, truncate_prompt_tokens=7, truncation_side="right")[0].prompt == tuple(ids[:7])
    assert requests_of(model, input=ids, truncate_prompt_tokens=-1)[0].prompt == tuple(ids[-512:])
    assert requests_of(model, input=[[1, 2], ids], truncate_prompt_tokens=5)[0].prompt == (1, 2)
    assert len(requests_of(model, input="x" * 10_000, truncate_prompt_tokens=9)[0].prompt) == 9
    assert len(requests_of(model, input=[1] * 512)[0].prompt) == 512, "no position is reserved for an answer"
    assert requests_of(model, dimensions=32, encoding_format=None, model="", pooling=None, normalize=None)


def test_add_special_tokens(model: ServedModel) -> None:
    class Beginning:
        vocab_size = 260

        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return [BOS] * add_special + list(text.encode())

    tokenizer: Any = Beginning()
    begins = replace(model, tokenizer=tokenizer)
    assert requests_of(begins)[0].prompt == requests_of(begins, add_special_tokens=True)[0].prompt == (BOS, 104, 105)
    assert requests_of(begins, add_special_tokens=False)[0].prompt == (104, 105)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "at least one token"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [""]}, "input.0", "at least one token"),
        ({"input": ["a", ""]}, "input.1", "at least one token"),
        ({"input": [[1], []]}, "input.1", "at least 1 item"),
        ({"input": None}, "input", "valid string"),
        ({"input": [1, -1]}, "input.1", "greater than or equal to 0"),
        ({"input": [1, 260]}, "input", "input: token id 260 at position 1 is outside the vocabulary of 260"),
        ({"input": [[1], [2, 999]]}, "input.1", "input.1: token id 999 at position 1 is outside the vocabulary of 260"),
        ({"input": ["a"] * (MAX_PROMPTS + 1)}, "input", "must have at most 1024 entries"),
        ({"input": [[1]] * (MAX_PROMPTS + 1)}, "input", "must have at most 1024 entries"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"dimensions": 33}, "dimensions", "at most 32, the size of this model's embeddings, got 33"),
        ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"pooling": "cls"}, "pooling", "'mean' or 'last'"),
        ({"normalize": 1}, "normalize", "valid boolean"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no token"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"cache_salt": ["a"]}, "cache_salt", "valid string"),
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


def test_length_limit_of_a_small_cache(model: ServedModel) -> None:
    small = replace(model, limits=replace(LIMITS, num_blocks=5))
    assert len(requests_of(small, input=[1] * 80)[0].prompt) == 80
    assert refusal(small, input=[1] * 81).extra["n_ctx"] == 80
    assert len(requests_of(small, input=[1] * 81, truncate_prompt_tokens=-1)[0].prompt) == 80


# ---- the reply


VECTOR = float32([0.5, -1.5, 2.25, 0.1])


def test_reply_form() -> None:
    reply = embedding_reply(body_of(), "tiny", [sample(VECTOR, 3), sample(float32([1, 2, 3, 4]), 5)])
    assert CreateEmbeddingResponse.model_validate(reply).to_dict() == reply
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert reply["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert [one["index"] for one in reply["data"]] == [0, 1]
    assert {one["object"] for one in reply["data"]} == {"embedding"}
    assert json.loads(json.dumps(reply, allow_nan=False)) == reply


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


@pytest.mark.parametrize("fields", [{}, {"dimensions": 3}, {"normalize": False}])
def test_base64_decodes_to_the_floats(fields: dict[str, Any]) -> None:
    plain = embedding_reply(body_of(encoding_format="float", **fields), "tiny", [sample(VECTOR)])["data"][0]
    coded = embedding_reply(body_of(encoding_format="base64", **fields), "tiny", [sample(VECTOR)])["data"][0]
    data = base64.b64decode(coded["embedding"], validate=True)
    assert [number for (number,) in struct.iter_unpack("<f", data)] == plain["embedding"]
    assert len(data) == 4 * fields.get("dimensions", 4)


def test_base64_is_little_endian() -> None:
    reply = embedding_reply(body_of(encoding_format="base64", normalize=False), "tiny", [sample((1.0, -2.0))])
    assert base64.b64decode(reply["data"][0]["embedding"]) == b"\x00\x00\x80\x3f\x00\x00\x00\xc0"


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


# ---- with an engine


def test_embeddings_equal_the_engines(tiny_directory: Path, model: ServedModel) -> None:
    texts = ["hello", "another text", "hello"]
    config = EngineConfig(model_path=str(tiny_directory), kv_cache_bytes=8 << 20, device="cpu", num_threads=1)
    with InferenceEngine(config) as engine:
        served = replace(model, limits=engine.limits)
        for fields in ({"pooling": "mean"}, {"pooling": "last"}):
            body = body_of(input=texts, **fields)
            requests = ask_embedding(body, served, ServerConfig(), "salt").requests
            samples = engine.generate(
                [request.prompt for request in requests], [request.params for request in requests]
            )
            reply = embedding_reply(body, "tiny", samples)
            expected = engine.embed([model.tokenizer.encode(one) for one in texts], **fields, normalize=True)
            for one, vector in zip(reply["data"], expected, strict=True):
                assert one["embedding"] == pytest.approx(vector, abs=1e-5)
            assert reply["usage"]["prompt_tokens"] == sum(len(model.tokenizer.encode(one)) for one in texts)
        assert refusal(served, dimensions=33).param == "dimensions"


# ---- over HTTP


def last_hidden(directory: Path, text: bytes) -> torch.Tensor:
    """Return Transformers' hidden states after the last norm, [T, E]."""
    model = transformers.LlamaModel.from_pretrained(directory, dtype=torch.float32)
    tokens = load_tokenizer(TokenizerSource(str(directory))).encode(text.decode())
    with torch.no_grad():
        hidden: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden


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


def test_embeddings_and_completions_run_concurrently(server: Running) -> None:
    alone = server.post("/v1/embeddings", {"input": "abc"}).json()["data"][0]["embedding"]
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
        answers = [pool.submit(server.post, "/v1/completions", body) for _ in range(4)]
        vectors = [pool.submit(server.post, "/v1/embeddings", {"input": ["abc", "d"]}) for _ in range(4)]
        assert all(one.result().status_code == 200 for one in answers)
        for one in vectors:
            assert one.result().json()["data"][0]["embedding"] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["", "a"]}, "input.0"),
        ({"input": "x" * 600}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": "x", "dimensions": 33}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "model": "other"}, "model"),
    ],
)
def test_refusals_over_http(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/embeddings", fields)
    assert reply.status_code in (400, 404) and reply.json()["error"]["param"] == param
