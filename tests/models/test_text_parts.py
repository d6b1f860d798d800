"""Text parts of multimodal models, compared with Transformers' text classes; their names in files and updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nano_inference import BadRequest, EngineConfig, InferenceEngine, ModelError, SamplingParams, WeightError
from nano_inference.cli import doctor
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.rl.exact.policy import Policy
from nano_inference.weights.checksum import weights_checksum
from tests.models.families import gap
from tests.parallel.ranks import open_ranks

SIZES: dict[str, Any] = {
    **{"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
IDS = [5, 9, 130, 2, 44, 17, 80, 3, 71, 12, *range(20, 60)]
EMBEDDING = "model.language_model.embed_tokens.weight"


class Wrapped(NamedTuple):
    """A multimodal model on disk, and Transformers' text class with the same weights."""

    kind: str
    directory: Path
    whole: transformers.PreTrainedModel
    text: transformers.PreTrainedModel


def gemma3() -> transformers.PreTrainedModel:
    text = transformers.Gemma3TextConfig(**SIZES, sliding_window=19, query_pre_attn_scalar=20, eos_token_id=1)
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text.to_dict(),
            vision_config=transformers.SiglipVisionConfig(**VISION).to_dict(),
            **{"image_token_index": 150, "boi_token_index": 151, "eoi_token_index": 152, "mm_tokens_per_image": 4},
            eos_token_id=[1, 7],
        )
    )


def ministral3() -> transformers.PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return mistral3(transformers.Ministral3Config(**SIZES, rope_parameters=rope))


def mistral3(text: Any = None) -> transformers.PreTrainedModel:
    text = text or transformers.MistralConfig(**SIZES, sliding_window=None)
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config=text.to_dict(),
            vision_config=transformers.PixtralVisionConfig(**VISION).to_dict(),
            **{"image_token_index": 150, "tie_word_embeddings": False},
        )
    )


def qwen3_5() -> transformers.PreTrainedModel:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    types = ["linear_attention", "full_attention", "linear_attention"]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
    media = {"image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(
            text_config={**SIZES, **linear, "layer_types": types, "eos_token_id": 2},
            vision_config=vision,
            **media,
            tie_word_embeddings=True,
        )
    )


KINDS = {
    "gemma3": (gemma3, transformers.Gemma3ForCausalLM),
    "mistral3": (mistral3, transformers.MistralForCausalLM),
    "ministral3": (ministral3, transformers.Ministral3ForCausalLM),
    "qwen3_5": (qwen3_5, transformers.Qwen3_5ForCausalLM),
}


def text_part(whole: transformers.PreTrainedModel, kind: type[Any]) -> transformers.PreTrainedModel:
    """Return the text class with a multimodal model's weights."""
    config = whole.config.text_config
    config._attn_implementation, config.tie_word_embeddings = "eager", whole.config.tie_word_embeddings
    model = kind(config).eval().float()
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.lm_head.load_state_dict(whole.lm_head.state_dict())
    return model


def redraw(whole: transformers.PreTrainedModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            is_norm = "norm" in name
            is_plain = whole.config.model_type == "mistral3" or name.endswith(
                "linear_attn.norm.weight"
            )  # no (1 + weight)
            weight.copy_(torch.randn_like(weight) * (0.3 if is_norm else 0.1) + (is_norm and is_plain))


@pytest.fixture(scope="module", params=KINDS)
def wrapped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wrapped]:
    directory = tmp_path_factory.mktemp(request.param)
    make, text = KINDS[request.param]
    whole = make().eval().float()
    redraw(whole, 7)
    whole.save_pretrained(directory)
    yield Wrapped(request.param, directory, whole, text_part(whole, text))


def config(directory: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model_path=str(directory), device="cpu", kv_cache_bytes=8 << 20, **options)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_text_part_equals_the_text_class_before_and_after_updates(wrapped: Wrapped, kernels: Any) -> None:
    with InferenceEngine(config(wrapped.directory, kernels=kernels)) as ours:
        assert gap(wrapped.text, IDS, ours.score(IDS)) < 1e-4
        before = ours.weights_checksum()
        assert before == weights_checksum(wrapped.whole.named_parameters())
        other = KINDS[wrapped.kind][0]()
        redraw(other, 8)
        new = text_part(other.eval().float(), type(wrapped.text))
        files = load_file(wrapped.directory / "model.safetensors")  # the files' names, which are not the trainer's
        for named in (other.named_parameters(), new.named_parameters()):  # of the whole model, of the text class
            ours.update_weights(named, blocking=True)
            assert gap(new, IDS, ours.score(IDS)) < 1e-4
            ours.update_weights(files, blocking=True)
            assert ours.weights_checksum() == before
        if kernels == "auto":
            policy = Policy(ours, wrapped.whole)  # ignores the vision tower
            policy.sync()
            assert ours.weights_checksum() == before
        head = "lm_head.weight" if wrapped.whole.config.tie_word_embeddings else None
        given = {EMBEDDING: other.get_parameter(EMBEDDING)}
        ours.update_weights(given, partial=True, blocking=True)
        with pytest.raises(WeightError, match=r"^model\.embed_tokens\.weight: occurs twice"):
            ours.update_weights(
                [*given.items(), ("model.embed_tokens.weight", given[EMBEDDING])], partial=True, blocking=True
            )
        with pytest.raises(WeightError, match=r"^model\.tower\.x: the model has no such tensor"):
            ours.update_weights({**dict(other.named_parameters()), "model.tower.x": torch.zeros(2)}, blocking=True)
        if head is not None:
            with pytest.raises(WeightError, match="differs from"):
                ours.update_weights({**given, head: given[EMBEDDING] + 1}, partial=True, blocking=True)


def test_ranks_of_a_divided_model_take_the_trainers_names(wrapped: Wrapped) -> None:
    with open_ranks(config(wrapped.directory, kernels="off", tensor_parallel=2)) as ours:
        assert gap(wrapped.text, IDS, ours.score(IDS)) < 1e-4
        ours.update_weights(wrapped.whole.named_parameters(), blocking=True)
        assert gap(wrapped.text, IDS, ours.score(IDS)) < 1e-4


def changed(wrapped: Wrapped, directory: Path, fields: dict[str, Any], more: dict[str, torch.Tensor]) -> Path:
    """Write a copy of a model with other fields and further tensors."""
    found = json.loads((wrapped.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(found | fields))
    save_file(load_file(wrapped.directory / "model.safetensors") | more, directory / "model.safetensors")
    return directory


def test_ignored_tensors_are_counted_and_others_refused(wrapped: Wrapped, tmp_path: Path) -> None:
    path = changed(wrapped, tmp_path, {}, {"mtp.norm.weight": torch.zeros(48), "mtp.fc.weight": torch.zeros(2, 2)})
    checkpoint = open_checkpoint(path)
    assert checkpoint.num_parameters == sum(one.numel() for one in wrapped.text.parameters())
    counts = doctor.ignored_tensors(checkpoint)
    vision = (
        {"model.visual."} if "Qwen" in checkpoint.config.architecture else {"vision_tower.", "multi_modal_projector."}
    )
    assert counts["mtp."] == 2 and counts.keys() == {"mtp.", *vision}
    assert sum(counts.values()) + len(checkpoint.sources) == len(load_file(path / "model.safetensors"))
    row = doctor.of_model("m", checkpoint, "float32", doctor.Machine(1 << 34, 1 << 30, has_kernels=False))
    assert row["ignored_tensors"] == sum(counts.values()) and row["weight_bytes"] == 4 * checkpoint.num_parameters
    unknown = changed(wrapped, tmp_path, {}, {"audio_tower.x": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"has audio_tower\.x, which the model does not have"):
        InferenceEngine(config(unknown, kernels="off"))
    both = changed(wrapped, tmp_path, {}, {"model.norm.weight": torch.zeros(48)})
    with pytest.raises(ModelError, match=r"two tensors for model\.norm\.weight"):
        open_checkpoint(both)


def test_prompts_with_tokens_of_images_are_refused(wrapped: Wrapped) -> None:
    with InferenceEngine(config(wrapped.directory, kernels="off")) as ours:
        ours.generate([IDS], SamplingParams(max_tokens=2))
        text = r"token id 150 at position 2 is the model's image_token_(id|index): images and videos are not supported$"
        for call in (lambda ids: ours.generate([ids]), ours.score, ours.embed, ours.add_request):
            with pytest.raises(BadRequest, match=text) as caught:
                call([3, 4, 150, 5])
            assert caught.value.field == "prompt"


def test_both_files_end_tokens_and_the_outer_tie_count(wrapped: Wrapped) -> None:
    found = open_checkpoint(wrapped.directory).config
    kind = wrapped.kind
    assert found.eos_token_ids == ((1, 7) if kind == "gemma3" else (2,))
    assert found.tie_embeddings is (kind not in ("mistral3", "ministral3"))
    assert found.architecture.endswith(f", text part of {type(wrapped.whole).__name__}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {"model_type": "mistral4"}}, "text_config: unknown architecture 'mistral4'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config ('fp8') is not supported"),
        ({"image_token_id": "x", "image_token_index": "x"}, "must be an integer"),
    ],
)
def test_invalid_fields_are_named(wrapped: Wrapped, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(changed(wrapped, tmp_path, fields, {}))
    assert message in str(caught.value) and "\n" not in str(caught.value)
