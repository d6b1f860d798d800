"""`scripts/install_torch.py` by its command line: which Pythons it takes, which build of PyTorch, and from where."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server
from socketserver import BaseRequestHandler
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install_torch.py"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
VERSION = "2.13.0"
OLD = ("3.6", "3.7", "3.8", "3.9", "3.10")


def environment(**changes: str) -> Mapping[str, str]:
    """An environment in which pip knows no index, and nothing else than what `changes` name."""
    kept = {name: text for name, text in os.environ.items() if name not in ("PIP_CERT", "REQUESTS_CA_BUNDLE")}
    sources = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return kept | sources | nowhere | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | changes


def install(*words: str, python: str = sys.executable, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    command = [python, str(SCRIPT), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment(**changes), cwd="/"
    )


def plan(tmp_path: Path, *words: str, **changes: str) -> list[str]:
    """Return what the script says that it would do: a line for the user, and the command."""
    done = install(str(tmp_path / "venv"), "--dry-run", *words, **changes)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and not (tmp_path / "venv").exists()
    return done.stdout.splitlines()


def tools(directory: Path, name: str, script: str) -> str:
    """Return a PATH on which a program of that name comes first."""
    directory.mkdir()
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, format: str, *args: object) -> None:
        return None


@contextmanager
def serving(handler: Callable[..., BaseRequestHandler]) -> Iterator[str]:
    """Serve HTTP on a free port; return the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index over HTTP with a wheel that calls itself PyTorch's CPU build."""
    wheel = tmp_path / "index" / "torch" / f"torch-{VERSION}+cpu-py3-none-any.whl"
    write_wheel(wheel)
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')

    with serving(partial(Quiet, directory=str(tmp_path / "index"))) as url:
        yield url


def write_wheel(path: Path) -> None:
    """Write a wheel with nothing but its name."""
    path.parent.mkdir(parents=True)
    info = f"torch-{VERSION}+cpu.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION}+cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


needs_linux_without_gpu = pytest.mark.skipif(
    sys.platform != "linux" or Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
    reason="it is about a Linux machine without an NVIDIA GPU",
)


def pythons(*versions: str) -> list[tuple[str, str]]:
    """Return those of these versions that this machine has, with their paths."""
    found = []
    for version in versions:
        for path in (shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")):
            if (
                path is not None
                and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0
            ):
                found.append((version, str(path)))
                break
    return found


@pytest.mark.parametrize("version", OLD)
def test_an_old_python_is_refused_in_one_line(version: str, tmp_path: Path) -> None:
    found = pythons(version)
    if not found:
        pytest.skip(f"there is no Python {version} here")
    done = install(str(tmp_path / "venv"), python=found[0][1])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"install_torch: Python 3\.11 to 3\.14 is needed, and \S+ is {version}; .*\n", done.stderr)
    assert not (tmp_path / "venv").exists()


def test_the_script_is_plain_enough_for_python_3_6() -> None:
    import ast

    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    assert "from __future__" not in SCRIPT.read_text(), "annotations are not in Python 3.6's __future__"
    assert re.search(r'requires-python = ">=3\.11"', PYPROJECT) and "OLDEST, NEWEST = (3, 11)" in SCRIPT.read_text()


@needs_linux_without_gpu
def test_an_index_that_answers_is_taken_by_name(index: str, tmp_path: Path) -> None:
    notice, command = plan(tmp_path, "--source", index)
    assert notice == f"no NVIDIA GPU: downloading PyTorch {VERSION}, CPU build, from {index}: about 190 MB"
    assert command.endswith(f"-P -m pip install --extra-index-url {index} torch=={VERSION}+cpu")


class Slow(Quiet):
    """Answers at once, and its page takes longer than an answer may."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(8):
            self.wfile.write(b"-")
            time.sleep(0.5)
        self.wfile.write(f"torch-{VERSION}".encode())


class Plan(NamedTuple):
    """An index, and what the script says that it would do."""

    source: str
    lines: list[str]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Plan]:
    """The plans with an index that is not there, a silent one and a slow one; the script waits for all at once."""
    with create_server(("127.0.0.1", 0)) as silent, serving(Slow) as slow, ThreadPoolExecutor() as pool:
        port = silent.getsockname()[1]  # it takes connections and says nothing
        sources = {"absent": "http://127.0.0.1:9", "silent": f"http://127.0.0.1:{port}", "slow": slow}
        homes = [tmp_path_factory.mktemp(name) for name in sources]
        plans = pool.map(lambda home, source: plan(home, "--source", source), homes, sources.values())
        return {name: Plan(sources[name], lines) for name, lines in zip(sources, plans, strict=True)}


@needs_linux_without_gpu
@pytest.mark.parametrize("name", ["absent", "silent"])
def test_an_index_that_does_not_answer_is_given_up(name: str, waiting: Mapping[str, Plan]) -> None:
    """The plan ends at all: the silent server never answers."""
    source, (notice, command) = waiting[name]
    assert notice.startswith(f"no NVIDIA GPU, but {source} does not answer (")
    assert f"PyTorch {VERSION} with CUDA libraries from the package index: about 4.6 GB" in notice
    assert command.endswith(f"-P -m pip install torch=={VERSION}")


@needs_linux_without_gpu
def test_an_index_on_a_slow_link_is_taken(waiting: Mapping[str, Plan]) -> None:
    source, (notice, _) = waiting["slow"]
    assert notice.startswith(f"no NVIDIA GPU: downloading PyTorch {VERSION}, CPU build, from {source}")


@needs_linux_without_gpu
def test_an_answer_that_is_no_http_is_named(tmp_path: Path) -> None:
    class Nonsense(Quiet):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(b"SSH-2.0-nothing\r\n")

    with serving(Nonsense) as source:
        notice, _ = plan(tmp_path, "--source", source)
    assert "does not answer (SSH-2.0-nothing" in notice


@needs_linux_without_gpu
def test_an_index_without_this_version_is_not_taken(index: str, tmp_path: Path) -> None:
    (tmp_path / "index" / "torch" / "index.html").write_text("torch-1.0.0")
    notice, command = plan(tmp_path, "--source", index)
    assert f"it has no PyTorch {VERSION}" in notice and command.endswith(f"install torch=={VERSION}")


@needs_linux_without_gpu
def test_a_wheel_that_pip_is_configured_to_find_is_taken(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels" / f"torch-{VERSION}+cpu-py3-none-any.whl")
    changes = {"PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_NO_INDEX": "1"}
    notice, command = plan(tmp_path, "--source", "http://127.0.0.1:9", **changes)
    assert notice == f"no NVIDIA GPU: installing PyTorch {VERSION}, CPU build, which pip finds: about 190 MB"
    assert command.endswith(f"-P -m pip install torch=={VERSION}+cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is Linux's here")
def test_an_nvidia_gpu_gets_cuda_from_the_package_index(index: str, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", "nvidia-smi", 'test "$1" = -L && echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"')
    notice, command = plan(tmp_path, "--source", index, PATH=path)
    assert (
        notice == f"an NVIDIA GPU is here: downloading PyTorch {VERSION} with CUDA from the package index: about 4.6 GB"
    )
    assert command.endswith(f"-P -m pip install torch=={VERSION}")


@needs_linux_without_gpu
@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found", "kill -9 $$"])
def test_nvidia_smi_without_a_gpu_changes_nothing(script: str, index: str, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", "nvidia-smi", script)
    assert plan(tmp_path, "--source", index, PATH=path)[0].startswith("no NVIDIA GPU: ")


class Failed(NamedTuple):
    """An environment, and what the script printed that found it without pip and could not reach an index."""

    venv: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """The making of the environment was interrupted, too; to make one takes three seconds."""
    venv = tmp_path_factory.mktemp("interrupted") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    return Failed(venv, install(str(venv), "--source", "http://127.0.0.1:9"))


@needs_linux_without_gpu
def test_it_installs_into_an_environment_whose_making_was_interrupted_and_not_twice(index: str, failed: Failed) -> None:
    first = install(str(failed.venv), "--source", index)
    assert first.returncode == 0, first.stderr
    assert f"torch-{VERSION}" in first.stdout and first.stdout.startswith("no NVIDIA GPU: downloading")
    again = install(str(failed.venv), "--source", "http://127.0.0.1:9")
    assert (again.returncode, again.stdout) == (0, f"PyTorch {VERSION} is there already\n")


@needs_linux_without_gpu
def test_what_pip_cannot_install_ends_in_one_line_of_ours(failed: Failed) -> None:
    assert failed.done.returncode == 2 and "Traceback" not in failed.done.stderr
    assert (failed.venv / "bin" / "python").exists()
    last = failed.done.stderr.splitlines()[-1]
    assert last.startswith(f"install_torch: pip could not install torch=={VERSION}: see above")


def test_an_environment_that_cannot_be_made_ends_in_one_line_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = install(str(tmp_path / "file" / "venv"), "--source", "http://127.0.0.1:9")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("install_torch: no virtual environment could be made: see above")


def test_make_takes_the_script_before_anything_else(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--always-make", ".venv/ready", "PYTHON=python3.x", "TORCH_INDEX=http://mirror"]
    notice = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in notice.splitlines() if "python" in line]
    assert lines[0].endswith("python3.x scripts/install_torch.py --source http://mirror .venv")
    done = subprocess.run([*command[:1], "-B", *command[3:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "python3.x is not here: install Python 3.11 or newer" in done.stdout


def test_readme_and_makefile_install_the_same_pytorch() -> None:
    for name in ("README.md", "docs/getting-started.md", "docs/index.md"):
        found = set(re.findall(r"torch==([\w.]+)", (ROOT / name).read_text()))
        assert found <= {VERSION}, name
    assert f'VERSION = "{VERSION}"' in SCRIPT.read_text()
