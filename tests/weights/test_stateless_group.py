"""`stateless_group`: vLLM's rendezvous and NCCL, with a library for host memory in place of libnccl."""

from __future__ import annotations

import asyncio
import ctypes
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nano_inference import WeightError
from nano_inference.loading.pickle_data import PickleError
from nano_inference.models.names import WeightShapes
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.groups import Groups
from nano_inference.weights.member import Place, PlainSpec, plain_specs
from nano_inference.weights.nccl import Communicator, find_library, read_unique_id, stateless_group
from nano_inference.weights.plain import PlainGroup
from nano_inference.weights.state_dicts import read_description, state_dicts
from tests.pickles import Runs
from tests.weights.pairs import OpenEngine, Pair
from tests.weights.plain_trainer import Trainer, dtypes_and_shapes
from tests.weights.test_group import free_port
from tests.weights.test_plain_group import collect
from tests.weights.vllm_trainer import compile_stub, pickled_id, vllm_trainer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MIXED = {
    "a": torch.arange(3).to(torch.bfloat16),
    "b": torch.arange(4, dtype=torch.float32),
    "c": torch.ones((), dtype=torch.float16),
    "d": torch.arange(6, dtype=torch.float64).view(2, 3),
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_stub(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def mixed(tmp_path: Path, library: str) -> Iterator[Trainer]:
    with vllm_trainer(MIXED, tmp_path, library) as one:
        yield one


def join(trainer: Trainer, library: str, timeout: float = 60) -> PlainGroup:
    port = free_port()
    trainer.host(port)
    group = stateless_group(Place("127.0.0.1", port, 1, 2, timeout), CPU, library)
    trainer.wait()
    return group


def specs_of(named: dict[str, torch.Tensor]) -> tuple[PlainSpec, ...]:
    return plain_specs(list(named), *dtypes_and_shapes(named, list(named)))


def assert_same(received: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(received) == list(sent)
    assert all(received[name].dtype == one.dtype and torch.equal(received[name], one) for name, one in sent.items())


def test_engine_updates_as_trl_sends_its_weights(
    untied: Pair, tmp_path: Path, library: str, open_engine: OpenEngine
) -> None:
    engine, other = open_engine(untied), open_engine(untied)
    sent = untied.named()
    other.update_weights(sent, blocking=True)
    with vllm_trainer(sent, tmp_path, library) as trainer:
        group = join(trainer, library)
        for version, limit in ((1, 20_000), (2, 1 << 30)):
            trainer.pack(list(sent), limit)
            assert engine.update_weights(group.receive(specs_of(sent), bucket_bytes=limit), blocking=True) == version
            trainer.wait()
            assert engine.weights_checksum() == other.weights_checksum()
        group.close()
        group.close()


@pytest.mark.parametrize("limit", [None, 7])
def test_tensors_arrive_alone_and_packed(mixed: Trainer, library: str, limit: int | None) -> None:
    group = join(mixed, library)
    for _ in range(2):
        if limit is None:
            mixed.send(list(MIXED))
        else:
            mixed.pack(list(MIXED), limit)
        assert_same(collect(group.receive(specs_of(MIXED), bucket_bytes=limit)), MIXED)
        mixed.wait()


def test_a_rejected_update_leaves_the_ranks_in_step(
    untied: Pair, tmp_path: Path, library: str, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    before = engine.weights_checksum()
    sent = {"unknown": torch.zeros(4), **untied.named()}
    with vllm_trainer(sent, tmp_path, library) as trainer:
        group = join(trainer, library)
        trainer.send(list(sent))
        with pytest.raises(WeightError, match="unknown: the model has no such tensor"):
            engine.update_weights(group.receive(specs_of(sent)), blocking=True)
        trainer.wait()
        assert engine.weights_checksum() == before
        good = untied.named()
        trainer.send(list(good))
        assert engine.update_weights(group.receive(specs_of(good)), blocking=True) == 1


# ---- prime-rl's state dicts -----------------------------------------------------------------------------------------


def test_engine_updates_from_state_dicts(untied: Pair, tmp_path: Path, library: str, open_engine: OpenEngine) -> None:
    engine, other = open_engine(untied), open_engine(untied)
    sent = untied.named()
    norm = "model.norm.weight"
    sent[norm] = sent[norm].bfloat16()  # two dtypes in a state dict
    other.update_weights(sent, blocking=True)
    shapes = {name: tuple(one.shape) for name, one in sent.items()}
    with vllm_trainer({"unknown": torch.zeros(2), **sent}, tmp_path, library) as trainer:
        group = join(trainer, library)
        trainer.send_dicts(["unknown", *sent])
        with pytest.raises(WeightError, match="unknown: the model has no such tensor"):
            engine.update_weights(state_dicts(group, shapes), blocking=True)
        trainer.wait()
        trainer.send_dicts(list(sent))
        assert engine.update_weights(state_dicts(group, shapes), blocking=True) == 1
        trainer.wait()
    assert engine.weights_checksum() == other.weights_checksum()


HUGE = {torch.float32: [("a", torch.Size([1 << 40]), 1 << 40)]}
BAD_DESCRIPTIONS = [
    (pickle.dumps({torch.int8: [("a", torch.Size([1]), 1)]}), "names 'torch int8'"),
    (pickle.dumps({torch.float32: [("a", torch.Size([2]), 1)]}), "size is not the number of its values"),
    (pickle.dumps({torch.float32: [("a", Runs(torch.Size, [1] * 9), 1)]}), "at most 8 dimensions, got 9"),
    (pickle.dumps({torch.float32: [(1, torch.Size([1]), 1)]}), "name must be text of 1 to 512 characters"),
    (pickle.dumps({torch.float32: [("a", 1)]}), "not described by"),
    (pickle.dumps({torch.float32: []}), "not a list of tensors"),
    (pickle.dumps([1]), "not a dict of dtypes"),
    (pickle.dumps({"a": [1]}), "a dtype is not one of"),
    (b"\x80\x04", "it is damaged"),
]


@pytest.mark.parametrize(("data", "part"), BAD_DESCRIPTIONS)
def test_a_bad_description_is_named(data: bytes, part: str) -> None:
    with pytest.raises(PickleError, match=part):
        read_description(data)


@pytest.mark.parametrize(
    ("data", "part"), [BAD_DESCRIPTIONS[1], (pickle.dumps(HUGE), "more than 4 times the model's values")]
)
def test_a_bad_description_closes_the_group(mixed: Trainer, library: str, data: bytes, part: str) -> None:
    group = join(mixed, library)
    mixed.begin("describe", data)
    with pytest.raises(WeightError, match=part):
        collect(state_dicts(group, {"a": (2,)}))
    with pytest.raises(WeightError, match="is closed"):
        collect(state_dicts(group, {"a": (2,)}))


# ---- the rendezvous -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["vllm.distributed.device_communicators.pynccl_wrapper", "sglang.srt.distributed"])
def test_unique_id_is_read_as_data(module: str) -> None:
    data = bytes(range(128))
    if module.startswith("vllm"):
        assert read_unique_id(pickled_id(data, module)) == data
    else:
        with pytest.raises(PickleError, match=r"it names 'sglang\.srt\.distributed ncclUniqueId'"):
            read_unique_id(pickled_id(data, module))


@pytest.mark.parametrize("value", [pickle.dumps(bytes(128)), pickled_id(bytes(128))[:-9]])
def test_another_value_in_place_of_the_unique_id_is_refused(mixed: Trainer, library: str, value: bytes) -> None:
    port = free_port()
    mixed.host(port, 2, value)
    with pytest.raises(WeightError, match="sent no unique id of NCCL"):
        stateless_group(Place("127.0.0.1", port, 1, 2, 60), CPU, library)


def test_a_trainer_that_is_not_there_is_waited_for(library: str) -> None:
    with pytest.raises(WeightError, match="no connection to rank 0"):
        stateless_group(Place("127.0.0.1", free_port(), 1, 2, 0.2), CPU, library)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_cuda_is_refused() -> None:
    with pytest.raises(ValueError, match="backend: nccl needs a CUDA device"):
        stateless_group(Place("127.0.0.1", free_port(), 1, 2))


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    place = tmp_path / "libnccl.so.2"
    with pytest.raises(WeightError, match=f"NCCL cannot be loaded from {place}"):
        Communicator(bytes(128), rank=1, world_size=2, device=CPU, library=str(place))
    assert find_library().endswith("libnccl.so.2")


def test_an_error_of_nccl_is_named(library: str) -> None:
    with pytest.raises(WeightError, match=r"ncclCommInitRank: invalid argument \(NCCL error 4\)"):
        Communicator(bytes([1]) * 128, rank=1, world_size=2, device=CPU, library=library)


def test_an_error_after_joining_aborts_the_communicator(library: str, tmp_path: Path) -> None:
    base = tmp_path / "nccl"
    (tmp_path / "nccl.1.down").touch()  # an empty file in place of rank 0's pipe: the first sum fails
    num_aborts = ctypes.CDLL(library).stub_num_aborts
    before = num_aborts()
    with pytest.raises(WeightError, match="ncclAllReduce: unhandled system error"):
        Communicator(str(base).encode().ljust(128, b"\0"), rank=1, world_size=2, device=CPU, library=library)
    assert num_aborts() == before + 1


@pytest.mark.parametrize("data", [torch.zeros(2, dtype=torch.complex64), torch.zeros(4, 4).t()])
def test_an_array_that_nccl_cannot_send_is_refused(mixed: Trainer, library: str, data: torch.Tensor) -> None:
    group = join(mixed, library)
    with pytest.raises(WeightError, match="no NCCL broadcast"):
        group.broadcast(data)


def until_in_call(thread: threading.Thread) -> None:
    """Wait until a thread is about to call NCCL, or does."""
    deadline = time.monotonic() + 60
    frame = None
    while frame is None or frame.f_code.co_name != "_call":
        assert time.monotonic() < deadline
        frame = sys._current_frames().get(thread.ident or 0)


def test_closing_ends_a_broadcast_that_does_not_come(mixed: Trainer, library: str) -> None:
    group = join(mixed, library)
    failures: list[WeightError] = []

    def receive() -> None:
        try:
            collect(group.receive(specs_of(MIXED)))
        except WeightError as error:
            failures.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    until_in_call(thread)
    group.close()
    thread.join(60)
    assert [str(one) for one in failures] == ["ncclBroadcast: aborted (NCCL error 3)"]
    with pytest.raises(WeightError, match="is closed"):
        collect(group.receive(specs_of(MIXED)))


# ---- the server's groups --------------------------------------------------------------------------------------------


def test_server_joins_a_trainer_of_vllm(mixed: Trainer, library: str) -> None:
    async def run() -> Any:
        shapes = {name: tuple(one.shape) for name, one in MIXED.items()}
        groups = Groups(60, lambda: WeightShapes(shapes), nccl_device="cpu", nccl_library=library)
        port = free_port()
        mixed.host(port)
        place = {"rank": 1, "world_size": 2, "backend": "nccl", "bucket_bytes": 7, "is_vllm": True}
        await groups.join("g", "127.0.0.1", port, **place)
        mixed.wait()
        mixed.pack(list(MIXED), 7)
        with groups.receive("g", list(MIXED), *dtypes_and_shapes(MIXED, list(MIXED)), "dtypes") as source:
            assert groups.receiving() == ["g"], "before it is read"
            received = await asyncio.to_thread(collect, source)
        assert groups.receiving() == []
        mixed.wait()
        mixed.send_dicts(list(MIXED))
        with groups.receive_state_dicts("g") as source:
            again = await asyncio.to_thread(collect, source)
        assert groups.has("g") and groups.leave("g") and not groups.has("g")
        return received, again

    received, again = asyncio.run(run())
    assert_same(received, MIXED)
    assert {name: one.tolist() for name, one in again.items()} == {name: one.tolist() for name, one in MIXED.items()}


def test_server_gives_up_a_rank_that_nccl_waits_for(mixed: Trainer, library: str) -> None:
    async def run() -> None:
        groups = Groups(1, lambda: WeightShapes({}), nccl_device="cpu", nccl_library=library)
        port = free_port()
        mixed.host(port, 3)
        with ThreadPoolExecutor() as pool:
            third = pool.submit(  # a rank that comes to the store, but not to NCCL
                dist.TCPStore, "127.0.0.1", port, 3, is_master=False, timeout=timedelta(seconds=60)
            )
            with pytest.raises(ApiError, match=r"did not join the group within 1 seconds|no weight group of 3"):
                await groups.join("g", "127.0.0.1", port, rank=1, world_size=3, backend="nccl", is_vllm=True)
            third.result(60)
        assert not groups.has("g")

    asyncio.run(run())
