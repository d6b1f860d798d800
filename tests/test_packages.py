"""The engine runs with torch, numpy, safetensors and tokenizers alone, and a missing package is named in one line."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nano_inference
from nano_inference.loading.catalog import find_builtin
from nano_inference.support.packages import PACKAGES, MissingPackage, needed
from nano_inference.types import ModelError
from tests.bare import exercise
from tests.forking import Forks
from tests.loading.tiny_models import make_model, write_gguf
from tests.server.tiny import make_tiny

ROOT = Path(__file__).parents[1]
GPU_OPTIONS = ("--noconftest", "-p", "no:cacheprovider", "-W", "default")
"""Of docs/cuda.md: conftest.py needs hypothesis."""
ESSENTIAL = ("torch", "numpy", "safetensors", "tokenizers")
RUN_COMMAND = "import sys; from nano_inference.cli import main; sys.exit(main(sys.argv[1:]))"
COMMANDS = {
    "cyclopts": "doctor",
    "gguf": "tokenize hello --model {gguf}",
    "h11": "serve --model {tiny}",
    "httpx2": "chat --server http://127.0.0.1:1 --prompt hello",
    "huggingface-hub": "models list",
    "prometheus-client": "serve --model {tiny}",
    "prompt-toolkit": "chat --model {tiny}",
    "psutil": "serve --model {tiny} --further-model two={tiny}",
    "pydantic": "serve --model {tiny}",
    "regex": "serve --model {tiny}",
    "rich": "generate hello --model {tiny}",
    "starlette": "serve --model {tiny}",
    "tiktoken": "tokenize hello --model calculator",
    "uvicorn": "serve --model {tiny}",
}
"""A command that needs each package."""


def with_dependencies(package: str) -> set[str]:
    """Return a package and what it requires without extras, at any depth, as far as it is installed."""
    found: set[str] = set()
    open_names = [package]
    while open_names:
        name = canonicalize_name(open_names.pop())
        if name in found:
            continue
        found.add(name)
        try:
            wanted = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        open_names += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def others_than(*packages: str) -> list[str]:
    """Return every installed top-level module but those of the essential packages, of others and of what they import.

    tokenizers requires huggingface-hub only to fetch files, so it is among the others.
    """
    kept = {"tokenizers", "nano-inference"}.union(*map(with_dependencies, ("torch", "numpy", "safetensors", *packages)))
    owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    return sorted(module for module, names in owners.items() if not names & kept and module.isidentifier())


@pytest.fixture(scope="module")
def others() -> list[str]:
    return others_than()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny_packages"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf_packages") / "tiny.gguf"
    return write_gguf(path, "llama", make_model("llama", num_hidden_layers=1))


@pytest.fixture(scope="module")
def forks(others: list[str]) -> Iterator[Forks]:
    """A process with the essential packages, whose children hide what a test names."""
    with Forks((*ESSENTIAL, "safetensors.torch"), hidden=others) as process:
        yield process


def result_without(forks: Forks, hidden: Collection[str], function: str, *arguments: object) -> Any:
    """Return what a function of `tests.bare` returns where the hidden modules are not installed."""
    code = f"import json, sys; from tests import bare; print(json.dumps(bare.{function}(*sys.argv[1:])))"
    done = forks.run(code, *arguments, hidden=hidden)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_engine_runs_with_the_essential_packages_alone(
    kernels: str, tiny: Path, others: list[str], forks: Forks
) -> None:
    assert set(PACKAGES) <= set(others)
    found, here = result_without(forks, others, "exercise", tiny, kernels), exercise(str(tiny), kernels)
    assert found.pop("scores") == pytest.approx(here.pop("scores"), abs=1e-4)
    assert found == here
    stopped, reason, stop = found["stopped"]
    assert (reason, stop) == ("stop", found["stop"]) and len(stopped) < len(found["tokens"])
    assert found["streamed"] == found["tokens"] and (kernels == "auto" or found["code"] == "torch")


@pytest.mark.slow
def test_every_public_name_imports_with_the_essential_packages_alone(others: list[str], forks: Forks) -> None:
    code = "import nano_inference as n; print(len([getattr(n, name) for name in n.__all__]))"
    done = forks.run(code, hidden=others)
    assert done.stdout.strip() == str(len(nano_inference.__all__)), done.stderr


@pytest.mark.slow
def test_the_gpu_tests_are_collected_with_the_essential_packages_and_pytest_alone(forks: Forks) -> None:
    """A module that cannot be imported would stop all of them; those that need other packages are skipped."""
    code = "import os, sys; os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'; import pytest; sys.exit(pytest.main())"
    code = code.replace("main()", f"main({[*GPU_OPTIONS, '--collect-only', '-rs', 'tests/gpu']!r})")
    done = forks.run(code, hidden=others_than("pytest"))
    assert done.returncode in (0, 5), done.stdout + done.stderr
    assert "NO TRANSFORMERS" in done.stdout and "tests/gpu/test_executor.py" in done.stdout


@pytest.mark.slow
def test_each_feature_names_the_package_it_lacks(
    tiny: Path, gguf_file: Path, others: list[str], forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n")
    found = result_without(forks, others, "refusals", tiny, gguf_file, tmp_path)
    builtin = find_builtin("calculator")
    assert builtin is not None
    grammar = found.pop("grammar")
    lines = {
        "gguf": f"{gguf_file}: a GGUF file needs the package gguf: pip install gguf",
        "nanochat": f"{builtin.directory}/tokenizer.pkl: nanochat's tokenizer needs the package tiktoken: "
        "pip install tiktoken",
        "tiktoken": f"{tmp_path}/qwen.tiktoken: tiktoken's file needs the package tiktoken: pip install tiktoken",
        "hub": "Hugging Face's hub needs the package huggingface-hub: pip install huggingface-hub",
    }
    assert found == {name: ["MissingPackage", line] for name, line in lines.items()}
    assert grammar[0] == "BadRequest" and "pip install 'nano-inference[grammar]'" in grammar[1]


@pytest.mark.slow
@pytest.mark.parametrize("package", COMMANDS)
def test_a_command_names_the_package_it_lacks(package: str, tiny: Path, gguf_file: Path, forks: Forks) -> None:
    words = [word.format(tiny=tiny, gguf=gguf_file) for word in COMMANDS[package].split()]
    done = forks.run(RUN_COMMAND, *words, hidden=[module for module, one in PACKAGES.items() if one == package])
    wanted = rf"nano-inference: .*\bneeds the package {package}: pip install {package}\n"
    assert done.returncode == 2 and re.fullmatch(wanted, done.stderr), done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_generate_runs_without_what_it_does_not_use(tiny: Path, forks: Forks) -> None:
    hidden = [module for module, package in PACKAGES.items() if package not in ("cyclopts", "rich")]
    words = ("generate", "hello", "--model", tiny, "--max-tokens", "4", "--temperature", "0", "--quiet")
    done = forks.run(RUN_COMMAND, *words, hidden=hidden)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_needed_passes_on_what_it_does_not_know() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needed("a feature"):
        __import__("no_such_module")
    with pytest.raises(ZeroDivisionError), needed("a feature"):
        _ = 1 / 0
    with pytest.raises(MissingPackage) as caught, needed("a feature"):
        raise ModuleNotFoundError("No module named 'pydantic_core.core_schema'", name="pydantic_core.core_schema")
    assert str(caught.value) == "a feature needs the package pydantic: pip install pydantic"
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, ModelError)


def imported_packages() -> Iterator[str]:
    """Yield the top-level name of every module that the package imports, at any depth."""
    for path in Path(nano_inference.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield str(node.module).partition(".")[0]


def test_packages_lists_every_import_and_every_dependency() -> None:
    imported = set(imported_packages()) - sys.stdlib_module_names - {"nano_inference"}
    with_torch = {"jinja2"}  # torch requires it, and filelock
    assert imported == {*ESSENTIAL, *PACKAGES, *with_torch, "filelock", "llguidance", "ray", "triton", "verl"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(text).name for text in project["dependencies"]} == {*ESSENTIAL, *with_torch, *PACKAGES.values()}
