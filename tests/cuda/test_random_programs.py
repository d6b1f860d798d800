"""The CUDA executor on CPU tensors agrees with torch on random decoders and random ragged steps."""

from __future__ import annotations

import random

import pytest
import torch

from nano_inference.executors.cuda import fusions
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.loading import load_weights
from nano_inference.executors.protocol import CacheSize
from nano_inference.executors.torch.attention import SdpaBackend
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.sources import TensorSource
from tests.cuda.plain import plain_kernels
from tests.executors.random_programs import MAX_LEN, NUM_STATES, Writer, random_steps, random_weights
from tests.executors.test_random_programs import BLOCK_SIZES, relative_difference

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(16, 100))]
)
def test_random_programs_agree_with_torch(seed: int, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "FUSED_ROWS", 400 if seed % 2 else 0)
    writer = Writer(random.Random(seed), most_head_norms=1)
    program, config = writer.program(), writer.config()
    weights = random_weights(program, torch.Generator().manual_seed(seed))
    limits = Limits(max_len=MAX_LEN, max_rows=4, max_tokens=400, is_deterministic=is_deterministic)
    ours = CudaExecutor(config, program, CPU, torch.float32, plain_kernels(), limits)
    plain = TorchExecutor(config, program, CPU, torch.float32, SdpaBackend())
    block_size = BLOCK_SIZES[seed % len(BLOCK_SIZES)]
    steps, num_blocks = random_steps(random.Random(seed + 1000), program.vocab_size, block_size)
    for executor in (ours, plain):
        load_weights(executor, {name: TensorSource(weight) for name, weight in weights.items()})
        executor.cache.allocate(CacheSize(num_blocks=num_blocks, block_size=block_size, num_states=NUM_STATES))
    ours.store.k_LSKD.fill_(torch.nan)  # what no row wrote is never read
    ours.store.v_LSKD.fill_(torch.nan)
    if ours.store.states is not None:
        ours.store.states.slots_ZF.fill_(torch.nan)
    for rows, kept in steps:
        with torch.inference_mode():
            right = plain.hidden(rows, kept)
            mine = ours.hidden(rows, kept).clone()
            assert relative_difference(mine, right) <= 1e-5
            assert relative_difference(ours.final(mine), plain.final(right)) <= 1e-5
            assert relative_difference(ours.logits(mine), plain.logits(right)) <= 1e-5
