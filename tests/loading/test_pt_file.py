"""Reading pickled weights: bit-equal tensors, no code execution, one-line errors for damaged files."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.loading.pt_file import read_pt
from nano_inference.types import ModelError
from tests.pickles import Runs


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "transformer.wte.weight": torch.randn(8, 4).bfloat16(),
        "lm_head.weight": torch.randn(8, 4),
        "resid_lambdas": torch.randn(2),
        "half": torch.randn(3).half(),
        "double": torch.randn(3).double(),
        "scalar": torch.tensor(0.5),
        "none": torch.empty(0, 4),
    }


def message(path: Path) -> str:
    """Return the error message, a single line naming the file."""
    with pytest.raises(ModelError) as caught:
        read_pt(path)
    text = str(caught.value)
    assert path.name in text and "\n" not in text and len(text) < 500
    assert "weights_only" not in text, "torch proposes to trust the file"
    return text


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_tensors_are_bit_equal(tmp_path: Path, prefix: str, kind: type[dict[str, Any]]) -> None:
    path, given = tmp_path / "model_000001.pt", tensors()
    torch.save(kind({prefix + name: t for name, t in given.items()}), path)
    read = read_pt(path)
    assert list(read) == list(given)
    for name, tensor in given.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_views_of_one_storage_are_read(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    torch.save({"a": whole[2:8].view(2, 3), "b": whole, "c": whole}, tmp_path / "x.pt")
    read = read_pt(tmp_path / "x.pt")
    assert torch.equal(read["a"], whole[2:8].view(2, 3)) and torch.equal(read["c"], whole)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_zip_file_is_memory_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(2**16)}, path)
    read = read_pt(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    del read
    assert str(path) not in Path("/proc/self/maps").read_text()


ATTACKS: dict[str, Callable[[str], object]] = {
    "system": lambda mark: Runs(os.system, f"touch {mark}"),
    "eval": lambda mark: Runs(eval, f"open({mark!r}, 'w')"),
    "getattr": lambda mark: Runs(getattr, "", "join"),
    "path": lambda mark: Path(mark),
    "bytearray": lambda mark: Runs(bytearray, 1 << 40),
    "torch.Tensor": lambda mark: Runs(torch.Tensor, 1 << 40),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_do_not_run(tmp_path: Path, name: str) -> None:
    mark, path = tmp_path / "mark", tmp_path / "x.pt"
    attack = ATTACKS[name](str(mark))
    for payload in (attack, {"a": torch.ones(2), "b": attack}, {"a": [attack]}):
        torch.save(payload, path)
        assert "it is not executed" in message(path)
    path.write_bytes(pickle.dumps(attack))
    message(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([torch.ones(2)], "must contain a dict of tensors, got list"),
        ({}, "contains no tensors"),
        ({"a": {"b": torch.ones(2)}}, "'a' must be a tensor, got dict"),
        ({1: torch.ones(2)}, "name must be a string, got int"),
        ({"a": torch.ones(2), "_orig_mod.a": torch.ones(2)}, "has 'a' twice"),
        ({"a": torch.eye(3).to_sparse()}, "names 'torch._utils._rebuild_sparse_tensor'"),
        ({"a": torch.empty(10**12, device="meta")}, "_rebuild_meta_tensor_no_storage'"),
        ({"a": torch.ones(1).expand(10**9)}, "not contiguous"),
        ({"a": torch.ones(2, 3).T}, "not contiguous"),
        ({"a": torch.ones(2, dtype=torch.bool)}, "dtype bool"),
    ],
)
def test_only_flat_dicts_of_dense_tensors_are_accepted(tmp_path: Path, value: object, text: str) -> None:
    torch.save(value, tmp_path / "x.pt")
    assert text in message(tmp_path / "x.pt")


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Rewrite a zip file with changed records."""
    with zipfile.ZipFile(path) as old:
        records = {name: change(name, old.read(name)) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in records.items():
            new.writestr(name, data)


def test_torch_warnings_are_suppressed(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    # torch warns about every protocol except 2.
    newer = {b"\x80\x02": b"\x80\x03"}
    rewritten(tmp_path / "x.pt", lambda name, data: newer.get(data[:2], data[:2]) + data[2:])
    assert torch.equal(read_pt(tmp_path / "x.pt")["a"], torch.ones(2))


def test_format_before_torch_1_6_is_rejected_unread(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert "not a zip file" in message(tmp_path / "x.pt")
    mark = tmp_path / "mark"
    torch.save(ATTACKS["system"](str(mark)), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert "not a zip file" in message(tmp_path / "x.pt") and not mark.exists()


def test_too_many_views_of_a_storage_are_rejected(tmp_path: Path) -> None:
    one = torch.zeros(1 << 16)
    torch.save({"a": one, "b": one}, tmp_path / "x.pt")
    assert len(read_pt(tmp_path / "x.pt")) == 2
    torch.save({str(i): one for i in range(50)}, tmp_path / "x.pt")
    assert "more than 4 times the bytes of the file" in message(tmp_path / "x.pt")


def test_compressed_records_are_rejected(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "x.pt")
    rewritten(tmp_path / "x.pt", lambda name, data: data, zipfile.ZIP_DEFLATED)
    assert "is compressed" in message(tmp_path / "x.pt")


@pytest.mark.parametrize("count", [10**6, 2**31 - 1])
def test_huge_declared_size_is_rejected(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(54321)}, path)
    # The pickle contains 54321 twice, for the storage and the shape, as a 16-bit integer; replace it by 32 bits.
    old, new = b"M" + struct.pack("<H", 54321), b"J" + struct.pack("<i", count)
    rewritten(path, lambda name, data: data.replace(old, new) if name.endswith("data.pkl") else data)
    message(path)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for data in (b"PK\x03\x04", b"PK\x05\x06" + bytes(18), bytes(1000), b"\x80\x02}."):
        path.write_bytes(data)
        message(path)
    path.write_bytes(b"")
    assert "the file is empty" in message(path)
    assert "cannot be read" in message(tmp_path / "absent.pt")
    (tmp_path / "directory.pt").mkdir()
    message(tmp_path / "directory.pt")
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("a.txt", "hello")
    message(path)


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.randn(5), "b": torch.randn(3)}, path)
    data = path.read_bytes()
    for cut in range(0, len(data), 7):
        path.write_bytes(data[:cut])
        message(path)
