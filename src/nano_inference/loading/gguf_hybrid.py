"""What is particular to GGUF files of Qwen3.5: names, sizes of layers without attention, and their tensors.

Source: ggml-org/llama.cpp, conversion/qwen.py: `ssm_a` is -exp(A_log), convolutions are squeezed, and value heads are
ordered such that head h has key head h % num_k_heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nano_inference.loading.fields import Fields, shown
from nano_inference.loading.gguf_file import PLAIN, GgufFile, GgufTensor
from nano_inference.loading.pieces import FileRange
from nano_inference.loading.sources import WeightSource
from nano_inference.models.names import TEXT_NAMES, TiledHeads
from nano_inference.models.qwen35 import DeltaTerms
from nano_inference.types import ModelError

HYBRID_PARTS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NUMBERS: Mapping[str, str] = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Tensors of Qwen3.5 whose names have no `.weight`."""
_OF_HEADS = (
    *((f"linear_attn.{name}", 0) for name in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")),
    *(("linear_attn.A_log", 0), ("linear_attn.dt_bias", 0), ("linear_attn.out_proj.weight", 1)),
)
_AFTER_KEYS = ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")
"""Weights with value heads: the axis of these; and those of which they follow queries and keys."""
_MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens of Qwen3.5 that stand for images and videos, and those around them."""


def hybrid_fields(file: GgufFile, fields: Fields, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a configuration of Qwen3.5 that other architectures lack."""
    num_v_heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if inner % num_v_heads:
        raise ModelError(f"{fields.origin}: ssm.inner_size ({inner}) must be a multiple of ssm.time_step_rank")
    num_k_heads, k_dim = fields.integer("ssm.group_count"), fields.integer("ssm.state_size")
    terms = DeltaTerms(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=k_dim,
        v_dim=inner // num_v_heads,
        taps=fields.integer("ssm.conv_kernel", low=2),
        is_tiled=True,
    )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    found = {text: token for token, text in enumerate(tokens if isinstance(tokens, tuple) else ()) if text in _MEDIA}
    media = tuple((text, token) for text, token in found.items() if token < vocab_size)
    places = [(end, axis, 0) for end, axis in _OF_HEADS] + [(end, 0, 2 * num_k_heads * k_dim) for end in _AFTER_KEYS]
    tiled = TiledHeads(num_k_heads=num_k_heads, num_v_heads=num_v_heads, places=tuple(places))
    return {"terms": terms, "names": replace(TEXT_NAMES, tiled=tiled), "media_token_ids": media}


def layer_of(name: str) -> int | None:
    """Return the number of a tensor's block, or None."""
    where = name.split(".")
    is_block = len(where) > 2 and where[0] == "blk" and where[1].isascii() and where[1].isdigit() and len(where[1]) < 9
    return int(where[1]) if is_block else None


def hybrid_number(name: str) -> str | None:
    """Return the Hugging Face name of a tensor that is none of a matrix or norm, or None."""
    index = layer_of(name)
    own = None if index is None else _NUMBERS.get(name.removeprefix(f"blk.{index}."))
    return None if own is None else f"model.layers.{index}.{own}"


def recurrent_source(file: GgufFile, tensor: GgufTensor) -> WeightSource:
    """Return a convolution's weight [channels, 1, taps], or the logarithm of a decay: `ssm_a` is -exp(A_log)."""
    if tensor.type_name not in PLAIN:
        raise ModelError(f"{file.path}: tensor {shown(tensor.name)} must not be of type {tensor.type_name}")
    plain = FileRange(file.path, tensor.offset, tensor.shape, PLAIN[tensor.type_name])
    if tensor.name.endswith(".ssm_a"):
        return DecaySource(plain)
    if len(tensor.shape) != 2:
        raise ModelError(f"{file.path}: tensor {shown(tensor.name)} must have 2 dimensions, got {tensor.shape}")
    return replace(plain, shape=(tensor.shape[0], 1, tensor.shape[1]))


@dataclass(frozen=True, slots=True)
class DecaySource:
    """A_log of the gated delta rule, from a file's -exp(A_log); satisfies `WeightSource`."""

    source: FileRange

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, target: Tensor) -> None:
        """Fill a tensor; the logarithm is taken in float64. Raises `ModelError` for a number that is not below 0."""
        values = torch.empty(self.shape, dtype=torch.float64)
        self.source.read_into(values)
        if not bool((values < 0).all()):
            raise ModelError(f"{self.source.path}: ssm_a must be below 0")
        target.copy_(torch.log(-values))
