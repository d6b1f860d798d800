"""`WeightGroup`: updates through a gloo process group of two processes."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from nano_inference import SamplingParams, WeightError, WeightGroup, weights_checksum
from tests.weights.pairs import OpenEngine, Pair
from tests.weights.plain_trainer import PROCESSES

pytestmark = pytest.mark.slow

Named = dict[str, torch.Tensor]
Trainer = Callable[[WeightGroup, Named], None]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def train(trainer: Trainer, port: int, path: Path, timeout: float) -> None:
    """Run the trainer process (rank 0)."""
    torch.set_num_threads(1)
    trainer(WeightGroup("127.0.0.1", port, rank=0, world_size=2, timeout=timeout), torch.load(path))


@contextmanager
def trainer_process(trainer: Trainer, named: Named, path: Path, timeout: float = 60) -> Iterator[int]:
    """Run a trainer process during the block; yield its port."""
    port = free_port()
    torch.save(named, path / "sent.pt")
    process = PROCESSES.Process(target=train, args=(trainer, port, path / "sent.pt", timeout), daemon=True)
    process.start()
    try:
        yield port
    finally:
        process.kill()
        process.join()


def send_twice(group: WeightGroup, named: Named) -> None:
    group.send(named, bucket_bytes=20_000)
    group.send({name: tensor.bfloat16() for name, tensor in named.items()})
    group.close()


def test_engine_updates_from_broadcast(untied: Pair, tmp_path: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    with trainer_process(send_twice, untied.named(), tmp_path) as port:
        group = engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2, timeout=60)
        assert engine.update_weights(group.receive(), blocking=True) == 1
        assert engine.weights_checksum() == weights_checksum(untied.named().items())
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert engine.update_weights(group.receive()) == 2
        assert engine.finish_update() == 2
    rounded = {name: tensor.bfloat16() for name, tensor in untied.named().items()}
    assert engine.weights_checksum() == weights_checksum(rounded.items(), torch.float32)
    with pytest.raises(WeightError, match="no weight group"):
        engine.init_weights_update_group("127.0.0.1", free_port(), rank=1, world_size=2, timeout=1)
    with pytest.raises(WeightError, match="join a new one"):  # the attempt to join another has closed it
        engine.update_weights(group.receive(), blocking=True)


def send_wrong_then_right(group: WeightGroup, named: Named) -> None:
    name = next(iter(named))
    group.send({name: torch.zeros(3), **{k: v for k, v in named.items() if k != name}}, bucket_bytes=5_000)
    group.send(named)
    group.close()


def test_group_is_usable_after_rejected_update(untied: Pair, tmp_path: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(untied)
    with trainer_process(send_wrong_then_right, untied.named(), tmp_path) as port:
        group = engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2, timeout=60)
        refused = group.receive()  # referenced, so that garbage collection does not close it
        with pytest.raises(WeightError, match="the update has the shape"):
            engine.update_weights(refused, blocking=True)
        assert engine.update_weights(group.receive(), blocking=True) == 1
    assert engine.weights_checksum() == weights_checksum(untied.named().items())


def fail_during_send(group: WeightGroup, named: Named, does_exit: bool) -> None:
    original, count = group.broadcast, 0

    def broadcast(data: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count > 5 and does_exit:
            raise SystemExit
        if count > 5:
            multiprocessing.Event().wait(60)
        return original(data)

    group.broadcast = broadcast  # type: ignore[method-assign]
    group.send(named, bucket_bytes=5_000)


@pytest.mark.parametrize(("does_exit", "blocking"), [(True, True), (False, False)])
def test_trainer_failure_during_send_leaves_the_weights_unchanged(
    does_exit: bool, blocking: bool, untied: Pair, tmp_path: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    before = engine.weights_checksum()
    with trainer_process(partial(fail_during_send, does_exit=does_exit), untied.named(), tmp_path) as port:
        group = WeightGroup("127.0.0.1", port, rank=1, world_size=2, timeout=60)
        group.channel.timeout = timedelta(seconds=2)  # joining may take long, receiving may not
        request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        with pytest.raises(WeightError, match="the broadcast failed, the group is closed"):
            engine.update_weights(group.receive(), blocking=blocking)
            engine.finish_update()
        with pytest.raises(WeightError, match="join a new one"):
            engine.update_weights(group.receive(), blocking=True)
    assert engine.weights_checksum() == before and engine.get_weight_version() == 0
    samples = []
    while engine.has_pending():
        samples += engine.step()
    assert samples[0].request_id == request and samples[0].token_versions == (0, 0, 0, 0)
    assert engine.update_weights(untied.named(), blocking=True) == 1


def test_join_times_out_without_other_ranks() -> None:
    with pytest.raises(WeightError, match="no weight group of 2 at 127"):
        WeightGroup("127.0.0.1", free_port(), rank=1, world_size=2, timeout=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("address", ""), ("port", 70000), ("rank", 2), ("world_size", 1), ("backend", "mpi"), ("timeout", 0)],
)
def test_invalid_argument_is_named(field: str, value: object) -> None:
    arguments = {"address": "127.0.0.1", "port": 5000, "rank": 1, "world_size": 2, "backend": "gloo", "timeout": 1}
    arguments[field] = value
    address, port = arguments.pop("address"), arguments.pop("port")
    with pytest.raises(ValueError, match=field):
        WeightGroup(address, port, **arguments)  # type: ignore[arg-type]
