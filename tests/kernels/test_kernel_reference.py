"""The reference implementation of the kernels, compared with torch functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nano_inference.executors.cpu.native import Cache
from nano_inference.executors.cpu.program import Activate, Attend, Embed, Heads, Keep, Norm, Product, Program
from tests.kernels import reference
from tests.kernels.steps import Span, layout_of, random

NUM_HEADS, NUM_KV, DIM, SIZE, NUM_TOKENS = 6, 2, 16, 4, 11
WIDTH = (NUM_HEADS + 2 * NUM_KV) * DIM


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler")


def rotated(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + R/2) as complex numbers; the first half of the sine is negated."""
    half = cos_TR.size(1) // 2
    turn = torch.complex(cos_TR[:, :half], sin_TR[:, half:]).unsqueeze(1)
    pair = torch.complex(x_THD[..., :half], x_THD[..., half : 2 * half]) * turn
    return torch.cat((pair.real, pair.imag, x_THD[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_layer_matches_torch(window: int | None) -> None:
    table = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.float32, generator=random(1))
    angle_PR = torch.rand(NUM_TOKENS, DIM // 4, generator=random(2)).double()
    cos_PR, sin_PR = angle_PR.cos().repeat(1, 2), torch.cat((-angle_PR.sin(), angle_PR.sin()), dim=-1)
    q_weight, k_weight = torch.rand(2, DIM, generator=random(3)) + 0.5
    heads = Heads(x="qkv", layer=0, rope=0, norm="before", q_weight=q_weight, k_weight=k_weight, eps=1e-5, offset=1.0)
    attend = Attend(x="qkv", out="att", layer=0, scale=0.3, window=window)
    program = Program(
        ops=(Embed(out="qkv", table=reference.pack(table)), heads, Keep(buffers=("qkv",)), attend),
        widths={"qkv": WIDTH, "att": NUM_HEADS * DIM},
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV,
        head_dim=DIM,
    )
    layer = 5 * NUM_KV * DIM * SIZE
    cache = Cache(*(torch.zeros(layer + 64, dtype=torch.float64) for _ in "kv"), SIZE, NUM_KV * DIM * SIZE)
    got = []
    for begin, end in ((0, 5), (5, 6), (6, NUM_TOKENS)):
        span = Span(tuple(range(begin, end)), begin, (4, 0, 2))
        kept = [t - begin for t in range(begin, end) if t % 3]
        got.append(reference.run(program, layout_of((span,), kept), cache, [(cos_PR, sin_PR)], torch.float64)["att"])
    rows_THD = table.double().view(NUM_TOKENS, -1, DIM)
    q, k, v = rows_THD.split((NUM_HEADS, NUM_KV, NUM_KV), dim=1)
    q = rotated(F.rms_norm(q, (DIM,), 1 + q_weight.double(), 1e-5), cos_PR, sin_PR)
    k = rotated(F.rms_norm(k, (DIM,), 1 + k_weight.double(), 1e-5), cos_PR, sin_PR)
    distance = torch.arange(NUM_TOKENS).unsqueeze(-1) - torch.arange(NUM_TOKENS)
    mask = (distance >= 0) & (distance < (window or NUM_TOKENS))
    k, v = (each.transpose(0, 1).repeat_interleave(NUM_HEADS // NUM_KV, dim=0) for each in (k, v))
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=0.3)
    kept = [t for t in range(NUM_TOKENS) if t % 3]
    assert torch.allclose(torch.cat(got), expected.transpose(0, 1).flatten(1)[kept])


def test_row_operations_match_torch() -> None:
    x_SK, bias_N = torch.randn(5, 33, generator=random(4)), torch.randn(24, generator=random(5))
    gate_NK, up_NK = torch.randn(2, 12, 33, generator=random(6))
    weight_K = torch.rand(33, generator=random(7))
    program = Program(
        ops=(
            Norm(x="x", out="n", weight=weight_K, eps=1e-6),
            Product(x="n", out="gate_up", matrices=(reference.pack(gate_NK), reference.pack(up_NK)), bias=bias_N),
            Activate(x="gate_up", out="act", kind="silu"),
        ),
        widths={"x": 33, "n": 33, "gate_up": 24, "act": 12},
    )
    normed_SK = F.rms_norm(x_SK, (33,), weight_K, 1e-6)
    gate_SN, up_SN = F.linear(normed_SK, torch.cat((gate_NK, up_NK)), bias_N).chunk(2, dim=-1)
    assert torch.allclose(
        reference.run_rows(program, {"x": x_SK})["act"], F.silu(gate_SN) * up_SN, rtol=1e-4, atol=1e-5
    )


def test_eight_bit_product_is_close_to_exact_product() -> None:
    weight_NK, x_SK = torch.randn(20, 300, generator=random(8)), torch.randn(4, 300, generator=random(9))
    program = Program(
        ops=(Product(x="x", out="y", matrices=(reference.pack_int8(weight_NK),)),), widths={"x": 300, "y": 20}
    )
    got_SN = reference.run_rows(program, {"x": x_SK})["y"]
    exact_SN = x_SK @ weight_NK.T
    assert (got_SN - exact_SN).abs().max() <= 0.05 * exact_SN.abs().max()
    assert not torch.equal(got_SN, exact_SN)
