"""POST /update_weights_from_tensor: weights in memory that a trainer on the same machine shares."""

from __future__ import annotations

import base64
import os
import pickle
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from starlette.requests import Request

from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.sglang import require_same_machine
from nano_inference.types import WeightError
from nano_inference.weights.shared_tensors import shared_weights
from tests.server.tiny import Running
from tests.server.trainer import PROMPT, SHORT, Stream, fresh_tokens, make_weights, ok, refused, serving, weights_of
from tests.weights.shared_trainer import SharedTrainer, shared_trainer

pytestmark = pytest.mark.slow

PATH = "/update_weights_from_tensor"
FIELD = "serialized_named_tensors"
KEY = {"authorization": "Bearer an-admin-key"}


@pytest.fixture(scope="module")
def new(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tiny_directory, tmp_path_factory.mktemp("shared") / "new", seed=22)


@pytest.fixture(scope="module")
def named(new: Path) -> dict[str, torch.Tensor]:
    good = weights_of(new)
    bad = good["model.norm.weight"].clone()
    bad[3] = torch.nan
    return {**good, "bad": bad}


@pytest.fixture(scope="module")
def good(named: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in named if name != "bad"]


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, tiny_directory, weight_timeout=60, admin_key=("an-admin-key",)) as one:
        one.client.headers.update(KEY)
        yield one


@pytest.fixture(scope="module")
def trainer(named: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedTrainer]:
    with shared_trainer(named, tmp_path_factory.mktemp("sharing")) as one:
        yield one


def send(server: Running, text: str, **fields: Any) -> httpx2.Response:
    return server.post(PATH, {FIELD: [text], "flush_cache": True, **fields})


def checksum(server: Running) -> str:
    return str(ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"])


FORMS: list[tuple[str, str | None]] = [
    *(("list", None), ("parameters", None), ("local", None)),
    *(("bytes", "flattened_bucket"), ("values", "flattened_bucket")),
]


@pytest.mark.parametrize(("form", "load_format"), FORMS)
def test_weights_of_a_trainer_beside_the_server_are_installed(
    server: Running,
    trainer: SharedTrainer,
    good: list[str],
    new: Path,
    tiny_directory: Path,
    form: str,
    load_format: str | None,
) -> None:
    ok(server.post("/update_weights_from_disk", {"model_path": str(tiny_directory)}))
    reply = ok(send(server, trainer.serialize(form, *good), load_format=load_format, weight_version=f"of-{form}"))
    assert (reply["success"], reply["weight_version"]) == (True, f"of-{form}")
    assert Stream(server, params=SHORT).result().completion_tokens == fresh_tokens(tiny_directory, new, PROMPT, SHORT)


def test_each_bucket_is_an_update(
    server: Running, trainer: SharedTrainer, good: list[str], tiny_directory: Path
) -> None:
    ok(server.post("/update_weights_from_disk", {"model_path": str(tiny_directory)}))
    for number, start in enumerate(range(0, len(good), 5)):
        text = trainer.serialize("bytes", *good[start : start + 5])
        reply = ok(send(server, text, load_format="flattened_bucket", weight_version=str(number)))
        assert reply["weight_version"] == str(number)
    whole = checksum(server)
    digest = ok(send(server, trainer.serialize("list", *good), checksum=whole))
    assert digest["success"] is True
    refused(send(server, trainer.serialize("list", *good), checksum="0000"), 400, "checksum")
    assert checksum(server) == whole


def test_shared_memory_is_released(
    server: Running, named: dict[str, torch.Tensor], good: list[str], tmp_path: Path
) -> None:
    with shared_trainer(named, tmp_path) as other:
        for form, names, status in (("bytes", good, 200), ("list", [*good, "bad"], 400)):
            load_format = "flattened_bucket" if form == "bytes" else None
            assert send(server, other.serialize(form, *names), load_format=load_format).status_code == status
            assert other.files()
            other.drop()
            assert not other.files()


def test_a_storage_may_have_several_tensors(server: Running, trainer: SharedTrainer) -> None:
    refused(send(server, trainer.serialize("tied", "model.norm.weight")), 400, "model.norm.weight.tied: the model has")


def test_a_tensor_that_is_refused_leaves_the_old_weights(
    server: Running, trainer: SharedTrainer, good: list[str]
) -> None:
    before = checksum(server)
    refused(send(server, trainer.serialize("list", *good[:5], "bad")), 400, "bad: the model has no such tensor")
    text = trainer.serialize("two-ranks", *good)
    refused(send(server, text), 400, "a LocalSerializedTensor has 2 values")
    assert checksum(server) == before


def test_file_descriptors_are_refused_by_name(server: Running, named: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = checksum(server)
    with shared_trainer(named, tmp_path, "file_descriptor") as other:
        text = other.serialize("list", "model.norm.weight")
        refused(send(server, text), 400, FIELD, "set_sharing_strategy('file_system')")
    assert checksum(server) == before


def test_memory_of_a_trainer_that_ended_is_refused(
    server: Running, named: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with shared_trainer(named, tmp_path) as other:
        text = other.serialize("list", "model.norm.weight")
        other.stop()
    refused(send(server, text), 400, FIELD, "No such file", "on this machine")


SENTINEL = "/tmp/nano-inference-pickle-was-run"


class Runs:
    """Unpickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def texts(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def raw(data: bytes) -> str:
    return base64.b64encode(data).decode()


def shared(handle: bytes, size: int = 4, manager: bytes = b"/tmp/torch-shm-dir-aaaaaa/manager.sock") -> bytes:
    """Return a pickle of one float32 tensor in a shared file."""
    from torch.multiprocessing import reductions as torchs

    storage = Runs(torchs.rebuild_storage_filename, torch.UntypedStorage, manager, handle, size)
    typed = Runs(torchs.rebuild_typed_storage, storage, torch.float32)
    tensor = Runs(torchs.rebuild_tensor, torch.Tensor, typed, (0, torch.Size([1]), (1,), False))
    return pickle.dumps([("model.norm.weight", tensor)])


NESTED = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
DEEP_KEY = b"\x80\x04})" + b"\x85" * 100_000 + b"K\x01s."
HOSTILE: dict[str, tuple[str, str]] = {
    "system": (texts([("a", Runs(os.system, f"touch {SENTINEL}"))]), "it names 'posix system'"),
    "getattr": (texts(Runs(getattr, 1, "real")), "it names 'builtins getattr'"),
    "eval": (texts(Runs(eval, f"open({SENTINEL!r}, 'w')")), "it names 'builtins eval'"),
    "memory": (texts(Runs(bytearray, 1 << 40)), "builtins bytearray"),
    "another torch function": (texts([("a", Runs(torch.load, "/etc/passwd"))]), "torch.serialization load"),
    "nested": (raw(NESTED), "an entry is not a pair"),
    "a nested key": (raw(DEEP_KEY), "nested more than 64 deep"),
    "itself": (raw(b"\x80\x04]\x94h\x00a."), "an entry is not a pair"),
    "a huge memo": (raw(b"\x80\x04]r\xff\xff\xff\x7f."), "memoizes a value"),
    "a missing memo": (raw(b"\x80\x04h\x07."), "it is damaged"),
    "a huge text": (raw(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"a."), "it is damaged"),
    "a huge integer": (raw(b"\x80\x04\x8b\xff\xff\xff\x7f."), "it is damaged"),
    "truncated": (raw(shared(b"/torch_1_1_1")[:-9]), "it is damaged"),
    "two values": (raw(b"\x80\x04]]."), "exactly one value"),
    "an old protocol": (raw(b"(lp0\n."), "protocol 2 to 5"),
    "a persistent id": (raw(b"\x80\x04Pa\n."), "opcode"),
    "not base64": ("§§", "not base64"),
    "empty": ("", "protocol 2 to 5"),
    "another file": (raw(shared(b"/../../etc/passwd")), "not one that torch gives"),
    "another socket": (raw(shared(b"/torch_1_1_1", manager=b"/run/docker.sock")), "not one that torch makes"),
    "a file that is not there": (raw(shared(b"/torch_1_1_1")), "No such file"),
    "a tensor beyond its storage": (raw(shared(b"/torch_1_1_1", size=3)), "larger than its storage"),
    "a negative size": (raw(shared(b"/torch_1_1_1", size=-1)), "at least 0"),
    "no tensor": (texts([("a", 1)]), "not a tensor"),
    "no name": (texts([(1, 1)]), "name must be text"),
    "a dict": (texts({"a": 1}), "not a tensor in shared memory"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickle_is_refused(kind: str) -> None:
    text, part = HOSTILE[kind]
    for is_bucket, said in ((False, re.escape(part)), (True, "")):
        with pytest.raises(WeightError, match=f"{FIELD}.*{said}") as found:
            list(shared_weights(text, is_bucket=is_bucket, field=FIELD))
        assert "\n" not in str(found.value) and len(str(found.value)) < 300 and not Path(SENTINEL).exists()


def test_hostile_pickle_leaves_the_old_weights(server: Running) -> None:
    before = checksum(server)
    refused(send(server, HOSTILE["system"][0]), 400, FIELD, "it names 'posix system'")
    assert checksum(server) == before and not Path(SENTINEL).exists()


def test_a_file_of_another_size_is_refused(server: Running, trainer: SharedTrainer) -> None:
    text = trainer.serialize("list", "model.norm.weight")  # 32 float32 values, whose size is pickled as K\x80
    data = base64.b64decode(text).replace(b"K\x80t", b"K\xfft", 1)
    assert data != base64.b64decode(text)
    refused(send(server, raw(data)), 400, FIELD, "has 128 bytes, 255 were announced")


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("load_format", "direct", "load_format 'direct' is not supported"),
        ("load_format", "verl.workers.delta.load", "is not supported"),
        (FIELD, ["a", "b"], "must have one entry, got 2"),
        (FIELD, [], FIELD),
        (FIELD, None, FIELD),
        ("weight_versions", "a", "there is no such field"),
    ],
)
def test_invalid_field_is_named(server: Running, field: str, value: Any, part: str) -> None:
    error = refused(server.post(PATH, {FIELD: ["a"], field: value}), 400, part)
    assert error["param"].startswith(field)


def test_an_admin_key_is_needed(server: Running) -> None:
    refused(server.client.post(PATH, json={FIELD: ["a"]}, headers={"authorization": "Bearer b"}), 403, "admin key")


def test_a_proxy_is_refused(server: Running) -> None:
    reply = server.client.post(PATH, json={FIELD: ["a"]}, headers={"x-forwarded-for": "192.0.2.7"})
    refused(reply, 403, "from this machine only")


@pytest.mark.parametrize(
    ("peer", "own", "is_here"),
    [
        (("127.0.0.1", 5), ("127.0.0.1", 80), True),
        (("::1", 5), ("::1", 80), True),
        (("::ffff:127.0.0.1", 5), ("::", 80), True),
        (("192.0.2.9", 5), ("192.0.2.9", 80), True),
        (None, None, True),
        (("192.0.2.8", 5), ("192.0.2.9", 80), False),
        (("192.0.2.8", 5), None, False),
        (("testclient", 5), ("192.0.2.9", 80), False),
    ],
)
def test_peer_on_another_machine_is_refused(peer: Any, own: Any, is_here: bool) -> None:
    request = Request({"type": "http", "headers": [], "client": peer, "server": own})
    if is_here:
        require_same_machine(request)
    else:
        with pytest.raises(ApiError, match="from this machine only"):
            require_same_machine(request)
