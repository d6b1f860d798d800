"""Measure what the host needs for a window of the CUDA executor: filling slots and reading results.

    python benchmarks/windows.py [--rows 256] [--tokens 16] [--tops 0,5,20]

The step computes nothing, and the slots are on the CPU: what remains is the CPU time of this thread in
`executors/cuda/windows.py`, for a number of most probable tokens that each row reports. The core's part of a step
is in `benchmarks/steps.py --lookahead`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.core.step import Row
from nano_inference.executors.cuda.decode import DecodeStep, StepKey
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.cuda.windows import Windows
from nano_inference.executors.loading import load_weights
from nano_inference.executors.protocol import CacheSize
from nano_inference.loading.sources import TensorSource
from nano_inference.models import dense
from nano_inference.models.config import LayerConfig, ModelConfig, RopeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cuda.plain import plain_kernels

BLOCK, PROMPT_TOKENS, WARM_UP, WINDOWS = 16, 32, 4, 40


class IdleStepper:
    """Counts a token of every slot as drawn; computes nothing."""

    def __init__(self, num_new_S: Tensor) -> None:
        self._num_new_S = num_new_S

    def replay(self, key: StepKey) -> None:
        self._num_new_S.add_(1)

    def forget(self) -> None:
        """Do nothing."""

    def warm_up(self, keys: list[StepKey], progress: Callable[[int, int], None]) -> None:
        """Do nothing."""


def open_step(num_rows: int, num_tokens: int) -> DecodeStep:
    """Return the step of a tiny model, with a slot for each row."""
    config = ModelConfig(
        architecture="Tiny", family="dense", vocab_size=64, hidden_size=32, intermediate_size=32, num_heads=2,
        num_kv_heads=1, head_dim=16, layers=(LayerConfig(rope=0),), max_positions=4096,
        ropes=(RopeConfig(rotary_dim=16, theta=1e4),),
    )  # fmt: skip
    program = dense.program(config)
    limits = Limits(max_len=config.max_positions, max_rows=num_rows, lookahead=num_tokens)
    executor = CudaExecutor(config, program, torch.device("cpu"), torch.float32, plain_kernels(), limits)
    load_weights(executor, {spec.name: TensorSource(torch.zeros(spec.shape)) for spec in program.weights})
    executor.new_cache(CacheSize(num_blocks=1, block_size=BLOCK))
    return executor.memory.decode_step(executor.store)


def rows_of(num_rows: int, num_tokens: int, tops: int) -> list[Row]:
    """Return rows of a decode window, each with its own blocks."""
    params = SamplingParams(max_tokens=4096, logprobs=tops or None, ignore_eos=True, seed=1)
    num_blocks = _num_blocks(PROMPT_TOKENS + num_tokens * (WARM_UP + WINDOWS + 1))
    return [
        Row(
            id=index, tokens=(1,), prev_token=1, start=PROMPT_TOKENS, num_sampled=num_tokens, params=params,
            blocks=tuple(range(index * num_blocks, index * num_blocks + _num_blocks(PROMPT_TOKENS + num_tokens))),
            logprobs_mode="tempered", seed=1, sample_index=0,
        )
        for index in range(num_rows)
    ]  # fmt: skip


def after(row: Row, num_tokens: int) -> Row:
    """Return a row as it is after a window, with the blocks of the next one."""
    start, first = row.start + num_tokens, row.blocks[0]
    return row._replace(start=start, blocks=tuple(range(first, first + _num_blocks(start + num_tokens))))


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def us_a_token(num_rows: int, num_tokens: int, tops: int) -> float:
    """Return the median microseconds of windows, divided by their tokens."""
    step = open_step(num_rows, num_tokens)
    step.scratch.top_id.fill_(-1)[:, :tops] = 0
    windows = Windows(step, IdleStepper(step.slots.slots.num_new))
    rows, taken = rows_of(num_rows, num_tokens, tops), []
    for _ in range(WARM_UP + WINDOWS):
        started = time.thread_time()
        results = windows.run(rows)
        taken.append(time.thread_time() - started)
        first = results[0]
        assert len(first.tokens) == num_tokens and all(len(top) == tops for top in first.top_logprobs)
        rows = [after(row, num_tokens) for row in rows]
    return 1e6 * statistics.median(taken[WARM_UP:]) / (num_rows * num_tokens)


def counts(text: str) -> list[int]:
    """Read a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a row in a window")
    parser.add_argument("--tops", type=counts, default=[0, 5, 20], help="most probable tokens that are reported")
    given = parser.parse_args(arguments)
    for tops in given.tops:
        us = us_a_token(given.rows, given.tokens, tops)
        print(f"{given.rows} rows, {given.tokens} tokens a window, {tops} tops: {us:.2f} us a token", flush=True)


if __name__ == "__main__":
    main()
