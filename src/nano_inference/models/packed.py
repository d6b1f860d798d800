"""What the engine may ask of the weights of a model, whether torch modules or the kernels compute with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from nano_inference.kernels.matrix import Matrix, Packer, unpack
from nano_inference.memory import Slabs
from nano_inference.models.build import (
    Model,
    build,
    build_empty,
    build_like,
    checkpoint_name,
    module_slots,
    parameters,
    weight_slots,
)
from nano_inference.models.kernel import KernelModel
from nano_inference.models.programs import Weights

AnyModel = Model | KernelModel
Pace = Callable[[int], None]
"""Told how many bytes come next; returns when they may, raises when they no longer shall."""

_PIECE_ELEMENTS = 32768
"""Elements copied or packed at once beside running steps: torch works on so few without a second thread."""


def weight_shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight under its checkpoint's name."""
    named = weight_slots(build_empty(model.config) if isinstance(model, KernelModel) else model)
    return {name: tuple(slot.shape) for name, slot in named.items()}


def weight_values(model: AnyModel, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under their checkpoint's names, all or those named.

    Those of a packed model are widened to float32 one after another.
    """
    if not isinstance(model, KernelModel):
        yield from ((name, slot) for name, slot in weight_slots(model).items() if names is None or name in names)
        return
    for path in module_slots(build_empty(model.config)):
        name = checkpoint_name(model.config, path)
        if names is None or name in names:
            yield name, _values(model, path)


def _values(model: KernelModel, name: str) -> Tensor:
    """Widen one weight, to the precision that its torch module would have: nanochat's learnt numbers stay float32."""
    vector = model.weights.vectors.get(name)
    values = unpack(model.library, model.weights.matrices[name]) if vector is None else vector
    return values.bfloat16() if model.keep == "bfloat16" and not is_scalar(name) else values


def is_scalar(name: str) -> bool:
    """Whether a weight is one of nanochat's learnt numbers, which are kept in float32 always."""
    return "lambda" in name


def staging_model(model: AnyModel, device: torch.device) -> Model:
    """Return memory in which another set of weights can be gathered; its contents are not set."""
    if isinstance(model, KernelModel):
        return build(model.config, device, torch.bfloat16 if model.keep == "bfloat16" else torch.float32)
    return build_like(model, device)


def finished(live: AnyModel, staged: Model, taken: Collection[str], pace: Pace | None = None) -> AnyModel:
    """Return the model to compute with: what was gathered itself, or, where kernels compute, a packed copy of it.

    Weights that are not among the `taken` stay as they are packed: what a file has in four bits, a copy of its values
    would have in more, or rounded. `pace` is told of every piece before it is packed.
    """
    if not isinstance(live, KernelModel):
        return staged
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Tensor] = {}
    slabs = Slabs()
    for name, slot in module_slots(staged).items():
        is_new = checkpoint_name(live.config, name) in taken
        if slot.dim() == 2:
            matrices[name] = _packed(live, slot, slabs, pace) if is_new else live.weights.matrices[name]
        else:
            vectors[name] = slot.float().clone() if is_new else live.weights.vectors[name]
    return live.with_weights(Weights(matrices, vectors))


def _packed(live: KernelModel, slot: Tensor, slabs: Slabs, pace: Pace | None) -> Matrix:
    """Pack one matrix a few rows at a time."""
    packer = Packer(live.library, slot, slabs, rounds=live.keep == "int8")
    for piece in pieces_of(slot, pace):
        packer.put(piece.start, piece.stop)
    return packer.matrix


def pieces_of(slot: Tensor, pace: Pace | None) -> Iterator[slice]:
    """Yield the rows of a tensor of at least one dimension: all, or, at a pace, a few after the other."""
    rows = slot.size(0)
    if pace is None or not rows:
        yield slice(0, rows)
        return
    step = max(1, _PIECE_ELEMENTS * rows // slot.numel())
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        pace(slot[piece].nbytes)
        yield piece


def left_over(replaced: AnyModel, gathered: Model | None) -> Model | None:
    """Return the memory that an exchange of weights leaves for gathering the next."""
    return gathered if isinstance(replaced, KernelModel) else replaced


def move_weights(model: AnyModel, device: torch.device) -> None:
    """Move the weights to a device; the kernels' stay in main memory."""
    if not isinstance(model, KernelModel):
        for weight in parameters(model):
            weight.data = weight.data.to(device)


def discard_weights(model: AnyModel) -> None:
    """Give the memory of the weights back; nothing can be computed until there are new ones."""
    if isinstance(model, KernelModel):
        model.discard()
        return
    for weight in parameters(model):
        weight.data = weight.data.new_empty(0)


def copied(model: AnyModel, device: torch.device) -> AnyModel:
    """Return a second model with the same weights; packed ones are never written, so they are shared."""
    if isinstance(model, KernelModel):
        return model.with_weights(model.weights)
    twin = build_like(model, device)
    with torch.no_grad():
        for (_, target), (_, source) in zip(weight_slots(twin).items(), weight_slots(model).items(), strict=True):
            target.copy_(source)
    return twin


def num_weight_bytes(model: AnyModel) -> int:
    """Return the bytes that the weights take in memory."""
    if isinstance(model, KernelModel):
        matrices, vectors = model.weights.matrices.values(), model.weights.vectors.values()
        return sum(matrix.num_bytes for matrix in matrices) + sum(vector.nbytes for vector in vectors)
    return sum(slot.nbytes for slot in weight_slots(model).values())


def weight_dtype(model: AnyModel) -> str:
    """Return the precision that updates are kept in; "float32" also where narrower weights are kept as they came."""
    if isinstance(model, KernelModel):
        return "float32" if model.keep == "own" else model.keep
    return str(next(iter(weight_slots(model).values())).dtype).removeprefix("torch.")


def weight_device(model: AnyModel) -> torch.device:
    """Return where the weights are; the kernels' are in main memory."""
    return torch.device("cpu") if isinstance(model, KernelModel) else next(iter(weight_slots(model).values())).device
