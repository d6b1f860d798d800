"""`scripts/install_torch.py`: which Pythons it takes, which build of PyTorch, and from where."""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server

import pytest

from scripts import install_torch
from scripts.install_torch import VERSION, make_plan, python_problem, why_silent

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install_torch.py"
NOWHERE = "http://127.0.0.1:9"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, format: str, *args: object) -> None:
        return None


class Nonsense(Quiet):
    def handle(self) -> None:
        self.request.recv(1000)
        self.request.sendall(b"SSH-2.0-nothing\r\n")


@contextmanager
def serving(handler: object) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index over HTTP with a wheel that calls itself PyTorch's CPU build, and has nothing but its name."""
    wheel = tmp_path / "index" / "torch" / f"torch-{VERSION}+cpu-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    info = f"torch-{VERSION}+cpu.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION}+cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    with serving(partial(Quiet, directory=str(tmp_path / "index"))) as url:
        yield url


@pytest.mark.parametrize("version", [(3, 6), (3, 10), (3, 15)])
def test_a_python_outside_the_range_is_refused_in_one_line(version: tuple[int, int]) -> None:
    problem = python_problem(version)
    assert problem is not None and problem.startswith("Python 3.11 to 3.14 is needed, and ") and "\n" not in problem
    assert python_problem((3, 11)) is None is python_problem((3, 14))


def test_old_pythons_can_parse_the_script() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    assert "from __future__" not in SCRIPT.read_text(), "annotations are not in Python 3.6's __future__"
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()


def test_an_index_is_asked_for_the_version(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert why_silent(index) is None
    (tmp_path / "index" / "torch" / "index.html").write_text("torch-1.0.0")
    assert why_silent(index) == f"it has no PyTorch {VERSION}"
    assert "refused" in str(why_silent(NOWHERE))
    with serving(Nonsense) as source:
        assert why_silent(source) == "SSH-2.0-nothing"


def test_an_index_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(install_torch, "PROBE_S", 0.1)
    with create_server(("127.0.0.1", 0)) as silent:  # it takes connections
        assert why_silent(f"http://127.0.0.1:{silent.getsockname()[1]}") in ("no answer in 0.1 s", "timed out")


PLAIN, CPU = f"torch=={VERSION}", f"torch=={VERSION}+cpu"


@pytest.mark.parametrize(
    ("system", "has_gpu", "is_silent", "offers", "requirement", "options", "notice"),
    [
        ("Darwin", False, False, (), PLAIN, [], "from the package index: about 110 MB"),
        ("Linux", True, False, (), PLAIN, [], "an NVIDIA GPU is here"),
        ("Linux", False, False, (), CPU, ["--extra-index-url", "URL"], "no NVIDIA GPU: downloading PyTorch"),
        ("Linux", False, True, ("pip",), CPU, [], "CPU build, which pip finds"),
        ("Linux", False, True, ("URL",), CPU, ["--extra-index-url", "URL"], "CPU build, from URL"),
        ("Linux", False, True, (), PLAIN, [], "URL does not answer (silent): downloading PyTorch"),
    ],
)
def test_the_build_follows_the_machine_and_the_indexes(
    system: str,
    has_gpu: bool,
    is_silent: bool,
    offers: tuple[str, ...],
    requirement: str,
    options: list[str],
    notice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(install_torch, "has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(install_torch, "why_silent", lambda source: "silent" if is_silent else None)
    monkeypatch.setattr(install_torch, "pip_offers", lambda python, *more: ("URL" if more else "pip") in offers)
    plan = make_plan("python", "URL")
    assert (plan.requirement, plan.options) == (requirement, options) and notice in plan.notice


@pytest.mark.parametrize(
    ("script", "has_gpu"),
    [('test "$1" = -L && echo "GPU 0: NVIDIA H200"', True), ("exit 9", False), ("echo No devices", False)],
)
@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU")
def test_nvidia_smi_must_list_a_gpu(
    script: str, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert install_torch.has_nvidia_gpu() is has_gpu


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or install_torch.has_nvidia_gpu(), reason="the CPU build is Linux's without a GPU"
)
def test_it_installs_into_an_environment_whose_making_was_interrupted_and_not_twice(index: str, tmp_path: Path) -> None:
    def install(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
        """Run the script where pip knows no index."""
        sources = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": "",
            "PIP_EXTRA_INDEX_URL": "",
            "no_proxy": "127.0.0.1",
        }
        environment = os.environ | sources | {"PIP_INDEX_URL": NOWHERE, "PIP_RETRIES": "0"}
        command = [sys.executable, str(SCRIPT), str(directory), "--source", source]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd="/")

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    failed = install(venv, NOWHERE)
    last = failed.stderr.splitlines()[-1]
    assert failed.returncode == 2 and last.startswith(f"install_torch: pip could not install {PLAIN}: see above")
    done = install(venv, index)
    assert done.returncode == 0 and done.stdout.startswith("no NVIDIA GPU: downloading"), done.stderr
    again = install(venv, NOWHERE)
    assert (again.returncode, again.stdout) == (0, f"PyTorch {VERSION} is there already\n")
    (tmp_path / "file").touch()
    impossible = install(tmp_path / "file" / "venv", NOWHERE)
    assert impossible.stderr.splitlines()[-1].startswith("install_torch: no virtual environment could be made")


def test_make_takes_the_script_before_anything_else() -> None:
    command = ["make", "--dry-run", "--always-make", ".venv/ready", "PYTHON=python3.x", "TORCH_INDEX=http://mirror"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first = next(line for line in printed.splitlines() if "python" in line)
    assert first.endswith("python3.x scripts/install_torch.py --source http://mirror .venv")
