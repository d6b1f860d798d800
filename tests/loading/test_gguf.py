"""GGUF files in the converter's conventions, compared with the state dict and with transformers' reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.loading.gguf_file import GgufTensor, read_gguf
from nano_inference.loading.packed import Exchanged, PackedTensor
from nano_inference.models.config import ModelConfig
from nano_inference.models.rope import frequencies
from nano_inference.types import ModelError
from tests.loading.tiny_models import (
    GGUF_ARCHITECTURES,
    HALVES,
    finish,
    gguf_bytes,
    make_model,
    random_blocks,
    read_all,
    save,
    weights_of,
    write_gguf,
)

pytestmark = pytest.mark.slow


def can_dequantise(kind: Kind) -> bool:
    """Return whether the gguf package dequantises a kind of block."""
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


UNPACKABLE = [kind for kind in Kind if kind not in (Kind.F32, Kind.F16, Kind.BF16) and can_dequantise(kind)]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, norms: bool = True) -> None:
    """Assert equality; Gemma's norms may differ by the rounding of adding and subtracting 1."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if norms or not name.endswith("norm.weight"):
            assert torch.equal(found[name], tensor), name
        else:
            assert torch.equal(found[name], (tensor + 1) - 1), name


@pytest.mark.parametrize("family", GGUF_ARCHITECTURES)
def test_gguf_matches_hugging_face_directory(family: str, tmp_path: Path) -> None:
    # The file has no key for Gemma's attention scale; all but the largest use 1 / sqrt(head size).
    model = make_model(family, **({"query_pre_attn_scalar": 16} if family == "gemma3" else {}))
    ours = open_checkpoint(write_gguf(tmp_path / "m.gguf", family, model))
    same(read_all(ours), weights_of(model), norms=not family.startswith("gemma"))
    directory = open_checkpoint(save(model, tmp_path / "hf"))
    assert facts(ours.config) == facts(directory.config)
    assert (ours.dtype, ours.path) == ("float32", tmp_path / "m.gguf")
    assert ours.tokenizer.gguf is not None and ours.tokenizer.gguf["tokenizer.ggml.eos_token_id"] == 2


def facts(config: ModelConfig) -> dict[str, Any]:
    """Return the properties that do not depend on the file format: windows, rotations by value, sizes."""
    plain = {
        name: getattr(config, name) for name in ModelConfig.__slots__ if name not in ("layers", "ropes", "norm_eps")
    }
    plain["norm_eps"] = pytest.approx(config.norm_eps, rel=1e-6)
    plain["attention_scale"] = pytest.approx(config.scale)
    plain["layers"] = [
        (layer.window, None if layer.rope is None else config.ropes[layer.rope].theta) for layer in config.layers
    ]
    return plain


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_gguf_matches_transformers(family: str, tmp_path: Path) -> None:
    # transformers ignores the file's head size for Qwen3 and uses 128.
    model = make_model(family, **({"head_dim": 128} if family == "qwen3" else {}))
    path = write_gguf(tmp_path / "m.gguf", family, model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    found = read_all(open_checkpoint(path))
    for name, tensor in weights_of(theirs).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_quantised_model_matches_dequantised_model(family: str, kind: Kind, tmp_path: Path) -> None:
    model = make_model(family, intermediate_size=64)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", family, model, kind=kind))
    expected = {}
    for name, tensor in weights_of(model).items():
        if tensor.dim() > 1:
            tensor = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
        expected[name] = tensor
    same(read_all(checkpoint), expected, norms=family != "gemma3")
    assert checkpoint.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind.name, kind.name)


def one_tensor(path: Path, data: np.ndarray, kind: Kind) -> GgufTensor:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t.weight", data, raw_dtype=kind)
    finish(writer)
    return read_gguf(path).tensors["t.weight"]


@pytest.mark.parametrize("kind", UNPACKABLE)
@pytest.mark.parametrize("piece_values", [1, 3 * 512, 2**20])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")
def test_dequantising_in_pieces_matches_gguf_package(kind: Kind, piece_values: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(int(kind))
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    packed = rng.integers(0, 256, (24, 512 // block * block_bytes), dtype=np.uint8)
    tensor = one_tensor(tmp_path / "x.gguf", packed, kind)
    whole = torch.from_numpy(gguf.quants.dequantize(packed, kind))
    target = torch.empty(24, 512)
    PackedTensor(tmp_path / "x.gguf", tensor, piece_values=piece_values).read_into(target)
    assert torch.equal(target.nan_to_num(nan=7.0), whole.nan_to_num(nan=7.0))
    PackedTensor(tmp_path / "x.gguf", tensor, row_order=Exchanged((-1, 4, 2, 1)), piece_values=piece_values).read_into(
        target
    )
    undone = whole.view(3, 4, 2, 512).transpose(1, 2).reshape(24, 512)
    assert torch.equal(target.nan_to_num(nan=7.0), undone.nan_to_num(nan=7.0))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_K])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")
def test_a_part_of_a_tensor_is_that_of_the_whole(kind: Kind, tmp_path: Path) -> None:
    packed = random_blocks(24, 512, kind, np.random.default_rng(1)) if kind in HALVES else plain_rows(kind)
    source = PackedTensor(
        tmp_path / "x.gguf", one_tensor(tmp_path / "x.gguf", packed, kind), row_order=Exchanged((-1, 4, 2, 1))
    )
    whole = torch.empty(24, 512)
    source.read_into(whole)
    for start, stop in ((0, 8), (8, 24)):
        part = torch.empty(stop - start, 512)
        source.rows(start, stop).read_into(part)
        assert torch.equal(part, whole[start:stop])
    straight = replace(source, row_order=None)
    straight.read_into(whole)
    for start, stop in ((0, 256), (256, 512), (100, 300), (511, 512)):
        columns = torch.empty(24, stop - start)
        assert straight.columns(start, stop).shape == (24, stop - start)
        straight.columns(start, stop).read_into(columns)
        assert torch.equal(columns, whole[:, start:stop])


def plain_rows(kind: Kind) -> np.ndarray:
    return gguf.quants.quantize(np.random.default_rng(2).standard_normal((24, 512), dtype=np.float32), kind)


def test_llama3_rope_factors_match_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = make_model("llama", head_dim=16, rope_parameters={**rope, "original_max_position_embeddings": 64})
    theirs = model.model.rotary_emb.inv_freq
    plain = 5e5 ** -(torch.arange(0, 16, 2).double() / 16)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", (plain / theirs.double()).float().numpy())

    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", model, more=more))
    assert checkpoint.config.ropes[0].kind == "factors"
    frequency, scale = frequencies(checkpoint.config.ropes[0])
    torch.testing.assert_close(frequency, theirs, rtol=1e-6, atol=0)
    assert scale == 1.0 and "rope_freqs.weight" not in dict(checkpoint.tensors())


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_matches_hugging_face_directory(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 5e5, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
    model = make_model("qwen2", rope_parameters=rope)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(64)

    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2", model, more=more)).config
    frequency, scale = frequencies(config.ropes[0])
    torch.testing.assert_close(frequency, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(model.model.rotary_emb.attention_scaling)


def opened(tmp_path: Path, family: str, more: Callable[[gguf.GGUFWriter], None], **changes: Any) -> Checkpoint:
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", family, make_model(family, **changes), more=more))


@pytest.mark.parametrize(("family", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_attention_scale_of_largest_gemma(family: str, num_layers: int, tmp_path: Path) -> None:
    model = make_model(family, num_hidden_layers=num_layers, query_pre_attn_scalar=32 // 4)
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", family, model)).config
    assert config.scale == pytest.approx(model.model.layers[0].self_attn.scaling)


def test_all_end_tokens_are_read(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "b", "c", "d", "<end_of_turn>"])
        writer.add_eot_token_id(3)

    assert opened(tmp_path, "gemma2", more).config.eos_token_ids == (2, 3, 4)
    assert opened(tmp_path, "llama", more).config.eos_token_ids == (2, 3, 4)


def test_equal_per_layer_head_counts_are_accepted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"))
    data = rewritten(path, "llama.attention.head_count_kv", [2] * 8)
    assert open_checkpoint(data).config.num_kv_heads == 2
    with pytest.raises(ModelError, match="differs from layer to layer"):
        open_checkpoint(rewritten(path, "llama.attention.head_count_kv", [2] * 7 + [4]))


def rewritten(path: Path, key: str, value: Any) -> Path:
    """Change one metadata key of a file; return its path."""
    reader, out = gguf.GGUFReader(path), path.with_name("rewritten.gguf")
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", key):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    add = writer.add_array if isinstance(value, list) else writer.add_string
    if isinstance(value, float):
        add = writer.add_float32
    if isinstance(value, int):
        add = writer.add_uint32
    if value is not None:
        add(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return out


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", None, "block_count is missing"),
        ("llama.block_count", "8", "block_count must be an integer"),
        ("llama.block_count", 2**31, "block_count must be an integer"),
        ("llama.embedding_length", 33, "token_embd.weight has the shape"),
        ("llama.attention.head_count", 0, "head_count"),
        ("llama.attention.key_length", 7, "value_length differs"),
        ("llama.rope.dimension_count", 9, "rope.dimension_count must be at most"),
        ("llama.rope.dimension_count", 3, "rotary_dim must be even"),
        ("llama.rope.freq_base", float("nan"), "rope.freq_base"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.attention.layer_norm_rms_epsilon", float("inf"), "layer_norm_rms_epsilon"),
        ("tokenizer.ggml.eos_token_id", "x", "eos_token_id"),
        ("general.alignment", 48, "power of two"),
    ],
)
def test_invalid_metadata_is_reported_by_key(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"))
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(rewritten(path, key, value))
    assert "rewritten.gguf" in str(caught.value)


def test_unknown_tensors_and_types_are_rejected(tmp_path: Path) -> None:
    def alien(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_qkv.weight", np.zeros((4, 4), np.float32))

    def integers(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.weight2", np.zeros((4, 4), np.int8))

    with pytest.raises(ModelError, match=r"'blk.0.attn_qkv.weight' is not known in architecture llama"):
        opened(tmp_path, "llama", alien)
    with pytest.raises(ModelError, match="type I8 cannot be unpacked"):
        opened(tmp_path, "llama", integers)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    finish(writer)
    with pytest.raises(ModelError, match="unknown architecture 'bert'; known: llama, qwen2"):
        open_checkpoint(tmp_path / "m.gguf")


def test_header_matches_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tmp_path))
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = field.contents()
            assert ours.metadata[name] == (tuple(value) if isinstance(value, list) else value), name
    assert len(ours.metadata) == len(theirs.fields) - 3
    assert ours.data_offset == theirs.data_offset
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.offset, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert entry.shape == tuple(reversed(tensor.shape.tolist())) and entry.type_name == tensor.tensor_type.name
