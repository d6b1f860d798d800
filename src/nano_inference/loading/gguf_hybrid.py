"""What is particular to GGUF files of Qwen3.5: names, sizes of layers without attention, and their tensors.

Source: ggml-org/llama.cpp, conversion/qwen.py: `ssm_a` is -exp(A_log), convolutions are squeezed, and value heads are
ordered such that head h has key head h % num_k_heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_inference.loading.fields import Fields, shown
from nano_inference.loading.gguf_file import PLAIN, GgufFile, GgufTensor
from nano_inference.loading.packed import Exchanged, PackedTensor
from nano_inference.loading.pieces import FileRange
from nano_inference.loading.sources import MappedSource, WeightSource
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
    v_dim = inner // num_v_heads
    terms = DeltaTerms(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        taps=fields.integer("ssm.conv_kernel", low=2),
        is_tiled=any(v_dim % values for values in _block_values(file)),
    )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    found = {text: token for token, text in enumerate(tokens if isinstance(tokens, tuple) else ()) if text in _MEDIA}
    media = tuple((text, token) for text, token in found.items() if token < vocab_size)
    names = replace(TEXT_NAMES, tiled=_tiled(terms) if terms.is_tiled else None)
    return {"terms": terms, "names": names, "media_token_ids": media}


def _tiled(terms: DeltaTerms) -> TiledHeads:
    keys = 2 * terms.num_k_heads * terms.k_dim
    places = [(end, axis, 0) for end, axis in _OF_HEADS] + [(end, 0, keys) for end in _AFTER_KEYS]
    return TiledHeads(num_k_heads=terms.num_k_heads, num_v_heads=terms.num_v_heads, places=tuple(places))


def _block_values(file: GgufFile) -> set[int]:
    """Return the sizes of blocks whose columns are those of value heads."""
    from nano_inference.loading.ggml import block_layout

    kinds = {tensor.type_name for tensor in file.tensors.values() if tensor.name.endswith(".ssm_out.weight")}
    return {block_layout(kind)[0] for kind in kinds}


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


def hybrid_source(file: GgufFile, tensor: GgufTensor, name: str, terms: DeltaTerms) -> WeightSource:
    """Return a weight of a layer without attention, with value heads in the order of `terms`.

    A convolution has the shape [channels, 1, taps]; the file has the decay -exp(A_log).
    """
    is_decay, is_convolution = tensor.name.endswith(".ssm_a"), tensor.name.endswith(".ssm_conv1d.weight")
    if (is_decay or is_convolution) and tensor.type_name not in PLAIN:
        raise ModelError(f"{file.path}: tensor {shown(tensor.name)} must not be of type {tensor.type_name}")
    if is_convolution and len(tensor.shape) != 2:
        raise ModelError(f"{file.path}: tensor {shown(tensor.name)} must have 2 dimensions, got {tensor.shape}")
    if is_convolution:
        tensor = replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    place = None if terms.is_tiled else _tiled(terms).place_of(name)
    if place is None and tensor.type_name in PLAIN:
        source: WeightSource = FileRange(file.path, tensor.offset, tensor.shape, PLAIN[tensor.type_name])
    else:
        axis, start = place or (0, 0)
        order = place and Exchanged((1, terms.num_v_heads // terms.num_k_heads, terms.num_k_heads, -1), start)
        source = PackedTensor(file.path, tensor, None if axis else order, order if axis else None)
    return MappedSource(source, partial(_logarithm, file.path)) if is_decay else source


def _logarithm(path: Path, decays: Tensor) -> Tensor:
    """Return A_log from -exp(A_log); in float64, so that the exponential is the file's number again."""
    if not bool((decays < 0).all()):
        raise ModelError(f"{path}: ssm_a must be below 0")
    return torch.log(-decays.double())
