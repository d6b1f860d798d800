"""Runs every kernel on odd sizes and compares it with the reference, for sanitizers and valgrind.

    python -m tests.kernels.everything LIBRARY [THREADS]

Address sanitizer and undefined behaviour (test_sanitizers.py does this):

    LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python -m tests.kernels.everything LIBRARY

where LIBRARY was compiled with -fsanitize=address,undefined. Valgrind does not support AVX-512; for the other two:

    python -m tests.kernels.everything --valgrind avx2
    python -m tests.kernels.everything --valgrind generic

which compiles with -g, runs the checks under memcheck, and prints only reports with kernels in their stack.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from nano_inference.core.step import RowState
from nano_inference.executors import step_input
from nano_inference.executors.cpu import native
from nano_inference.executors.cpu.compile import Isa, compile_library, sources
from nano_inference.executors.cpu.drawing import KernelSampler, kernel_normalise
from nano_inference.executors.cpu.executor import state_rows
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.matrix import Matrix
from nano_inference.executors.cpu.native import Cache, Continuation, NativeProgram
from nano_inference.executors.cpu.program import (
    Activate,
    Arrange,
    Convolve,
    Delta,
    Embed,
    Gate,
    GatedNorm,
    Keep,
    Product,
    Program,
    Softcap,
)
from nano_inference.executors.sampling import WholeVocabulary, draw
from tests.kernels import reference, steps
from tests.kernels.steps import FORMATS, Shape, Span
from tests.kernels.test_draw import random_draws

SHAPES = (
    Shape(num_heads=3, num_kv_heads=1, head_dim=20, block_size=16, num_rows=5, chunks=(9,), longest=290),
    Shape(num_heads=2, num_kv_heads=2, head_dim=33, block_size=1, num_rows=2, window=3, longest=40),
    Shape(num_heads=2, num_kv_heads=1, head_dim=7, block_size=300, num_rows=2, softcap=5.0, longest=650),
    Shape(num_heads=1, num_kv_heads=1, head_dim=16, block_size=48, num_rows=1, longest=500),
)


_OURS = re.compile(rf"\((?:{'|'.join(path.name for path in sources().iterdir())}):\d+\)")
"""A line of a stack trace within the kernels."""


def check_products(library: Library) -> None:
    for name in FORMATS:
        for num_out, num_in in ((1, 1), (70, 33), (33, 1030)):
            weight = steps.make_matrix(library, name, num_out, num_in, seed=1)
            for num_rows in (1, 2, 5, 14):
                check_product(library, weight, num_rows)


def check_product(library: Library, weight: Matrix, num_rows: int) -> None:
    """Multiply three matrices: an odd number of panels, which two threads process in halves."""
    bias_N = torch.randn(3 * weight.num_out)
    op = Product(x="x", out="y", matrices=(weight,) * 3, bias=bias_N)
    program = Program(ops=(op,), widths={"x": weight.num_in, "y": 3 * weight.num_out})
    x_SK = torch.randn(num_rows, weight.num_in)
    got = steps.run_rows(library, program, {"x": x_SK}, "y")
    assert torch.allclose(got, reference.run_rows(program, {"x": x_SK})["y"], rtol=1e-3, atol=0.1)


def check_attention(library: Library) -> None:
    for seed, shape in enumerate(SHAPES):
        case = steps.make_case(shape, seed)
        cache = case.fresh()
        got = steps.attend(library, case, case.spans, cache)
        right, _ = steps.attend_reference(case)
        assert all(torch.allclose(row.double(), right[token], atol=1e-3) for token, row in got.items())
        assert steps.same_bits(got, steps.attend(library, case, case.spans[:1], cache))
        for kept in ([len(got) - 1], list(range(0, len(got), 2))):
            assert steps.same_bits(got, steps.attend(library, case, case.spans, cache, kept))
        assert not steps.attend(library, case, case.spans, cache, [])


def check_continuation(library: Library) -> None:
    """Run a body and a head in one call; both buffers grow in the second step."""
    table = steps.make_matrix(library, "float32", 70, 33, seed=3)
    ops = (Embed(out="x", table=table), Keep(buffers=("x",)))
    body = NativeProgram(library, Program(ops=ops, widths={"x": 33}))
    product = Product(x="h", out="y", matrices=(table,))
    head = NativeProgram(library, Program(ops=(product,), widths={"h": 33, "y": 70}))
    cache = Cache(torch.zeros(64), torch.zeros(64), 16, 16)
    for num_tokens, kept in ((3, [1]), (60, list(range(0, 60, 3)))):
        layout = steps.layout_of((Span(tuple(range(num_tokens)), 0, tuple(range(4))),), kept)
        body.run(layout, cache, Continuation(head, "h", "x"))
        rows_SK = reference.unpack(table)[torch.tensor(kept)]
        assert torch.allclose(head.buffer("y", len(kept)), rows_SK @ reference.unpack(table).T, atol=1e-4)


def check_rows(library: Library) -> None:
    for width in (1, 17, 35):
        for kind in ("silu", "gelu_tanh", "relu_squared"):
            ops = (Activate(x="x", out="y", kind=kind), Softcap(x="y", cap=30.0))
            program = Program(ops=ops, widths={"x": width if kind == "relu_squared" else 2 * width, "y": width})
            x_SW = torch.randn(9, program.widths["x"])
            x_SW[0, 0], x_SW[1, 0], x_SW[2, 0] = torch.nan, torch.inf, -1e30
            got = steps.run_rows(library, program, {"x": x_SW}, "y")
            assert torch.allclose(got, reference.run_rows(program, {"x": x_SW})["y"], atol=1e-4, equal_nan=True)


def delta_program(library: Library, v_dim: int) -> Program:
    """Return the operations of layers with states, with 2 key heads of 7 and 4 value heads, from tables of tokens."""
    keys, values, taps = 2 * 2 * 7, 4 * v_dim, 3
    channels = keys + values
    widths = {"rows": channels + 8, "gate": values, "x": channels, "y": channels, "o": values}
    rows, gates = (steps.make_matrix(library, "float32", 70, widths[name], seed=1) for name in ("rows", "gate"))
    weights = {"a_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    ops = (
        Embed(out="rows", table=rows),
        Embed(out="gate", table=gates),
        Arrange(x="rows", out="x", pieces=torch.arange(channels, dtype=torch.int32), dim=1),
        Convolve(x="x", out="y", weight=torch.randn(taps, channels), state=0),
        Delta(
            x="y", more="rows", a=channels, b=channels + 4, out="o", **weights,
            num_k_heads=2, num_v_heads=4, k_dim=7, state=(taps - 1) * channels, is_tiled=False,
        ),
        GatedNorm(x="o", more="gate", column=0, out="o", weight=torch.ones(v_dim), eps=1e-6, head_dim=v_dim),
        Gate(x="o", more="gate", column=0, out="o"),
    )  # fmt: skip
    return Program(ops=ops, widths=widths)


def check_states(library: Library) -> None:
    """A fork of a snapshot, and tokens one by one, have the bits of the whole row; others than it are left alone."""
    tokens = torch.randint(70, (40,)).tolist()
    for v_dim in (13, 32, 45):
        program = NativeProgram(library, delta_program(library, v_dim))
        slots_ZF = torch.full((4, 2 * (28 + 4 * v_dim) + 4 * 7 * v_dim), torch.nan)
        cache = Cache(torch.zeros(64), torch.zeros(64), 16, 16, slots_ZF)

        def run(
            start: int, end: int, state: RowState, program: NativeProgram = program, cache: Cache = cache
        ) -> torch.Tensor:
            span = Span(tuple(tokens[start:end]), start, (0, 1, 2))
            row = step_input.Span(0, end - start, start, (0, 1, 2), state)
            program.run(replace(steps.layout_of((span,)), states=state_rows([row])), cache)
            return program.buffer("o", end - start).clone()

        whole = run(0, 40, RowState(0, 0, ((1, 2), (25, 1))))
        assert torch.equal(run(25, 40, RowState(3, 1)), whole[25:])
        assert torch.equal(slots_ZF[3], slots_ZF[0])
        one_by_one = [run(at, at + 1, RowState(2, 2)) for at in range(1, 25)]
        assert torch.equal(torch.cat(one_by_one), whole[1:25])
        assert torch.equal(slots_ZF[2], slots_ZF[1])
        assert torch.equal(run(25, 26, RowState(2, 2, ((26, 0),))), whole[25:26])
        assert torch.equal(slots_ZF[2], slots_ZF[0]) and slots_ZF.isfinite().all()


def check_draws(library: Library) -> None:
    for vocab_size in (1, 7, 513, 1040):
        logits_BV = 3 * torch.randn(5, vocab_size)
        arguments = ([0.0, 1e-9, 0.5, 1.0, 100.0], [0.0, 0.3, 1 - 2**-53, 0.9, 0.0], [True, False, True, False, True])
        tokens, _ = native.draw(library, logits_BV, *arguments)
        assert all(0 <= token < vocab_size for token in tokens)
        logits_BV[2, 0], logits_BV[3, -1] = torch.nan, torch.inf
        native.draw(library, logits_BV, *arguments)
    for seed in range(12):
        logits_BV, rows = random_draws(seed, 8, (40, 513, 1040)[seed % 3])
        expected = draw(logits_BV.clone(), rows, WholeVocabulary(kernel_normalise(library)))
        assert repr(KernelSampler(library)(logits_BV, rows)) == repr(expected)


def check_all(library: Library) -> None:
    torch.manual_seed(0)
    for check in (check_products, check_attention, check_continuation, check_rows, check_states, check_draws):
        check(library)
    library.close()


def valgrind(isa: Isa) -> int:
    """Run the checks under memcheck; return 1 if it reports anything in the kernels. It does not support AVX-VNNI."""
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(isa, Path(folder), os.environ, extra=("-g", *("-mno-avxvnni",) * (isa == "avx2")))
        log = Path(folder) / "log"
        options = ["--error-limit=no", "--num-callers=20", f"--log-file={log}", "--track-origins=no"]
        arguments = [sys.executable, "-m", "tests.kernels.everything", str(library), "2"]
        environ = {**os.environ, "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(["valgrind", *options, *arguments], env=environ, check=False)
        blocks = re.split(r"\n==\d+== \n", log.read_text())
    found = [block for block in blocks if _OURS.search(block)]
    print("\n\n".join(found))
    print(f"{isa}: exit {done.returncode}, {len(blocks)} blocks in the log, {len(found)} with the kernels in them")
    return 1 if found or done.returncode else 0


if __name__ == "__main__":
    if sys.argv[1] == "--valgrind":
        sys.exit(valgrind("avx2" if sys.argv[2] == "avx2" else "generic"))
    check_all(Library(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2))
    print("everything was checked")
