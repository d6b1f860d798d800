"""Sizes and dequantisation of ggml's tensor types. The only module that imports `gguf`. No torch."""

from __future__ import annotations

import gguf
import numpy as np


def type_layout(code: int) -> tuple[str, int, int]:
    """Return a type's (name, values per block, bytes per block). Raises `ValueError` for an unknown code."""
    kind = gguf.GGMLQuantizationType(code)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return kind.name, block, block_bytes


def block_layout(type_name: str) -> tuple[int, int]:
    """Return a type's (values per block, bytes per block)."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return block, block_bytes


def dequantize(rows: np.ndarray, type_name: str) -> np.ndarray:
    """Return the float32 values of rows of bytes. Raises `NotImplementedError` for a type that `gguf` cannot unpack."""
    # numpy would warn about infinite scales in damaged blocks.
    with np.errstate(all="ignore"):
        values: np.ndarray = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    return values


def can_dequantize(type_name: str) -> bool:
    """Return True if `gguf` can unpack a type; tries a block of zeros, because `gguf` does not list them."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_name)
    except NotImplementedError:
        return False
    return True
