"""GGUF files of Qwen3.5, written as llama.cpp's converter writes them, compared with the Hugging Face files."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from nano_inference import BadRequest, EngineConfig, InferenceEngine, ModelError, SamplingParams, weights_checksum
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.weights.directory import save_weights
from tests.loading.tiny_models import finish, random_blocks, read_all, write_metadata
from tests.models.families import gap
from tests.models.hybrids import make_hybrid
from tests.parallel.ranks import open_ranks

IDS = [5, 9, 130, 2, 44, 17, 80, 3, 71, 12, *range(20, 120)]
SIZES = {"linear_num_value_heads": 8, "linear_value_head_dim": 32, "linear_key_head_dim": 16}  # 256 values a layer
HEADS = (2, 8)


def tiled(values: np.ndarray, axis: int, num_k: int, num_v: int) -> np.ndarray:
    """Return the heads of an axis in the converter's order: the first of each key head, then the second of each."""
    shape = values.shape
    split = values.reshape(*shape[:axis], num_k, num_v // num_k, -1, *shape[axis + 1 :])
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1).reshape(shape))


def untiled(values: np.ndarray, axis: int, num_k: int, num_v: int) -> np.ndarray:
    return tiled(values, axis, num_v // num_k, num_v)


def rearranged(model: Any) -> dict[str, np.ndarray]:
    """Return the weights with value heads in the converter's order, under Hugging Face names."""
    config, out = model.config, {}
    heads = (config.linear_num_key_heads, config.linear_num_value_heads)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        part = name.split("linear_attn.")[-1]
        if part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            values = tiled(values, 0, *heads)
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            keys = 2 * heads[0] * config.linear_key_head_dim
            values = np.concatenate((values[:keys], tiled(values[keys:], 0, *heads)))
        elif part == "out_proj.weight":
            values = tiled(values, 1, *heads)
        out[name] = values
    return out


def converted(model: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a GGUF file of the model, by its names."""
    out = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, model.config.num_hidden_layers)
    for name, values in rearranged(model).items():
        if name.endswith("A_log"):
            values = -np.exp(values.astype(np.float64)).astype(np.float32)  # numpy's float32 is 2 units off
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + 1
        name = name.replace("dt_bias", "dt_proj.bias")
        values = values.squeeze() if "conv1d" in name else values
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    if model.config.tie_word_embeddings:
        del out["output.weight"]
    return out


def save_expanded(model: Any, directory: Path) -> Path:
    """Write the same model with a copy of a key head for each value head, these in the converter's order.

    It adds the columns of `out_proj` in the order in which the GGUF file has them.
    """
    config = deepcopy(model.config)
    keys, each = (
        config.linear_num_key_heads * config.linear_key_head_dim,
        config.linear_num_value_heads // config.linear_num_key_heads,
    )
    config.linear_num_key_heads = config.linear_num_value_heads
    state = {}
    for name, values in rearranged(model).items():
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            q, k, v = values[:keys], values[keys : 2 * keys], values[2 * keys :]
            values = np.concatenate((*[q] * each, *[k] * each, v))
        state[name] = torch.from_numpy(values)
    whole = type(model)(config).float()
    whole.load_state_dict(state)
    whole.save_pretrained(directory)
    return directory


def write(
    path: Path, model: Any, blocks: dict[str, tuple[Kind, np.ndarray]] | None = None, num_drafting: int = 0
) -> Path:
    """Write a GGUF file; `blocks` replaces tensors by quantised ones. Blocks that draft tokens are zeros."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN35])
    config.num_hidden_layers += num_drafting
    write_metadata(writer, config, config.head_dim)
    config.num_hidden_layers -= num_drafting
    rope = config.rope_parameters
    writer.add_uint32("qwen35.rope.dimension_count", int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32("qwen35.nextn_predict_layers", num_drafting)
    found = converted(model)
    for index in range(config.num_hidden_layers, config.num_hidden_layers + num_drafting):
        found[f"blk.{index}.nextn.eh_proj.weight"] = np.zeros((8, 16), np.float32)
        found[f"blk.{index}.attn_q.weight"] = np.zeros((8, 16), np.float32)
    for name, values in found.items():
        kind, data = (blocks or {}).get(name, (Kind.F32, values))
        writer.add_tensor(name, data, raw_dtype=kind)
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    tokens[7] = "<|image_pad|>"
    writer.add_token_list(tokens)
    finish(writer)
    return path


def scores(path: Path, kernels: str) -> torch.Tensor:
    config = EngineConfig(model_path=str(path), device="cpu", kv_cache_bytes=8 << 20, kernels=kernels)  # type: ignore[arg-type]
    with InferenceEngine(config) as engine:
        return torch.tensor(engine.score(IDS))


def check(path: Path, directory: Path, kernels: str) -> None:
    """Compare a GGUF file with Hugging Face files: equal bits with the C kernels."""
    found, expected = scores(path, kernels), scores(directory, kernels)
    if kernels == "auto":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(
    ("name", "more"),
    [("plain", SIZES), ("equal-heads-tied", {}), ("two-taps", {"attention_bias": False}), ("wide-values", {})],
)
def test_a_gguf_file_equals_the_hugging_face_file(
    name: str, more: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    model = make_hybrid(name, tmp_path / "hf", {"max_position_embeddings": 256, **more})
    check(write(tmp_path / "m.gguf", model, num_drafting=1), tmp_path / "hf", kernels)


def replace_out(model: Any, kind: Kind) -> dict[str, tuple[Kind, np.ndarray]]:
    """Replace `out_proj` by values of a type; return those of the file. A block of Q4_K has columns of eight heads."""
    rng, blocks = np.random.default_rng(5), {}
    for index in (0, 1, 2):
        weight = model.model.layers[index].linear_attn.out_proj.weight.data
        own = random_blocks(48, 256, kind, rng) if kind == Kind.Q4_K else None
        data = gguf.quants.quantize(tiled(weight.numpy(), 1, *HEADS), kind) if own is None else own
        weight.copy_(torch.from_numpy(untiled(gguf.quants.dequantize(data, kind), 1, *HEADS)))
        blocks[f"blk.{index}.ssm_out.weight"] = (kind, data)
    return blocks


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0, Kind.Q4_K])
def test_quantised_heads_are_moved_by_blocks_or_keep_their_order(kind: Kind, kernels: str, tmp_path: Path) -> None:
    model = make_hybrid("plain", tmp_path / "hf", {"max_position_embeddings": 256, **SIZES})
    path = write(tmp_path / "m.gguf", model, replace_out(model, kind))
    checkpoint = open_checkpoint(path)
    type_name = "bfloat16" if kind == Kind.BF16 else kind.name
    assert checkpoint.sources["model.layers.0.linear_attn.out_proj.weight"].dtype == type_name
    if kind == Kind.Q4_K:  # a block of 256 holds eight heads; the sums have the file's order
        check(path, save_expanded(model, tmp_path / "expanded"), kernels)
    else:
        model.save_pretrained(tmp_path / "hf")
        check(path, tmp_path / "hf", kernels)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_K])
def test_updates_have_the_trainers_order_of_heads(kind: Kind, kernels: Any, tmp_path: Path) -> None:
    old, new = (make_hybrid("plain", tmp_path / name, SIZES) for name in ("old", "new"))
    with torch.no_grad():
        for weight in new.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    named = {name.replace("model.", "model.language_model.", 1): one for name, one in new.named_parameters()}
    path = write(tmp_path / "m.gguf", old, replace_out(old, kind))
    assert open_checkpoint(path).config.terms.is_tiled == (kind == Kind.Q4_K)
    config = EngineConfig(model_path=str(path), device="cpu", kernels=kernels)
    with InferenceEngine(replace(config, kv_cache_bytes=8 << 20)) as engine:
        engine.update_weights(named, blocking=True, checksum=weights_checksum(named))
        assert gap(new, IDS, engine.score(IDS)) < 1e-4 < gap(old, IDS, engine.score(IDS))
        engine.update_weights(save_weights(old.named_parameters(), tmp_path / "files"), blocking=True)
        assert gap(old, IDS, engine.score(IDS)) < 1e-4
        assert engine.weights_checksum() == weights_checksum(old.named_parameters())
        part = "model.layers.2.linear_attn.out_proj.weight"
        engine.update_weights({part: new.get_parameter(part)}, partial=True, blocking=True)
        with torch.no_grad():
            old.get_parameter(part).copy_(new.get_parameter(part))
        assert gap(old, IDS, engine.score(IDS)) < 1e-4


def test_drafting_blocks_are_ignored_and_tokens_of_images_refused(tmp_path: Path) -> None:
    model = make_hybrid("plain", tmp_path / "hf", {"max_position_embeddings": 256})
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", model, num_drafting=1))
    assert checkpoint.config.num_layers == 4 and len(checkpoint.ignored) == 2
    assert checkpoint.config.kv_layers == (3,)
    config = EngineConfig(model_path=str(checkpoint.path), device="cpu", kv_cache_bytes=8 << 20, kernels="off")
    with InferenceEngine(config) as engine:
        assert len(engine.generate([IDS], SamplingParams(max_tokens=2, ignore_eos=True))[0].completion_tokens) == 2
        with pytest.raises(BadRequest, match=r"token id 7 at position 1 is the model's <\|image_pad\|>: images"):
            engine.generate([[5, 7]])


def test_decays_and_norms_are_read_to_a_rounding(tmp_path: Path) -> None:
    model = make_hybrid("plain", tmp_path / "hf", {"max_position_embeddings": 256, **SIZES})
    found = read_all(open_checkpoint(write(tmp_path / "m.gguf", model)))
    for name, values in model.state_dict().items():
        np.testing.assert_allclose(found[name].numpy(), values.numpy(), rtol=2e-7, atol=2e-7, err_msg=name)


def test_ranks_divide_value_heads_unless_blocks_join_them(tmp_path: Path) -> None:
    model = make_hybrid("plain", tmp_path / "hf", {"max_position_embeddings": 256, **SIZES})
    path = write(tmp_path / "m.gguf", model)
    config = EngineConfig(model_path=str(path), device="cpu", kv_cache_bytes=8 << 20, kernels="off", tensor_parallel=2)
    with open_ranks(config) as engine:
        torch.testing.assert_close(torch.tensor(engine.score(IDS)), scores(path, "off"), rtol=0, atol=2e-5)
    path = write(path, model, replace_out(model, Kind.Q4_K))
    with pytest.raises(ValueError, match=r"^tensor_parallel: 2 does not divide the value heads of this GGUF file"):
        InferenceEngine(replace(config, model_path=str(path)))


def test_a_decay_that_is_no_logarithm_is_refused(tmp_path: Path) -> None:
    model = make_hybrid("plain", tmp_path / "hf", {"max_position_embeddings": 256})
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.fill_(-torch.inf)  # a decay of 0
    with pytest.raises(ModelError, match=r"ssm_a must be below 0"):
        scores(write(tmp_path / "m.gguf", model), "off")
