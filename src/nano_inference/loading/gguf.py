"""Weights of GGUF files under Hugging Face names, dequantised by the `gguf` package in bounded pieces.

Undoes two changes of llama.cpp's converter: it permutes the rows of Llama's q and k (ggml rotates adjacent dimensions,
Hugging Face halves), and adds 1 to Gemma's norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from nano_inference.loading.fields import shown
from nano_inference.loading.gguf_config import RULES, architecture_of
from nano_inference.loading.gguf_file import GgufFile, GgufTensor
from nano_inference.loading.pieces import FileRange, fill, open_at
from nano_inference.loading.sources import WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.types import ModelError

PIECE_VALUES = 2**20  # most values that are dequantised at a time, but at least a row or a head

PLAIN: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_TOP: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS: Mapping[str, Mapping[str, str]] = {
    "dense": {"ffn_norm": "post_attention_layernorm"},
    "gemma": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_DERIVED = ("rope_freqs.weight", "rope_freqs", "attn_rot_embd", "rotary_emb.inv_freq")
"""Rotary frequencies: `gguf_config` reads those that it needs."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of a GGUF file that must be dequantised or changed; satisfies `WeightSource`."""

    path: Path
    tensor: GgufTensor
    head_rows: int = 0  # rows per head, if their permutation must be undone; otherwise 0
    shift: float = 0.0  # added to every value
    column_range: tuple[int, int] | None = None
    """The columns [start, stop) of the tensor that this source reads; None: all."""
    piece_values: int = PIECE_VALUES

    @property
    def shape(self) -> tuple[int, ...]:
        if self.column_range is None:
            return self.tensor.shape
        start, stop = self.column_range
        return (self.tensor.shape[0], stop - start)

    def rows(self, start: int, stop: int) -> PackedTensor:
        """Return rows [start, stop): whole heads if their permutation must be undone."""
        tensor, width = self.tensor, self.tensor.row_bytes
        if len(tensor.shape) == 1:
            width = tensor.row_bytes // tensor.shape[0]
            row_bytes = num_bytes = (stop - start) * width
        else:
            row_bytes, num_bytes = width, (stop - start) * width
        part = replace(
            tensor,
            shape=(stop - start, *tensor.shape[1:]),
            offset=tensor.offset + start * width,
            num_bytes=num_bytes,
            row_bytes=row_bytes,
        )
        return replace(self, tensor=part)

    def columns(self, start: int, stop: int) -> PackedTensor:
        """Return columns [start, stop) of a matrix."""
        assert len(self.tensor.shape) == 2 and self.column_range is None
        return replace(self, column_range=(start, stop))

    @property
    def dtype(self) -> str:
        """Return ggml's type name, such as "Q4_1", or the dtype of plain values."""
        return PLAIN.get(self.tensor.type_name, self.tensor.type_name)

    def read_into(self, target: Tensor) -> None:
        """Fill a contiguous tensor of the same shape, any float dtype and device, in pieces of whole heads."""
        flat = target.view(-1)
        num_rows = self.tensor.num_bytes // self.tensor.row_bytes
        row_values = flat.numel() // num_rows
        read = self._read_rows if self.column_range is None else self._read_columns
        unit = self.head_rows if self.head_rows and len(self.shape) > 1 else 1
        step = max(1, self.piece_values // (unit * row_values)) * unit
        with open_at(self.path, self.tensor.offset) as file:
            for start in range(0, num_rows, step):
                values = read(file, start, min(step, num_rows - start))
                self._place(values, flat[start * row_values : (start + step) * row_values])

    def _read_rows(self, file: FileIO, start: int, count: int) -> Tensor:
        """Return the values of the next rows of the file."""
        packed = torch.empty(count, self.tensor.row_bytes, dtype=torch.uint8)
        fill(file, self.path, packed.view(-1))
        return unpack(packed, self.tensor.type_name)

    def _read_columns(self, file: FileIO, start: int, count: int) -> Tensor:
        """Return the values of some rows in the columns of this source, reading only the blocks that hold them."""
        from nano_inference.loading.ggml import block_layout

        assert self.column_range is not None
        block, block_bytes = block_layout(self.tensor.type_name)
        first, last = self.column_range[0] // block, -(-self.column_range[1] // block)
        packed = torch.empty(count, (last - first) * block_bytes, dtype=torch.uint8)
        for index, row in enumerate(packed, start):
            file.seek(self.tensor.offset + index * self.tensor.row_bytes + first * block_bytes)
            fill(file, self.path, row)
        values = unpack(packed, self.tensor.type_name).view(count, -1)
        skip = self.column_range[0] - first * block
        return values[:, skip : skip + self.shape[1]].reshape(-1)

    def read_blocks(self) -> tuple[Tensor, Tensor | None]:
        """Return the file's rows, uint8 [rows, bytes], and the file row of each row of the weight (None: the same).

        Only for two-dimensional tensors without a shift.
        """
        assert not self.shift and len(self.shape) == 2 and self.column_range is None
        rows = torch.empty(self.shape[0], self.tensor.row_bytes, dtype=torch.uint8)
        with open_at(self.path, self.tensor.offset) as file:
            fill(file, self.path, rows.view(-1))
        if not self.head_rows:
            return rows, None
        order = torch.arange(self.shape[0], dtype=torch.int32).view(-1, self.head_rows // 2, 2)
        return rows, order.transpose(1, 2).reshape(-1).contiguous()

    def _place(self, values: Tensor, piece: Tensor) -> None:
        """Write the dequantised values of some rows to `piece`, shifted and in Hugging Face's order."""
        if self.shift:
            values += self.shift
        if not self.head_rows:
            piece.copy_(values)
            return
        num_columns = self.shape[1] if len(self.shape) > 1 else 1
        half = self.head_rows // 2
        piece.view(-1, 2, half, num_columns).copy_(values.view(-1, half, 2, num_columns).transpose(1, 2))


def unpack(packed: Tensor, type_name: str) -> Tensor:
    """Return the float32 values of rows of bytes, flattened."""
    from nano_inference.loading.ggml import dequantize  # `read_gguf` has checked that `gguf` is installed

    return torch.from_numpy(dequantize(packed.numpy(), type_name)).view(-1)


def gguf_sources(file: GgufFile, config: ModelConfig) -> dict[str, WeightSource]:
    """Return the source of every weight by Hugging Face name, in file order.

    Raises `ModelError` for a tensor that the architecture does not have, or whose type cannot be unpacked.
    """
    from nano_inference.loading.ggml import can_dequantize

    architecture = architecture_of(file)
    for type_name in sorted({tensor.type_name for tensor in file.tensors.values()} - PLAIN.keys()):
        if not can_dequantize(type_name):
            raise ModelError(f"{file.path}: tensors of type {type_name} cannot be unpacked")
    sources: dict[str, WeightSource] = {}
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        part = tensor.name.split(".")[-2:][0]
        if tensor.name in _DERIVED or part in _DERIVED:
            continue
        name = hf_name(tensor.name, RULES[architecture].family)
        if name is None:
            raise ModelError(f"{file.path}: tensor {shown(tensor.name)} is not known in architecture {architecture}")
        head_rows = config.head_dim if RULES[architecture].permuted and part in ("attn_q", "attn_k") else 0
        shift = -1.0 if RULES[architecture].family == "gemma" and name.endswith("norm.weight") else 0.0
        sources[name] = _source(file, tensor, head_rows, shift)
    return sources


def hf_name(name: str, family: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None."""
    *where, part, kind = name.split(".") if "." in name else ("", name)
    if kind not in ("weight", "bias"):
        return None
    if not where and part in _TOP:
        return f"{_TOP[part]}.{kind}"
    if len(where) != 2 or where[0] != "blk" or not (where[1].isascii() and where[1].isdigit()):
        return None
    found = _LAYER.get(part) or _NORMS[family].get(part)
    return None if found is None else f"model.layers.{where[1]}.{found}.{kind}"


def _source(file: GgufFile, tensor: GgufTensor, head_rows: int, shift: float) -> WeightSource:
    """Return a file range if the values can be read unchanged, otherwise a `PackedTensor`."""
    if head_rows % 2 or (head_rows and tensor.shape[0] % head_rows):
        raise ModelError(
            f"{file.path}: tensor {shown(tensor.name)} has {tensor.shape[0]} rows, not whole heads of {head_rows}"
        )
    if head_rows or shift or tensor.type_name not in PLAIN:
        return PackedTensor(file.path, tensor, head_rows, shift)
    return FileRange(file.path, tensor.offset, tensor.shape, PLAIN[tensor.type_name])


def main_type(file: GgufFile) -> str:
    """Return the type with the most bytes: "float32", "bfloat16", "Q4_1", …"""
    sizes = Counter[str]()
    for tensor in file.tensors.values():
        sizes[tensor.type_name] += tensor.num_bytes
    name = sizes.most_common(1)[0][0]
    return PLAIN.get(name, name)
