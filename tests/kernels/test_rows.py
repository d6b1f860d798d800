"""Row operations: norms, rotations, activations, mixtures, embeddings."""

from __future__ import annotations

import math
import struct
from array import array
from itertools import product

import pytest
import torch
from torch import Tensor

from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.executors.cpu.native import Cache, NativeProgram
from nano_inference.executors.cpu.program import (
    Activate,
    Embed,
    GateValues,
    Heads,
    Mix,
    Norm,
    Op,
    Product,
    Program,
    Smear,
    Softcap,
)
from tests.kernels import reference
from tests.kernels.conftest import Team
from tests.kernels.steps import FORMATS, PLAIN, Span, layout_of, make_matrix, pack, random, run_rows

WIDTHS = (1, 3, 4, 7, 15, 16, 17, 31, 33, 64, 100, 577)
NUM_ROWS = 19
"""More than two pieces of 8 rows."""
GPU_NAN = struct.unpack("<f", b"\xff\xff\xff\x7f")[0]
"""The NaN of CUDA: unlike that of x86, every bit of its fraction is set."""
SPECIAL = (math.nan, GPU_NAN, -GPU_NAN, math.inf, -math.inf, 3e38, -3e38, 1e-45, -100.0, 100.0, 0.0)
ACTIVATIONS = ("silu", "gelu_tanh", "relu_squared")


def rows_programs(width: int) -> dict[str, tuple[Program, str]]:
    """Return, by name, programs of one operation on buffers x and y, with the buffer that they write."""
    weight_W, one = torch.randn(width, generator=random(1)), torch.tensor([0.7])
    widths = {"x": width, "y": width, "out": width}
    ops: dict[str, Op] = {
        "norm": Norm(x="x", out="out", weight=weight_W, eps=1e-6),
        "norm+1": Norm(x="x", out="out", weight=weight_W, eps=1e-5, offset=1.0),
        "bare norm": Norm(x="x", out="out", weight=None, eps=1e-6),
        "norm in place": Norm(x="x", out="x", weight=weight_W, eps=1e-6),
        "added norm": Norm(x="x", out="y", weight=weight_W, eps=1e-6, offset=1.0, add=True),
        "mix": Mix(x="x", y="y", out="out", a=one, b=one + 1, scale=-0.5),
        "mix in place": Mix(x="x", y="y", out="x", b=one),
        "copy": Mix(x="x", y="x", out="out", scale=0.0),
        "softcap": Softcap(x="x", cap=15.0),
    }
    written = {"norm in place": "x", "added norm": "y", "mix in place": "x", "softcap": "x"}
    made = {name: (Program(ops=(op,), widths=widths), written.get(name, "out")) for name, op in ops.items()}
    for kind in ACTIVATIONS:
        inner = {"x": width if kind == "relu_squared" else 2 * width, "out": width}
        made[kind] = Program(ops=(Activate(x="x", out="out", kind=kind),), widths=inner), "out"
    return made


def inputs_of(program: Program, num_rows: int, seed: int) -> dict[str, Tensor]:
    names = [name for name in program.widths if name != "out"]
    return {name: 3 * torch.randn(num_rows, program.widths[name], generator=random(seed)) for name in names}


def bound_of(name: str, width: int, exact_SW: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return an error bound: relative 1e-6, for a norm's sum of squares W/16 + 8 roundings more. tanh is accurate to a
    few ulps of 1, so a softcap to a few ulps of its cap, and GELU of its inputs; sums of two terms to those of the
    larger. SiLU may return 1e-36 instead of 0, because exponentials are infinite above e^88."""
    relative = 1e-6 + (width / 16 + 8) * 2**-24 * ("norm" in name)
    size_SW = exact_SW.abs()
    if "gelu" in name:
        size_SW = size_SW + (inputs["x"][:, :width] * inputs["x"][:, width:]).abs()
    elif "softcap" in name:
        size_SW = size_SW + 15.0
    elif "mix" in name or "added" in name:
        size_SW = size_SW + inputs["x"].abs() + 2 * inputs["y"].abs()
    return relative * size_SW + 1e-36


def test_row_operations_match_float64_and_rows_are_independent(team: Team) -> None:
    cases = [(name, width, *made) for width in WIDTHS for name, made in rows_programs(width).items()]
    for name, width, program, out in cases:
        inputs = inputs_of(program, NUM_ROWS, seed=width)
        got_SW = run_rows(team[2], program, inputs, out)
        exact_SW = reference.run_rows(program, inputs, dtype=torch.float64)[out]
        assert ((got_SW - exact_SW).abs() <= bound_of(name, width, exact_SW, inputs)).all(), (name, width)
        for threads in (1, 3):
            assert torch.equal(run_rows(team[threads], program, inputs, out), got_SW), (name, width)
        alone = {key: rows_SW[11:12] for key, rows_SW in inputs.items()}
        assert torch.equal(run_rows(team[1], program, alone, out), got_SW[11:12]), (name, width)


@pytest.mark.parametrize("width", [1, 17, 40])
def test_special_values_match_torch_and_stay_in_their_row(library: Library, width: int) -> None:
    others = [row for row in range(NUM_ROWS) if row != 5]
    for name, (program, out) in rows_programs(width).items():
        inputs = inputs_of(program, NUM_ROWS, seed=width)
        clean_SW = run_rows(library, program, inputs, out)
        for value in SPECIAL:
            inputs["x"][5, width // 2] = value
            got_SW = run_rows(library, program, inputs, out)
            plain_W = reference.run_rows(program, inputs)[out][5]
            assert got_SW[5].isnan()[plain_W.isnan()].all(), (name, value)
            if not math.isfinite(value):
                assert torch.equal(got_SW[5].isfinite(), plain_W.isfinite()), (name, value)
            assert torch.equal(got_SW[others], clean_SW[others]), (name, value)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_accurate_over_the_whole_range(library: Library, kind: str) -> None:
    program, out = rows_programs(1000)[kind]
    x_SW = torch.linspace(-120, 120, 8000).view(8, 1000)
    x_SW = x_SW if kind == "relu_squared" else torch.cat((x_SW, torch.ones_like(x_SW)), dim=-1)
    got_SW = run_rows(library, program, {"x": x_SW}, out)
    exact_SW = reference.run_rows(program, {"x": x_SW}, dtype=torch.float64)[out]
    assert ((got_SW - exact_SW).abs() <= bound_of(kind, 1000, exact_SW, {"x": x_SW})).all()


# ---- operations on tokens -------------------------------------------------------------------------------------------

NUM_HEADS, NUM_KV, DIM, SIZE = 6, 2, 20, 16
WIDTH = (NUM_HEADS + 2 * NUM_KV) * DIM


def run_tokens(library: Library, ops: tuple[Op, ...], widths: dict[str, int], span: Span) -> dict[str, list[Tensor]]:
    """Return each written buffer (and keys k and values v) of the kernels and of the float64 reference."""
    program = Program(ops=ops, widths=widths, num_heads=NUM_HEADS, num_kv_heads=NUM_KV, head_dim=DIM)
    angle_PR = torch.rand(64, 16, generator=random(20))
    ropes = [(angle_PR.cos(), angle_PR.sin())]
    layer = 8 * NUM_KV * DIM * SIZE
    caches = [
        Cache(*(torch.zeros(layer + 64, dtype=dtype) for _ in "kv"), SIZE, NUM_KV * DIM * SIZE)
        for dtype in (torch.float32, torch.float64)
    ]
    made = NativeProgram(library, program, ropes)
    made.run(layout_of((span,)), caches[0])
    exact = reference.run(program, layout_of((span,)), caches[1], ropes, dtype=torch.float64)
    both = {name: [made.buffer(name, len(span.tokens)).clone(), value] for name, value in exact.items()}
    return both | {"k": [each.k for each in caches], "v": [each.v for each in caches]}


SPAN = Span(tokens=tuple(range(3, 33)), start=9, blocks=(5, 0, 7))


def embedding(library: Library, width: int, seed: int) -> Embed:
    return Embed(out="qkv", table=make_matrix(library, "float32", 40, width, seed))


def test_heads_are_normalised_rotated_and_stored(library: Library) -> None:
    q, k = torch.randn(2, DIM, generator=random(21))
    for norm, rope, (q_weight, k_weight, offset) in product(
        ("none", "before", "after"), (None, 0), ((None, None, 0.0), (q, k, 0.5))
    ):
        op = Heads(
            x="qkv", layer=0, rope=rope, norm=norm, q_weight=q_weight, k_weight=k_weight, eps=1e-6, offset=offset
        )
        for got, exact in run_tokens(library, (embedding(library, WIDTH, 22), op), {"qkv": WIDTH}, SPAN).values():
            assert (got - exact).abs().max() <= 3e-6, (norm, rope, offset)
            assert exact.abs().max() > 1


def test_values_are_gated_per_kv_head(library: Library) -> None:
    ops = (
        embedding(library, WIDTH, 23),
        Embed(out="gate", table=make_matrix(library, "float32", 40, NUM_KV + 1, 24), scale=9.0),
        Embed(out="more", table=make_matrix(library, "float32", 40, NUM_KV * DIM, 25)),
        GateValues(x="qkv", gate="gate", more="more", scale=2.0),
    )
    widths = {"qkv": WIDTH, "gate": NUM_KV + 1, "more": NUM_KV * DIM}
    for got, exact in run_tokens(library, ops, widths, SPAN).values():
        assert (got - exact).abs().max() <= 3e-6


@pytest.mark.parametrize("before", [-1, 7])
def test_smear_adds_previous_embedding_if_there_is_one(library: Library, before: int) -> None:
    layout = layout_of((SPAN,))
    layout.previous_T[:] = array("i", [before, *SPAN.tokens[:-1]])
    ops = (
        Embed(out="x", table=make_matrix(library, "bfloat16", 40, 33, 26)),
        Embed(out="before", table=make_matrix(library, "bfloat16", 40, 33, 26), rows="previous"),
        Embed(out="gate", table=make_matrix(library, "float32", 40, 1, 27), scale=5.0),
        Smear(x="x", gate="gate", before="before", weight=torch.tensor([0.3])),
    )
    program = Program(ops=ops, widths={"x": 33, "before": 33, "gate": 1}, head_dim=16)
    cache = Cache(torch.zeros(1024), torch.zeros(1024), 16, 512)
    made = NativeProgram(library, program)
    made.run(layout, cache)
    exact = reference.run(program, layout, cache, dtype=torch.float64)
    assert (made.buffer("x", 30) - exact["x"]).abs().max() <= 3e-6
    table = reference.unpack(ops[0].table)
    assert torch.equal(made.buffer("x", 30)[0], table[3]) is (before < 0)


def test_embed_selects_rows(library: Library) -> None:
    for name, rows in product([name for name in FORMATS if name != "int8"], ("token", "previous", "pair")):
        check_embedding(library, make_matrix(library, name, 71, 50, 28), rows)


def check_embedding(library: Library, table: Matrix, rows: str) -> None:
    program = Program(ops=(Embed(out="x", table=table, rows=rows, scale=0.3),), widths={"x": table.num_in})
    span = Span(tokens=(70, 0, 64, 63, 5, 70, 69), start=3, blocks=(1,))
    layout = layout_of((span,))
    layout.previous_T[:] = array("i", [-1, *span.tokens[:-1]])
    cache = Cache(torch.zeros(64), torch.zeros(64), 16, 16)
    made = NativeProgram(library, program)
    made.run(layout, cache)
    expected = reference.run(program, layout, cache)["x"]
    assert torch.equal(made.buffer("x", 7), expected)
    indices = {"token": span.tokens, "previous": (0, *span.tokens[:-1])}.get(rows)
    if indices is None:
        pairs = zip(span.tokens[1:], span.tokens, strict=False)
        indices = (70, *((36313 * token ^ 27191 * before) % 70 for token, before in pairs))
    assert torch.equal(expected, reference.unpack(table)[list(indices)] * torch.tensor(0.3))


@pytest.mark.parametrize("dtype", PLAIN.values())
def test_embed_reads_tables_that_are_stored_by_rows(library: Library, dtype: torch.dtype) -> None:
    weight_NK = torch.randn(71, 51, generator=random(32)).to(dtype)
    weight_NK[64, :4] = torch.tensor([6e-8, -torch.inf, -0.0, 65504.0]).to(dtype)
    table = pack(library, weight_NK, by_rows=True)
    program = Program(ops=(Embed(out="x", table=table),), widths={"x": 51})
    layout = layout_of((Span(tokens=(70, 0, 64, 63), start=0, blocks=(0,)),))
    made = NativeProgram(library, program)
    made.run(layout, Cache(torch.zeros(64), torch.zeros(64), 16, 16))
    assert torch.equal(made.buffer("x", 4), weight_NK.float()[[70, 0, 64, 63]])
    with pytest.raises(AssertionError, match="products read panels"):
        NativeProgram(library, Program(ops=(Product(x="x", out="y", matrices=(table,)),), widths={"x": 51, "y": 71}))


def test_embed_reads_eight_bit_tables(library: Library) -> None:
    table = make_matrix(library, "int8", 71, 50, 29)
    program = Program(ops=(Embed(out="x", table=table),), widths={"x": 50})
    layout = layout_of((Span(tokens=(70, 0, 64), start=0, blocks=(0,)),))
    cache = Cache(torch.zeros(64), torch.zeros(64), 16, 16)
    made = NativeProgram(library, program)
    made.run(layout, cache)
    assert torch.equal(made.buffer("x", 3), reference.unpack(table)[[70, 0, 64]])


def test_weights_may_be_unaligned(library: Library) -> None:
    memory = torch.randn(34, generator=random(30))
    x_SW = torch.randn(3, 33, generator=random(31))
    results = []
    for weight in (memory[1:], memory[1:].clone()):
        program = Program(ops=(Norm(x="x", out="x", weight=weight, eps=1e-6),), widths={"x": 33})
        results.append(run_rows(library, program, {"x": x_SW}, "x"))
    assert torch.equal(*results)
