"""Reads the weights of a `.pt` file: tensors by name and nothing else, with torch's restricted unpickler.

Format: a zip file with a pickle of the dict and one uncompressed record for each tensor (pytorch, serialization.py).
"""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from nano_inference.files import open_buffered
from nano_inference.loader.fields import Fields, read_json, shown
from nano_inference.types import ModelError

COMPILED_PREFIX = "_orig_mod."
"""What torch.compile puts before every name."""
_ZIP = b"PK\x03\x04"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COUNTS = (torch.int64, torch.int32)
"""Counters among the buffers of mixture-of-experts checkpoints; the caller says what becomes of them."""
_PLAIN = re.compile(r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)")
_MAX_PICKLE = 4 << 20
"""Bytes: a hundred for each tensor, and a model of a hundred layers has a thousand."""
_MOST_SHARED = 4
"""Tensors may share a storage (tied weights); together they may have this many times the file's bytes."""


def read_pt(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a file that torch.save wrote, mapped into memory.

    No code in the file is ever run. A prefix of torch.compile is taken off the names. Raises `ModelError`, one line
    that names the file, when it cannot be read or is anything but a flat dict of contiguous tensors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes, protocols and layouts of pickles; what matters is checked
        num_bytes = _check_container(path)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged pickle can raise anything
            raise ModelError(f"{path}: {_reason(error)}") from None
    named = _named(path, loaded)
    if sum(tensor.nbytes for tensor in named.values()) > _MOST_SHARED * num_bytes:
        raise ModelError(f"{path}: its tensors share their memory so often that they come to many times the file")
    return named


def read_meta(path: Path) -> Fields:
    """Return the JSON object beside a checkpoint; `ModelError` when it is none or cannot be read."""
    return read_json(path)


def _check_container(path: Path) -> int:
    """Refuse all but a zip file whose records are stored as they are and whose pickle makes tensors; return its size.

    torch before 1.6 wrote bare pickles, in which a dozen bytes can ask for gigabytes.
    """
    try:
        with open_buffered(path) as file:
            start = file.read(len(_ZIP))
            if not start:
                raise ModelError(f"{path}: the file is empty")
            if start != _ZIP:
                raise ModelError(f"{path}: not a zip file, as which torch.save has written tensors since 2020")
            archive = zipfile.ZipFile(file)
            for record in archive.infolist():
                _check_record(path, archive, record)
            return file.seek(0, 2)
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, RuntimeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read, is it truncated? ({shown(str(error))})") from None


def _check_record(path: Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    if record.compress_type != zipfile.ZIP_STORED:
        raise ModelError(f"{path}: the record {shown(record.filename)} is compressed; torch.save writes none such")
    if record.filename.endswith("data.pkl"):
        if record.file_size > _MAX_PICKLE:
            raise ModelError(f"{path}: a pickle of {record.file_size} bytes (limit {_MAX_PICKLE})")
        _check_globals(path, archive.read(record))


def _check_globals(path: Path, data: bytes) -> None:
    """Refuse a pickle that asks for anything but plain tensors.

    What torch's own restricted reader allows besides includes `bytearray` and `torch.Tensor`, which make an object of
    any size out of a number.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            raise ModelError(f"{path}: the pickle in it is not of the kind that torch.save writes ({opcode.name})")
        if opcode.name == "GLOBAL" and not _PLAIN.fullmatch(str(argument)):
            asked = shown(".".join(str(argument).split()))
            raise ModelError(
                f"{path}: the pickle asks for {asked}, which is no part of a plain tensor; it is not executed"
            )


def _reason(error: Exception) -> str:
    """Say in one line why torch refused a file; its own text runs over many and proposes to trust the file."""
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return "the pickle in it is damaged, or holds more than tensors"
    lines = str(error).splitlines() or [""]
    return f"cannot be read as a file of tensors, is it damaged? ({type(error).__name__}: {shown(lines[0])})"


def _named(path: Path, loaded: object) -> dict[str, Tensor]:
    if not isinstance(loaded, dict):
        raise ModelError(f"{path}: must hold a dict of tensors, got {type(loaded).__name__}")
    if not loaded:
        raise ModelError(f"{path}: holds no tensors")
    out: dict[str, Tensor] = {}
    for key, value in loaded.items():
        if not isinstance(key, str):
            raise ModelError(f"{path}: a tensor's name must be a string, got {type(key).__name__}")
        name = key.removeprefix(COMPILED_PREFIX)
        if name in out:
            raise ModelError(f"{path}: has {shown(name)} twice, with and without {COMPILED_PREFIX}")
        out[name] = _checked(path, name, value)
    return out


def _checked(path: Path, name: str, value: object) -> Tensor:
    """Return one tensor; a contiguous one is never larger than the bytes that the file has for it."""
    if not isinstance(value, Tensor):
        raise ModelError(f"{path}: {shown(name)} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
        raise ModelError(f"{path}: {shown(name)} is not a plain dense tensor")
    if value.dtype not in (*_FLOATS, *_COUNTS):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        got = str(value.dtype).removeprefix("torch.")
        raise ModelError(f"{path}: {shown(name)} has the dtype {got}; known: {known}")
    if not value.is_contiguous():
        raise ModelError(f"{path}: {shown(name)} is not contiguous")
    return value.detach()
