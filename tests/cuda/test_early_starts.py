"""Every kernel waits for the one before it, of which it may read what it writes, before it does anything else."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from nano_inference.executors import cuda

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="NO TRITON: pip install -e '.[aot]' (286 MB)"
)


def first_statements() -> dict[str, str]:
    """Return the first statement of each function of the kernels, after its docstring."""
    found = {}
    for path in (Path(cuda.__file__).parent / "kernels").glob("*.py"):
        for one in ast.parse(path.read_text()).body:
            if isinstance(one, ast.FunctionDef) and len(one.body) > 1:
                found[one.name] = ast.unparse(one.body[1])
    return found


def test_every_kernel_begins_with_the_wait() -> None:
    from scripts.configurations import configurations

    kernels = {one.kernel_name for one in configurations()}
    assert len(kernels) > 15
    assert {name: text for name, text in first_statements().items() if name in kernels} == dict.fromkeys(
        kernels, "begin_kernel()"
    )
