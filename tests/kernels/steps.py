"""Random test data: weights in every format, and sequences with shared prefixes in a paged cache."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nano_inference.executors.cpu import matrix
from nano_inference.executors.cpu.library import BF16, F32, INT8, Library
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.executors.cpu.native import MAX_SPLIT_TOKENS, Cache, Layout, NativeProgram
from nano_inference.executors.cpu.program import Attend, Embed, Heads, Keep, Program
from nano_inference.support.memory import Slabs
from tests.kernels import reference

EPS = 2.0**-24
"""Half an ulp of 1 in float32: the relative error of one rounding."""
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Inputs and bytes of a ggml block."""
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Offsets of a block's half-precision scales."""
NIBBLES = ("Q4_0", "Q4_1", "Q4_K")
ROUNDED = ("int8", *(f"{name} x int8" for name in NIBBLES))
"""Formats that are multiplied with eight-bit activations."""
FORMATS = (*PLAIN, *BLOCK, *ROUNDED)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def block_rows(name: str, num_out: int, num_in: int, seed: int) -> Tensor:
    """Return rows of random blocks with scales of moderate size."""
    inputs, size = BLOCK[name]
    blocks = torch.randint(0, 256, (num_out, num_in // inputs, size), dtype=torch.uint8, generator=random(seed))
    for at in _SCALES[name]:
        scale = torch.randn(num_out, num_in // inputs, 1, generator=random(seed + at)).half() * 0.1
        blocks[..., at : at + 2] = scale.view(torch.uint8)
    return blocks.flatten(1)


def make_matrix(library: Library, name: str, num_out: int, num_in: int, seed: int) -> Matrix:
    """Return a random matrix of any format; `num_in` is rounded up to whole blocks."""
    kind = name.removesuffix(" x int8")
    if kind in BLOCK:
        num_in = -(-num_in // BLOCK[kind][0]) * BLOCK[kind][0]
        rows = block_rows(kind, num_out, num_in, seed)
        return matrix.pack_blocks(library, kind, rows, num_in, Slabs(0), rounds=kind != name)
    weight_NK = torch.randn(num_out, num_in, generator=random(seed))
    return pack(library, weight_NK, INT8) if name == "int8" else pack(library, weight_NK.to(PLAIN[name]))


def pack(library: Library, weight_NK: Tensor, kind: int | None = None, *, by_rows: bool = False) -> Matrix:
    """Pack in a format; by default that of the values, or bfloat16 for float32 values that fit it."""
    weight_NK = weight_NK.contiguous()
    if kind is None:
        kind = matrix.PLAIN[weight_NK.dtype]
        kind = BF16 if kind == F32 and matrix.scan(library, weight_NK).fits_bfloat16 else kind
    packer = matrix.Packer(library, weight_NK, Slabs(0), kind, by_rows=by_rows)
    packer.put(0, weight_NK.size(0))
    return packer.matrix


def run_rows(library: Library, program: Program, inputs: Mapping[str, Tensor], out: str) -> Tensor:
    """Run a program without tokens; return one buffer."""
    made = NativeProgram(library, program)
    made.run_rows(inputs)
    return made.buffer(out, next(iter(inputs.values())).size(0)).clone()


def product_bound(x_SK: Tensor, matrices: tuple[Matrix, ...], start_SN: Tensor) -> Tensor:
    """Return a bound of the error of a float32 product.

    K products and sums, each rounded once (twice without fused multiply-add), bias and addition: at most K + 4
    roundings affect a term, so the error is below (K + 4) eps times the sum of all terms' magnitudes.
    """
    each = [x_SK.double().abs()[:, : m.num_in] @ reference.unpack(m).double().abs().T for m in matrices]
    return (x_SK.size(1) + 4) * EPS * 1.01 * (torch.cat(each, dim=-1) + start_SN.double().abs()) + 1e-37


# ---- sequences in a cache -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention layer, and the number and length of test sequences."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None
    num_rows: int = 8
    """Number of decode rows."""
    chunks: tuple[int, ...] = ()
    """Tokens of each chunk."""
    longest: int = 600
    has_prefix: bool = True
    """True if sequences share prefixes."""
    has_root: bool = False
    """True if all sequences start with the same block."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a sequence; a token's id is its row in the embedding table."""

    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]

    def cut(self, begin: int, end: int) -> Span:
        return replace(self, tokens=self.tokens[begin:end], start=self.start + begin)


@dataclass(frozen=True)
class Case:
    """Spans, the queries, keys and values of their tokens, and a cache with the earlier tokens."""

    shape: Shape
    spans: tuple[Span, ...]
    qkv_TW: Tensor
    cache: Cache

    def fresh(self, dtype: torch.dtype = torch.float32) -> Cache:
        return replace(self.cache, k=self.cache.k.to(dtype, copy=True), v=self.cache.v.to(dtype, copy=True))

    def program(self, table: Matrix) -> Program:
        """Return a program of one layer: rows of an embedding are stored in the cache and attended to."""
        s = self.shape
        ops = (
            Embed(out="qkv", table=table),
            Heads(x="qkv", layer=1, rope=None),
            Keep(buffers=("qkv",)),
            Attend(x="qkv", out="att", layer=1, scale=s.head_dim**-0.5, window=s.window, softcap=s.softcap),
        )
        widths = {"qkv": self.qkv_TW.size(1), "att": s.num_heads * s.head_dim}
        return Program(ops=ops, widths=widths, num_heads=s.num_heads, num_kv_heads=s.num_kv_heads, head_dim=s.head_dim)


def layout_of(spans: tuple[Span, ...], kept: Sequence[int] | None = None) -> Layout:
    """Return a step's layout; by default all tokens are kept."""
    tokens = [token for span in spans for token in span.tokens]
    lengths = [len(span.blocks) for span in spans]
    return Layout(
        token_T=array("i", tokens),
        previous_T=array("i", [-1 for _ in tokens]),
        num_tokens_S=array("i", [len(span.tokens) for span in spans]),
        start_S=array("i", [span.start for span in spans]),
        table_begin_S=array("i", accumulate(lengths[:-1], initial=0)),
        tables=array("i", [block for span in spans for block in span.blocks]),
        keep_K=array("i", range(len(tokens)) if kept is None else kept),
    )


def make_case(shape: Shape, seed: int) -> Case:
    """Return sequences whose block tables form a tree; unwritten slots are NaN."""
    rng = np.random.default_rng(seed)
    counts = [1] * shape.num_rows + list(shape.chunks)
    return _case(shape, *_spans(shape, counts, rng), seed, rng)


def make_staircase(shape: Shape, seed: int) -> Case:
    """Return sequences that diverge from a common prefix one after another: the largest number of stretches."""
    size, chain = shape.block_size, range(shape.num_rows)
    spans = [
        Span((i,), (i + 1) * size + i % size, (*chain[: i + 1], shape.num_rows + i)) for i in range(shape.num_rows)
    ]
    return _case(shape, spans, 2 * shape.num_rows, seed, np.random.default_rng(seed))


def _case(shape: Shape, spans: list[Span], num_blocks: int, seed: int, rng: np.random.Generator) -> Case:
    size = shape.num_kv_heads * shape.head_dim * shape.block_size
    k, v = (torch.full((2 * num_blocks * size + 64,), torch.nan) for _ in range(2))
    rows_TW = _rows(shape, sum(len(span.tokens) for span in spans), seed)
    case = Case(shape, tuple(spans), rows_TW, Cache(k, v, shape.block_size, 2 * size))
    for span in spans:
        _fill(case, span, rng)
    return replace(case, spans=tuple(spans[i] for i in rng.permutation(len(spans))))


def _rows(shape: Shape, num_tokens: int, seed: int) -> Tensor:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return 1.5 * torch.randn(num_tokens, width, generator=random(seed))


def _spans(shape: Shape, counts: list[int], rng: np.random.Generator) -> tuple[list[Span], int]:
    """Return spans whose sequences start with full blocks of an earlier sequence, and the number of blocks."""
    spans: list[Span] = []
    size, used, token = shape.block_size, 0, 0
    most = len(counts) * (-(-shape.longest // size) + 2)
    names = rng.permutation(most).tolist()
    for count in counts:
        first = size if shape.has_root else 0
        start = int(rng.integers(first, shape.longest - count + 1)) if first or rng.random() < 0.9 else 0
        shared: tuple[int, ...] = ()
        if spans and shape.has_prefix and (first or rng.random() < 0.8):
            parent = spans[int(rng.integers(len(spans)))]
            shared = parent.blocks[: int(rng.integers(first // size, min(parent.start, start) // size + 1))]
        own = (start + count - 1) // size + 1 - len(shared)
        blocks = (*shared, *names[used : used + own])
        used += own
        spans.append(Span(tuple(range(token, token + count)), start, tuple(blocks)))
        token += count
    return spans, most


def _fill(case: Case, span: Span, rng: np.random.Generator) -> None:
    """Write the tokens before a span to the cache, except blocks shared with an earlier span."""
    shape, cache = case.shape, case.cache
    k_NJDZ, v_NJZD = layer_of(case, cache)
    for index, block in enumerate(span.blocks):
        slots = min(shape.block_size, span.start - index * shape.block_size)
        if slots <= 0 or not v_NJZD[block, 0, 0, 0].isnan():
            continue
        values = rng.standard_normal((2, shape.num_kv_heads, slots, shape.head_dim)).astype(np.float32)
        k_NJDZ[block, :, :, :slots] = torch.from_numpy(values[0]).transpose(1, 2)
        v_NJZD[block, :, :slots] = torch.from_numpy(values[1])


def layer_of(case: Case, cache: Cache) -> tuple[Tensor, Tensor]:
    """Return keys [N, J, D, Z] and values [N, J, Z, D] of the layer under test."""
    return layers_of(case, cache)[1]


def layers_of(case: Case, cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of every layer."""
    s = case.shape
    num_blocks = cache.k.numel() // cache.block_values
    total = num_blocks * cache.block_values
    k = cache.k[:total].view(num_blocks, -1, s.num_kv_heads, s.head_dim, s.block_size)
    v = cache.v[:total].view(num_blocks, -1, s.num_kv_heads, s.block_size, s.head_dim)
    return list(zip(k.unbind(1), v.unbind(1), strict=True))


def attend(
    library: Library,
    case: Case,
    spans: tuple[Span, ...],
    cache: Cache,
    kept: Sequence[int] | None = None,
    max_split_tokens: int = MAX_SPLIT_TOKENS,
) -> dict[int, Tensor]:
    """Return the attention output by token, of all tokens or of those in `kept`."""
    program = NativeProgram(library, case.program(pack(library, case.qkv_TW)), max_split_tokens=max_split_tokens)
    program.run(layout_of(spans, kept), cache)
    tokens = [token for span in spans for token in span.tokens]
    if kept is not None:
        tokens = [tokens[t] for t in kept]
    return dict(zip(tokens, program.buffer("att", len(tokens)).clone(), strict=True))


def attend_reference(case: Case, cache_dtype: torch.dtype = torch.float64) -> tuple[dict[int, Tensor], Cache]:
    """Return the attention output by token in float64, and the cache afterwards."""
    cache = case.fresh(cache_dtype)
    made = reference.run(
        case.program(pack(reference.library(), case.qkv_TW)), layout_of(case.spans), cache, dtype=torch.float64
    )
    tokens = [token for span in case.spans for token in span.tokens]
    return dict(zip(tokens, made["att"], strict=True)), cache


def attention_bound(case: Case, cache: Cache) -> float:
    """Return a bound of the error of float32 attention.

    A score is off by d <= (D + 8) eps |q| |k| scale (D roundings of products and sums), with a softcap by 8 eps cap
    more, tanh being accurate to a few ulps. Probabilities are then off by a factor e^(2 d), and the weighted sum
    over C keys by (C + 40) eps more: exponentials, sums, merges.
    """
    s = case.shape
    q_TX = case.qkv_TW[:, : s.num_heads * s.head_dim].reshape(-1, s.head_dim)
    k_NJDZ, v_NJZD = layer_of(case, cache)
    largest = q_TX.norm(dim=-1).max() * k_NJDZ.nan_to_num().norm(dim=2).max() * s.head_dim**-0.5
    off = (s.head_dim + 8) * EPS * float(largest) + 8 * EPS * (s.softcap or 0.0)
    return (2 * off + (s.longest + 40) * EPS) * float(v_NJZD.nan_to_num().abs().max())


def same_bits(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    """Return True if the results of all shared tokens are bit-equal."""
    shared = a.keys() & b.keys()
    assert shared
    return all(torch.equal(a[token], b[token]) for token in shared)


def in_child(check: Callable[[], bool]) -> int:
    """Run a check in a forked process, at most 20 seconds; return 0 if it succeeded."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        held = False
        try:
            held = check()
        finally:
            os._exit(0 if held else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def threads_here() -> set[str]:
    """Return the ids of this process's threads, including C threads; those of earlier tests may still be ending."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


def have_ended(threads: set[str]) -> bool:
    """Wait until threads are gone; return True if they are. A joined thread may be listed for a moment."""
    deadline = time.monotonic() + 10
    while threads & threads_here():
        if time.monotonic() > deadline:
            return False
    return True
