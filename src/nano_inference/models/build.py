"""Makes a model from its configuration, and tells where each checkpoint tensor belongs in it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from nano_inference.attention import StepContext
from nano_inference.memory import huge_empty
from nano_inference.models.config import Family, ModelConfig
from nano_inference.models.layers import Embedding, Linear, RMSNorm
from nano_inference.models.nanochat import Scalars, hf_name
from nano_inference.models.rope import RotaryTable

_FAMILIES: dict[Family, str] = {
    "dense": "nano_inference.models.dense:Dense",
    "gemma": "nano_inference.models.gemma:Gemma",
    "nanochat": "nano_inference.models.nanochat:Nanochat",
}


class Model(Protocol):
    """What the runner needs of a decoder."""

    config: ModelConfig
    ropes: tuple[RotaryTable, ...]

    def __call__(self, token_T: Tensor, context: StepContext) -> Tensor:
        """Return the hidden states [T, E] of a step's tokens."""

    def head(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V]."""


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """Return a model with memory for its weights, which are not yet set."""
    return _build(config, tuple(RotaryTable(rope, device) for rope in config.ropes), device, dtype)


def build_like(model: Model, device: torch.device) -> Model:
    """Return a second model of the same configuration and precision, with memory of its own."""
    return _build(model.config, model.ropes, device, model_dtype(model))


def model_dtype(model: Model) -> torch.dtype:
    """Return the precision that a model computes in: its embedding's, which every decoder has first."""
    return next(parameters(model)).dtype


def parameters(model: Model) -> Iterator[nn.Parameter]:
    """Return every parameter once, fused as it is computed with."""
    return cast(nn.Module, model).parameters()


def build_empty(config: ModelConfig) -> Model:
    """Return a model without any memory: what it tells is the names and shapes of its weights."""
    return cast(Model, _skeleton(config, ()))


def _skeleton(config: ModelConfig, ropes: tuple[RotaryTable, ...]) -> nn.Module:
    module_name, _, class_name = _FAMILIES[config.family].partition(":")
    decoder = getattr(importlib.import_module(module_name), class_name)
    with torch.device("meta"):
        model: nn.Module = decoder(config, ropes)
    return model


def _build(config: ModelConfig, ropes: tuple[RotaryTable, ...], device: torch.device, dtype: torch.dtype) -> Model:
    model = _skeleton(config, ropes)
    for module in model.modules():
        wanted = torch.float32 if getattr(module, "keeps_float32", False) else dtype
        for name, weight in module.named_parameters(recurse=False):
            memory = huge_empty(tuple(weight.shape), wanted, device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
    return cast(Model, model.eval())


def weight_slots(model: Model) -> dict[str, Tensor]:
    """Return, for every name in the checkpoint, the view of the model's memory that it fills. Tied heads have none."""
    return {checkpoint_name(model.config, name): slot for name, slot in module_slots(model).items()}


def module_slots(model: Model) -> dict[str, Tensor]:
    """Return the same under the names that the model's modules give them; for nanochat these are its own."""
    slots: dict[str, Tensor] = {}
    for path, module in cast(nn.Module, model).named_modules():
        if isinstance(module, Linear | RMSNorm | Embedding | Scalars):
            slots |= module.slots(path)
    return slots


def checkpoint_name(config: ModelConfig, name: str) -> str:
    """Return what the files of a model's family call the weight at a module's path."""
    if config.nanochat is None:
        return name if name.startswith("lm_head.") else f"model.{name}"
    return hf_name(name) if config.nanochat.has_hf_names else name
