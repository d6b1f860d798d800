"""Hugging Face directories saved by transformers are read exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nano_inference.loading import pieces
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.safetensors_file import INDEX_NAME, read_header
from nano_inference.types import ModelError
from tests.loading.tiny_models import FAMILIES, make_model, read_all, save, weights_of


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_match_the_state_dict(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    checkpoint = open_checkpoint(save(model, tmp_path))
    found, expected = read_all(checkpoint), weights_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (checkpoint.dtype, checkpoint.path) == ("float32", tmp_path)
    assert checkpoint.tokenizer == (str(tmp_path), None)
    assert checkpoint.generation["eos_token_id"] == 2


def test_shards_are_read_by_index(tmp_path: Path) -> None:
    model = make_model("llama")
    save(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    found, expected = read_all(open_checkpoint(str(tmp_path))), weights_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_dtypes_are_converted(stored: torch.dtype, wanted: torch.dtype, num_pieces: int, tmp_path: Path) -> None:
    num_rows = 37 + (num_pieces - 1) * pieces.PIECE_BYTES // stored.itemsize // 5
    values = torch.randn(num_rows, 5).to(stored)
    save_file({"a": values, "b": torch.tensor(3.0).to(stored), "c": torch.zeros(0, 4, dtype=stored)}, tmp_path / "x")
    header = read_header(tmp_path / "x")
    fused = torch.full((7 + num_rows + 6, 5), torch.nan, dtype=wanted)
    header["a"].read_into(fused[7 : 7 + num_rows])
    assert torch.equal(fused[7 : 7 + num_rows], values.to(wanted))
    assert fused[:7].isnan().all() and fused[7 + num_rows :].isnan().all()
    for name, expected in (("b", torch.tensor(3.0)), ("c", torch.zeros(0, 4))):
        target = torch.empty(header[name].shape, dtype=wanted)
        header[name].read_into(target)
        assert torch.equal(target, expected.to(wanted))


def test_file_truncated_after_opening_is_rejected(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(make_model("llama"), tmp_path))
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ModelError, match="1 bytes early"):
        read_all(checkpoint)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        read_all(checkpoint)


def with_index(directory: Path, weight_map: object) -> Path:
    """Write a sharded directory with another index."""
    save(make_model("llama"), directory, max_shard_size="40KB")
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "plain .safetensors file name"),
        ({"a": "sub/model.safetensors"}, "plain .safetensors file name"),
        ({"a": "x\0.safetensors"}, "plain .safetensors file name"),
        ({"a": "model.bin"}, "plain .safetensors file name"),
        ({"a": 3}, "plain .safetensors file name"),
        ({"a": "absent.safetensors"}, "absent.safetensors: cannot be read"),
        ({}, "weight_map is missing or empty"),
        ([], "weight_map must be an object"),
    ],
)
def test_invalid_index_is_rejected(weight_map: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(with_index(tmp_path, weight_map))


def test_missing_shard_or_tensor_is_rejected(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no tensor 'model.norm.weight'"):
        open_checkpoint(tmp_path)
    (tmp_path / index["weight_map"]["model.embed_tokens.weight"]).unlink()
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_columns_of_a_file_are_those_of_the_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(7, 12).to(torch.bfloat16)
    save_file({"first": torch.zeros(5), "x": values}, tmp_path / "model.safetensors")
    source = read_header(tmp_path / "model.safetensors")["x"]
    parts = {
        source.rows(2, 5): values[2:5],
        source.columns(3, 9): values[:, 3:9],
        source.columns(3, 9).rows(1, 7): values[1:7, 3:9],
        source.rows(1, 7).columns(11, 12): values[1:7, 11:12],
        source.columns(4, 4): values[:, 4:4],
    }
    for part, expected in parts.items():
        target = torch.empty(part.shape, dtype=dtype)
        part.read_into(target)
        assert torch.equal(target, expected.to(dtype))
