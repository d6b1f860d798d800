"""Every backend against a masked softmax in float64, with garbage wherever attention must not read."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nano_inference.core.step import BlockCopy
from nano_inference.executors.batch import build, in_step_order
from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.attention import (
    AttentionSpec,
    Backend,
    FlexAttentionBackend,
    SdpaBackend,
    create_attention_mask,
    create_sliding_window_causal_mask,
)
from nano_inference.executors.torch.store import KVStore
from tests.rows import make_row

CPU = torch.device("cpu")
GARBAGE = 3e4
HEAD_DIM = 8
LAYER = 1
Place = tuple[int, int]
"""How many tokens a row has behind it, and how many it computes."""

DECODES: tuple[Place, ...] = ((0, 1), (3, 1), (4, 1), (15, 1), (16, 1), (17, 1), (40, 1), (41, 1), (90, 1))
CHUNKS: tuple[Place, ...] = ((0, 7), (0, 16), (5, 11), (16, 2), (33, 20))
MANY: tuple[Place, ...] = tuple((n, 1) for n in range(20, 60))


@pytest.fixture(params=["sdpa", pytest.param("flex", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return SdpaBackend() if request.param == "sdpa" else FlexAttentionBackend()


@dataclass
class Scene:
    """A step over a poisoned cache, and for every row its whole K and V in order."""

    step: ForwardInput
    store: KVStore
    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    histories: list[tuple[Tensor, Tensor]]


def make_scene(
    places: tuple[Place, ...], block_size: int, num_kv_heads: int, ratio: int, window: int | None, seed: int = 0
) -> Scene:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + count) // block_size) for start, count in places]
    num_blocks = sum(counts) + 5
    free = rng.sample(range(num_blocks), num_blocks)
    rows = []
    for i, ((start, count), num) in enumerate(zip(places, counts, strict=True)):
        blocks = tuple(free.pop() for _ in range(num))
        rows.append(make_row(i, (1,) * count, start=start, blocks=blocks))
    step = build(in_step_order(tuple(rows)), block_size, CPU)
    store = KVStore(2, num_blocks, block_size, num_kv_heads, HEAD_DIM, torch.float32, CPU)
    store.k_LSKD.fill_(GARBAGE)
    store.v_LSKD.fill_(-GARBAGE)
    num_tokens = step.token_T.size(0)
    q_THD = torch.randn(num_tokens, num_kv_heads * ratio, HEAD_DIM, generator=generator)
    k_TKD, v_TKD = torch.randn(2, num_tokens, num_kv_heads, HEAD_DIM, generator=generator).unbind(0)
    histories = []
    for span in step.spans:
        k_SKD, v_SKD = torch.randn(2, span.start, num_kv_heads, HEAD_DIM, generator=generator).unbind(0)
        seen = 0 if window is None else max(0, span.start + 1 - window)
        k_SKD[:seen], v_SKD[:seen] = -GARBAGE, GARBAGE  # outside the window
        slot_S = torch.tensor([span.blocks[p // block_size] * block_size + p % block_size for p in range(span.start)])
        store.write(LAYER, slot_S.long(), k_SKD, v_SKD)
        own = slice(span.offset, span.offset + span.num_tokens)
        histories.append((torch.cat([k_SKD, k_TKD[own]]), torch.cat([v_SKD, v_TKD[own]])))
    store.write(LAYER, step.slot_T, k_TKD, v_TKD)
    return Scene(step, store, q_THD, k_TKD, v_TKD, histories)


def naive(scene: Scene, spec: AttentionSpec) -> Tensor:
    """Softmax over what each token may see, one head of one token at a time, in float64."""
    out_THD = torch.empty_like(scene.q_THD, dtype=torch.float64)
    for span, (k_SKD, v_SKD) in zip(scene.step.spans, scene.histories, strict=True):
        ratio = scene.q_THD.size(1) // k_SKD.size(1)
        for i in range(span.num_tokens):
            last = span.start + i
            first = 0 if spec.window is None else max(0, last + 1 - spec.window)
            for head in range(scene.q_THD.size(1)):
                k_SD, v_SD = (x[first : last + 1, head // ratio].double() for x in (k_SKD, v_SKD))
                score_S = k_SD @ scene.q_THD[span.offset + i, head].double() * spec.scale
                if spec.softcap is not None:
                    score_S = torch.tanh(score_S / spec.softcap) * spec.softcap
                out_THD[span.offset + i, head] = torch.softmax(score_S, -1) @ v_SD
    return out_THD


def check(
    backend: Backend,
    places: tuple[Place, ...],
    *,
    block_size: int = 4,
    num_kv_heads: int = 1,
    ratio: int = 3,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    scene = make_scene(places, block_size, num_kv_heads, ratio, window)
    spec = AttentionSpec(0.4, window, softcap)
    plan = backend.plan(scene.step, block_size, window)
    out_THD = backend.attend(scene.q_THD, scene.k_TKD, scene.v_TKD, scene.store, LAYER, spec, plan)
    assert out_THD.shape == scene.q_THD.shape
    assert float((out_THD.double() - naive(scene, spec)).abs().max()) < 1e-5


@pytest.mark.parametrize(("num_kv_heads", "ratio"), [(3, 1), (2, 3), (1, 7)])
@pytest.mark.parametrize("window", [None, 6])
def test_query_heads_share_the_right_kv_head(backend: Backend, num_kv_heads: int, ratio: int, window: int) -> None:
    check(backend, DECODES + CHUNKS, num_kv_heads=num_kv_heads, ratio=ratio, window=window)


@pytest.mark.parametrize(("window", "block_size"), [(1, 4), (5, 1), (5, 16), (17, 4), (1000, 4)])
def test_window_masks_exactly_the_older_keys(backend: Backend, window: int, block_size: int) -> None:
    check(backend, DECODES + CHUNKS, block_size=block_size, window=window)


@pytest.mark.parametrize("window", [None, 5])
def test_soft_cap_applies_before_the_mask(backend: Backend, window: int | None) -> None:
    check(backend, DECODES + CHUNKS, window=window, softcap=0.5, num_kv_heads=2)
    check(SdpaBackend(score_elements=200), CHUNKS, softcap=2.0, window=window, num_kv_heads=2)  # in pieces


@pytest.mark.parametrize("places", [DECODES, CHUNKS, DECODES[3:4], CHUNKS[:1], CHUNKS[3:4], MANY, MANY + CHUNKS[2:4]])
@pytest.mark.parametrize("block_size", [1, 16])
def test_every_mix_of_rows_is_exact(backend: Backend, places: tuple[Place, ...], block_size: int) -> None:
    check(backend, places, block_size=block_size, ratio=1)


def test_masks_are_what_the_loops_say() -> None:
    for num_queries, num_keys, window in ((1, 1, 1), (4, 4, 1), (4, 4, 2), (3, 9, 5), (5, 9, 100), (0, 3, 2)):
        mask_QK = create_sliding_window_causal_mask(num_queries, window, num_keys=num_keys)
        expected = [[0 <= q - k < window for k in range(num_keys)] for q in range(num_keys - num_queries, num_keys)]
        assert mask_QK.tolist() == expected
        assert mask_QK.dtype == torch.bool
    assert create_sliding_window_causal_mask(3, 2).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]
    query_Q, key_K = torch.tensor([4, 0, 9]), torch.tensor([9, 3, 0, 4])
    assert create_attention_mask(query_Q, key_K).tolist() == [[k <= q for k in (9, 3, 0, 4)] for q in (4, 0, 9)]
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="window"):
            create_sliding_window_causal_mask(2, wrong)
    with pytest.raises(ValueError, match="num_keys"):
        create_sliding_window_causal_mask(3, 1, num_keys=2)


def test_copies_read_every_source_before_they_write() -> None:
    store = KVStore(2, 4, 3, 1, 2, torch.float32, CPU)
    for cache in (store.k_LSKD, store.v_LSKD):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
    before = [cache.clone().unflatten(1, (4, 3)) for cache in (store.k_LSKD, store.v_LSKD)]
    store.prepare((), (BlockCopy(0, 1, 2), BlockCopy(1, 2, 3), BlockCopy(2, 0, 1)))
    for cache, old in zip((store.k_LSKD, store.v_LSKD), before, strict=True):
        new = cache.unflatten(1, (4, 3))
        assert torch.equal(new[:, 1, :2], old[:, 0, :2]) and torch.equal(new[:, 1, 2:], old[:, 1, 2:])
        assert torch.equal(new[:, 2], old[:, 1])
        assert torch.equal(new[:, 0, :1], old[:, 2, :1]) and torch.equal(new[:, 0, 1:], old[:, 0, 1:])
        assert torch.equal(new[:, 3], old[:, 3])
    store.prepare((), ())


def test_a_step_is_laid_out_row_after_row() -> None:
    rows = (
        make_row(0, (5, 6, 7), start=3, blocks=(9, 2), prev_token=4),
        make_row(1, (8,), start=6, blocks=(1, 3), prev_token=7),
        make_row(2, (9,)),
    )
    step = build(in_step_order(rows), 4, CPU)
    assert step.token_T.tolist() == [9, 8, 5, 6, 7]
    assert step.prev_T.tolist() == [-1, 7, 4, 5, 6]
    assert step.position_T.tolist() == [0, 6, 3, 4, 5]
    assert step.slot_T.tolist() == [0, 14, 39, 8, 9]
    assert [(span.offset, span.num_tokens, span.start, span.end) for span in step.spans] == [
        (0, 1, 0, 1),
        (1, 1, 6, 7),
        (2, 3, 3, 6),
    ]
