"""Weight updates of prime-rl's trainers: state dicts that a group's rank 0 broadcasts with their own description.

Format (prime_rl/transports/weights/nccl.py at 559b447): the number of state dicts, as one int64; then for each the
number of bytes of its description, as one int64, the description, and one array for each dtype. The description is a
pickled dict from dtypes to lists of (name, size, number of values), in the order of the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nano_inference.loading.pickle_data import MAX_BYTES, Named, PickleError, name_of, read_data
from nano_inference.loading.pieces import DTYPES
from nano_inference.support.memory import huge_empty
from nano_inference.types import WeightError
from nano_inference.weights.member import Member, PlainSpec, Receiver, Shapes, received, unpacked
from nano_inference.weights.shared_pickle import SIZE, read_name, read_shape

_DTYPES = {f"torch {name}": name for name in DTYPES}
_NAMES = frozenset({SIZE, *_DTYPES})
_MAX_DICTS = 1 << 16
_MAX_SURPLUS = 4  # most values of an update, as a multiple of the model's


def state_dicts(group: Member, own: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of one update. `own` are the model's shapes, which bound the memory.

    If it is closed early, the remaining broadcasts are received and dropped. Raises `WeightError`, and then closes the
    group, if a description is not valid: it is unknown what the trainer sends next.
    """
    return received(group, _receivers(group, own))


def _receivers(group: Member, own: Shapes) -> Iterator[Receiver]:
    """Yield a function for each array of values, which must be called before the next is requested."""
    left = _MAX_SURPLUS * sum(math.prod(shape) for shape in own.values())
    for _ in range(_number(group, "state dicts", _MAX_DICTS)):
        size = _number(group, "bytes of a description", MAX_BYTES)
        description = bytes(group.broadcast(torch.zeros(size, dtype=torch.uint8)).numpy().data)
        try:
            arrays = read_description(description)
        except PickleError as error:
            raise WeightError(f"the trainer's description of a state dict: {error}; the group is closed") from None
        for specs in arrays:
            left -= sum(math.prod(spec.shape) for spec in specs)
            if left < 0:
                raise WeightError(f"the trainer announces more than {_MAX_SURPLUS} times the model's values")
            yield partial(_receive, group, specs)


def _receive(group: Member, specs: list[PlainSpec]) -> list[tuple[str, Tensor]]:
    dtype = DTYPES[specs[0].dtype]
    array = huge_empty((sum(math.prod(spec.shape) for spec in specs),), dtype, group.device)
    return unpacked(group.broadcast(array).view(torch.uint8), specs)


def _number(group: Member, what: str, most: int) -> int:
    found = int(group.broadcast(torch.zeros(1, dtype=torch.int64)).item())
    if not 0 <= found <= most:
        raise WeightError(f"the trainer announces {found} {what} (limit {most})")
    return found


def read_description(data: bytes) -> list[list[PlainSpec]]:
    """Return the tensors of each array of a state dict. Raises `PickleError`."""
    tree = read_data(data, _NAMES)
    if not isinstance(tree, dict):
        raise PickleError("it is not a dict of dtypes")
    found = []
    for dtype, entries in tree.items():
        if name_of(dtype) not in _DTYPES:
            raise PickleError(f"a dtype is not one of {', '.join(DTYPES)}")
        if not isinstance(entries, list) or not entries:
            raise PickleError("the entry of a dtype is not a list of tensors")
        specs = []
        for entry in entries:
            if not isinstance(entry, tuple) or len(entry) != 3:
                raise PickleError("a tensor is not described by its name, size and number of values")
            name, shape = read_name(entry[0]), read_shape(entry[1])
            if not isinstance(entry[1], Named) or type(entry[2]) is not int or math.prod(shape) != entry[2]:
                raise PickleError("a tensor's size is not the number of its values")
            specs.append(PlainSpec(name, _DTYPES[name_of(dtype)], shape))
        found.append(specs)
    return found
