"""Modules, compilers and headers in the current directory are never used, also not by child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from nano_inference.executors.cpu.compile import compile_library, find_compiler
from nano_inference.loading.downloads import pip_download
from nano_inference.support.processes import PYTHON, environment, find_program, run

pytestmark = pytest.mark.slow

MODULES = (
    *("argparse", "ast", "base64", "configparser", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime"),
    *("email", "enum", "getpass", "glob", "gzip", "hashlib", "html", "http", "inspect", "json", "locale", "logging"),
    *("multiprocessing", "pathlib", "pickle", "platform", "queue", "random", "select", "shlex", "shutil", "signal"),
    *("socket", "ssl", "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize"),
    *("traceback", "typing", "urllib", "uuid", "warnings", "weakref", "xml", "zipfile"),
    *("pip", "setuptools", "torch", "numpy", "tokenizers", "tiktoken", "cyclopts", "jinja2", "starlette", "uvicorn"),
    *("huggingface_hub", "certifi", "safetensors", "triton", "gguf", "sitecustomize", "usercustomize"),
)
PROGRAMS = ("cc", "gcc", "clang", "as", "ld", "collect2", "cc1", "python", "python3", "pip", "git", "ldconfig")
FILES = ("specs", "stdint.h", "immintrin.h", "math.h", "pthread.h", "stdlib.h", "string.h", "pip.conf", "setup.cfg")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, in which everything that is run or read as code leaves a mark."""
    place = tmp_path / "hostile"
    place.mkdir()
    for name in MODULES:
        text = (
            f"open({str(place / 'ran')!r}, 'a').write('{name}.py ')\nraise ImportError('from the current directory')\n"
        )
        (place / f"{name}.py").write_text(text)
    for name in PROGRAMS:
        (place / name).write_text(f"#!/bin/sh\necho {name} >> {place / 'ran'}\nexit 1\n")
        (place / name).chmod(0o755)
    for name in FILES:
        (place / name).write_text("#error from the current directory\n")
    info = place / "hostile_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile_package\nVersion: 1.0\n")
    groups = ("formats", "families", "tokenizers", "models", "commands")
    points = "".join(f"[nano_inference.{group}]\nhostile = random:ROW\n" for group in groups)
    (info / "entry_points.txt").write_text(points)
    monkeypatch.chdir(place)
    return place


def ran(place: Path) -> str:
    """What left a mark."""
    marks = place / "ran"
    return marks.read_text() if marks.exists() else ""


def open_environment(place: Path) -> dict[str, str]:
    """This process's environment with everything that can name the current directory naming it."""
    relative = {"PATH": f".:{os.environ['PATH']}:", "PYTHONPATH": ".", "CPATH": ".", "C_INCLUDE_PATH": ":/nothing"}
    libraries = {"LIBRARY_PATH": ":", "COMPILER_PATH": ".", "LD_LIBRARY_PATH": ":", "GCC_EXEC_PREFIX": "./"}
    return {**os.environ, **relative, **libraries}


def command_line(*words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program in the current directory."""
    environ = {name: value for name, value in (environ or dict(os.environ)).items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)


def console_script() -> str:
    script = Path(sys.executable).parent / "nano-inference"
    assert script.exists()
    return str(script)


@pytest.mark.parametrize(
    "words", [("generate", "12+30=", "--model", "calculator", "--max-tokens", "2", "--quiet"), ("models", "list")]
)
def test_commands_run_nothing_of_the_current_directory(hostile: Path, words: Sequence[str]) -> None:
    done = command_line(console_script(), *words)
    assert not ran(hostile) and done.returncode == 0, done.stderr


def test_the_kernels_are_compiled_with_nothing_of_the_current_directory(hostile: Path, tmp_path: Path) -> None:
    """By this machine's compiler; everything that names directories names the current one."""
    environ = open_environment(hostile)
    assert Path(find_compiler(environ)).is_absolute() and not find_compiler(environ).startswith(str(hostile))
    path = compile_library("generic", tmp_path / "cache", environ, extra=("-O0",))
    assert path.stat().st_size and not ran(hostile)


def test_a_named_compiler_may_lie_in_the_current_directory(hostile: Path) -> None:
    assert find_compiler({"CC": "./cc", "PATH": "."}) == str(hostile / "cc")
    assert find_program("cc", {"PATH": "."}) != str(hostile / "cc")
    assert find_program("cc", {"PATH": f".:{hostile}"}) == str(hostile / "cc"), "an absolute entry is the user's choice"


@pytest.mark.parametrize("module", ["nano_inference", "nano_inference.nanochat"])
def test_a_module_run_by_python_leaves_the_current_directory(hostile: Path, module: str) -> None:
    """Python itself imports a few modules before it looks for the one to run; those cannot be guarded."""
    code = "import runpy, pkgutil, __future__, sys; print(*sys.modules)"
    for name in command_line(sys.executable, "-P", "-c", code).stdout.split():
        (hostile / f"{name}.py").unlink(missing_ok=True)
    assert (hostile / "random.py").exists() and (hostile / "json.py").exists()
    words = ["--max-tokens", "2"] if module.endswith("nanochat") else ["tokenize", "a", "--model", "calculator"]
    done = command_line(sys.executable, "-m", module, *words)
    assert not ran(hostile) and done.returncode == 0, done.stderr


def test_pip_runs_nothing_of_the_current_directory(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel is fetched from a directory that is named as an index."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "fake_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr("fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("fake_model-1.0.dist-info/RECORD", "")
    for name, value in open_environment(hostile).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())
    target = tmp_path / "target"
    target.mkdir()
    pip_download("fake-model==1.0", target)
    assert [path.name for path in target.glob("*.whl")] == ["fake_model-1.0-py3-none-any.whl"]
    assert not ran(hostile)


def test_a_python_child_is_isolated(hostile: Path, tmp_path: Path) -> None:
    code = "import sys, os; print(sys.flags.isolated, sys.path[0] == os.getcwd(), '' in sys.path)"
    done = run([*PYTHON, "-c", code], cwd=tmp_path, environ=open_environment(hostile), timeout=60)
    assert done.stdout == "1 False False\n" and not ran(hostile)


def test_the_environment_of_a_child_has_no_relative_search_paths() -> None:
    given = {
        "PATH": ".:/usr/bin::bin:/bin",
        "CPATH": ":",
        "LD_PRELOAD": "./a.so libx.so /b.so",
        "HOME": "x",
        "TMPDIR": "t",
    }
    assert environment(given) == {"PATH": "/usr/bin:/bin", "LD_PRELOAD": "libx.so:/b.so", "HOME": "x"}
