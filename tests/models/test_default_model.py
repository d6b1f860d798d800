"""The default model compared with Transformers on the same file, in float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import SamplingParams
from tests.models.families import gap, gap_to, reference_logprobs
from tests.models.written import smollm2_config
from tests.text.tokenizer_samples import ODD

pytestmark = pytest.mark.model
TOLERANCE = 1e-4

TOPICS = ("the sea", "bicycles", "Roman roads", "bread", "jazz", "glaciers", "chess", "tea", "coral reefs", "railways")
QUESTIONS = (
    "What is special about {}?",
    "Write two sentences about {}.",
    "Explain {} to a child.",
    "Name three facts about {}.",
    "Why do people like {}?",
)
TEXT = " ".join(question.format(topic) for question in QUESTIONS for topic in TOPICS)


@pytest.fixture(scope="module")
def stored(default_model_path: Path) -> gguf.GGUFReader:
    """Return the file as the gguf package reads it, which takes seconds."""
    return gguf.GGUFReader(default_model_path)


@pytest.fixture(scope="module")
def weights(stored: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    """Return the weights by Transformers' names, as the gguf package names and dequantises them.

    Transformers does the same when it loads the file, but in three times the time.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    found = {tensor.name: tensor for tensor in stored.tensors}
    with torch.device("meta"):
        empty = transformers.LlamaModel(smollm2_config())
    weights = {}
    for name in (f"model.{name}" for name in empty.state_dict()):
        tensor = found[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        weights[name] = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if "q_proj" in name or "k_proj" in name:  # llama.cpp stores the pairs that a rotation mixes side by side
            weights[name] = weights[name].view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
    return weights


@pytest.fixture(scope="module")
def witness(weights: dict[str, torch.Tensor]) -> transformers.PreTrainedModel:
    """Return Transformers' model with these weights."""
    return transformers.LlamaForCausalLM.from_pretrained(None, config=smollm2_config(), state_dict=weights).eval()


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(model_path=str(default_model_path), device="cpu")) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(engine: InferenceEngine) -> Tokenizer:
    assert engine.parts.checkpoint is not None
    return load_tokenizer(engine.parts.checkpoint.tokenizer)


def chat(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def test_scores_match_transformers_cold_chunked_and_cached(
    default_model_path: Path, engine: InferenceEngine, tokenizer: Tokenizer, witness: transformers.PreTrainedModel
) -> None:
    ids = tokenizer.encode(TEXT)
    assert len(ids) >= 256
    expected = reference_logprobs(witness, ids)
    assert gap_to(expected, ids, engine.score(ids)) <= TOLERANCE
    start = len(ids) - 50
    engine.generate([ids[: start - 5]], SamplingParams(max_tokens=1))
    assert gap_to(expected, ids, engine.score(ids, start=start)) <= TOLERANCE
    config = EngineConfig(
        model_path=str(default_model_path), device="cpu", max_tokens_per_batch=101, block_size=7, kv_cache_bytes=1 << 28
    )
    with InferenceEngine(config) as chunked:
        assert gap_to(expected[:219], ids[:220], chunked.score(ids[:220])) <= TOLERANCE


def test_a_weight_is_read_exactly(default_model_path: Path, weights: dict[str, torch.Tensor]) -> None:
    found = open_checkpoint(default_model_path)
    assert (found.dtype, found.config.num_layers, found.config.eos_token_ids) == ("Q4_1", 30, (0, 2, 4))
    target = torch.empty(192, 576)
    name = "model.layers.29.self_attn.k_proj.weight"
    dict(found.tensors())[name].read_into(target)
    assert torch.equal(target, weights[name])


def test_token_ids_equal_those_of_transformers_and_published_ones(
    default_model_path: Path, stored: gguf.GGUFReader
) -> None:
    values = {name: field.contents() for name, field in stored.fields.items() if name.startswith("tokenizer.")}
    metadata = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    ours = load_tokenizer(TokenizerSource(str(default_model_path), metadata))
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (49152, 1, (2, 0, 4))
    # Published ids of SmolLM2's tokenizer: each digit is a token, a space belongs to the next word.
    assert ours.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert ours.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert ours.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoTokenizer.from_pretrained(
            str(default_model_path.parent), gguf_file=default_model_path.name
        )
    for text in (*ODD, "<|im_start|>user\nhi<|im_end|>"):
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special=False) == text
        if not any(char.isnumeric() for char in text):
            assert ids == theirs(text, add_special_tokens=False)["input_ids"], text


def test_greedy_tokens_are_identical(
    engine: InferenceEngine, tokenizer: Tokenizer, witness: transformers.PreTrainedModel
) -> None:
    questions = [question.format(topic) for question in QUESTIONS for topic in TOPICS[::3]]
    prompts = [chat(tokenizer, question) for question in questions[::3]]
    samples = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert len(samples) >= 6
    for sample in samples:
        table = reference_logprobs(witness, [*sample.prompt_tokens, *sample.completion_tokens], 24)
        assert table.argmax(-1).tolist() == list(sample.completion_tokens)
        chosen = table.gather(-1, torch.tensor(sample.completion_tokens).unsqueeze(-1)).squeeze(-1)
        assert float((chosen - torch.tensor(sample.logprobs)).abs().max()) <= TOLERANCE


def test_preempted_rollout_matches_transformers(
    default_model_path: Path, tokenizer: Tokenizer, witness: transformers.PreTrainedModel
) -> None:
    model_bytes_per_block = 45 * 1024 * 16
    config = EngineConfig(model_path=str(default_model_path), device="cpu", kv_cache_bytes=8 * model_bytes_per_block)
    prompts = [chat(tokenizer, QUESTIONS[0].format(topic)) for topic in TOPICS[:5]]
    with InferenceEngine(config) as tight:
        samples = tight.generate(prompts, SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    assert sum(sample.num_preemptions for sample in samples) > 0
    for sample in samples:
        assert gap(witness, [*sample.prompt_tokens, *sample.completion_tokens], list(sample.logprobs)) <= TOLERANCE
