"""Read the named tensors of a `.pt` file with torch's restricted unpickler.

Format: a zip file with a pickle of the dict and one uncompressed record per tensor (pytorch, serialization.py).
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

from nano_inference.loading.fields import shown
from nano_inference.support.files import open_buffered
from nano_inference.types import MissingFile, ModelError

PREFIX = re.compile(r"(_orig_mod\.|module\.)+")  # what torch.compile and DistributedDataParallel put before every name
_ZIP = b"PK\x03\x04"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COUNTS = (torch.int64, torch.int32)
"""Counters in the buffers of mixture-of-experts checkpoints, which `rules` refuses by name."""
_PLAIN = re.compile(r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)")
_MAX_PICKLE = 4 << 20  # most bytes: a tensor takes about a hundred, and a model of a hundred layers has a thousand
_MOST_SHARED = 4  # most bytes of all tensors as a multiple of the file's; tensors may share a storage (tied weights)


def read_pt(path: Path, *, is_mapped: bool = True) -> dict[str, Tensor]:
    """Return the named tensors of a file written by torch.save, mapped into memory unless its writer may change it.

    Runs no code of the file. Removes prefixes of torch's wrappers from names. Raises `ModelError` with the file's name
    if it cannot be read or is not a flat dict of contiguous tensors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols and layouts, which are checked here
        num_bytes = _check_container(path)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
        except Exception as error:  # a damaged pickle can raise anything; torch's text proposes to trust the file
            if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
                raise ModelError(f"{path}: its pickle is damaged, or contains more than tensors") from None
            reason = f"{type(error).__name__}: {shown((str(error).splitlines() or [''])[0])}"
            raise ModelError(f"{path}: cannot be read as a file of tensors, is it damaged? ({reason})") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{path}: must contain a dict of tensors, got {type(loaded).__name__}")
    if not loaded:
        raise ModelError(f"{path}: contains no tensors")
    named: dict[str, Tensor] = {}
    for key, value in loaded.items():
        if not isinstance(key, str):
            raise ModelError(f"{path}: a tensor's name must be a string, got {type(key).__name__}")
        name = unwrapped(key)
        if name in named:
            raise ModelError(f"{path}: has {shown(name)} twice, with and without a prefix as {shown(key)}")
        if not isinstance(value, Tensor):
            raise ModelError(f"{path}: {shown(name)} must be a tensor, got {type(value).__name__}")
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
            raise ModelError(f"{path}: {shown(name)} is not a plain dense tensor")
        if value.dtype not in (*_FLOATS, *_COUNTS):
            got, *known = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, *_FLOATS))
            raise ModelError(f"{path}: {shown(name)} has the dtype {got}; known: {', '.join(known)}")
        if not value.is_contiguous():  # so it is not larger than its storage
            raise ModelError(f"{path}: {shown(name)} is not contiguous")
        named[name] = value.detach()
    if sum(tensor.nbytes for tensor in named.values()) > _MOST_SHARED * num_bytes:
        raise ModelError(f"{path}: its tensors together have more than {_MOST_SHARED} times the bytes of the file")
    return named


def _check_container(path: Path) -> int:
    """Check that a file is a zip file with uncompressed records and a pickle of tensors; return its size in bytes.

    torch before 1.6 wrote bare pickles, in which a dozen bytes can allocate gigabytes.
    """
    try:
        with open_buffered(path) as file:
            start = file.read(len(_ZIP))
            if not start:
                raise ModelError(f"{path}: the file is empty")
            if start != _ZIP:
                raise ModelError(f"{path}: not a zip file, the format of torch.save since 2020")
            archive = zipfile.ZipFile(file)
            for record in archive.infolist():
                name, size = record.filename, record.file_size
                if record.compress_type != zipfile.ZIP_STORED:
                    raise ModelError(f"{path}: the record {shown(name)} is compressed; torch.save does not compress")
                if name.endswith("data.pkl") and size > _MAX_PICKLE:
                    raise ModelError(f"{path}: a pickle of {size} bytes (limit {_MAX_PICKLE})")
                # torch's restricted unpickler also allows `bytearray` and `torch.Tensor`, which allocate any size.
                for opcode, argument, _ in (
                    pickletools.genops(archive.read(record)) if name.endswith("data.pkl") else ()
                ):
                    if opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                        raise ModelError(
                            f"{path}: its pickle has an opcode that torch.save does not write ({opcode.name})"
                        )
                    if opcode.name == "GLOBAL" and not _PLAIN.fullmatch(str(argument)):
                        asked = shown(".".join(str(argument).split()))
                        raise ModelError(
                            f"{path}: its pickle names {asked}, which plain tensors do not need; it is not executed"
                        )
            num_bytes = file.seek(0, 2)
            if sum(record.file_size for record in archive.infolist()) > num_bytes:
                raise ModelError(f"{path}: its records together have more bytes than the file")
            return num_bytes
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, RuntimeError) as error:
        if isinstance(error, ModelError):
            raise
        if isinstance(error, FileNotFoundError):
            raise MissingFile(f"{path}: cannot be read, it does not exist") from None
        raise ModelError(f"{path}: cannot be read, is it truncated? ({shown(str(error))})") from None


def unwrapped(name: str) -> str:
    """Return a weight's name without prefixes of torch's wrappers."""
    match = PREFIX.match(name)
    return name[match.end() :] if match else name
