"""Run the cases in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.cuda.interpret [--models DIR] [--few]`.

Prints one JSON object: for each case its difference or the text of its exception, its bound, and its seconds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.language.core import is_builtin
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from nano_inference.executors.cuda.launchers import triton_kernels
from tests.cuda import executor_cases, triton_cases
from tests.cuda.all_cases import all_cases
from tests.cuda.case import Case

DEAR = frozenset(
    {
        *("executor G4", "executor two-taps", "sampler-vocabulary-512k", "sampler-truncating-neighbour"),
        *("attention-batch-dependence-both", "attention-queries7-ratio4-both", "attention-group-both"),
        *("attention-tiles-pieces-both", "attention-tiles-pieces-float32", "attention-tiles-group-both"),
        *("linear-tiles-70-1200-float32", "fused-product-gelu_tanh-float16", "fused-product-None-float16"),
    }
)
"""A third of the time, for kernels and shapes that others have, too."""


def remember_builtins() -> None:
    """Let `inspect.getmembers` list the builtins of Triton's modules and classes, and find their names once.

    The interpreter replaces builtins, and no other members, at every call of a kernel and of a function within it. To
    list and sort all members took a third of the time.
    """
    names: dict[Any, list[str]] = {}
    getmembers = inspect.getmembers

    def members(thing: Any, predicate: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
        name = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None)
        if predicate is not None or not str(name).startswith("triton.language"):
            return getmembers(thing, predicate)
        if thing not in names:
            names[thing] = [name for name, member in getmembers(thing) if is_builtin(member)]
        return [(name, getattr(thing, name)) for name in names[thing]]

    inspect.getmembers = members


def dot_in_order(builder: object, a: Any, b: Any, d: Any, *options: object) -> TensorHandle:
    """Add a matrix product input by input, as tensor cores do. numpy's order depends on the number of rows."""
    sum_MN, a_MK, b_KN = np.zeros_like(d.data), a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    for k in range(a_MK.shape[-1]):
        sum_MN += a_MK[..., k : k + 1] * b_KN[..., k : k + 1, :]
    return TensorHandle(sum_MN + d.data, d.dtype.scalar)


def main() -> int:
    """Run the cases; with --few without the dear ones."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", type=Path, help="directory in which executor_cases.write_models has written")
    parser.add_argument("--few", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy warns about NaN and infinity, which the cases contain on purpose
    remember_builtins()
    InterpreterBuilder.create_dot = dot_in_order
    with tempfile.TemporaryDirectory() as home:
        if args.models is None:
            executor_cases.write_models(Path(home))
        cases = (*all_cases(), *triton_cases.cases(), *executor_cases.cases(args.models or Path(home)))
        wanted = [one for one in cases if not one.needs_gpu and not (args.few and one.name in DEAR)]
        print(json.dumps(found(wanted), indent=1))
    return 0


def found(cases: Sequence[Case]) -> dict[str, tuple[float | str, float, float]]:
    """Return the result, the bound and the seconds of each case."""
    kernels, done = triton_kernels(), dict[str, tuple[float | str, float, float]]()
    for case in cases:
        started = time.process_time()
        try:
            result: float | str = case.run(kernels, torch.device("cpu"))
        except Exception:
            result = traceback.format_exc(limit=-4)
        done[case.name] = (result, case.bound, round(time.process_time() - started, 2))
    return done


if __name__ == "__main__":
    sys.exit(main())
