"""Product kernels: accuracy against float64, and equal bits of a row in any batch and with any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from nano_inference.executors.cpu import matrix
from nano_inference.executors.cpu.library import INT8, Library
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.executors.cpu.program import Product, Program
from nano_inference.support.memory import Slabs
from tests.kernels import reference
from tests.kernels.conftest import Team
from tests.kernels.steps import (
    BLOCK,
    FORMATS,
    NIBBLES,
    ROUNDED,
    block_rows,
    in_child,
    make_matrix,
    pack,
    product_bound,
    random,
    run_rows,
)

pytestmark = pytest.mark.slow

COUNTS = (*range(1, 14), 24, 25, 64, 95, 96, 97, 168, 169, 192, 193)
"""Numbers of rows around every limit in the C code: four rows, tiles of 6 and 12, pieces of 96, 168 and 192."""
SIZES = ((1, 1), (3, 7), (64, 33), (130, 576), (70, 1030), (5, 2051), (1700, 9), (6300, 3))
"""Outputs and inputs; up to 99 panels, which are processed in runs for few rows."""


def program(matrices: tuple[Matrix, ...], bias: Tensor | None = None, *, add: bool = False, num_in: int) -> Program:
    op = Product(x="x", out="y", matrices=matrices, bias=bias, add=add)
    return Program(ops=(op,), widths={"x": num_in, "y": sum(m.num_out for m in matrices)})


def assert_rows_independent(
    library: Library, made: Program, counts: Sequence[int], x_SK: Tensor, y_SN: Tensor, whole_SN: Tensor
) -> None:
    """Assert that any range of rows has the same bits as among all rows."""
    for count in counts:
        first = COUNTS.index(count) * 13 % (x_SK.size(0) - count + 1)
        some = slice(first, first + count)
        part_SN = run_rows(library, made, {"x": x_SK[some], "y": y_SN[some]}, "y")
        assert torch.equal(part_SN, whole_SN[some]), (count, first)


def read_by(name: str, x_SK: Tensor) -> Tensor:
    """Return the inputs as a format reads them."""
    return reference.dequantised(x_SK) if name in ROUNDED else x_SK


@pytest.mark.parametrize("name", FORMATS)
def test_products_match_float64_and_rows_are_independent(teams: dict[str, Team], name: str) -> None:
    for index, size in enumerate(SIZES):
        weight = make_matrix(teams["generic"][1], name, *size, seed=1)
        x_SK = torch.randn(200, weight.num_in, generator=random(2))
        y_SN = torch.zeros(200, weight.num_out)
        one = program((weight,), num_in=weight.num_in)
        right_SN = reference.run_rows(one, {"x": x_SK}, dtype=torch.float64)["y"]
        bound_SN, found = product_bound(read_by(name, x_SK), (weight,), y_SN), []
        for build, team in teams.items():
            made = program((make_matrix(team[1], name, *size, seed=1),), num_in=weight.num_in)
            whole_SN = run_rows(team[2], made, {"x": x_SK, "y": y_SN}, "y")
            assert ((whole_SN - right_SN).abs() <= bound_SN).all(), (build, size)
            if name == "int8" or (name in ROUNDED and build != "generic"):  # which has no fused multiply-add
                found.append(whole_SN)
            assert_rows_independent(team[2], made, COUNTS[index % 3 :: 3], x_SK, y_SN, whole_SN)
            for threads in (1, 3):
                assert torch.equal(run_rows(team[threads], made, {"x": x_SK, "y": y_SN}, "y"), whole_SN), (build, size)
        assert all(torch.equal(one_SN, found[0]) for one_SN in found[1:])


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_write_adjacent_columns(team: Team, name: str) -> None:
    for add, with_bias in product((False, True), repeat=2):
        check_columns(team, name, add, with_bias)


def check_columns(team: Team, name: str, add: bool, with_bias: bool) -> None:
    matrices = tuple(make_matrix(team[1], name, num_out, 256, seed=num_out) for num_out in (70, 1, 64, 33))
    width = sum(m.num_out for m in matrices)
    x_SK, y_SN = torch.randn(30, 256, generator=random(3)), torch.randn(30, width, generator=random(4))
    bias_N = torch.randn(width, generator=random(5)) if with_bias else None
    made = program(matrices, bias_N, add=add, num_in=256)
    got_SN = run_rows(team[3], made, {"x": x_SK, "y": y_SN}, "y")
    exact_SN = reference.run_rows(made, {"x": x_SK, "y": y_SN}, dtype=torch.float64)["y"]
    start_SN = y_SN.abs() * add + (0 if bias_N is None else bias_N.abs())
    assert ((got_SN - exact_SN).abs() <= product_bound(read_by(name, x_SK), matrices, start_SN)).all()
    assert torch.equal(got_SN[7:8], run_rows(team[1], made, {"x": x_SK[7:8], "y": y_SN[7:8]}, "y"))


def test_matrices_of_several_formats_write_adjacent_columns(library: Library) -> None:
    names = ("Q4_K", "Q6_K", "bfloat16", "int8", "Q8_0", "Q4_1 x int8")
    matrices = tuple(make_matrix(library, name, 67, 512, seed=6) for name in names)
    x_SK = torch.randn(9, 512, generator=random(7))
    together_SN = run_rows(library, program(matrices, num_in=512), {"x": x_SK}, "y")
    apart = [run_rows(library, program((m,), num_in=512), {"x": x_SK}, "y") for m in matrices]
    assert torch.equal(together_SN, torch.cat(apart, dim=-1))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8"])
def test_matrix_with_fewer_inputs_uses_first_columns(library: Library, name: str) -> None:
    weight = make_matrix(library, name, 5, 13, seed=8)
    x_SK = torch.randn(6, 20, generator=random(9))
    wide = run_rows(library, program((weight,), num_in=20), {"x": x_SK}, "y")
    assert torch.equal(wide, run_rows(library, program((weight,), num_in=13), {"x": x_SK[:, :13]}, "y"))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_row_does_not_affect_other_rows(library: Library, name: str) -> None:
    weight = make_matrix(library, name, 70, 256, seed=10)
    for value, num_rows in product((float("nan"), float("inf"), -float("inf")), (3, 20)):
        check_nan_row(library, weight, value, num_rows)


def check_nan_row(library: Library, weight: Matrix, value: float, num_rows: int) -> None:
    made = program((weight,), num_in=256)
    x_SK = torch.randn(num_rows, 256, generator=random(11))
    clean_SN = run_rows(library, made, {"x": x_SK}, "y")
    x_SK[1, 77] = value
    got_SN = run_rows(library, made, {"x": x_SK}, "y")
    others = [row for row in range(num_rows) if row != 1]
    assert torch.equal(got_SN[others], clean_SN[others])
    assert got_SN[1].isnan()[reference.run_rows(made, {"x": x_SK})["y"][1].isnan()].all()
    assert not got_SN[1].isfinite().any() or (reference.unpack(weight)[:, 77] == 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [2, 20])
def test_nan_weights_affect_only_their_outputs(library: Library, dtype: torch.dtype, num_rows: int) -> None:
    weight_NK = torch.randn(70, 33, generator=random(12)).to(dtype)
    made = program((pack(library, weight_NK),), num_in=33)
    x_SK = torch.randn(num_rows, 33, generator=random(13))
    clean_SN = run_rows(library, made, {"x": x_SK}, "y")
    weight_NK[5, 4], weight_NK[69, 32] = torch.nan, torch.inf
    got_SN = run_rows(library, program((pack(library, weight_NK),), num_in=33), {"x": x_SK}, "y")
    assert got_SN[:, 5].isnan().all() and got_SN[:, 69].isinf().all()
    others = [n for n in range(70) if n not in (5, 69)]
    assert torch.equal(got_SN[:, others], clean_SN[:, others])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_eight_bit_rounding_preserves_nan(library: Library, value: float) -> None:
    weight_NK = torch.randn(70, 33, generator=random(14))
    weight_NK[5, 4] = value
    x_SK = torch.randn(3, 33, generator=random(15))
    got_SN = run_rows(library, program((pack(library, weight_NK, INT8),), num_in=33), {"x": x_SK}, "y")
    assert got_SN[:, 5].isnan().all()
    assert got_SN[:, :5].isfinite().all() and got_SN[:, 6:].isfinite().all()


@pytest.mark.parametrize("name", NIBBLES)
def test_largest_nibble_products_do_not_overflow(team: Team, name: str) -> None:
    """All products have the largest magnitude and one sign: 16-bit sums can hold exactly one block."""
    for blocks in (1, 2, 3):
        check_largest_products(team, name, blocks)


def check_largest_products(team: Team, name: str, blocks: int) -> None:
    num_in = blocks * BLOCK[name][0]
    rows = block_rows(name, 70, num_in, seed=17).view(70, blocks, -1)
    rows[..., -BLOCK[name][0] // 2 :] = 255
    weight = matrix.pack_blocks(team[1], name, rows.flatten(1), num_in, Slabs(0), rounds=True)
    x_SK = torch.tensor([[1.0], [-1.0], [2.0], [-3.0], [1.0]]).expand(5, num_in).contiguous()
    made = program((weight,), num_in=num_in)
    got_SN = run_rows(team[2], made, {"x": x_SK}, "y")
    exact_SN = x_SK.double() @ reference.unpack(weight).double().T
    assert ((got_SN - exact_SN).abs() <= 1e-5 * exact_SN.abs() + 1e-3).all()


def test_empty_input_gives_empty_output(library: Library) -> None:
    made = program((make_matrix(library, "bfloat16", 70, 33, seed=16),), num_in=33)
    assert in_child(lambda: run_rows(library, made, {"x": torch.empty(0, 33)}, "y").shape == (0, 70)) == 0
    assert reference.run_rows(made, {"x": torch.empty(0, 33)})["y"].shape == (0, 70)
