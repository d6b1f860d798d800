"""`PlainGroup`: a trainer process that uses only torch sends one broadcast per tensor."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nano_inference import WeightError
from nano_inference.models.names import WeightShapes
from nano_inference.weights.member import Place, PlainSpec, misfits, plain_specs
from nano_inference.weights.plain import PlainGroup, forwarded_to, plain_group
from tests.weights.pairs import OpenEngine, Pair
from tests.weights.plain_trainer import Trainer, dtypes_and_shapes, trainer_process
from tests.weights.test_group import free_port

pytestmark = pytest.mark.slow


def join_group(trainer: Trainer, name: str = "updates", timeout: float = 60) -> PlainGroup:
    """Join a trainer's group."""
    port = free_port()
    trainer.join(port, name)
    group = plain_group(Place("127.0.0.1", port, 1, 2, timeout), name)
    trainer.wait()
    return group


def specs_of(named: dict[str, torch.Tensor], names: list[str]) -> tuple[PlainSpec, ...]:
    return plain_specs(names, *dtypes_and_shapes(named, names))


def collect(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return copies of all tensors: each is valid only until the next is requested."""
    return {name: tensor.clone() for name, tensor in pairs}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["updates", "a/b c"])
def test_engine_updates_from_plain_broadcasts(
    dtype: torch.dtype, name: str, untied: Pair, tmp_path: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(untied)
    sent = {key: tensor.to(dtype) for key, tensor in untied.named().items()}
    with trainer_process(sent, tmp_path) as trainer:
        group = join_group(trainer, name)
        for version in (1, 2):
            trainer.send(list(sent))
            assert engine.update_weights(group.receive(specs_of(sent, list(sent))), blocking=True) == version
            trainer.wait()
        group.close()
    other = open_engine(untied)
    other.update_weights(sent, blocking=True)
    assert engine.weights_checksum() == other.weights_checksum()


@pytest.mark.parametrize("limit", [1, 7, 1 << 20])
def test_buckets_hold_tensors_of_any_dtype(limit: int, tmp_path: Path) -> None:
    """A float32 tensor may follow an odd number of bfloat16 ones, so that its bytes are not aligned."""
    sent = {
        "a": torch.arange(3).to(torch.bfloat16),
        "b": torch.arange(4, dtype=torch.float32),
        "c": torch.ones((), dtype=torch.float16),
        "d": torch.arange(6, dtype=torch.float64).view(2, 3),
    }
    with trainer_process(sent, tmp_path) as trainer:
        group = join_group(trainer)
        for _ in range(2):
            trainer.pack(list(sent), limit)
            received = collect(group.receive(specs_of(sent, list(sent)), bucket_bytes=limit))
            trainer.wait()
            assert list(received) == list(sent)
            assert all(torch.equal(received[name], sent[name]) for name in sent)
        trainer.pack(list(sent), limit)
        some = group.receive(specs_of(sent, list(sent)), bucket_bytes=limit)
        next(some)
        some.close()
        trainer.wait()
        group.close()


def test_group_is_usable_after_reader_stops_early(untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)
    with trainer_process(sent, tmp_path) as trainer:
        group = join_group(trainer)
        trainer.send(names)
        some = group.receive(specs_of(sent, names))
        next(some)
        with pytest.raises(WeightError, match="still receives"):
            next(iter(group.receive(specs_of(sent, names))))
        some.close()
        trainer.wait()
        trainer.send(names)
        received = collect(group.receive(specs_of(sent, names)))
        trainer.wait()
    assert all(torch.equal(received[name], sent[name]) for name in names)


@pytest.mark.parametrize("end", ["dies", "falls silent"])
def test_trainer_failure_during_update_raises(end: str, untied: Pair, tmp_path: Path) -> None:
    sent = untied.named()
    names = list(sent)
    with trainer_process(sent, tmp_path) as trainer:
        group = join_group(trainer)
        trainer.send(names[:3])
        pairs = group.receive(specs_of(sent, names))
        for _ in range(3):
            next(pairs)
        trainer.wait()
        group.channel.timeout = timedelta(seconds=2)  # short only from here on: earlier broadcasts may take longer
        if end == "dies":
            trainer.die()
        with pytest.raises(WeightError, match="the broadcast failed, the group is closed"):
            next(pairs)
        with pytest.raises(WeightError, match="join a new one"):
            next(iter(group.receive(specs_of(sent, names))))
        group.close()


class SignallingGroup:
    """A process group that signals when it starts to receive."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.is_receiving = threading.Event()

    def broadcast(self, data: torch.Tensor, root: int) -> Any:
        work = self.inner.broadcast(data, root)
        self.is_receiving.set()
        return work

    def shutdown(self) -> None:
        self.inner.shutdown()


def test_closing_while_receiving_drops_remaining_tensors(
    untied: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = untied.named()
    names = list(sent)
    made: list[SignallingGroup] = []
    connect = dist.ProcessGroupGloo

    def signalling(*arguments: Any) -> SignallingGroup:
        made.append(SignallingGroup(connect(*arguments)))
        return made[-1]

    monkeypatch.setattr(dist, "ProcessGroupGloo", signalling)
    with trainer_process(sent, tmp_path) as trainer, ThreadPoolExecutor() as pool:
        group = join_group(trainer)
        pairs = group.receive(specs_of(sent, names))
        waiting = pool.submit(lambda: next(pairs))
        assert made[0].is_receiving.wait(60)
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
    ("narrow", "float32", [16], {}, "has fewer; it seems to be float16 [16] or bfloat16 [16]"),
    ("large", "float32", [4, 4], {"weight": (300, 200)}, "has more; it seems to be float32 [300, 200]"),
    ("flat", "float32", [300, 200], {}, "announced as float32 [300, 200], 240000 bytes, .* has fewer"),
    ("flat", "float32", [15], {}, "has more; was another dtype or shape sent?"),
    ("empty", "float32", [16], {}, "has fewer"),
]


def test_broadcast_of_other_size_is_rejected_and_group_stays_usable(tmp_path: Path) -> None:
    with trainer_process(SENT, tmp_path) as trainer:
        group = join_group(trainer)
        for name, dtype, shape, own, message in OTHER_SIZES:
            trainer.send([name, "flat"])
            specs = (*plain_specs(["weight"], [dtype], [shape]), *specs_of(SENT, ["flat"]))
            pattern = re.escape(message.replace("announced", "weight: announced")).replace(r"\.\*", ".*")
            with pytest.raises(WeightError, match=pattern):
                collect(group.receive(specs, own))
            trainer.wait()
        trainer.send(list(SENT))
        received = collect(group.receive(specs_of(SENT, list(SENT)), {"flat": (5000,)}))
        trainer.wait()
    assert all(torch.equal(received[name], SENT[name]) for name in SENT)


def test_receive_buffer_is_shared_and_released(tmp_path: Path) -> None:
    with trainer_process(SENT, tmp_path) as trainer:
        group = join_group(trainer)
        trainer.send(["large", "flat", "large"])
        pairs = group.receive(specs_of(SENT, ["large", "flat", "large"]))
        places = {(tensor.data_ptr(), group.buffer_bytes > 0) for _, tensor in pairs}
        trainer.wait()
        assert len(places) == 1 and places.pop()[1] and group.buffer_bytes == 0


def test_forwarding_ranks_forward_whole_buffers(tmp_path: Path) -> None:
    """Of five ranks, rank 1 forwards to rank 3; its receive buffer is larger than the broadcast."""
    port = free_port()
    specs = specs_of(SENT, ["flat", "large"])
    with trainer_process(SENT, tmp_path) as trainer, ThreadPoolExecutor() as pool:
        trainer.join(port, "five", 5)

        def receive(rank: int) -> tuple[Any, str]:
            group = plain_group(Place("127.0.0.1", port, rank, 5, 60), "five")
            good = collect(group.receive(specs))
            with pytest.raises(WeightError) as refused:
                collect(group.receive(plain_specs(["flat"], ["bfloat16"], [[16]])))
            return good, str(refused.value)

        ranks = [pool.submit(receive, rank) for rank in range(1, 5)]
        trainer.wait()
        trainer.send(["flat", "large", "flat"])
        trainer.wait()
        for one in ranks:
            good, text = one.result(60)
            assert all(torch.equal(good[name], SENT[name]) for name in good)
            assert "it seems to be float32 [16]" in text


def test_every_rank_is_forwarded_to_once() -> None:
    for world_size in range(2, 20):
        handed = [one for rank in range(world_size) for one in forwarded_to(rank, world_size)]
        assert sorted(handed) == list(range(1, world_size))
    assert not any(forwarded_to(rank, 3) for rank in (1, 2)) and forwarded_to(1, 4) == (3,)


def test_misfits_lists_unusable_tensors() -> None:
    specs = plain_specs(["a", "b", "c", "x.rotary_emb.inv_freq"], ["float32"] * 4, [[1], [2], [3], [4]])
    assert misfits(specs, WeightShapes({"a": (1,), "b": (3,)})) == [
        "b: has the shape (2,), the model (3,)",
        "c: the model has no such tensor",
    ]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((["a"], [], [[1]]), r"^dtypes must have one entry for each of 1 names, has 0"),
        ((["a"], ["float32"], []), r"^shapes must have one entry for each of 1 names, has 0"),
        ((["a"], ["int8"], [[1]]), r"^dtypes\[0\] must be one of .*bfloat16, got 'int8'"),
        ((["a", "b"], ["float32"] * 2, [[1], [2**30, 2**30]]), r"^shapes\[1\] takes more than"),
    ],
)
def test_plain_specs_rejects_inconsistent_lists(
    lists: tuple[list[str], list[str], list[list[int]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plain_specs(*lists)


def test_plain_specs_accepts_torch_dtype_names() -> None:
    assert plain_specs(["a"], ["torch.bfloat16"], [[2, 3]]) == (PlainSpec("a", "bfloat16", (2, 3)),)
