"""All executors agree on random decoders and random ragged steps, in float32."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.loading import load_weights
from nano_inference.executors.protocol import CacheSize
from nano_inference.executors.torch.attention import SdpaBackend
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.sources import TensorSource
from nano_inference.models import ops
from tests.executors.random_programs import MAX_LEN, NUM_STATES, Writer, random_steps, random_weights

NUM_PROGRAMS = 50
BLOCK_SIZES = (1, 4, 16)
CPU = torch.device("cpu")


def relative_difference(mine: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value (at least 1)."""
    return float((mine - right).abs().max()) / max(1.0, float(right.abs().max()))


@pytest.mark.parametrize(
    "seed",
    [*range(NUM_PROGRAMS), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(NUM_PROGRAMS, 400))],
)
def test_executors_agree_on_random_programs(seed: int, library: Library) -> None:
    writer = Writer(random.Random(seed))
    program, config = writer.program(), writer.config()
    weights = random_weights(program, torch.Generator().manual_seed(seed))
    ours = CpuExecutor(config, program, library, MAX_LEN)
    plain = TorchExecutor(config, program, CPU, torch.float32, SdpaBackend())
    block_size = BLOCK_SIZES[seed % len(BLOCK_SIZES)]
    steps, num_blocks = random_steps(random.Random(seed + 1000), program.vocab_size, block_size)
    for executor in (ours, plain):
        load_weights(executor, {name: TensorSource(weight) for name, weight in weights.items()})
        executor.cache.allocate(CacheSize(num_blocks=num_blocks, block_size=block_size, num_states=NUM_STATES))
    slots_ZF = ours.store.cache.slots_ZF
    slots_ZF = torch.empty(0) if slots_ZF is None else slots_ZF
    for rows, kept in steps:
        with torch.inference_mode():
            right = plain.hidden(rows, kept)
            before_ZF = slots_ZF.clone()
            mine = ours.hidden(rows, kept).clone()
            assert relative_difference(mine, right) <= 1e-5
            assert relative_difference(ours.final(mine), plain.final(right)) <= 1e-5
            slots_ZF.copy_(before_ZF)  # rows advance the states that they start from
            logits = ours.step_logits(rows, kept).clone()
            assert torch.equal(ours.logits(mine), logits)
            assert relative_difference(logits, plain.logits(right)) <= 1e-5


def test_random_programs_use_every_operation() -> None:
    found = Counter(type(op) for seed in range(NUM_PROGRAMS) for op in Writer(random.Random(seed)).program().ops)
    whole = set(ops.Op.__args__) - {ops.Reduce}  # type: ignore[attr-defined]  # only divided programs have it
    assert set(found) == whole and min(found.values()) >= NUM_PROGRAMS // 4
