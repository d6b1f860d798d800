"""Plain groups: a trainer that knows only torch, in another process, sends one broadcast for each tensor."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import WeightError
from nano_inference.weights.plain import PlainGroup, PlainSpec, first_device, forwarded_to, misfits, plain_specs
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


def kept(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return what comes; each tensor is good until the next is asked for."""
    return {name: tensor.clone() for name, tensor in pairs}


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
        received = kept(group.receive(specs_of(sent, names)))
        trainer.wait()
    assert all(torch.equal(received[name], sent[name]) for name in names)


@pytest.mark.parametrize("end", ["dies", "falls silent"])
def test_a_trainer_that_ends_half_way_is_noticed(end: str, untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)
    with trainer_process(sent, tmp_path) as trainer:
        group = meet(trainer)
        trainer.send(names[:3])
        pairs = group.receive(specs_of(sent, names))
        for _ in range(3):
            next(pairs)
        trainer.wait()
        group._timeout = type(group._timeout)(seconds=2)  # what has come may take long here, what does not come may not
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


SENT = {
    "narrow": torch.arange(1.0, 17.0).to(torch.bfloat16),
    "flat": torch.arange(1.0, 17.0),
    "large": torch.randn(300, 200, generator=torch.Generator().manual_seed(1)),
    "empty": torch.zeros(0),
}
OTHER_SIZES = [
    ("flat", "bfloat16", [16], {}, "announced as bfloat16 [16], 32 bytes, .* has more; it seems to be float32 [16]"),
    ("flat", "float64", [16], {}, "announced as float64 [16], 128 bytes, .* has fewer; it seems to be float32 [16]"),
    ("narrow", "float32", [16], {}, "has fewer; it seems to be float16 [16] or bfloat16 [16]"),
    ("large", "float32", [16], {}, "announced as float32 [16], 64 bytes, .* has more"),
    ("large", "float32", [4, 4], {"weight": (300, 200)}, "has more; it seems to be float32 [300, 200]"),
    ("flat", "float32", [300, 200], {}, "announced as float32 [300, 200], 240000 bytes, .* has fewer"),
    ("flat", "float32", [17], {}, "has fewer; was another dtype or shape sent?"),
    ("flat", "float32", [15], {}, "has more; was another dtype or shape sent?"),
    ("flat", "float32", [0], {}, "0 bytes, .* has more"),
    ("empty", "float32", [16], {}, "has fewer"),
]


def test_a_broadcast_of_another_size_is_refused_and_the_group_stays_in_step(tmp_path: Path) -> None:
    with trainer_process(SENT, tmp_path) as trainer:
        group = meet(trainer)
        for name, dtype, shape, own, message in OTHER_SIZES:
            if name == "large" and not own:
                shape, message = [200, 200], message.replace("[16], 64", "[200, 200], 160000")
            trainer.send([name, "flat"])
            specs = (*plain_specs(["weight"], [dtype], [shape]), *specs_of(SENT, ["flat"]))
            pattern = re.escape(message.replace("announced", "weight: announced")).replace(r"\.\*", ".*")
            with pytest.raises(WeightError, match=pattern):
                kept(group.receive(specs, own))
            trainer.wait()
        trainer.send(list(SENT))
        received = kept(group.receive(specs_of(SENT, list(SENT)), {"flat": (5000,)}))
        trainer.wait()
    assert all(torch.equal(received[name], SENT[name]) for name in SENT)


def test_the_memory_that_is_received_into_is_one_and_is_let_go(tmp_path: Path) -> None:
    with trainer_process(SENT, tmp_path) as trainer:
        group = meet(trainer)
        trainer.send(["large", "flat", "large"])
        pairs = group.receive(specs_of(SENT, ["large", "flat", "large"]))
        places = {tensor.data_ptr() for _, tensor in pairs}
        trainer.wait()
        assert len(places) == 1 and group._buffer.numel() == 0


def test_ranks_that_hand_on_do_so_whole(tmp_path: Path) -> None:
    """Of five, rank 1 hands on to rank 3: what it received into is larger than what it was sent."""
    port = free_port()
    specs = specs_of(SENT, ["flat", "large"])
    with trainer_process(SENT, tmp_path) as trainer, ThreadPoolExecutor() as pool:
        trainer.join(port, "five", 5)

        def receive(rank: int) -> tuple[Any, str]:
            group = PlainGroup("127.0.0.1", port, rank=rank, world_size=5, name="five", timeout=60)
            good = kept(group.receive(specs))
            with pytest.raises(WeightError) as refused:
                kept(group.receive(plain_specs(["flat"], ["bfloat16"], [[16]])))
            return good, str(refused.value)

        all_of_them = [pool.submit(receive, rank) for rank in range(1, 5)]
        trainer.wait()
        trainer.send(["flat", "large", "flat"])
        trainer.wait()
        for one in all_of_them:
            good, text = one.result(60)
            assert all(torch.equal(good[name], SENT[name]) for name in good)
            assert "it seems to be float32 [16]" in text


@pytest.mark.parametrize("world_size", range(2, 20))
def test_every_rank_is_forwarded_to_once(world_size: int) -> None:
    handed = [one for rank in range(world_size) for one in forwarded_to(rank, world_size)]
    assert sorted(handed) == list(range(1, world_size))
    assert not any(forwarded_to(rank, 3) for rank in (1, 2)) and forwarded_to(1, 4) == (3,)


def test_what_a_model_cannot_use_is_told_before_it_comes() -> None:
    specs = plain_specs(["a", "b", "c", "x.rotary_emb.inv_freq"], ["float32"] * 4, [[1], [2], [3], [4]])
    assert misfits(specs, {"a": (1,), "b": (3,)}) == [
        "b: has the shape (2,), the model (3,)",
        "c: the model has no such tensor",
    ]


def test_three_ranks_meet(untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)[:4]
    port = free_port()
    with trainer_process(sent, tmp_path) as trainer, ThreadPoolExecutor() as pool:
        trainer.join(port, "three", 3)

        def receive(rank: int) -> dict[str, torch.Tensor]:
            group = PlainGroup("127.0.0.1", port, rank=rank, world_size=3, name="three", timeout=60)
            return kept(group.receive(specs_of(sent, names)))

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
