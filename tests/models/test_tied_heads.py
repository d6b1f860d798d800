"""Files of tied models that have a head too, compared with Transformers, which compares it with the embedding."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nano_inference import EngineConfig, InferenceEngine, WeightError
from nano_inference.loading.checkpoint import open_checkpoint
from tests.models.families import gap, make_model
from tests.parallel.ranks import open_ranks

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = [5, 9, 130, 2, 44, 17, 80, 3, 71, 12, *range(20, 40)]
FAMILIES = ("llama-ratio1-untied", "mistral-window", "qwen2-ratio7", "qwen3-ratio3-tied", "smollm3-layers-without-rope")
GEMMAS = ("gemma2", "gemma3")


def write(family: str, directory: Path, head: str, *, leave_out: bool = False) -> transformers.PreTrainedModel:
    """Write a tied model whose file has a head, for "only" no embedding; return the model that Transformers loads."""
    make_model(family, directory, {"tie_word_embeddings": True})
    weights = load_file(directory / "model.safetensors")
    weights[HEAD] = weights[EMBEDDING].clone()
    if head == "own":
        weights[HEAD][-1, -1] += 0.5
        weights[HEAD][3] = -weights[HEAD][3]
    elif head == "only":
        del weights[EMBEDDING]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    if leave_out:
        fields = json.loads((directory / "config.json").read_text())
        del fields["tie_word_embeddings"]
        (directory / "config.json").write_text(json.dumps(fields))
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def config(directory: Path, **options: object) -> EngineConfig:
    return EngineConfig(model_path=str(directory), device="cpu", kv_cache_bytes=8 << 20, **options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head"),
    [*((family, "own") for family in (*FAMILIES, *GEMMAS)), *product((FAMILIES[0], GEMMAS[1]), ("equal", "only"))],
)
def test_a_head_in_the_file_is_used_as_transformers_uses_it(family: str, head: str, tmp_path: Path) -> None:
    leave_out = family in ("smollm3-layers-without-rope", *GEMMAS)  # these families tie by default
    model = write(family, tmp_path, head, leave_out=leave_out)
    assert open_checkpoint(tmp_path).config.tie_embeddings == (head != "own")
    for kernels in ("auto", "off"):
        with InferenceEngine(config(tmp_path, kernels=kernels)) as ours:
            assert gap(model, IDS, ours.score(IDS)) < 1e-4
    if head == "own" and family == "llama-ratio1-untied":
        with open_ranks(config(tmp_path, kernels="off", tensor_parallel=2)) as ours:
            assert gap(model, IDS, ours.score(IDS)) < 1e-4


def test_an_engine_with_its_own_head_needs_it_in_updates(tmp_path: Path) -> None:
    model = write("llama3-rope-ratio3-tied", tmp_path, "own")
    weights = load_file(tmp_path / "model.safetensors")
    with InferenceEngine(config(tmp_path)) as ours:
        with pytest.raises(WeightError, match=r"lacks 1 tensors: lm_head\.weight"):
            ours.update_weights({name: value for name, value in weights.items() if name != HEAD}, blocking=True)
        ours.update_weights({HEAD: weights[EMBEDDING]}, blocking=True, partial=True)
        ours.update_weights(weights, blocking=True)
        assert gap(model, IDS, ours.score(IDS)) < 1e-4


@pytest.mark.parametrize("size", [1, 2])
def test_a_new_head_alone_does_not_change_a_tied_embedding(size: int, tmp_path: Path) -> None:
    model = write("llama3-rope-ratio3-tied", tmp_path, "equal")
    head = load_file(tmp_path / "model.safetensors")[HEAD]
    with (
        open_ranks(config(tmp_path, kernels="off", tensor_parallel=size))
        if size > 1
        else InferenceEngine(config(tmp_path)) as ours
    ):
        ours.update_weights({HEAD: head}, blocking=True, partial=True)
        with pytest.raises(WeightError, match=r"^lm_head\.weight: differs from model\.embed_tokens\.weight, to which"):
            ours.update_weights({HEAD: head + 1}, blocking=True, partial=True)
        assert gap(model, IDS, ours.score(IDS)) < 1e-4
        ours.update_weights({HEAD: head + 1, EMBEDDING: head + 1}, blocking=True, partial=True)
        with torch.no_grad():
            model.get_input_embeddings().weight += 1
        assert gap(model, IDS, ours.score(IDS)) < 1e-4
