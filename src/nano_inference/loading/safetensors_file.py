"""Weights in safetensors files, single or sharded.

Format: an unsigned 64-bit little-endian length, a JSON header of that length, then the tensors' bytes without gaps
(huggingface/safetensors, README). The header gets the same checks as in that library, which is not used because it
memory-maps whole files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from nano_inference.loading.fields import read_json
from nano_inference.loading.listing import pickle_note
from nano_inference.loading.pieces import DTYPES, FileRange
from nano_inference.support.files import is_present, json_object, open_buffered, shown
from nano_inference.types import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 16_000_000  # the format allows 100 MB; a hundred thousand tensors take 12 MB
MAX_TENSORS = 100_000

_KNOWN: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ENTRY_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


def read_header(path: Path) -> dict[str, FileRange]:
    """Return the range of each tensor of a file, in file order. Raises `ModelError` if the file is damaged."""
    try:
        with open_buffered(path) as file:
            num_file_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if num_file_bytes < 8 or length > min(num_file_bytes - 8, MAX_HEADER_BYTES):
                raise ModelError(
                    f"{path}: a header of {length} bytes in a file of {num_file_bytes} (limit {MAX_HEADER_BYTES})"
                )
            header = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    ranges = header_ranges(path, header, 8 + length)
    end = 8 + length + sum(map(num_bytes, ranges.values()))
    if end != num_file_bytes:
        raise ModelError(f"{path}: the tensors end at byte {end}, the file at {num_file_bytes}; is it truncated?")
    return ranges


def header_ranges(path: Path, header: bytes, data_offset: int) -> dict[str, FileRange]:
    """Return the range of each tensor of a header, in file order. Raises `ModelError` unless they are contiguous."""
    entries = json_object(f"{path}: header", header)
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise ModelError(f"{path}: holds {len(entries)} tensors (limit {MAX_TENSORS})")
    ranges: dict[str, FileRange] = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.keys() != _ENTRY_FIELDS:
            raise ModelError(f"{path}: tensor {shown(name)} must have dtype, shape and data_offsets")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in _KNOWN:
            known = ", ".join(_KNOWN)
            raise ModelError(f"{path}: tensor {shown(name)} has the dtype {shown(entry['dtype'])}; known: {known}")
        for field in ("shape", "data_offsets"):
            values = entry[field]
            is_list = isinstance(values, list) and len(values) <= 8
            if not is_list or any(type(value) is not int or not 0 <= value < 2**63 for value in values):
                raise ModelError(f"{path}: tensor {shown(name)} has the {field} {shown(values)}")
        shape, offsets = tuple(entry["shape"]), tuple(entry["data_offsets"])
        if len(offsets) != 2:
            raise ModelError(f"{path}: tensor {shown(name)} must have two data_offsets, got {len(offsets)}")
        part = FileRange(path, data_offset + offsets[0], shape, _KNOWN[entry["dtype"]])
        if offsets[1] - offsets[0] != num_bytes(part):
            raise ModelError(
                f"{path}: tensor {shown(name)} has data_offsets {shown(offsets)}, but its shape takes "
                f"{shown(num_bytes(part))} bytes"
            )
        ranges[name] = part
    ordered = dict(sorted(ranges.items(), key=lambda item: (item[1].offset, num_bytes(item[1]))))
    end = data_offset
    for name, part in ordered.items():
        if part.offset != end:
            what = "overlaps the one before it" if part.offset < end else "does not follow the one before it"
            raise ModelError(f"{path}: tensor {shown(name)} {what}")
        end += num_bytes(part)
    return ordered


def num_bytes(part: FileRange) -> int:
    return math.prod(part.shape) * DTYPES[part.dtype].itemsize


def open_weights(directory: Path) -> dict[str, FileRange]:
    """Return every tensor of a directory's `model.safetensors`, or of the shards in its index."""
    if is_present(directory / SINGLE_NAME):
        return read_header(directory / SINGLE_NAME)
    if not is_present(directory / INDEX_NAME):
        raise ModelError(f"{directory}: has neither {SINGLE_NAME} nor {INDEX_NAME}{pickle_note(directory)}")
    shard_of = shards_of(directory / INDEX_NAME)
    headers = {file: read_header(directory / file) for file in sorted(set(shard_of.values()))}
    for name, file in shard_of.items():
        if name not in headers[file]:
            raise ModelError(f"{directory / file}: has no tensor {shown(name)}, which {INDEX_NAME} places there")
    # Shard by shard, so that each file is read sequentially.
    return {
        name: part for file, header in headers.items() for name, part in header.items() if shard_of.get(name) == file
    }


def shards_of(path: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Return the file name of each tensor in an index. Raises `ModelError`."""
    index = read_json(path)
    shard_of = index.mapping("weight_map")
    if not shard_of:
        raise ModelError(f"{index.origin}: weight_map is missing or empty")
    for file in shard_of.values():  # a path could leave the directory
        if not isinstance(file, str) or not file.endswith(suffix) or any(c in file for c in "/\\\0"):
            raise ModelError(f"{index.origin}: a shard must be a plain {suffix} file name, got {shown(file)}")
    return dict(shard_of)
