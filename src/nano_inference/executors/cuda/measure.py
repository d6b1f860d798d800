"""Steps that no request asked for: the largest ones, to measure memory, and the usual ones, to compile kernels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from nano_inference.executors.batch import Rows
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.torch.store import KVStore
from nano_inference.runner import Row
from nano_inference.types import SamplingParams

_PLAIN = SamplingParams(temperature=1.0, logprobs=1)
_CUT = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, raw_logprobs=True)
"""Without and with truncation; both want top tokens, which have kernels of their own."""


def largest_steps(limits: Limits, block_size: int) -> Iterator[Rows]:
    """Yield a pass with the most tokens and draws, and a window with the most rows; their blocks are the first ones."""
    num_tokens = min(limits.max_tokens // limits.max_rows, limits.max_len - 1)
    num_blocks = -(-(num_tokens + 1) // block_size)

    def row(index: int, size: int, start: int) -> Row:
        return _row(index, size, start, range(index * num_blocks, (index + 1) * num_blocks), _CUT)

    yield tuple(row(index, num_tokens, 0) for index in range(limits.max_rows))
    yield tuple(row(index, 1, num_tokens) for index in range(limits.max_rows))


def usual_passes(limits: Limits, store: KVStore) -> Iterator[Rows]:
    """Yield passes that together launch every kernel of a pass, in each form that Triton compiles.

    Decode rows and a prompt: 3 and 16 tokens, because Triton distinguishes multiples of 16; and as many as can be,
    because `Variant.launch` distinguishes many programs. Each with and without truncation. All rows share blocks.
    """
    most = min(limits.max_tokens, limits.max_len, store.num_blocks * store.block_size)
    many = min(limits.max_rows, most - 1) - 1
    for (size, num_tokens), params in product(((1, 2), (1, 15), (many, most - many)), (_PLAIN, _CUT)):
        blocks = range(-(-num_tokens // store.block_size))
        decode = (_row(index, 1, 1, blocks, params) for index in range(size))
        yield (*decode, _row(size, num_tokens, 0, blocks, params))


def _row(index: int, size: int, start: int, blocks: range, params: SamplingParams) -> Row:
    return Row(
        id=index,
        tokens=(0,) * size,
        prev_token=-1 if not start else 0,
        start=start,
        blocks=tuple(blocks),
        num_sampled=1,
        params=params,
        logprobs_mode="processed",
        seed=0,
        sample_index=0,
    )
