"""A checkpoint's weights packed for the CPU kernels, tensor by tensor: no float32 copy of the model ever exists."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nano_inference.kernels.library import Library
from nano_inference.kernels.matrix import Matrix, can_keep, can_round, pack, pack_blocks, pack_int8
from nano_inference.loader.door import HARMLESS_SUFFIX, WeightSource, check_names
from nano_inference.loader.gguf import PackedTensor
from nano_inference.loader.opened import Checkpoint
from nano_inference.loader.pieces import DTYPES
from nano_inference.memory import Slabs
from nano_inference.models.build import build_empty, checkpoint_name, module_slots
from nano_inference.models.kernel import Keep
from nano_inference.models.packed import is_scalar
from nano_inference.models.programs import Weights


def load_packed(
    checkpoint: Checkpoint, library: Library, keep: Keep, progress: Callable[[int, int], None] | None = None
) -> Weights:
    """Read and pack every weight. `progress` is told the values read so far and of all, in bytes of float32.

    Raises `ModelError` as `load_into` does.
    """
    config = checkpoint.config
    slots = {checkpoint_name(config, name): (name, slot) for name, slot in module_slots(build_empty(config)).items()}
    sources = {name: source for name, source in checkpoint.tensors() if not (_is_tied(name, checkpoint))}
    check_names({name: slot for name, (_, slot) in slots.items()}, sources)
    total = 4 * sum(slot.numel() for _, slot in slots.values())
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Tensor] = {}
    slabs = Slabs()
    done = 0
    for name, source in sources.items():
        module_name, slot = slots[name]
        if slot.dim() == 2:
            matrices[module_name] = _matrix(source, library, keep, slabs)
        else:
            vectors[module_name] = _vector(source, rounds=keep == "bfloat16" and not is_scalar(module_name))
        done += 4 * slot.numel()
        if progress is not None:
            progress(done, total)
    return Weights(matrices, vectors)


def _is_tied(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a file's tensor says again what another says already, or what follows from the configuration."""
    return name.endswith(HARMLESS_SUFFIX) or (name == "lm_head.weight" and checkpoint.config.tie_embeddings)


def _matrix(source: WeightSource, library: Library, keep: Keep, slabs: Slabs) -> Matrix:
    """Pack one matrix: ggml's blocks and plain values as they are, unless another precision is asked for."""
    if keep == "int8":
        return _rounded(source, library, slabs)
    if keep == "bfloat16":
        return pack(library, _read(source, torch.bfloat16), slabs)
    if isinstance(source, PackedTensor) and not source.shift and can_keep(source.tensor.type_name, source.shape[1]):
        rows, order = source.read_blocks()
        return pack_blocks(library, source.tensor.type_name, rows, source.shape[1], slabs, order)
    return pack(library, _read(source, _own_dtype(source)), slabs)


def _rounded(source: WeightSource, library: Library, slabs: Slabs) -> Matrix:
    """Pack one matrix for activations of eight bits: blocks of four bits as they are, all else rounded to eight."""
    if isinstance(source, PackedTensor) and not source.shift and can_round(source.tensor.type_name, source.shape[1]):
        rows, order = source.read_blocks()
        return pack_blocks(library, source.tensor.type_name, rows, source.shape[1], slabs, order, rounds=True)
    return pack_int8(library, _read(source, torch.float32), slabs)


def _vector(source: WeightSource, *, rounds: bool) -> Tensor:
    """Read norms, biases and nanochat's learnt numbers."""
    return _read(source, torch.bfloat16).float() if rounds else _read(source, torch.float32)


def _own_dtype(source: WeightSource) -> torch.dtype:
    """Return the narrowest precision that holds a source's values."""
    dtype = DTYPES.get(source.dtype, torch.float32)
    return torch.float32 if dtype == torch.float64 else dtype


def _read(source: WeightSource, dtype: torch.dtype) -> Tensor:
    values = torch.empty(source.shape, dtype=dtype)
    source.read_into(values)
    return values
