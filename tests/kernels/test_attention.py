"""Attention kernels: accuracy against float64, and equal bits of a row in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from nano_inference.executors.cpu.native import Cache
from tests.kernels import reference
from tests.kernels.conftest import Team
from tests.kernels.steps import (
    Case,
    Shape,
    Span,
    attend,
    attend_reference,
    attention_bound,
    layer_of,
    layers_of,
    layout_of,
    make_case,
    make_staircase,
    pack,
    same_bits,
)

pytestmark = pytest.mark.slow

SHAPES = (
    Shape(num_heads=2, num_kv_heads=2, head_dim=64, block_size=16, chunks=(40,)),
    Shape(num_heads=3, num_kv_heads=1, head_dim=64, block_size=16, num_rows=40, chunks=(7, 33)),
    Shape(num_heads=7, num_kv_heads=1, head_dim=16, block_size=1, num_rows=6, chunks=(5,), longest=300),
    Shape(num_heads=8, num_kv_heads=1, head_dim=128, block_size=32, window=100, chunks=(20,)),
    Shape(num_heads=6, num_kv_heads=2, head_dim=80, block_size=4, softcap=5.0, num_rows=12),
    Shape(num_heads=4, num_kv_heads=4, head_dim=20, block_size=48, window=1, chunks=(50,)),
    Shape(num_heads=3, num_kv_heads=3, head_dim=20, block_size=512, num_rows=4, chunks=(3,), longest=1100),
    Shape(num_heads=8, num_kv_heads=1, head_dim=16, block_size=256, window=256, num_rows=9, longest=900),
    Shape(num_heads=7, num_kv_heads=1, head_dim=80, block_size=32, has_prefix=False, chunks=(65, 2)),
    Shape(num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, window=3, softcap=30.0, num_rows=20, longest=280),
    Shape(num_heads=3, num_kv_heads=1, head_dim=128, block_size=4, window=257, num_rows=3, chunks=(100,)),
    Shape(num_heads=1, num_kv_heads=1, head_dim=20, block_size=1, num_rows=1, longest=1000),
    Shape(num_heads=3, num_kv_heads=1, head_dim=16, block_size=16, num_rows=70, chunks=(2,), longest=90, has_root=True),
)
NAMES = [f"{s.num_heads}of{s.num_kv_heads}-d{s.head_dim}-z{s.block_size}-w{s.window}" for s in SHAPES]

GPU_NAN = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32).item()
DTYPES = (torch.float32, torch.bfloat16)


@cache
def case_with_reference(index: int, dtype: torch.dtype = torch.float32) -> tuple[Case, dict[int, Tensor], Cache]:
    """Return a case with the reference result for a cache precision."""
    case = make_case(SHAPES[index], seed=index)
    return (case, *attend_reference(case, torch.float64 if dtype == torch.float32 else dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", range(len(SHAPES)), ids=NAMES)
def test_attention_matches_float64(teams: dict[str, Team], index: int, dtype: torch.dtype) -> None:
    case, right, after = case_with_reference(index, dtype)
    bound = attention_bound(case, after)
    for build, team in teams.items():
        cache = case.fresh(dtype)
        got = attend(team[2], case, case.spans, cache)
        for token, row in got.items():
            assert (row - right[token]).abs().max() <= bound, (build, token)
        for mine, theirs in zip(layer_of(case, cache), layer_of(case, after), strict=True):
            assert torch.equal(mine.nan_to_num(9.0).double(), theirs.nan_to_num(9.0).double()), build
        assert all(cache.isnan().all() for cache in layers_of(case, cache)[0]), f"{build}: another layer was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", range(len(SHAPES)), ids=NAMES)
def test_rows_have_the_same_bits_in_any_batch(teams: dict[str, Team], index: int, dtype: torch.dtype) -> None:
    case, _, _ = case_with_reference(index, dtype)
    wrong = [f"{build}: {what}" for build, team in teams.items() for what in differences(team, case, dtype)]
    assert wrong == []


def differences(team: Team, case: Case, dtype: torch.dtype) -> Iterator[str]:
    """Yield the ways to run a step that change a bit of a row."""
    cache = case.fresh(dtype)
    whole = attend(team[2], case, case.spans, cache)
    for threads in (1, 3):
        if not same_bits(whole, attend(team[threads], case, case.spans, cache)):
            yield f"{threads} threads"
    if not same_bits(whole, attend(team[2], case, case.spans[::-1], cache)):
        yield "another order"
    for span in case.spans[:9]:
        if not same_bits(whole, attend(team[2], case, (span,), cache)):
            yield "alone"
        chunks = (span.cut(0, 1), *pieces(span.cut(1, len(span.tokens))))
        if not same_bits(whole, attend(team[3], case, chunks, cache)):
            yield "in chunks"
    if not same_bits(whole, attend(team[3], case, case.spans[:1], cache, max_split_tokens=0)):
        yield "long rows uncut"
    if not same_bits(whole, attend(team[3], case, case.spans[:3], cache, max_split_tokens=10_000)):
        yield "long rows cut"


def test_kept_rows_have_the_same_bits_as_among_all_rows(team: Team) -> None:
    for index in range(len(SHAPES)):
        check_kept_rows(team, index)


def check_kept_rows(team: Team, index: int) -> None:
    case, _, _ = case_with_reference(index)
    whole, cache = attend(team[2], case, case.spans, case.fresh()), case.fresh()
    num_tokens = len(whole)
    rng = np.random.default_rng(index)
    assert not attend(team[2], case, case.spans, cache, [])
    for count in {1, num_tokens // 2 + 1, max(1, num_tokens - 1)}:
        kept = sorted(rng.choice(num_tokens, count, replace=False).tolist())
        got = attend(team[2], case, case.spans, cache, kept)
        assert len(got) == len(kept) and same_bits(got, whole), (NAMES[index], kept)


def pieces(span: Span) -> tuple[Span, ...]:
    """Split a span into chunks of several lengths."""
    cuts = [0, *(at for at in (1, 3, 20, 52) if at < len(span.tokens)), len(span.tokens)]
    return tuple(span.cut(begin, end) for begin, end in pairwise(cuts) if begin < end)


@pytest.mark.parametrize("block_size", [1, 8, 16, 256])
@pytest.mark.parametrize("num_rows", [31, 32, 33, 70])
def test_crews_with_tables_diverging_at_every_block(teams: dict[str, Team], block_size: int, num_rows: int) -> None:
    """Crews of 32 tokens, each sharing one block less: the largest number of stretches."""
    shape = Shape(num_heads=3, num_kv_heads=1, head_dim=16, block_size=block_size, num_rows=num_rows)
    shape = replace(shape, longest=(num_rows + 1) * block_size)
    case = make_staircase(shape, seed=70)
    right, after = attend_reference(case)
    bound = attention_bound(case, after)
    for build, team in teams.items():
        got = attend(team[2], case, case.spans, case.fresh())
        assert all((row - right[token]).abs().max() <= bound for token, row in got.items()), build
        for span in case.spans[::9]:
            assert same_bits(got, attend(team[1], case, (span,), case.fresh())), build


def test_split_rows_have_the_bits_of_unsplit_rows(team: Team) -> None:
    """Scores differ much between splits, so that each merge rescales one side."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16, block_size=16, num_rows=2, longest=2000, has_prefix=False)
    case = make_case(shape, seed=50)
    k_NJDZ, _ = layer_of(case, case.cache)
    k_NJDZ *= 12 * torch.rand(k_NJDZ.size(0), 1, 1, 1, generator=torch.Generator().manual_seed(1))
    right, after = attend_reference(case)
    cut = attend(team[3], case, case.spans, case.fresh())
    assert same_bits(cut, attend(team[3], case, case.spans, case.fresh(), max_split_tokens=0))
    bound = attention_bound(case, after)
    assert all((row - right[token]).abs().max() <= bound for token, row in cut.items())


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_nan_in_one_sequence_does_not_affect_others(teams: dict[str, Team], part: str) -> None:
    """One sequence's last token is NaN or infinite; the others share its first blocks."""
    for value in (float("nan"), GPU_NAN, float("inf"), -float("inf")):
        check_nan(teams, value, part)


def check_nan(teams: dict[str, Team], value: float, part: str) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=20, block_size=16, num_rows=12, chunks=(9,), longest=300)
    case = make_case(shape, seed=60)
    clean = {build: attend(team[2], case, case.spans, case.fresh()) for build, team in teams.items()}
    spoiled = case.spans[4].tokens[-1]
    case.qkv_TW[spoiled, {"query": 0, "key": 120, "value": 160}[part]] = value
    own = set(case.spans[4].tokens)
    right, _ = attend_reference(case)
    for build, team in teams.items():
        got = attend(team[2], case, case.spans, case.fresh())
        assert same_bits({t: row for t, row in got.items() if t not in own}, clean[build]), build
        assert got[spoiled].isnan()[right[spoiled].isnan()].all(), build
        assert not got[spoiled].isfinite().all() or right[spoiled].isfinite().all(), build


def test_row_without_finite_scores_is_nan(team: Team) -> None:
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=16, block_size=16, num_rows=3, longest=60, has_prefix=False)
    case = make_case(shape, seed=61)
    case.qkv_TW[:, :16] = -torch.inf
    k_NJDZ, _ = layer_of(case, case.cache)
    k_NJDZ.abs_()
    case.qkv_TW[:, 16:32].abs_()
    assert all(row.isnan().all() for row in attend_reference(case)[0].values())
    assert all(row.isnan().all() for row in attend(team[2], case, case.spans, case.fresh()).values())


@pytest.mark.parametrize("skip", [1, 3])
def test_cache_may_be_unaligned(team: Team, skip: int) -> None:
    case, right, _ = case_with_reference(4)
    clean = attend(team[2], case, case.spans, case.fresh())
    k, v = (torch.cat((torch.zeros(skip), each))[skip:] for each in (case.cache.k, case.cache.v))
    got = attend(team[2], case, case.spans, Cache(k, v, case.cache.block_size, case.cache.block_values))
    assert same_bits(clean, got) and got.keys() == right.keys()


def test_cache_rounds_to_bfloat16_like_torch(team: Team) -> None:
    """Ties to even, overflow to infinity, NaN stays NaN."""
    for value in (1.0, 1.00390625, 1.01171875, -3.4e38, 1e-40, 3.0e-39, float("inf"), float("nan")):
        check_rounding(team, value)


def check_rounding(team: Team, value: float) -> None:
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=16, block_size=4, num_rows=1, longest=9, has_prefix=False)
    case = make_case(shape, seed=62)
    case.qkv_TW[:, 16:] = value
    cache, right = case.fresh(torch.bfloat16), case.fresh(torch.bfloat16)
    attend(team[2], case, case.spans, cache)
    reference.run(case.program(pack(team[2], case.qkv_TW)), layout_of(case.spans), right)
    span = case.spans[0]
    block, slot = span.blocks[span.start // 4], span.start % 4
    written, expected = torch.full((16,), value).bfloat16().float().nan_to_num(7.0), layer_of(case, right)
    for mine, theirs, place in zip(
        layer_of(case, cache), expected, ((block, 0, ..., slot), (block, 0, slot)), strict=True
    ):
        assert torch.equal(mine[place].float().nan_to_num(7.0), written)
        assert torch.equal(mine[place].float().nan_to_num(7.0), theirs[place].float().nan_to_num(7.0))
