"""The largest steps that an executor can be given, to measure how much memory they need."""

from __future__ import annotations

from collections.abc import Iterator

from nano_inference.executors.batch import Rows
from nano_inference.executors.cuda.memory import Limits
from nano_inference.runner import Row
from nano_inference.types import SamplingParams


def largest_steps(limits: Limits, block_size: int) -> Iterator[Rows]:
    """Yield a pass with the most tokens and draws, and a window with the most rows; their blocks are the first ones."""
    num_tokens = min(limits.max_tokens // limits.max_rows, limits.max_len - 1)
    num_blocks = -(-(num_tokens + 1) // block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, raw_logprobs=True)

    def row(index: int, size: int, start: int) -> Row:
        return Row(
            id=index,
            tokens=(0,) * size,
            prev_token=-1 if not start else 0,
            start=start,
            blocks=tuple(range(index * num_blocks, (index + 1) * num_blocks)),
            num_sampled=1,
            params=params,
            logprobs_mode="processed",
            seed=0,
            sample_index=0,
        )

    yield tuple(row(index, num_tokens, 0) for index in range(limits.max_rows))
    yield tuple(row(index, 1, num_tokens) for index in range(limits.max_rows))
