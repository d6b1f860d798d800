"""Packing and unpacking in C: the same bytes for every instruction set, and ggml's values."""

from __future__ import annotations

from itertools import product

import gguf
import pytest
import torch

from nano_inference.executors.cpu import matrix
from nano_inference.executors.cpu.library import BF16, F32, INT8, Library
from nano_inference.support.memory import Slabs
from tests.kernels import reference
from tests.kernels.steps import BLOCK, PLAIN, block_rows, pack, random

SIZES = ((1, 1), (1, 33), (5, 2), (63, 7), (64, 64), (65, 3), (129, 100), (200, 31))
SPECIAL = (float("nan"), float("inf"), -float("inf"), 6e-8, -6e-8, 1e-40, 65504.0, 0.0, -0.0)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of values, so that NaN equals NaN and -0 differs from 0."""
    return values.contiguous().view(torch.uint8)


def test_plain_weights_round_trip(library: Library) -> None:
    for dtype, size in product(PLAIN.values(), SIZES):
        check_round_trip(library, dtype, size)


def check_round_trip(library: Library, dtype: torch.dtype, size: tuple[int, int]) -> None:
    weight_NK = torch.randn(size, generator=random(0)).to(dtype)
    packed = pack(library, weight_NK)
    assert torch.equal(matrix.unpack(library, packed), weight_NK.float())
    assert torch.equal(matrix.unpack(library, packed, size[0] // 2, 1), weight_NK[size[0] // 2 :][:1].float())
    assert torch.equal(packed.packed, pack(reference.library(), weight_NK).packed)


@pytest.mark.parametrize("dtype", PLAIN.values())
def test_special_values_round_trip(library: Library, dtype: torch.dtype) -> None:
    weight_NK = torch.tensor(SPECIAL).to(dtype).repeat(70, 1)
    weight_NK[3] += 0.1  # so that float32 values do not fit bfloat16
    made, expected = matrix.unpack(library, pack(library, weight_NK)), weight_NK.float()
    assert torch.equal(made.isnan(), expected.isnan())
    assert torch.equal(
        bits(made.nan_to_num(7.0, torch.inf, -torch.inf)), bits(expected.nan_to_num(7.0, torch.inf, -torch.inf))
    )


def test_every_float16_is_widened_exactly(library: Library) -> None:
    half = torch.arange(65536).to(torch.int32).to(torch.uint16).view(torch.float16).view(512, 128)
    made = matrix.unpack(library, pack(library, half))
    assert torch.equal(made.isnan(), half.isnan())
    assert torch.equal(made.nan_to_num(), half.float().nan_to_num())


def test_float32_exact_in_bfloat16_is_stored_as_bfloat16(library: Library) -> None:
    weight_NK = torch.randn(70, 34, generator=random(1)).bfloat16().float()
    packed = pack(library, weight_NK)
    assert packed.format == BF16 and torch.equal(matrix.unpack(library, packed), weight_NK)
    weight_NK[69, 33] += 1e-6
    assert pack(library, weight_NK).format == F32


@pytest.mark.parametrize("name", BLOCK)
def test_blocks_unpack_to_ggml_values(library: Library, name: str) -> None:
    for num_out in (1, 63, 64, 70):
        check_blocks(library, name, num_out)


def check_blocks(library: Library, name: str, num_out: int) -> None:
    num_in = 3 * BLOCK[name][0]
    rows = block_rows(name, num_out, num_in, 2)
    kind = gguf.GGMLQuantizationType[name]
    expected = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)).view(num_out, num_in)
    made, plain = (matrix.pack_blocks(one, name, rows, num_in, Slabs(0)) for one in (library, reference.library()))
    assert torch.equal(made.packed, plain.packed)
    assert torch.equal(matrix.unpack(library, made), expected)
    assert torch.equal(matrix.unpack(library, made, num_out - 1, 1), expected[-1:])


def test_pack_blocks_reorders_rows(library: Library) -> None:
    order_N = torch.randperm(70, generator=random(4)).to(torch.int32)
    for name, (num_in, _) in BLOCK.items():
        rows = block_rows(name, 70, num_in, 3)
        made = matrix.pack_blocks(library, name, rows, num_in, Slabs(0), order_N)
        plain = matrix.pack_blocks(library, name, rows[order_N.long()], num_in, Slabs(0))
        assert torch.equal(made.packed, plain.packed), name


def test_eight_bit_rounding_is_to_the_nearest(library: Library) -> None:
    for size in SIZES:
        weight_NK = torch.randn(size, generator=random(5))
        weight_NK[0] = 0
        made, expected = pack(library, weight_NK, INT8), reference.quantised(weight_NK)
        assert all(torch.equal(a.float(), b) for a, b in zip(matrix.int8_parts(made), expected, strict=True)), size
        half_step_N1 = weight_NK.abs().amax(dim=-1, keepdim=True) / 254
        assert ((reference.unpack(made) - weight_NK).abs() <= half_step_N1 * (1 + 1e-5)).all(), size


def test_sources_may_be_unaligned(library: Library) -> None:
    weight_NK = torch.randn(5, 33, generator=random(6))
    memory = torch.empty(5 * 33 + 1)
    memory[1:] = weight_NK.flatten()
    assert torch.equal(matrix.unpack(library, pack(library, memory[1:].view(5, 33))), weight_NK)
    for name in BLOCK:
        rows = block_rows(name, 5, BLOCK[name][0], 7)
        memory_B = torch.empty(rows.numel() + 1, dtype=torch.uint8)
        memory_B[1:] = rows.flatten()
        odd = matrix.pack_blocks(library, name, memory_B[1:].view_as(rows), BLOCK[name][0], Slabs(0))
        assert torch.equal(odd.packed, matrix.pack_blocks(library, name, rows, BLOCK[name][0], Slabs(0)).packed)


@pytest.mark.parametrize("dtype", PLAIN.values())
def test_tables_by_rows_round_trip_and_reuse_the_memory_of_their_own_layout(
    library: Library, dtype: torch.dtype
) -> None:
    weight_NK = torch.randn(70, 33, generator=random(8)).to(dtype)
    table = pack(library, weight_NK, by_rows=True)
    assert table.num_bytes == weight_NK.nbytes, "no padding"
    assert torch.equal(matrix.unpack(library, table), weight_NK.float())
    assert torch.equal(matrix.unpack(library, table, 64, 2), weight_NK[64:66].float())
    panels = pack(library, weight_NK)
    for spare, is_reused in ((table, True), (panels, False)):
        packer = matrix.Packer(library, -weight_NK, Slabs(0), table.format, spare, by_rows=True)
        packer.put(0, 65)
        packer.put(65, 70)
        assert torch.equal(matrix.unpack(library, packer.matrix), -weight_NK.float())
        assert (packer.matrix.packed.data_ptr() == spare.packed.data_ptr()) is is_reused
    packer = matrix.Packer(library, weight_NK, Slabs(0), table.format, table)
    assert packer.matrix.packed.data_ptr() != table.packed.data_ptr()


@pytest.mark.parametrize(("name", "num_in", "can"), [("Q4_0", 32, True), ("Q4_0", 33, False), ("Q6_K", 128, False)])
def test_can_keep_requires_whole_blocks(name: str, num_in: int, can: bool) -> None:
    assert matrix.can_keep(name, num_in) is can
    assert not matrix.can_keep("IQ1_S", 256)
