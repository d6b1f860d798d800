"""Damaged and malicious files raise a `ModelError` naming the file, quickly and with little memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.gguf_file import read_gguf
from nano_inference.loading.safetensors_file import read_header
from nano_inference.types import BadRequest, ModelError
from tests.loading.tiny_models import gguf_bytes, make_model, save


@pytest.fixture(scope="module")
def gguf_whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gguf_bytes(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", num_hidden_layers=1, vocab_size=8), tmp_path_factory.mktemp("hf"))


def is_rejected(path: Path, read: Callable[[Path], Any]) -> bool:
    """Return True if reading raised a one-line `ModelError` naming the file; other exceptions propagate."""
    try:
        read(path)
    except ModelError as error:
        assert path.name in str(error) and "\n" not in str(error) and len(str(error)) < 1000
        return True
    return False


def test_truncated_safetensors_is_rejected(directory: Path, tmp_path: Path) -> None:
    data = (directory / "model.safetensors").read_bytes()
    path = tmp_path / "x.safetensors"
    for cut in sorted({*range(0, len(data), 501), 0, 1, 7, 8, 9, len(data) - 1}):
        path.write_bytes(data[:cut])
        assert is_rejected(path, read_header), cut
    path.write_bytes(data + b"\0")
    assert is_rejected(path, read_header)


def safetensors_bytes(header: Any, num_bytes: int = 24) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry("I64", (3,))}, "dtype 'I64'; known: F64, F32, F16, BF16"),
        ({"a": entry([])}, "dtype"),
        ({"a": entry(shape=(2, 4))}, "shape takes 32 bytes"),
        ({"a": entry(shape=(2**62, 2**62))}, "shape takes"),
        ({"a": entry(shape=(2**62, 2**62, 0), offsets=(0, 0))}, "end at byte"),
        ({"a": entry(shape=(-2, -3))}, "shape"),
        ({"a": entry(shape=(True, 6))}, "shape"),
        ({"a": entry(shape=6)}, "shape"),
        ({"a": entry(shape=(1,) * 9)}, "shape"),
        ({"a": entry(offsets=(0,))}, "two data_offsets"),
        ({"a": entry(offsets=(24, 0))}, "data_offsets"),
        ({"a": entry(offsets=(24, 48))}, "does not follow"),
        ({"a": entry(shape=(3,), offsets=(0, 12)), "b": entry(shape=(3,), offsets=(6, 18))}, "overlaps"),
        ({"a": entry(shape=(3,), offsets=(0, 12))}, "truncated"),
        ({"a": entry() | {"more": 1}}, "must have dtype, shape and data_offsets"),
        ({"a": 3}, "must have dtype, shape and data_offsets"),
        ([], "must hold a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a":' * 50_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
    ],
)
def test_invalid_safetensors_header_is_rejected(header: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(header))
    with pytest.raises(ModelError, match=message):
        read_header(tmp_path / "x.safetensors")


U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: bytes, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    counts = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + counts + struct.pack("<IQ", kind, offset)


def gguf_file(
    keys: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_keys = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(256)


NESTED = struct.pack("<IQ", ARRAY, 1) * 3 + struct.pack("<IQ", U32, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (gguf_file(version=1), "version 1 is not supported"),
        (gguf_file(version=3 << 24), "big-endian"),
        (gguf_file(counts=(2**63, 0)), "tensors are announced"),
        (gguf_file(counts=(0, 2**40)), "metadata keys are announced"),
        (gguf_file((key(b"a", U32, bytes(4)),) * 2), "'a' occurs twice"),
        (gguf_file((key(b"a", 13, bytes(4)),)), "metadata type 13"),
        (gguf_file((key(b"a", STRING, struct.pack("<Q", 2**63)),)), "bytes are announced"),
        (gguf_file((key(b"a", ARRAY, struct.pack("<IQ", U32, 2**61)),)), "numbers are announced"),
        (gguf_file((key(b"a", ARRAY, struct.pack("<IQ", STRING, 2**61)),)), "strings are announced"),
        (gguf_file((key(b"a", ARRAY, struct.pack("<IQ", 99, 0)),)), "array type 99"),
        (gguf_file((key(b"a", ARRAY, NESTED),)), "nested more than 3"),
        (gguf_file((key(b"general.alignment", U32, struct.pack("<I", 0)),)), "power of two"),
        (gguf_file(infos=(info(b"t", ()),)), "has 0 dimensions"),
        (gguf_file(infos=(info(b"t", (0,)),)), "blocks of 1"),
        (gguf_file(infos=(info(b"t", (2**63, 2**63, 2**63)),)), "ends at byte"),
        (gguf_file(infos=(info(b"t", (33,), kind=2),)), "blocks of 32"),
        (gguf_file(infos=(info(b"t", (8,), kind=4),)), "unknown type 4"),
        (gguf_file(infos=(info(b"t", (8,), offset=8),)), "multiple of 32"),
        (gguf_file(infos=(info(b"t", (8,)), info(b"t", (8,), offset=32))), "'t' occurs twice"),
        (gguf_file(infos=(info(b"t", (16,)), info(b"u", (8,), offset=32))), "'u' overlaps"),
    ],
)
def test_invalid_gguf_header_is_rejected(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path / "x.gguf")


def test_truncated_gguf_is_reported_as_incomplete_download(tmp_path: Path) -> None:
    keys = (key(b"a", ARRAY, struct.pack("<IQ", STRING, 3) + text(b"one") * 3), key(b"b", U32, bytes(4)))
    whole = gguf_file(keys, infos=(info(b"t", (16,)), info(b"u", (48,), offset=64)))
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    tensors = read_gguf(path).tensors.values()
    end = max(tensor.offset + tensor.num_bytes for tensor in tensors)
    for size in (*range(4, end, 5), end - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=rf"incomplete download\? expected .*\d+ bytes, found {size};"):
            read_gguf(path)
    with pytest.raises(ModelError, match=rf"x\.gguf: incomplete download\? expected {end} bytes, found {size};"):
        read_gguf(path)


def test_invalid_utf8_metadata_is_replaced(tmp_path: Path) -> None:
    strings = struct.pack("<IQ", STRING, 2) + text(b"\xff") + text(b"ok")
    (tmp_path / "x.gguf").write_bytes(gguf_file((key(b"a", ARRAY, strings),)))
    assert read_gguf(tmp_path / "x.gguf").metadata["a"] == ("�", "ok")


def test_strings_longer_than_a_chunk_are_read(tmp_path: Path) -> None:
    words = [bytes([97 + i % 26]) * (300_000 + i) for i in range(11)]
    strings = struct.pack("<IQ", STRING, len(words)) + b"".join(text(word) for word in words)
    number = key(b"after", U32, struct.pack("<I", 7))
    (tmp_path / "x.gguf").write_bytes(gguf_file((key(b"a", ARRAY, strings), number)))
    metadata = read_gguf(tmp_path / "x.gguf").metadata
    assert metadata["a"] == tuple(word.decode() for word in words) and metadata["after"] == 7


def test_path_without_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        open_checkpoint(tmp_path / "absent")
    for path, why in ((tmp_path / ("x" * 5000), "limit 4095"), ("a\0b", "zero byte")):
        with pytest.raises(BadRequest, match=f"^model: a path .*{why}"):
            open_checkpoint(path)
    with pytest.raises(ModelError, match="the directory is empty"):
        open_checkpoint(tmp_path)
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(ModelError, match=r"no config\.json and no \.gguf file"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        open_checkpoint(tmp_path / "readme.txt")


def test_directory_must_have_exactly_one_gguf(gguf_whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf_whole)
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(gguf_whole)
    with pytest.raises(ModelError, match=r"2 \.gguf files; name one of them: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_rejected_without_opening(name: str, directory: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=f"{name}.* a pickle"):
        open_checkpoint(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} is a pickle"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"{name} is a pickle"):
        open_checkpoint(tmp_path)
