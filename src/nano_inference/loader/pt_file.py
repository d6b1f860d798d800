"""Reads the weights of a `.pt` file: tensors by name and nothing else, with torch's restricted unpickler.

Format: a zip file with a pickle of the dict and one uncompressed record for each tensor (pytorch, serialization.py).
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from nano_inference.loader.fields import Fields, read_json, shown
from nano_inference.types import ModelError

COMPILED_PREFIX = "_orig_mod."
"""What torch.compile puts before every name."""
_ZIP = b"PK\x03\x04"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COUNTS = (torch.int64, torch.int32)
"""Counters among the buffers of mixture-of-experts checkpoints; the caller says what becomes of them."""
_FOREIGN = re.compile(r"\bGLOBAL ([\w.]{1,80})")
"""How torch's refusal names what a pickle asks for."""


def read_pt(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a file that torch.save wrote, mapped into memory.

    No code in the file is ever run. A prefix of torch.compile is taken off the names. Raises `ModelError`, one line
    that names the file, when it cannot be read or is anything but a flat dict of contiguous tensors.
    """
    _check_container(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols and layouts; what matters is checked below
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise ModelError(f"{path}: {_reason(error)}") from None
    return _named(path, loaded)


def read_meta(path: Path) -> Fields:
    """Return the JSON object beside a checkpoint; `ModelError` when it is none or cannot be read."""
    return read_json(path)


def _check_container(path: Path) -> None:
    """Refuse all but a zip file whose records are stored as they are, so that none can blow up.

    torch before 1.6 wrote bare pickles, in which a dozen bytes can ask for gigabytes.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
            if not start:
                raise ModelError(f"{path}: the file is empty")
            if start != _ZIP:
                raise ModelError(f"{path}: not a zip file, as which torch.save has written tensors since 2020")
            records = zipfile.ZipFile(file).infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read, is it truncated? ({shown(str(error))})") from None
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise ModelError(f"{path}: the record {shown(record.filename)} is compressed; torch.save writes none such")


def _reason(error: Exception) -> str:
    """Say in one line why torch refused a file; its own text runs over many and proposes to trust the file."""
    foreign = _FOREIGN.search(str(error))
    if foreign:
        return f"the pickle asks for {foreign[1]}, which is no part of a tensor; it is not executed"
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
