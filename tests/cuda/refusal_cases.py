"""What launchers refuse, and rows that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.records import Partials, States, range_memory
from nano_inference.executors.cuda.sample_records import new_scratch
from nano_inference.executors.torch.attention.context import AttentionSpec
from tests.cuda.attention_cases import World
from tests.cuda.case import Case, error


def messages(kernels: Kernels, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a word of each message, and the call that is refused with it."""
    world = World(rows=[(1, 5)], ratio=1, head_dim=64)
    q_THD, cache, rows, _ = world.on(device)
    out, spec = torch.empty_like(q_THD), AttentionSpec(1.0)
    wide, huge = torch.zeros(17, 32, device=device), torch.zeros(1, 16385, device=device)
    long, memory = torch.zeros(17, 600, device=device), range_memory(10, device)

    def attends(q: torch.Tensor, dim: int = 64) -> Callable[[], None]:
        kept = cache._replace(k_SJD=cache.k_SJD[..., :dim], v_SJD=cache.v_SJD[..., :dim])
        return lambda: kernels.attend.attend_chunks(out, q, kept, rows, spec, max_queries=1)

    yield "float32, float16 or bfloat16", attends(q_THD.double())
    yield "one precision", attends(q_THD.half())
    yield "do not match the cache", attends(q_THD[:, :1])
    if kernels.has_fixed_heads:
        yield "query heads per kv head", attends(q_THD.new_zeros(1, 18, 64))
        yield "head_dim", attends(q_THD.new_zeros(1, 2, 40), 40)
    yield "part_ZTN", lambda: kernels.multiply.multiply(wide[:4], long[:4], long, None, memory)
    yield "vocabularies", lambda: new_scratch(1, (1 << 19) + 1, 0, torch.device("meta"))
    yield "16384", lambda: kernels.operate.norm(huge, huge, None, eps=0.0)
    states = States(wide, wide, wide, wide)
    yield (
        "does not fit 32 channels",
        lambda: kernels.recur.convolve(
            wide, wide, wide.new_zeros(32, 1, 4), wide.new_zeros(1, 2, 32), states, wide, most_tokens=1
        ),
    )
    yield (
        "do not fit a state",
        lambda: kernels.recur.gated_delta(
            wide, wide, wide, wide, wide, wide, wide.new_zeros(1, 1, 9, 16), states, wide, is_tiled=False
        ),
    )
    yield "contiguous", lambda: kernels.operate.softcap(wide.t(), 1.0)
    yield "more_TW and sum_TW", lambda: kernels.operate.norm(wide, wide, None, eps=0.0, more_TW=wide)


def accepted(kernels: Kernels, device: torch.device) -> float:
    """Return the number of calls that were not refused with their message."""
    count = 0
    for word, call in messages(kernels, device):
        try:
            call()
        except ValueError as refusal:
            count += word not in str(refusal)
        else:
            count += 1
    return float(count)


def idle_error(kernels: Kernels, device: torch.device) -> float:
    """Return the largest difference if one row of three has length 0: its output is unchanged, others are right."""
    world = World(rows=[(1, 20), (1, 300), (1, 7)], ratio=2, head_dim=64)
    q_THD, cache, rows, position_T = world.on(device)
    rows.length_R[1], position_T[1] = 0, -1
    part_THND = torch.full((3, 4, 2, 64), torch.nan, device=device)
    partials = Partials(part_THND, part_THND[..., 0].clone())
    out_THD = torch.full(q_THD.shape, 7.0, device=device)
    kernels.attend.attend_splits(partials, q_THD, cache, rows, world.spec)
    kernels.attend.merge_splits(out_THD, partials, position_T, None)
    expected_THD = world.expected()
    expected_THD[1] = 7.0
    return error(out_THD, expected_THD)


def idle_chunk_error(kernels: Kernels, device: torch.device) -> float:
    """Return the largest difference of chunks if one row of three has length 0: its output is unchanged."""
    world = World(rows=[(9, 20), (5, 40), (3, 7)], ratio=2, head_dim=64)
    q_THD, cache, rows, _ = world.on(device)
    rows.length_R[1] = 0
    out_THD = torch.full(q_THD.shape, 7.0, device=device)
    kernels.attend.attend_chunks(out_THD, q_THD, cache, rows, world.spec, max_queries=9)
    expected_THD = world.expected()
    expected_THD[9:14] = 7.0
    return error(out_THD, expected_THD)


def cases() -> Iterator[Case]:
    """Yield every case."""
    yield Case("refusals", accepted, 0.0)
    yield Case("attention-idle-row", idle_error, 4e-6)
    yield Case("attention-idle-chunk", idle_chunk_error, 4e-6)
