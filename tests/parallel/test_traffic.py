"""What ranks read and exchange: only their parts of files, and never rows of logits."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from nano_inference import SamplingParams
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.kinds import installed_kinds
from nano_inference.parallel.executor import ShardedExecutor
from nano_inference.parallel.fingerprint import MOST_BYTES
from nano_inference.parallel.links import Links
from nano_inference.parallel.opening import divided_model, load_rank
from nano_inference.parallel.shard import shard
from tests.models.families import make_model
from tests.parallel.ranks import CPU, on_ranks, open_ranks
from tests.parallel.test_engine import config_of
from tests.parallel.test_updates import directory_of, weights_of

pytestmark = pytest.mark.slow

WIDE: dict[str, Any] = {"vocab_size": 65_536, "num_hidden_layers": 2, "intermediate_size": 2048}
NUM_ROWS = 8
LOGITS = NUM_ROWS * WIDE["vocab_size"] * 4
"""Bytes of a step's logits."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traffic") / "wide"
    make_model("llama-ratio1-untied", directory, WIDE)
    return directory


def bytes_read(thread: str = "/proc/thread-self") -> int:
    """Return the bytes that a thread has read so far."""
    lines = (line.split(": ") for line in (Path(thread) / "io").read_text().splitlines())
    return next(int(count) for name, count in lines if name == "rchar")


def part_bytes(path: Path, rank: int, size: int) -> int:
    """Return the bytes of a rank's part of a float32 model."""
    _, program = divided_model(open_checkpoint(path), config_of(path, tensor_parallel=size), installed_kinds())
    return sum(4 * math.prod(spec.shape) for spec in shard(program, rank, size).program.weights)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_loads_only_its_part_of_the_files(size: int, wide: Path) -> None:
    config, kinds = config_of(wide, tensor_parallel=size), installed_kinds()
    checkpoint = open_checkpoint(wide)
    model, program = divided_model(checkpoint, config, kinds)

    def load(links: Links) -> int:
        before = bytes_read()
        load_rank(checkpoint, model, program, config, links, CPU)
        return bytes_read() - before

    total = (wide / "model.safetensors").stat().st_size
    for rank, count in enumerate(on_ranks(size, load)):
        own = part_bytes(wide, rank, size)
        assert own <= count <= own + MOST_BYTES * len(checkpoint.sources) + 4096
        assert count < total * (1 / size + 0.02)


def test_a_rank_reads_only_its_part_of_an_update(wide: Path, tmp_path: Path) -> None:
    directory = directory_of(weights_of(wide, 1.25), tmp_path / "new", 3)
    others = set(threading.enumerate())
    with open_ranks(config_of(wide, tensor_parallel=2)) as engine:
        (receiver,) = (one for one in threading.enumerate() if one.name == "weights" and one not in others)
        places = ("/proc/thread-self", f"/proc/self/task/{receiver.native_id}")
        before = [bytes_read(place) for place in places]
        engine.update_weights(directory, blocking=True)
        read = [bytes_read(place) - count for place, count in zip(places, before, strict=True)]
    for rank, count in enumerate(read):
        own = part_bytes(wide, rank, 2)
        assert own <= count <= own + (64 << 10)  # rank 0 reads the headers


@pytest.mark.parametrize(
    ("params", "share"),
    [
        ({}, 0.02),
        ({"logprobs": 5, "repetition_penalty": 1.2}, 0.02),
        ({"top_k": 40, "top_p": 0.9}, 0.35),  # histograms, whose size does not depend on the vocabulary
    ],
    ids=["sampled", "logprobs", "truncated"],
)
def test_a_step_exchanges_far_less_than_logits(params: dict[str, Any], share: float, wide: Path) -> None:
    with open_ranks(config_of(wide, tensor_parallel=2)) as engine:
        executor = engine.parts.executor
        assert isinstance(executor, ShardedExecutor)
        chosen = SamplingParams(**{"seed": 1, "max_tokens": 12, "ignore_eos": True, **params})
        for index in range(NUM_ROWS):
            engine.add_request([index + 1, 2, 3], chosen)
        engine.tick()
        before = executor.tensor_bytes
        for _ in range(4):
            engine.tick()
        assert 0 < (executor.tensor_bytes - before) / 4 < share * LOGITS
