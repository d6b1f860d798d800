"""`shared_weights`: damaged handles of a trainer's memory raise `WeightError` and nothing else."""

from __future__ import annotations

import base64
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from nano_inference import WeightError
from nano_inference.weights.shared_tensors import shared_weights
from tests.weights.shared_trainer import pickled, rename, shared_trainer

SENT = {
    "a": torch.arange(3).to(torch.bfloat16),
    "b": torch.arange(4, dtype=torch.float32),
    "c": torch.ones((), dtype=torch.float16),
    "d": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    "e": torch.empty(0, 4),
}


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


class Runs:
    """Unpickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


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
    ({"device": "GPU-8a7a2d0e"}, "in CUDA memory, but this server has no CUDA device"),
    ({"handle": bytes(5000)}, "a CUDA handle is too long"),
    ({"counter": b"/etc/passwd"}, "its reference counter is not one that torch makes"),
    ({"num_bytes": 4}, "larger than its storage"),
    ({"start": -1}, "at least 0"),
    ({"event": "a"}, "not those of torch"),
    ({"class": torch.Size}, "not those of torch"),
    ({"more": 1}, "not those of torch"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(("changes", "part"), CUDA)
def test_cuda_handles_are_checked_before_they_are_opened(changes: dict[str, Any], part: str, patched: bool) -> None:
    rename(_rebuild_cuda_tensor_modified, "sglang.srt.utils.patch_torch")
    function = _rebuild_cuda_tensor_modified if patched else reductions.rebuild_cuda_tensor
    data = pickle.dumps([("a", Runs(function, *cuda_arguments(**changes)))])
    with pytest.raises(WeightError, match=f"^f: .*{part}"):
        list(shared_weights(base64.b64encode(data).decode(), is_bucket=False, field="f"))


FILES: list[tuple[Any, str]] = [
    ({"flattened_tensor": 1, "metadata": []}, "not a tensor in shared memory"),
    ({"flattened_tensor": [], "metadata": {}}, "metadata must be a list"),
    ({"flattened_tensor": []}, "needs a dict of flattened_tensor and metadata"),
    ([], "needs a dict of flattened_tensor and metadata"),
]


@pytest.mark.parametrize(("value", "part"), FILES)
def test_buckets_of_another_form_are_refused(value: Any, part: str) -> None:
    with pytest.raises(WeightError, match=part):
        list(shared_weights(base64.b64encode(pickled(value)).decode(), is_bucket=True, field="f"))
