"""Run the cases in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.cuda.interpret [PREFIX…]`.

Prints one JSON object: for each case its difference or the text of its exception, its bound, and its seconds.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings

import torch

from nano_inference.executors.cuda.launchers import triton_kernels
from tests.cuda import executor_cases, triton_cases
from tests.cuda.all_cases import all_cases


def main(prefixes: list[str]) -> int:
    """Run the cases whose names start with a prefix (default: all)."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy warns about NaN and infinity, which the cases contain on purpose
    kernels = triton_kernels()
    found: dict[str, tuple[float | str, float, float]] = {}
    for case in (*all_cases(), *triton_cases.cases(), *executor_cases.cases()):
        if case.needs_gpu:
            continue
        if not prefixes or case.name.startswith(tuple(prefixes)):
            started = time.process_time()
            try:
                result: float | str = case.run(kernels, torch.device("cpu"))
            except Exception:
                result = traceback.format_exc(limit=-4)
            found[case.name] = (result, case.bound, round(time.process_time() - started, 2))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
