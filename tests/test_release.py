"""What CONTRIBUTING.md promises: one version, and a wheel that works."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import nano_inference

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "nano_inference"
needs_setuptools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="needs setuptools to build a wheel without a network"
)


def test_the_version_is_stated_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"] and "version" not in project
    stated = re.compile(rf"(?<![\d.]){re.escape(nano_inference.__version__)}(?![\d.])")
    files = [ROOT / "pyproject.toml", ROOT / "Makefile", *PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    found = [path for path in files if stated.search(path.read_text(encoding="utf-8"))]
    assert found == [PACKAGE / "__init__.py"]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built without a network and unpacked."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*build, "--wheel-dir", str(out), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    assert wheel.name == f"nano_inference-{nano_inference.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


@pytest.mark.slow
@needs_setuptools
def test_the_wheel_has_every_file_of_the_package(unpacked: Path) -> None:
    def files(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    source = {name for name in files(PACKAGE) if "__pycache__" not in name}
    assert files(unpacked / "nano_inference") == source
    assert list(unpacked.glob("nano_inference-*.dist-info/licenses/LICENSE"))


@pytest.mark.slow
@needs_setuptools
@pytest.mark.parametrize(
    ("command", "output"),
    [
        (("-c", "import nano_inference; print(nano_inference.__file__)"), "/site/nano_inference/__init__.py\n"),
        (("-m", "nano_inference", "--version"), f"{nano_inference.__version__}\n"),
        (("-m", "nano_inference", "chat", "--model", "calculator", "--quiet", "-p", "What is 12 + 34?"), "46"),
    ],
)
def test_the_wheel_runs(command: tuple[str, ...], output: str, unpacked: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(unpacked)}  # before the files of this tree
    done = subprocess.run(
        [sys.executable, "-P", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert output in done.stdout
