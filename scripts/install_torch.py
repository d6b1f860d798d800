"""Make a virtual environment with PyTorch in it: the CPU build where there is no NVIDIA GPU.

PyTorch's own index has that build for Linux; the package index has one with CUDA, which comes with gigabytes of
libraries. Standard library only. Python 3.6 must be able to parse this file: older Pythons get one line, no traceback.
"""
# ruff: noqa: UP006, UP035, UP045

import argparse
import http.client
import os
import platform
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import List, NamedTuple, Optional

VERSION = "2.13.0"
OLDEST, NEWEST = (3, 11), (3, 14)
"""Versions of Python that both this package and PyTorch's wheels support."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 3.0
"""Seconds in which the CPU index must begin to answer."""
READ_S = 30.0
"""Further seconds for the rest of its answer: a slow link is no reason to download gigabytes."""
MAX_PAGE = 4 << 20
"""Bytes of the index's page that are read."""
CPU_SIZE, MACOS_SIZE, CUDA_SIZE = "about 190 MB", "about 110 MB", "about 4.6 GB"


class Plan(NamedTuple):
    """What is installed, and from where."""

    requirement: str
    options: List[str]
    """Further arguments of pip."""
    notice: str
    """Printed before the download."""


def main() -> int:
    """Install PyTorch; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="virtual environment, made when it is not there")
    parser.add_argument("--source", default=CPU_INDEX, help="index with the CPU builds (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be installed, and install nothing")
    options = parser.parse_args()
    problem = python_problem(sys.version_info[:2])
    if problem is not None:
        return refuse(problem)
    python = Path(options.directory) / "bin" / "python"
    is_missing = not options.dry_run and not has_pip(python)
    if is_missing and subprocess.call([sys.executable, "-P", "-m", "venv", options.directory]):
        return refuse("no virtual environment could be made: see above (Debian: apt install python3-venv)")
    if has_torch(python):
        print(f"PyTorch {VERSION} is there already")
        return 0
    plan = make_plan(str(python) if python.exists() else sys.executable, options.source)
    print(plan.notice, flush=True)
    command = [str(python), "-P", "-m", "pip", "install", *plan.options, plan.requirement]
    if options.dry_run:
        print(" ".join(command))
        return 0
    if subprocess.call(command):
        return refuse(f"pip could not install {plan.requirement}: see above; running the same command again retries")
    return 0


def refuse(text: str) -> int:
    """Print one line to stderr; return the exit code of a refusal."""
    print(f"install_torch: {text}", file=sys.stderr)
    return 2


def python_problem(version: "tuple[int, ...]") -> Optional[str]:
    """Return why this Python cannot be used; None when it can."""
    if OLDEST <= version <= NEWEST:
        return None
    wanted = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
    here = "{}.{}".format(*version)
    return f"Python {wanted} is needed, and {sys.executable} is {here}; name another one: make demo PYTHON=python3.12"


def has_pip(python: Path) -> bool:
    """Return True if the environment is whole; one whose making was interrupted has a Python without pip."""
    quiet = subprocess.DEVNULL
    return python.exists() and subprocess.call([str(python), "-P", "-m", "pip", "--version"], stdout=quiet) == 0


def has_torch(python: Path) -> bool:
    """Return True if the environment has this version of PyTorch."""
    code = f"import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '{VERSION}')"
    quiet = subprocess.DEVNULL
    return python.exists() and subprocess.call([str(python), "-P", "-c", code], stdout=quiet, stderr=quiet) == 0


def make_plan(python: str, source: str) -> Plan:
    """Return what to install on this machine."""
    plain = f"torch=={VERSION}"
    if platform.system() != "Linux":
        size = MACOS_SIZE if platform.system() == "Darwin" else "about 120 MB"
        return Plan(plain, [], f"downloading PyTorch {VERSION} from the package index: {size}")
    if has_nvidia_gpu():
        notice = f"an NVIDIA GPU is here: downloading PyTorch {VERSION} with CUDA from the package index: {CUDA_SIZE}"
        return Plan(plain, [], notice)
    cpu = f"{plain}+cpu"
    reason = why_silent(source)
    if reason is not None and pip_offers(python):
        return Plan(cpu, [], f"no NVIDIA GPU: installing PyTorch {VERSION}, CPU build, which pip finds: {CPU_SIZE}")
    # pip may be configured with a proxy that the probe does not know.
    if reason is None or pip_offers(python, "--extra-index-url", source):
        notice = f"no NVIDIA GPU: downloading PyTorch {VERSION}, CPU build, from {source}: {CPU_SIZE}"
        return Plan(cpu, ["--extra-index-url", source], notice)
    return Plan(
        plain,
        [],
        f"no NVIDIA GPU, but {source} does not answer ({reason}): downloading PyTorch {VERSION} with CUDA libraries "
        f"from the package index: {CUDA_SIZE}. Ctrl-C stops it; make demo TORCH_INDEX=URL takes another index",
    )


def has_nvidia_gpu() -> bool:
    """Return True if the driver of an NVIDIA GPU is loaded, or `nvidia-smi` lists one."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    found = shutil.which("nvidia-smi")
    if found is None:
        return False
    try:
        listed = subprocess.run([found, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


def why_silent(source: str) -> Optional[str]:
    """Return why an index does not offer this version of PyTorch; None when it does.

    Takes `PROBE_S` seconds at most, and `READ_S` more once the index answers.
    """
    found = [f"no answer in {PROBE_S:g} s"]
    answers = threading.Event()

    def probe() -> None:
        try:
            with urllib.request.urlopen(f"{source.rstrip('/')}/torch/", timeout=PROBE_S, context=trust()) as page:
                answers.set()
                is_there = f"torch-{VERSION}".encode() in page.read(MAX_PAGE)
            found[0] = "" if is_there else f"it has no PyTorch {VERSION}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            found[0] = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__

    # A thread, because `timeout` bounds neither the look-up of the name nor a page that comes byte by byte.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_S)
    if answers.is_set():
        thread.join(READ_S)
    return found[0] or None


def trust() -> ssl.SSLContext:
    """Return the certificates that pip would trust."""
    named = (os.environ.get(name) for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE"))
    return ssl.create_default_context(cafile=next((path for path in named if path and Path(path).is_file()), None))


def pip_offers(python: str, *options: str) -> bool:
    """Return True if pip, as it is configured here, lists the CPU build. Downloads nothing but lists."""
    command = [python, "-P", "-m", "pip", "index", "versions", "torch", "--timeout", "3", "--retries", "0", *options]
    try:
        listed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=READ_S)
    except subprocess.TimeoutExpired:
        return False
    return f"{VERSION}+cpu".encode() in listed.stdout.replace(b",", b" ").split()


if __name__ == "__main__":
    sys.exit(main())
