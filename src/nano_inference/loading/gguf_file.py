"""Reads header, metadata and tensor table of a GGUF file (v2 and v3, little endian); checks all lengths. No torch.

Format: ggml-org/ggml, docs/gguf.md. The reader of the `gguf` package is not used: it takes seconds for a vocabulary of
49 thousand tokens, and maps the file without bounds checks.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from nano_inference.loading.fields import shown
from nano_inference.support.files import open_regular
from nano_inference.support.packages import needed
from nano_inference.types import ModelError

MAX_HEADER_BYTES = 64 * 2**20
MAX_TENSORS = 100_000
MAX_KEYS = 2**16  # metadata keys; real files have a few dozen
MAX_ITEMS = 2**22
"""Items of all arrays; each takes up to 60 bytes in memory. A vocabulary of 262,144 needs less than a million."""

MAX_FILE_BYTES = 2**44  # 16 TiB: a header that requires a larger file is damaged; otherwise the download is incomplete

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_CHUNK_BYTES = 2**20
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 3
_STRING, _ARRAY, _BOOL = 8, 9, 7
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_SCALARS: Mapping[int, struct.Struct] = {
    code: struct.Struct(f"<{letter}") for code, letter in (*enumerate("BbHhIif?"), (10, "Q"), (11, "q"), (12, "d"))
}
"""Layouts by value type: u8 i8 u16 i16 u32 i32 f32 bool, then u64 i64 f64."""

PLAIN: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location and type of one tensor."""

    name: str
    shape: tuple[int, ...]  # in torch's order; the file has the reverse
    type_name: str  # ggml's name: F32, Q4_1, …
    offset: int  # byte offset in the file
    num_bytes: int
    row_bytes: int  # bytes of one row (the last dimension)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file. Invalid UTF-8 is replaced by U+FFFD."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, booleans, strings, and tuples of them
    tensors: Mapping[str, GgufTensor]  # in the order of the file's table
    data_offset: int  # byte offset of the tensor data


class _Cursor:
    """Owns the file while its header is read, in chunks; never reads past its end or the header limit."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.file_bytes = file.seek(0, 2)
        self.buffer = b""
        self.at = 0
        self.loaded = 0
        self.items = 0
        file.seek(0)

    @property
    def position(self) -> int:
        """Return the byte offset of the next value."""
        return self.loaded - len(self.buffer) + self.at

    def left(self) -> int:
        """Return how many more bytes the header may have."""
        return min(self.file_bytes, MAX_HEADER_BYTES) - self.position

    def need(self, num_bytes: int) -> None:
        """Read until the buffer holds the next `num_bytes` bytes. Raises `ModelError` if the file ends before."""
        if self.at + num_bytes <= len(self.buffer):
            return
        if num_bytes > self.left():
            end = self.position + num_bytes
            if end <= MAX_HEADER_BYTES:
                raise cut_short(self.path, f"at least {end}", self.file_bytes)
            raise self.bad(f"{num_bytes} bytes are announced where {self.left()} can follow")
        missing = self.at + num_bytes - len(self.buffer)
        more = self.file.read(min(max(missing, _CHUNK_BYTES), self.file_bytes - self.loaded))
        self.buffer, self.at = self.buffer[self.at :] + more, 0
        self.loaded += len(more)
        if num_bytes > len(self.buffer):
            raise self.bad("the file became shorter while it was read")

    def bad(self, what: str) -> ModelError:
        """Return an error with the current byte offset."""
        limit = f"{self.file_bytes} bytes, of which a header may take {MAX_HEADER_BYTES}"
        return ModelError(f"{self.path}: {what} (byte {self.position} of {limit})")

    def take(self, layout: struct.Struct) -> Any:
        """Return the next value."""
        self.need(layout.size)
        (value,) = layout.unpack_from(self.buffer, self.at)
        self.at += layout.size
        return value

    def u32(self) -> int:
        return int(self.take(_SCALARS[4]))

    def u64(self) -> int:
        return int(self.take(_SCALARS[10]))

    def count(self, what: str, min_bytes: int, limit: int) -> int:
        """Return the next 64-bit count, of items of at least `min_bytes` each. Raises `ModelError` above `limit`."""
        number = self.u64()
        if number > self.left() // min_bytes:
            end = self.position + number * min_bytes
            if number <= limit and end <= MAX_HEADER_BYTES:
                raise cut_short(self.path, f"at least {end}", self.file_bytes)
            raise self.bad(f"{number} {what} are announced where {self.left()} bytes can follow")
        if number > limit:
            raise self.bad(f"{number} {what} are announced, the limit is {limit}")
        return number

    def item_count(self, what: str, min_bytes: int) -> int:
        """Return the length of the next array; all arrays of a file may have `MAX_ITEMS` items together."""
        number = self.count(what, min_bytes, MAX_ITEMS - self.items)
        self.items += number
        return number

    def text(self) -> str:
        """Return the next string."""
        length = self.u64()
        self.need(length)
        value = self.buffer[self.at : self.at + length].decode("utf-8", "replace")
        self.at += length
        return value


def cut_short(path: Path, expected: str, found: int) -> ModelError:
    """Return the error of an incomplete file."""
    return ModelError(
        f"{path}: incomplete download? expected {expected} bytes, found {found}; delete the file and fetch it again"
    )


def read_gguf(path: str | Path) -> GgufFile:
    """Read everything except the tensor data. Raises `ModelError` naming the file."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            return _read(_Cursor(path, file))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def _read(cursor: _Cursor) -> GgufFile:
    if cursor.file_bytes < len(_MAGIC) or cursor.file.read(len(_MAGIC)) != _MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file (it does not begin with {_MAGIC.decode()})")
    cursor.loaded = len(_MAGIC)
    version = cursor.u32()
    if version not in _VERSIONS and int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
        raise ModelError(f"{cursor.path}: big-endian GGUF files are not supported")
    if version not in _VERSIONS:
        raise ModelError(f"{cursor.path}: GGUF version {version} is not supported; known: 2, 3")
    num_tensors = cursor.count("tensors", _MIN_TENSOR_BYTES, MAX_TENSORS)
    num_keys = cursor.count("metadata keys", _MIN_KEY_BYTES, MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise cursor.bad(f"the metadata key {shown(key)} occurs twice")
        metadata[key] = _value(cursor, cursor.u32(), 0)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        wanted = "must be a power of two up to 2^20"
        raise ModelError(f"{cursor.path}: general.alignment {wanted}, got {shown(alignment)}")
    table = [_table_entry(cursor, alignment) for _ in range(num_tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    # Tensors with absolute offsets, which must be within the file and disjoint.
    tensors: dict[str, GgufTensor] = {}
    last = max(table, key=lambda entry: entry.offset + entry.num_bytes, default=None)
    end = 0 if last is None else data_offset + last.offset + last.num_bytes
    if last is not None and end > MAX_FILE_BYTES:
        name = shown(last.name)
        raise ModelError(f"{cursor.path}: tensor {name} ends at byte {end}, the file at {cursor.file_bytes}")
    if end > cursor.file_bytes:
        raise cut_short(cursor.path, str(end), cursor.file_bytes)
    for entry in table:
        if entry.name in tensors:
            raise ModelError(f"{cursor.path}: the tensor {shown(entry.name)} occurs twice")
        tensors[entry.name] = replace(entry, offset=data_offset + entry.offset)
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ModelError(f"{cursor.path}: tensor {shown(tensor.name)} overlaps the one before it")
        end = tensor.offset + tensor.num_bytes
    return GgufFile(cursor.path, MappingProxyType(metadata), MappingProxyType(tensors), data_offset)


def _value(cursor: _Cursor, code: int, depth: int) -> Any:
    """Return the next metadata value of a type; an array as a tuple, within `depth` others."""
    if code in _SCALARS:
        return cursor.take(_SCALARS[code])
    if code == _STRING:
        return cursor.text()
    if code != _ARRAY:
        raise cursor.bad(f"{'array' if depth else 'metadata'} type {code} is not known")
    if depth == _MAX_DEPTH:
        raise cursor.bad(f"arrays are nested more than {_MAX_DEPTH} deep")
    code = cursor.u32()
    if code == _STRING:
        return _strings(cursor, cursor.item_count("strings", 8))
    if code not in _SCALARS:
        count = cursor.item_count("arrays", 12) if code == _ARRAY else 1
        return tuple(_value(cursor, code, depth + 1) for _ in range(count))
    layout = _SCALARS[code]
    length = cursor.item_count("numbers", layout.size)
    cursor.need(length * layout.size)
    data = cursor.buffer[cursor.at : cursor.at + length * layout.size]
    cursor.at += len(data)
    if code == _BOOL:
        return tuple(map(bool, data))
    numbers = array(layout.format[-1], data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)


def _strings(cursor: _Cursor, count: int) -> tuple[str, ...]:
    """Return `count` strings; uses local variables for speed, a vocabulary has hundreds of thousands."""
    out: list[str] = []
    unpack: Callable[[bytes, int], tuple[int]] = _SCALARS[10].unpack_from
    buffer, at = cursor.buffer, cursor.at
    for _ in range(count):
        end = at + 8
        if end <= len(buffer):
            end += unpack(buffer, at)[0]
        if end > len(buffer):
            cursor.at = at
            out.append(cursor.text())
            buffer, at = cursor.buffer, cursor.at
            continue
        out.append(buffer[at + 8 : end].decode("utf-8", "replace"))
        at = end
    cursor.at = at
    return tuple(out)


def _table_entry(cursor: _Cursor, alignment: int) -> GgufTensor:
    """Return the next tensor of the table; its offset is relative to the tensor data."""
    name = cursor.text()
    num_dimensions = cursor.u32()
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.bad(f"tensor {shown(name)} has {num_dimensions} dimensions, the limit is {_MAX_DIMENSIONS}")
    sizes = [cursor.u64() for _ in range(num_dimensions)]
    with needed(f"{cursor.path}: a GGUF file"):
        from nano_inference.loading.ggml import type_layout
    code = cursor.u32()
    try:
        type_name, block, block_bytes = type_layout(code)
    except ValueError as error:
        raise cursor.bad(f"tensor {shown(name)} has the unknown type {code}") from error
    offset = cursor.u64()
    if sizes[0] % block or 0 in sizes:
        raise cursor.bad(f"tensor {shown(name)} has the shape {sizes}, whose rows are not blocks of {block}")
    if offset % alignment:
        raise cursor.bad(f"tensor {shown(name)} begins at {offset}, not at a multiple of {alignment}")
    row_bytes = sizes[0] // block * block_bytes
    return GgufTensor(name, tuple(reversed(sizes)), type_name, offset, row_bytes * math.prod(sizes[1:]), row_bytes)
