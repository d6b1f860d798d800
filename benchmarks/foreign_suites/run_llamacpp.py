"""Run llama.cpp's tests of its server against `nano-inference serve`, and count what passes.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    python benchmarks/foreign_suites/stories_gguf.py stories260K.bin tok512.bin stories260K.gguf
    python benchmarks/foreign_suites/run_llamacpp.py llama_cpp_python-0.3.36/vendor/llama.cpp stories260K.gguf \\
        [--only test_basic.py]

The tests run in a copy of the sources, with `llama_server.py` as their program and `llamacpp_plugin.py` beside their
helper. Their model is Karpathy's stories260K: weights and tokenizer of llama2.c. The interpreter needs this package,
`openai`, `pytest-timeout`, `requests`, `wget`, `filelock` and `numpy`. On two cores about half an hour.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = tuple(
    f"unit/test_{name}.py"
    for name in (
        *("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "ctx_shift"),
        *("embedding", "ignore_eos", "security", "speculative", "template", "tokenize"),
    )
)


def main() -> int:
    """Run the files; return 0 if pytest could run them, whatever passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="llama.cpp's sources")
    parser.add_argument("model", type=Path, help="stories260K as a GGUF file")
    parser.add_argument("--only", default="", help="part of a file's name")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "tools" / "server" / "tests"
        shutil.copytree(given.suite / "tools" / "server" / "tests", home)
        shutil.copytree(given.suite / "models" / "templates", Path(folder) / "models" / "templates")
        program = Path(folder) / "llama-server"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "llama_server.py"}" "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        names = {"LLAMA_SERVER_BIN_PATH": str(program), "NANO_MODEL": str(given.model.resolve())}
        path = os.pathsep.join([str(HERE), str(ROOT / "src")])
        environment = os.environ | names | {"PYTHONPATH": path}
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "llamacpp_plugin", "-p", "counting"]
        chosen = [name for name in FILES if given.only in name]
        command = [sys.executable, "-m", "pytest", *options, "--timeout", "90", *chosen]
        done = subprocess.run(command, cwd=home, env=environment, check=False)
    return 0 if done.returncode in (0, 1) else 2


if __name__ == "__main__":
    sys.exit(main())
