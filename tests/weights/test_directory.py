"""`save_weights`, `weights_in` and `weights_checksum`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nano_inference import ModelError, WeightError, save_weights, weights_checksum, weights_in
from tests.pickles import Runs
from tests.weights.pairs import OpenEngine, Pair


def test_saved_directory_updates_an_engine(untied: Pair, tmp_path: Path, open_engine: OpenEngine) -> None:
    directory = save_weights(untied.new.named_parameters(), tmp_path / "deep" / "step-1")
    assert sorted(file.name for file in directory.iterdir()) == ["STABLE", "model.safetensors"]
    assert list(directory.parent.iterdir()) == [directory], "the hidden directory was renamed"
    engine = open_engine(untied)
    for version, source in enumerate((directory, str(directory), weights_in(directory)), start=1):
        assert engine.update_weights(source, blocking=version % 2 == 0) == version
        assert engine.finish_update() == version
    assert engine.weights_checksum() == weights_checksum(untied.new.named_parameters())


def test_sharded_transformers_directory_loads_without_marker(
    tied: Pair, tmp_path: Path, open_engine: OpenEngine
) -> None:
    tied.new.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = open_engine(tied)
    with pytest.raises(WeightError, match="has no file STABLE, so it is not complete"):
        engine.update_weights(tmp_path, blocking=True)
    engine.update_weights(weights_in(tmp_path, marker=None), blocking=True)
    assert engine.weights_checksum() == weights_checksum(tied.new.named_parameters())


def write_pickles(named: dict[str, torch.Tensor], directory: Path, num_shards: int) -> Path:
    """Write what `save_pretrained(safe_serialization=False)` of Transformers 4 writes."""
    directory.mkdir()
    if num_shards == 1:
        torch.save(named, directory / "pytorch_model.bin")
        return directory
    files = [f"pytorch_model-{shard + 1:05d}-of-{num_shards:05d}.bin" for shard in range(num_shards)]
    shard_of = {name: files[index % num_shards] for index, name in enumerate(named)}
    for file in files:
        torch.save({name: tensor for name, tensor in named.items() if shard_of[name] == file}, directory / file)
    index = {"metadata": {"total_size": 0}, "weight_map": shard_of}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("num_shards", [1, 3])
def test_pytorch_model_bin_updates_an_engine(
    num_shards: int, tied: Pair, tmp_path: Path, open_engine: OpenEngine
) -> None:
    directory = write_pickles(tied.new.state_dict(), tmp_path / "step", num_shards)
    (directory / "training_args.bin").write_bytes(b"not weights")
    engine = open_engine(tied)
    engine.update_weights(weights_in(directory, marker=None), blocking=True)
    assert engine.weights_checksum() == weights_checksum(tied.new.named_parameters())
    save_file({"model.norm.weight": torch.ones(3)}, directory / "model.safetensors")
    assert [name for name, _ in weights_in(directory, marker=None)] == ["model.norm.weight"], "safetensors come first"


def test_pytorch_model_bin_never_runs_code(untied: Pair, tmp_path: Path, open_engine: OpenEngine) -> None:
    directory, marker = tmp_path / "step", tmp_path / "marker"
    write_pickles({**untied.named(), "x": Runs(os.system, f"touch {marker}")}, directory, 1)  # type: ignore[dict-item]
    engine = open_engine(untied)
    before = engine.weights_checksum()
    with pytest.raises(WeightError, match=r"pytorch_model\.bin: its pickle names 'posix\.system'"):
        engine.update_weights(weights_in(directory, marker=None), blocking=True)
    assert engine.weights_checksum() == before and not marker.exists()


@pytest.mark.parametrize("file", ["../other/pytorch_model.bin", "other.pt"])
def test_index_of_pytorch_model_bin_names_plain_files(file: str, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match=r"a shard must be a plain \.bin file name"):
        list(weights_in(tmp_path, marker=None))


def test_save_weights_writes_a_tied_tensor_once(tied: Pair, tmp_path: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(tied)
    engine.update_weights(save_weights(tied.new.state_dict(), tmp_path / "step"), blocking=True)
    assert engine.weights_checksum() == weights_checksum(tied.new.named_parameters())


def test_save_weights_rejects_existing_directory(untied: Pair, tmp_path: Path) -> None:
    directory = save_weights(untied.named(), tmp_path / "step")
    with pytest.raises(WeightError, match="exists already"):
        save_weights(untied.named(), directory)


def test_failed_save_leaves_no_files(untied: Pair, tmp_path: Path) -> None:
    def dying() -> object:
        yield from list(untied.named().items())[:2]
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        save_weights(dying(), tmp_path / "step")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def write_wrong_shape(file: Path) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["model.norm.weight"]
    entry["shape"] = [1, *entry["shape"]]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is it truncated"),
        (write_wrong_shape, r"model\.norm\.weight: the update has the shape"),
        (Path.unlink, "has neither"),
    ],
)
def test_damaged_files_leave_the_weights_unchanged(
    damage: object, message: str, untied: Pair, tmp_path: Path, open_engine: OpenEngine
) -> None:
    directory = save_weights(untied.named(), tmp_path / "step")
    damage(directory / "model.safetensors")  # type: ignore[operator]
    engine = open_engine(untied)
    before = engine.weights_checksum()
    for blocking in (True, False):
        with pytest.raises(WeightError, match=message):
            engine.update_weights(directory, blocking=blocking)
            engine.finish_update()
    assert engine.weights_checksum() == before and engine.get_weight_version() == 0


def test_weights_in_detects_files_changed_while_reading(untied: Pair, tmp_path: Path) -> None:
    directory = save_weights(untied.named(), tmp_path / "step")
    with pytest.raises(WeightError, match="changed while they were read"):
        for index, _ in enumerate(weights_in(directory)):
            if index == 3:
                os.utime(directory / "model.safetensors", ns=(1, 1))


def test_weights_in_rejects_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no such directory"):
        list(weights_in(tmp_path / "none"))


def test_checksum_depends_on_names_shapes_and_bytes_but_not_order() -> None:
    named = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    base = weights_checksum(named.items())
    assert base == weights_checksum(reversed(named.items()))
    assert base == weights_checksum({"a": named["a"].T.contiguous().T, "b": named["b"]}.items())
    others = [
        {**named, "b": torch.ones(2, dtype=torch.float64)},
        {**named, "b": torch.tensor([1.0, -1.0])},
        {"a": named["a"].view(3, 2), "b": named["b"]},
        {"a": named["a"], "c": named["b"]},
    ]
    assert len({base, *(weights_checksum(other.items()) for other in others)}) == 5
    assert weights_checksum(others[0].items(), torch.float32) == base
