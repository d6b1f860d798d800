"""What docs/releasing.md promises: one version, a changelog, every figure's command, and a wheel that works."""

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
from tests.docs.pages import PAGES, spans_in
from tests.surface import SURFACES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "releasing.md"
PACKAGE = ROOT / "src" / "nano_inference"
MEASURED_ELSEWHERE = {"ab.py"}
"""Benchmarks that the pages name without figures of theirs: they compare two trees."""
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


def test_the_version_is_a_release_or_on_the_way_to_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", nano_inference.__version__)


def test_the_changelog_begins_with_the_version_or_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    version = re.escape(nano_inference.__version__)
    assert re.fullmatch(rf"Unreleased|{version} - \d{{4}}-\d\d-\d\d", headings[0])
    assert headings.count("Unreleased") <= 1


def test_every_frozen_surface_is_listed() -> None:
    listed = re.findall(r"^\| .+ \| `tests/surface/(\w+\.txt)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(SURFACES)


def test_every_benchmark_that_a_page_names_is_in_the_list_of_figures() -> None:
    listed = benchmarks_in(PAGE.read_text(encoding="utf-8").partition("## Figures and their commands")[2])
    named = {name for page in PAGES for name in benchmarks_in(page.read_text(encoding="utf-8"))}
    assert named - listed == MEASURED_ELSEWHERE


def benchmarks_in(text: str) -> set[str]:
    """Return the benchmarks that a page runs in a sentence; the reliability checks have a step of their own."""
    return {found[1] for span in spans_in(text) if (found := re.match(r"python benchmarks/(\w+\.py)", span))}


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


def run(site: Path, home: Path, *words: str) -> str:
    """Run a command of the unpacked wheel, whose files come before those of this tree."""
    command = [sys.executable, "-P", "-m", "nano_inference", *words]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_setuptools
def test_the_wheel_has_every_file_of_the_package(unpacked: Path) -> None:
    def files(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    source = {name for name in files(PACKAGE) if "__pycache__" not in name}
    assert files(unpacked / "nano_inference") == source
    assert list(unpacked.glob("nano_inference-*.dist-info/licenses/LICENSE"))


@needs_setuptools
def test_the_wheel_runs(unpacked: Path, tmp_path: Path) -> None:
    where = "import nano_inference; print(nano_inference.__file__)"
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    found = subprocess.run(
        [sys.executable, "-P", "-c", where], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).is_relative_to(unpacked)
    assert run(unpacked, tmp_path, "--version") == f"{nano_inference.__version__}\n"
    assert "46" in run(unpacked, tmp_path, "chat", "--model", "calculator", "--quiet", "-p", "What is 12 + 34?")
