"""Plain groups: a trainer that knows only torch, in another process, sends one broadcast for each tensor."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import WeightError
from nano_inference.weights.plain import PlainGroup, PlainSpec, first_device, plain_specs
from tests.weights.pairs import OpenEngine, Pair
from tests.weights.plain_trainer import Trainer, told, trainer_process
from tests.weights.test_group import free_port


def meet(trainer: Trainer, name: str = "updates", timeout: float = 60) -> PlainGroup:
    """Join a trainer's group."""
    port = free_port()
    trainer.join(port, name)
    group = PlainGroup("127.0.0.1", port, rank=1, world_size=2, name=name, timeout=timeout)
    trainer.wait()
    return group


def specs_of(named: dict[str, torch.Tensor], names: list[str]) -> tuple[PlainSpec, ...]:
    return plain_specs(names, *told(named, names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["updates", "a/b c"])
def test_an_engine_takes_what_a_plain_trainer_broadcasts(
    dtype: torch.dtype, name: str, untied: Pair, tmp_path: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    sent = {key: tensor.to(dtype) for key, tensor in untied.named().items()}
    with trainer_process(sent, tmp_path) as trainer:
        group = meet(trainer, name)
        for version in (1, 2):
            trainer.send(list(sent))
            assert engine.update_weights(group.receive(specs_of(sent, list(sent))), blocking=True) == version
            trainer.wait()
        group.close()
    other = open_engine(untied)
    other.update_weights(sent, blocking=True)
    assert engine.weights_checksum() == other.weights_checksum()


def test_a_reader_that_stops_leaves_the_group_usable(untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)
    with trainer_process(sent, tmp_path) as trainer:
        group = meet(trainer)
        trainer.send(names)
        some = group.receive(specs_of(sent, names))
        next(some)
        with pytest.raises(WeightError, match="still receives"):
            next(iter(group.receive(specs_of(sent, names))))
        some.close()
        trainer.wait()
        trainer.send(names)
        received = dict(group.receive(specs_of(sent, names)))
        trainer.wait()
    assert all(torch.equal(received[name], sent[name]) for name in names)


@pytest.mark.parametrize("end", ["dies", "falls silent"])
def test_a_trainer_that_ends_half_way_is_noticed(end: str, untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)
    with trainer_process(sent, tmp_path) as trainer:
        group = meet(trainer)
        group._timeout = type(group._timeout)(seconds=2)  # to meet may take long here, to receive may not
        trainer.send(names[:3])
        pairs = group.receive(specs_of(sent, names))
        for _ in range(3):
            next(pairs)
        trainer.wait()
        if end == "dies":
            trainer.die()
        with pytest.raises(WeightError, match="the broadcast failed, the group is closed"):
            next(pairs)
        with pytest.raises(WeightError, match="join a new one"):
            next(iter(group.receive(specs_of(sent, names))))
        group.close()


class Noted:
    """A process group that says when it begins to receive."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.is_receiving = threading.Event()

    def broadcast(self, data: torch.Tensor, root: int) -> Any:
        work = self.inner.broadcast(data, root)
        self.is_receiving.set()
        return work


def test_a_group_that_is_closed_while_it_receives_drops_what_comes(untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)
    with trainer_process(sent, tmp_path) as trainer, ThreadPoolExecutor() as pool:
        group = meet(trainer)
        noted = group._group = Noted(group._group)
        pairs = group.receive(specs_of(sent, names))
        waiting = pool.submit(lambda: next(pairs))
        assert noted.is_receiving.wait(60)
        group.close()
        trainer.send(names[:1])
        assert torch.equal(waiting.result(60)[1], sent[names[0]])
        with pytest.raises(WeightError, match="closed"):
            next(pairs)


def test_three_ranks_meet(untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)[:4]
    port = free_port()
    with trainer_process(sent, tmp_path) as trainer, ThreadPoolExecutor() as pool:
        trainer.join(port, "three", 3)

        def receive(rank: int) -> dict[str, torch.Tensor]:
            group = PlainGroup("127.0.0.1", port, rank=rank, world_size=3, name="three", timeout=60)
            return dict(group.receive(specs_of(sent, names)))

        both = [pool.submit(receive, rank) for rank in (1, 2)]
        trainer.wait()
        trainer.send(names)
        received = [one.result(60) for one in both]
    assert all(torch.equal(one[name], sent[name]) for one in received for name in names)


def test_nobody_comes() -> None:
    with pytest.raises(WeightError, match="no weight group of 2 at 127"):
        PlainGroup("127.0.0.1", free_port(), rank=1, world_size=2, name="none", timeout=1)


def test_a_group_is_named_after_a_kind_of_device() -> None:
    assert (first_device("gloo"), first_device("nccl")) == ("cpu", "cuda")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((["a"], [], [[1]]), r"^dtypes must have one entry for each of 1 names, has 0"),
        ((["a"], ["float32"], []), r"^shapes must have one entry for each of 1 names, has 0"),
        ((["a"], ["int8"], [[1]]), r"^dtypes\[0\] must be one of .*bfloat16, got 'int8'"),
        ((["a", "b"], ["float32"] * 2, [[1], [2**30, 2**30]]), r"^shapes\[1\] comes to more than"),
    ],
)
def test_lists_that_do_not_fit_are_named(lists: tuple[list[str], list[str], list[list[int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain_specs(*lists)


def test_precisions_may_be_torchs() -> None:
    assert plain_specs(["a"], ["torch.bfloat16"], [[2, 3]]) == (PlainSpec("a", "bfloat16", (2, 3)),)
