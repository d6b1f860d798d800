"""Builds the executor of a checkpoint, with its weights: on the CPU kernels, the CUDA kernels or torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from nano_inference.config import AttentionName, Dtype, EngineConfig
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.weights import Rounding
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import Kernels, triton_kernels
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.devices import pick_dtype
from nano_inference.executors.loading import LoadProgress, load_weights
from nano_inference.executors.protocol import Executor
from nano_inference.executors.sampling import draw
from nano_inference.executors.step import Sampler
from nano_inference.executors.torch.attention import pick
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.checkpoint import Checkpoint
from nano_inference.loading.sources import measured_sources
from nano_inference.models.config import ModelConfig, with_length
from nano_inference.models.families import Family, program_of

ROUNDINGS: Mapping[Dtype, Rounding] = {"auto": "own", "float32": "own", "bfloat16": "bfloat16", "int8": "int8"}
"""How the kernels store weights; "own" keeps the file's values exactly, in as few bytes as they need."""
CUDA_LOOKAHEAD = 16  # default of `EngineConfig.lookahead` with the CUDA kernels

_log = logging.getLogger("nano_inference")


def load_kernel_model(
    checkpoint: Checkpoint,
    library: Library,
    rounding: Rounding,
    max_model_len: int,
    progress: LoadProgress | None = None,
    *,
    families: Mapping[str, Family] | None = None,
) -> CpuExecutor:
    """Pack a checkpoint's weights for the kernels. A dynamic rope's base is fixed from `max_model_len`.

    `families` are those of `program_of`. Raises `ModelError` if the files do not have the model's weights.
    """
    config = with_length(checkpoint.config, max_model_len)
    executor = CpuExecutor(config, program_of(config, families), library, max_model_len, rounding)
    load_weights(executor, checkpoint.sources, progress)
    return executor


def pick_cuda_kernels(config: EngineConfig, device: torch.device) -> Kernels | None:
    """Return the CUDA kernels; None to use torch: on other devices, with kernels=off or a torch backend of attention.

    Without Triton, torch is used after a warning.
    """
    if device.type != "cuda" or config.kernels == "off" or config.attention != "auto":
        return None
    try:
        return triton_kernels()
    except ValueError as error:
        _log.warning("using torch, which is slower and whose results depend on the batch: %s", error)
        return None


def cuda_limits(config: EngineConfig, model: ModelConfig) -> Limits:
    """Return the largest steps of an engine with the CUDA kernels."""
    return Limits(
        max_len=min(config.max_model_len, model.max_positions),
        max_rows=config.max_batch_size,
        max_tokens=max(config.max_tokens_per_batch, config.max_batch_size),
        lookahead=config.lookahead or CUDA_LOOKAHEAD,
        is_deterministic=config.deterministic,
    )


def load_cuda_model(
    checkpoint: Checkpoint,
    device: torch.device,
    kernels: Kernels,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    *,
    families: Mapping[str, Family] | None = None,
) -> Executor:
    """Load a checkpoint's weights for the CUDA kernels.

    Raises `ValueError` naming what the kernels do not support, and `ModelError` as the other loaders.
    """
    max_model_len = min(config.max_model_len, checkpoint.config.max_positions)
    model = with_length(checkpoint.config, max_model_len)
    dtype, program = pick_dtype(config.dtype, device), program_of(model, families)
    executor = CudaExecutor(model, program, device, dtype, kernels, cuda_limits(config, model))
    sources, error = measured_sources(checkpoint.sources, dtype)
    load_weights(executor, sources, progress)
    if error.squares:
        _log.warning("%s; dtype=float32 keeps them", error)
    return executor


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    progress: LoadProgress | None = None,
    *,
    attention: AttentionName = "auto",
    sampler: Sampler = draw,
    families: Mapping[str, Family] | None = None,
) -> TorchExecutor:
    """Load a checkpoint's weights for torch. A dynamic rope's base is fixed from `max_model_len`.

    `families` are those of `program_of`. Raises `ModelError` if the files do not have the model's weights.
    """
    config = with_length(checkpoint.config, max_model_len)
    executor = TorchExecutor(config, program_of(config, families), device, dtype, pick(attention, device), sampler)
    load_weights(executor, checkpoint.sources, progress)
    return executor
