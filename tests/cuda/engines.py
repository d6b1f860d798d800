"""Engines on the CUDA executor with plain kernels, on CPU tensors: the same step code as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.build import parts_of
from nano_inference.executors.cuda.decode import EagerStepper, StepKey, Stepper
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.loading import load_weights
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.models.families import program_of
from tests.cuda.plain import plain_kernels

CPU = torch.device("cpu")


def eager(step: Callable[[StepKey], None], device: torch.device) -> Stepper:
    """Return an eager stepper."""
    return EagerStepper(step)


def executor_of(
    path: Path,
    config: EngineConfig,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
    stepper: Callable[[Callable[[StepKey], None], torch.device], Stepper] = eager,
) -> CudaExecutor:
    """Load a checkpoint for the CUDA executor on CPU tensors."""
    checkpoint = open_checkpoint(path, config.overrides)
    limits = Limits(
        max_len=min(config.max_model_len, checkpoint.config.max_positions),
        max_rows=min(config.max_batch_size, 32),
        max_tokens=config.max_tokens_per_batch,
        lookahead=config.lookahead or 16,
        is_deterministic=config.deterministic,
    )
    program = program_of(checkpoint.config)
    executor = CudaExecutor(checkpoint.config, program, device, dtype, kernels or plain_kernels(), limits, stepper)
    load_weights(executor, checkpoint.sources)
    return executor


def open_cuda(path: Path, config: EngineConfig, **options: object) -> InferenceEngine:
    """Return an engine on the CUDA executor."""
    return InferenceEngine(config, parts=parts_of(executor_of(path, config, **options), config))  # type: ignore[arg-type]
