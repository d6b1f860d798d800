"""The launchers of few rows against those that they replace, bit for bit, and against float64.

Shapes: T tokens, N outputs and K inputs of a product, H heads, J kv heads, D head size, L positions, F rotary size / 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.records import (
    Cache,
    HeadNorms,
    NewHeads,
    Partials,
    SumNorm,
    num_splits,
    num_sums,
    range_memory,
)
from nano_inference.executors.torch import ops as reference
from nano_inference.executors.torch.attention.context import AttentionSpec
from nano_inference.models.ops import Activation
from tests.cuda import attention_cases, pointwise_cases
from tests.cuda.attention_cases import World
from tests.cuda.case import Case
from tests.cuda.pointwise_cases import relative

_EPS = 1e-5


def bits_differ(found: Tensor, expected: Tensor) -> bool:
    """Return whether a bit differs, except those of NaN."""
    return not torch.equal(found.nan_to_num(nan=-77.0), expected.nan_to_num(nan=-77.0))


def product_error(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    kind: Activation | None,
    offset: float,
) -> float:
    """Return the largest difference of a product from float64; infinity if a bit differs from single launches."""
    num_tokens, num_out, num_in = shape
    generator = torch.Generator().manual_seed(num_in)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype).to(device)

    x_TK, more_TK, norm_K = random(num_tokens, num_in + 16)[:, :num_in], random(num_tokens, num_in), random(num_in)
    weight_NK, bias_N = random(num_out, num_in) * num_in**-0.5, random(num_out) if kind is None else None
    width = num_out if kind in (None, "relu_squared") else num_out // 2
    memory = range_memory(num_sums(num_tokens, num_out, num_in), device)
    memory.part_ZTN.fill_(torch.nan)
    sums = [torch.full_like(more_TK, torch.nan) for _ in range(2)]
    outs = [torch.full((num_tokens, width + 3), torch.nan, dtype=dtype, device=device)[:, :width] for _ in range(2)]
    norm = SumNorm(x_TK=x_TK, more_TK=more_TK, sum_TK=sums[0], weight_K=norm_K, eps=_EPS, offset=offset)
    for _ in range(2):  # the second needs what the first leaves in `done_I`
        kernels.multiply.multiply_norm(outs[0], norm, weight_NK, bias_N, kind, memory)
    normed_TK, whole_TN = torch.empty_like(more_TK), torch.empty(num_tokens, num_out, dtype=dtype, device=device)
    kernels.operate.norm(normed_TK, x_TK, norm_K, eps=_EPS, offset=offset, more_TW=more_TK, sum_TW=sums[1])
    kernels.multiply.multiply(whole_TN, normed_TK, weight_NK, bias_N, memory)
    if kind is None:
        outs[1].copy_(whole_TN)
    else:
        up_TN = None if kind == "relu_squared" else whole_TN[:, width:]
        kernels.operate.activate(outs[1], whole_TN[:, :width], up_TN, kind)
    if bits_differ(outs[0], outs[1]) or bits_differ(sums[0], sums[1]) or memory.done_I.any():
        return float("inf")
    want_TK = reference.rms_norm((x_TK + more_TK).cpu().double(), norm_K.cpu().double(), _EPS, offset)
    want_TN = want_TK @ weight_NK.cpu().double().t() + (0 if bias_N is None else bias_N.cpu().double())
    if kind is not None:
        want_TN = reference.activate(kind, want_TN[:, :width], None if up_TN is None else want_TN[:, width:])
    return relative(outs[0], want_TN)


def attention_error(
    kernels: Kernels, device: torch.device, world: World, norms: HeadNorms, rotary: int, done: int
) -> float:
    """Return the largest difference of attention from float64; infinity if a bit differs from single launches.

    The row `done` is not running.
    """
    whole, cache, rows, position_T = world.on(device)
    num_tokens, num_heads, dim = whole.shape
    num_kv, dtype = cache.k_SJD.size(1), world.dtype
    generator = torch.Generator().manual_seed(3)
    qkv_TW = torch.randn(num_tokens, (num_heads + 2 * num_kv) * dim + 16, generator=generator).to(dtype).to(device)
    qkv_TW = qkv_TW[:, : (num_heads + 2 * num_kv) * dim]
    angle_LF = torch.rand(int(position_T.max()) + 1, rotary // 2, generator=generator) * 6
    cos_LF, sin_LF = (one.to(dtype).to(device) for one in (angle_LF.cos(), angle_LF.sin()))
    position_T[done], rows.length_R[done] = -1, 0
    splits = num_splits(int(position_T.max()) + 1) + 1
    caches = [Cache(cache.k_SJD.clone(), cache.v_SJD.clone(), cache.table_RB, cache.block_size) for _ in range(2)]
    outs = [torch.full((num_tokens, num_heads, dim), torch.nan, dtype=dtype, device=device) for _ in range(2)]

    def partials() -> Partials:
        part_THND = torch.full((num_tokens, num_heads, splits, dim), torch.nan, device=device)
        return Partials(part_THND, part_THND[..., 0].clone())

    done_I = torch.zeros(num_tokens * num_kv, dtype=torch.int32, device=device)
    heads = NewHeads(qkv_TW=qkv_TW, cos_LF=cos_LF, sin_LF=sin_LF, norms=norms)
    for _ in range(2):
        kernels.attend.attend_rows(outs[0], partials(), heads, position_T, caches[0], world.spec, done_I)
    q_THD, row_T = torch.zeros_like(outs[0]), torch.arange(num_tokens, dtype=torch.int32, device=device)
    kernels.operate.rotate_and_store(q_THD, qkv_TW, cos_LF, sin_LF, position_T, row_T, caches[1], norms)
    singly = partials()
    kernels.attend.attend_splits(singly, q_THD, caches[1], rows, world.spec)
    kernels.attend.merge_splits(outs[1], singly, position_T, world.spec.window)
    pairs = [outs, *([getattr(one, name) for one in caches] for name in ("k_SJD", "v_SJD"))]
    if any(bits_differ(*pair) for pair in pairs) or done_I.any() or not outs[0][done].isnan().all():
        return float("inf")
    object.__setattr__(world, "q_THD", q_THD.cpu())
    new = Cache(caches[1].k_SJD.cpu(), caches[1].v_SJD.cpu(), world.cache.table_RB, cache.block_size)
    object.__setattr__(world, "cache", new)
    is_running_T = position_T.cpu() >= 0
    return relative(outs[0].cpu()[is_running_T], world.expected()[is_running_T])


def cases() -> Iterator[Case]:
    """Yield every case."""
    kinds: tuple[Activation | None, ...] = ("silu", "gelu_tanh", "relu_squared", None)
    for dtype in pointwise_cases.BOUNDS:
        for kind, offset, shape in zip(
            kinds, (0.0, 1.0, 0.0, 0.0), ((1, 96, 576), (2, 70, 1200), (3, 33, 100), (4, 160, 896)), strict=True
        ):

            def multiply(
                kernels: Kernels,
                device: torch.device,
                given: tuple[torch.dtype, tuple[int, int, int], Activation | None, float] = (
                    dtype,
                    shape,
                    kind,
                    offset,
                ),
            ) -> float:
                return product_error(kernels, device, *given)

            bound = 4 * pointwise_cases.BOUNDS[dtype]
            yield Case(f"fused-product-{kind}-{str(dtype)[6:]}", multiply, bound, dtype == torch.bfloat16)
    window = AttentionSpec(0.2, 290)
    for name, dtype, ratio, dim, order, rotary, spec in (
        ("none", torch.float16, 7, 64, "none", 64, AttentionSpec(0.2)),
        ("first", torch.float32, 2, 128, "first", 128, window),
        ("last", torch.float32, 3, 16, "last", 8, AttentionSpec(0.2)),
        ("bfloat16", torch.bfloat16, 2, 128, "first", 128, window),
    ):

        def attend(
            kernels: Kernels,
            device: torch.device,
            given: tuple[torch.dtype, int, int, str, int, AttentionSpec] = (dtype, ratio, dim, order, rotary, spec),
        ) -> float:
            dtype, ratio, dim, order, rotary, spec = given
            world = World(rows=[(1, 300), (1, 1), (1, 50), (1, 570)], ratio=ratio, head_dim=dim, dtype=dtype, spec=spec)
            norms = HeadNorms(order=order, eps=_EPS)  # type: ignore[arg-type]
            if order == "first":
                q_D, k_D = (torch.linspace(-1, 1, dim).to(dtype).to(device) for _ in "qk")
                norms = HeadNorms(order=order, eps=_EPS, offset=1.0, q_D=q_D, k_D=k_D)  # type: ignore[arg-type]
            return attention_error(kernels, device, world, norms, rotary, done=2)

        yield Case(f"fused-attention-{name}", attend, attention_cases.BOUNDS[dtype], dtype == torch.bfloat16)
