"""Estimates of a model's memory use, from its files' headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nano_inference.config import EngineConfig
from nano_inference.executors.cpu.matrix import can_keep, can_round
from nano_inference.loading.catalog import ModelEntry
from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.loading.gguf import PackedTensor
from nano_inference.loading.pieces import DTYPES
from nano_inference.loading.sources import WeightSource
from nano_inference.types import BadRequest, ModelError

FLOAT32 = 4
PANEL = 64  # outputs of a matrix are padded to a multiple (executors/cpu/c/formats.h)
_DEFAULTS = EngineConfig(model_path="any")
CONTEXT = _DEFAULTS.max_model_len  # tokens of context in the estimates of typical sizes
_MAX_SEQUENCES = _DEFAULTS.max_batch_size


class Size(NamedTuple):
    """A typical model: number of weights, and K and V values cached per token."""

    name: str
    parameters: int
    kv_values: int


SIZES = (
    Size("135M (SmolLM2)", 134_515_008, 2 * 30 * 3 * 64),
    Size("360M (SmolLM2)", 361_821_120, 2 * 32 * 5 * 64),
    Size("0.6B (Qwen3)", 596_049_920, 2 * 28 * 8 * 128),
    Size("1.7B (Qwen3)", 1_720_574_976, 2 * 28 * 8 * 128),
    Size("4B (Qwen3)", 4_022_468_096, 2 * 36 * 8 * 128),
    Size("8B (Qwen3)", 8_190_735_360, 2 * 36 * 8 * 128),
    Size("8B (Llama 3.1)", 8_030_261_248, 2 * 32 * 8 * 128),
)
PRECISIONS: Mapping[str, float] = {"bfloat16": 2.0, "int8": 1.0, "4 bits (Q4_0)": 18 / 32}
"""Bytes per weight; int8's scales per row are neglected."""


class Machine(NamedTuple):
    """This machine's memory, in bytes."""

    available: int
    kv_budget: int  # default capacity of the KV cache in bytes
    has_kernels: bool


def of_models(entries: Iterable[ModelEntry], machine: Machine) -> list[dict[str, Any]]:
    """Return estimates of every model on this machine, in the file's precision and in int8."""
    precisions = ("auto", "int8") if machine.has_kernels else ("float32",)
    rows: list[dict[str, Any]] = []
    for entry in entries:
        is_repo = entry.source == "hub" and not (entry.path / "config.json").is_file()  # of .gguf files, each a model
        files = [(f"{entry.name}:{file.name}", file) for file in sorted(entry.path.glob("*.gguf"))] if is_repo else []
        for name, path in files if is_repo else [(entry.name, entry.path)]:
            try:
                checkpoint = open_checkpoint(path)
            except (ModelError, BadRequest) as error:
                rows.append({"model": name, "problem": str(error)})
                continue
            rows += [of_model(name, checkpoint, precision, machine) for precision in precisions]
    return rows


def of_sizes(machine: Machine) -> list[dict[str, Any]]:
    """Return estimates of typical sizes in every precision."""
    return [
        {
            "size": size.name,
            "precision": precision,
            **_costs(int(size.parameters * each), FLOAT32 * size.kv_values, CONTEXT, machine),
        }
        for size in SIZES
        for precision, each in PRECISIONS.items()
    ]


def of_model(name: str, checkpoint: Checkpoint, precision: str, machine: Machine) -> dict[str, Any]:
    """Return an estimate of one model. `precision` is "auto", "int8", or "float32" without C kernels."""
    total = sum(
        weight_bytes(source, precision)
        for source_name, source in checkpoint.sources.items()
        if not (source_name == "lm_head.weight" and checkpoint.config.tie_embeddings)
    )
    context = min(CONTEXT, checkpoint.config.max_positions)
    kv_bytes = checkpoint.config.kv_bytes_per_token(FLOAT32)
    shown = f"auto ({checkpoint.dtype})" if precision == "auto" else precision
    return {"model": name, "precision": shown, **_costs(total, kv_bytes, context, machine)}


def weight_bytes(source: WeightSource, precision: str) -> int:
    """Return the bytes of one tensor in memory, in the layout of `executors.cpu.weights`."""
    if len(source.shape) != 2 or precision == "float32":
        return FLOAT32 * math.prod(source.shape)
    rows = -(-source.shape[0] // PANEL) * PANEL
    values = rows * source.shape[1]
    packed = source if isinstance(source, PackedTensor) and not source.shift else None
    can = can_round if precision == "int8" else can_keep
    if packed is not None and can(packed.tensor.type_name, packed.shape[1]):
        return packed.tensor.num_bytes * rows // source.shape[0]
    if precision == "int8":
        return values + FLOAT32 * rows
    dtype = DTYPES.get(source.dtype)
    return values * min(FLOAT32, dtype.itemsize if dtype is not None else FLOAT32)


def _costs(weights: int, kv_bytes: int, context: int, machine: Machine) -> dict[str, Any]:
    """Return the estimate for `weights` bytes and `kv_bytes` per token."""
    return {
        "weight_bytes": weights,
        "kv_bytes_per_token": kv_bytes,
        "context": context,
        "context_kv_bytes": kv_bytes * context,
        "kv_budget_tokens": min(machine.kv_budget // kv_bytes, _MAX_SEQUENCES * context),
        "fits": weights + kv_bytes * context <= machine.available,
    }
