"""The Triton kernels compile to sm_90a without a GPU, within the limits of a Hopper block."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.aot import PUBLISHED, Result, differing, waits_first

ROOT = Path(__file__).parents[2]
MOST_CONFIGURATIONS = 60
OLD_TRITON = ROOT / ".cache" / "triton-3.6"
"""The version that torch 2.11 comes with."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="NO TRITON: pip install -e '.[aot]' (286 MB)"
    ),
]


def aot(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "aot.py"), "--jobs", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module", params=["current", pytest.param("3.6", marks=pytest.mark.nightly)])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The resources of a choice in which every kernel and every value of a trait occurs."""
    options = ["--json", "--pairwise", str(MOST_CONFIGURATIONS)]
    if request.param == "3.6":
        if not (OLD_TRITON / "triton").is_dir():
            pytest.skip("NO TRITON 3.6: make .cache/triton-3.6/ready (188 MB)")
        options += ["--triton", str(OLD_TRITON)]
    done = aot(*options)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_choice_compiles(results: list[dict[str, Any]]) -> None:
    assert 20 < len(results) <= MOST_CONFIGURATIONS
    assert not [one for one in results if one["error"]]


def test_shared_memory_fits_a_block(results: list[dict[str, Any]]) -> None:
    assert max(one["shared"] for one in results) <= 227 << 10


def test_at_most_64_bytes_of_stack_are_used(results: list[dict[str, Any]]) -> None:
    """Spilled registers are on the stack. `make aot` lists every configuration that uses any."""
    assert not [one for one in results if one["stack"] > 64]


def test_choice_has_every_kernel_and_value_of_a_trait() -> None:
    from scripts.configurations import configurations, num_covered, pairwise

    whole = configurations()
    assert num_covered(pairwise(whole, MOST_CONFIGURATIONS), 1) == num_covered(whole, 1)


def test_a_kernel_that_reads_or_writes_before_it_waits_is_an_error() -> None:
    """`test_choice_compiles` finds those of the choice."""
    wait = "griddepcontrol.wait; // dummy %r1\n"
    for access in (
        "@%p1 ld.global.b32 { %r2 }, [ %rd1 ];",
        "st.global.b16 [%rd1], %r2;",
        "atom.global.gpu.acq_rel.add.s32",
    ):
        assert waits_first(f"ld.param.b64 %rd1, [p];\n{wait}{access}")
        assert not waits_first(f"{access}\n{wait}")
        assert not waits_first(access)
    assert not waits_first(f"cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;\n{wait}")


SUMS = (
    r"multiply_range dtype=bf16 ranges=\w+ bias=True tile=\w+ inputs=128"
    r"|attend_(split|group) dtype={} ratio=7 head_dim=64 cap=True"
)
"""Of the sums of a product and of attention, every tile that may compute them."""


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_tiles_of_all_sizes_add_in_the_same_order(dtype: str) -> None:
    """`deterministic` may use all of them. The source of an order is the same by `test_interpreter.py`."""
    from scripts.configurations import configurations

    done = aot("--json", "--only", SUMS.format(dtype))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    named = {one.name: one for one in configurations()}
    rows = defaultdict(set)
    for one in found:
        rows[named[one["name"]].sums].add(named[one["name"]].num_rows)
    attention = [16, 32] if dtype == "fp32" else [16, 32, 64]
    assert sorted(map(sorted, rows.values())) == [attention, [16, 32, 64, 128]]
    assert all(one["order"] for one in found)


FUSED = (
    r"multiply_norm dtype=bf16 ranges=split kind=silu weight=True bias=False inputs=128 even=True"
    r"|attend_row dtype=bf16 head_dim=128 norm=first\+weight$"
)
"""Of a product with a norm and an activation, and of attention with head norms."""


def test_fused_kernels_add_in_the_orders_of_those_that_they_replace() -> None:
    from scripts.configurations import configurations

    done = aot("--json", "--only", FUSED)
    assert done.returncode == 0, done.stderr
    results = [Result(**json.loads(line)) for line in done.stdout.splitlines()]
    named = {one.name: one for one in configurations()}
    found = [named[one.name] for one in results]
    parts = {name for one in found for name in one.parts}
    assert len(parts) == 4 and len(found) == 6 and not differing(found, results)
    for part in parts:
        others = [replace(one, order="another") if one.name == part else one for one in results]
        assert len(differing(found, others)) == 1


OTHERS = """
from dataclasses import replace
from scripts import aot
from scripts.configurations import configurations

def order(name, num_warps, **constants):
    one = next(one for one in configurations() if one.name == name)
    variant = replace(one.variant, constants={**one.variant.constants, **constants}, num_warps=num_warps)
    print(aot.compiled(replace(one, variant=variant)).order)

product, attention = "multiply_range dtype=bf16 ranges=one bias=True tile=1x32x64 inputs=128 even=True", "ATTENTION"
for more in ({}, {"M": 64}, {"BK": 64}):
    order(product, 4, **more)
for more in ({}, {"M": 64}, {"C": 32}):
    order(attention, 4, **more)
"""


def test_other_orders_are_seen() -> None:
    """More rows than `wgmma` needs, or other blocks of inputs or keys: what a table may not contain."""
    name = "attend_split dtype=bf16 ratio=7 head_dim=64 cap=False rows=16"
    done = subprocess.run(
        [sys.executable, "-c", OTHERS.replace("ATTENTION", name)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    orders = done.stdout.splitlines()
    assert len(set(orders)) == len(orders) == 6


def test_published_models_have_a_configuration_of_every_kernel_of_their_steps() -> None:
    from scripts.configurations import configurations

    names = [one.name for one in configurations()]
    kernels = {name.split()[0] for name in names if PUBLISHED.fullmatch(name)}
    others = {"gate_values_block", "smear_block", "softcap_block"}
    others |= {"convolve_row", "advance_state", "gated_norm_heads", "gate_block", "arrange_block"}  # of hybrids
    others |= {"shrink_row", "expand_block"}  # of adapters
    assert {name.split()[0] for name in names} - kernels == others
