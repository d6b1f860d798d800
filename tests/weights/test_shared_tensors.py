"""`shared_weights`: damaged handles of a trainer's memory raise `WeightError` and nothing else."""

from __future__ import annotations

import base64
import pickle
import pickletools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from nano_inference import WeightError
from nano_inference.loading.pickle_data import PickleError
from nano_inference.weights.shared_pickle import read_bucket, read_tensors
from nano_inference.weights.shared_tensors import shared_weights
from tests.pickles import Runs
from tests.weights.names import importable_as
from tests.weights.shared_trainer import (
    BUCKETS,
    UPDATER,
    FlattenedTensorMetadata,
    LocalSerializedTensor,
    pickled,
    shared_trainer,
)

pytestmark = pytest.mark.slow

SENT = {
    "a": torch.arange(3).to(torch.bfloat16),
    "b": torch.arange(4, dtype=torch.float32),
    "c": torch.ones((), dtype=torch.float16),
    "d": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    "e": torch.empty(0, 4),
}


@pytest.fixture(autouse=True)
def names_of_sglang() -> Iterator[None]:
    with (
        importable_as(BUCKETS, FlattenedTensorMetadata),
        importable_as(UPDATER, LocalSerializedTensor),
        importable_as("sglang.srt.utils.patch_torch", _rebuild_cuda_tensor_modified),
    ):
        yield


@pytest.mark.parametrize("form", ["list", "local", "bytes"])
def test_tensors_of_any_dtype_and_stride_arrive(form: str, tmp_path: Path) -> None:
    with shared_trainer(SENT, tmp_path) as trainer:
        text = trainer.serialize(form)
        received = list(shared_weights(text, is_bucket=form == "bytes", field="f"))
        assert [name for name, _ in received] == list(SENT)
        for name, tensor in received:
            assert tensor.dtype == SENT[name].dtype and torch.equal(tensor, SENT[name])


@pytest.mark.parametrize("form", ["list", "local", "bytes"])
def test_damaged_handles_raise_weight_errors(form: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    num_refused = 0
    with shared_trainer(SENT, tmp_path) as trainer:
        for _ in range(40):
            good = base64.b64decode(trainer.serialize(form))
            for _ in range(20):
                data = bytearray(good)
                for _ in range(rng.choice([1, 1, 2, 8])):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                text = base64.b64encode(data[: rng.choice([len(data), rng.randrange(len(data))])]).decode()
                try:
                    list(shared_weights(text, is_bucket=form == "bytes", field="f"))
                    break  # its memory may be opened once
                except WeightError as error:
                    assert "\n" not in str(error)
                    num_refused += 1
            trainer.drop()
    assert num_refused > 100


def numbers(data: bytes) -> list[tuple[int, int]]:
    """Return position and value of the one-byte integers of a pickle."""
    return [
        (at, int(value)) for code, value, at in pickletools.genops(data) if code.name == "BININT1" and at is not None
    ]


def test_every_number_that_grows_is_checked(tmp_path: Path) -> None:
    """Offsets, sizes and strides that leave a storage, and sizes of storages that are not the file's."""
    with shared_trainer(SENT, tmp_path) as trainer:
        count = len(numbers(base64.b64decode(trainer.serialize("list", "b"))))
        for index in range(count):
            data = bytearray(base64.b64decode(trainer.serialize("list", "b")))
            at, value = numbers(bytes(data))[index]
            data[at + 1] = value + 100
            try:
                found = list(shared_weights(base64.b64encode(data).decode(), is_bucket=False, field="f"))
            except WeightError as error:
                assert any(part in str(error) for part in ("larger than its storage", "were announced"))
            else:
                raise AssertionError(f"number {index}, {value}, became {value + 100}: {found}")


def _rebuild_cuda_tensor_modified(*arguments: Any) -> None:
    """SGLang's function, under whose name it is pickled; it is never called."""


def cuda_arguments(**changes: Any) -> list[Any]:
    """Return the arguments that torch gives for two float32 values in CUDA memory, some of them changed."""
    counter = b"/torch_7_8_9"
    fields = {
        **{"class": torch.Tensor, "size": torch.Size([2]), "stride": (1,), "offset": 0},
        **{"storage": torch.storage.TypedStorage, "dtype": torch.float32, "device": 0, "handle": bytes(66)},
        **{"num_bytes": 8, "start": 512, "grad": False, "counter": counter, "counter_offset": 0},
        **{"event": bytes(64), "waits": True},
    }
    return list({**fields, **changes}.values())


CUDA: list[tuple[dict[str, Any], str]] = [
    ({}, "in CUDA memory, but this server has no CUDA device"),
    ({"handle": bytes(5000)}, "a CUDA handle is too long"),
    ({"counter": b"/etc/passwd"}, "its reference counter is not one that torch makes"),
    ({"num_bytes": 4}, "larger than its storage"),
    ({"start": -1}, "at least 0"),
    ({"event": "a"}, "not those of torch"),
    ({"more": 1}, "not those of torch"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(("changes", "part"), CUDA)
def test_cuda_handles_are_checked_before_they_are_opened(changes: dict[str, Any], part: str, patched: bool) -> None:
    function = _rebuild_cuda_tensor_modified if patched else reductions.rebuild_cuda_tensor
    data = pickle.dumps([("a", Runs(function, *cuda_arguments(**changes)))])
    with pytest.raises(WeightError, match=f"^f: .*{part}"):
        list(shared_weights(base64.b64encode(data).decode(), is_bucket=False, field="f"))


# ---- pickles that cost more than their size -------------------------------------------------------------------------


def typed(num_bytes: int, dtype: torch.dtype = torch.uint8) -> Any:
    """Return what pickles as a storage in a shared file that is not there."""
    manager = b"/tmp/torch-shm-dir-aaaaaa/manager.sock"
    storage = Runs(reductions.rebuild_storage_filename, torch.UntypedStorage, manager, b"/torch_1_1_1", num_bytes)
    return Runs(reductions.rebuild_typed_storage, storage, dtype)


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], num_bytes: int = 1000, grad: Any = False) -> Any:
    """Return what pickles as a tensor of uint8 in a shared file that is not there."""
    return Runs(reductions.rebuild_tensor, torch.Tensor, typed(num_bytes), (0, torch.Size(shape), stride, grad))


def encoded(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def test_a_pickle_that_several_names_share_is_read_once() -> None:
    inner, other = pickle.dumps(tensor((4,), (1,))), pickle.dumps(tensor((5,), (1,)))
    one = LocalSerializedTensor([inner])
    values = [one, LocalSerializedTensor([inner]), one, LocalSerializedTensor([other])]
    found = read_tensors(encoded([(str(index), value) for index, value in enumerate(values)]))
    assert [(name, one.shape) for name, one in found] == [("0", (4,)), ("1", (4,)), ("2", (4,)), ("3", (5,))]
    assert len({id(one) for _, one in found}) == 2


@pytest.mark.parametrize("grad", [None, [None] * 1000])
def test_requires_grad_is_a_bool(grad: Any) -> None:
    with pytest.raises(PickleError, match="requires_grad"):
        read_tensors(encoded([("a", tensor((4,), (1,), grad=grad))]))


def entry_of(num_fields: int) -> FlattenedTensorMetadata:
    """Return an entry with fields that SGLang's class does not have."""
    entry = FlattenedTensorMetadata("a", torch.Size([1]), torch.uint8, 0, 1, 1)
    vars(entry).update({f"more{index}": None for index in range(num_fields)})
    return entry


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1 << 33, 1000), (0, 1)),
    ((500,), (2,)),
    ((2, 3), (3, 1)),
    ((), ()),
]


@pytest.mark.parametrize(("shape", "stride"), SHAPES)
def test_a_bucket_is_one_contiguous_row(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    text = encoded({"flattened_tensor": tensor(shape, stride), "metadata": [entry_of(0)]})
    with pytest.raises(WeightError, match=r"^f: flattened_tensor must be one-dimensional and contiguous"):
        list(shared_weights(text, is_bucket=True, field="f"))


def test_a_bucket_may_be_empty_and_its_entries_may_have_more_fields() -> None:
    bucket, parts = read_bucket(encoded({"flattened_tensor": tensor((0,), (1,)), "metadata": [entry_of(2)]}))
    assert (bucket.shape, [part.name for part in parts]) == ((0,), ["a"])


FILES: list[tuple[Any, str]] = [
    ({"flattened_tensor": 1, "metadata": []}, "not a tensor in shared memory"),
    ({"flattened_tensor": [], "metadata": {}}, "metadata must be a list"),
    ([], "needs a dict of flattened_tensor and metadata"),
]


@pytest.mark.parametrize(("value", "part"), FILES)
def test_buckets_of_another_form_are_refused(value: Any, part: str) -> None:
    with pytest.raises(WeightError, match=part):
        list(shared_weights(base64.b64encode(pickled(value)).decode(), is_bucket=True, field="f"))
