"""ggml's tensor types: their sizes, and their values in float32. The only module that imports `gguf`. No torch."""

from __future__ import annotations

import gguf
import numpy as np


def type_layout(code: int) -> tuple[str, int, int]:
    """Return a type's name, the values in a block and the bytes of a block. Raises `ValueError` for an unknown code."""
    kind = gguf.GGMLQuantizationType(code)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return kind.name, block, block_bytes


def dequantize(rows: np.ndarray, type_name: str) -> np.ndarray:
    """Return the float32 values of rows of bytes. Raises `NotImplementedError` for a type that `gguf` cannot unpack."""
    # Damaged blocks may hold infinite scales: numpy would print a warning for each.
    with np.errstate(all="ignore"):
        values: np.ndarray = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    return values


def can_dequantize(type_name: str) -> bool:
    """Return whether `gguf` unpacks a type: it has no list of them, so one block of zeros is tried."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_name)
    except NotImplementedError:
        return False
    return True
