"""Shell completion scripts, run in shells with an installed command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nano_inference
from nano_inference.cli import main, shells
from nano_inference.cli.app import build_app
from nano_inference.loading.catalog import WHEELS

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
HUB = ("org/plain", "org/planets", "other/it's $(touch pwned) a;b")
_ASK = r"""
source "$1"
words=("${@:2}")
COMP_WORDS=("${words[@]}"); COMP_CWORD=$((${#words[@]} - 1))
_nano_inference
for word in "${COMPREPLY[@]}"; do
    eval "plain=$word"  # as the shell would parse it
    printf '%s\n' "$plain"
done
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with the command, models in both caches, and the scripts."""
    home = tmp_path_factory.mktemp("machine")
    command = home / "bin" / "nano-inference"
    command.parent.mkdir()
    source = Path(nano_inference.__file__).parents[1]
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{source}" exec "{sys.executable}" -m nano_inference "$@"\n')
    command.chmod(0o755)
    for repo in HUB:
        snapshot = home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / "c0ffee"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(b"1")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("c0ffee")
    (home / "cache").mkdir()
    with (home / "cache" / WHEELS[0].file_name).open("wb") as file:
        file.truncate(WHEELS[0].file_bytes)
    for shell in ("bash", "zsh", "fish"):
        (home / f"script.{shell}").write_text(shells.script(build_app(), shell), encoding="utf-8")
    return home


def environment(home: Path) -> dict[str, str]:
    """Environment of a shell on that machine; its invalid option must not matter."""
    return os.environ | {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "HF_HUB_CACHE": str(home / "hub"),
        "NANO_INFERENCE_CACHE": str(home / "cache"),
        "NANO_INFERENCE_CONFIG": "/no/such/file",
    }


def complete(home: Path, *words: str) -> set[str]:
    """Return bash's completions of the last word."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    done = subprocess.run(
        ["bash", "--norc", "-c", _ASK, "bash", str(home / "script.bash"), "nano-inference", *words],
        capture_output=True,
        text=True,
        env=environment(home),
        cwd=home,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
    return set(done.stdout.splitlines())


def test_bash_completes_cached_models(machine: Path) -> None:
    assert complete(machine, "chat", "--model", "") == {*HUB, "calculator", WHEELS[0].name}
    assert complete(machine, "serve", "--port", "9", "-m", "org/pl") == {"org/plain", "org/planets"}
    assert complete(machine, "tokenize", "-m", "smol") == {WHEELS[0].name}
    assert not (machine / "pwned").exists()


def test_bash_completes_positional_arguments(machine: Path) -> None:
    assert complete(machine, "models", "info", "org/plan") == {"org/planets"}
    assert complete(machine, "models", "export", "calc") == {"calculator"}
    assert complete(machine, "models", "rm", "") == {*HUB, WHEELS[0].name}, "models of the package cannot be deleted"
    assert complete(machine, "models", "pull", "") == {"calculator", "default", WHEELS[0].name}


def test_bash_completes_commands_options_and_choices(machine: Path) -> None:
    assert complete(machine, "mo") == {"models"} and complete(machine, "models", "p") == {"pull"}
    assert complete(machine, "serve", "--kv-cache-d") == {"--kv-cache-dtype"}
    assert complete(machine, "generate", "--cache-type", "") == {"paged", "radix"}
    assert complete(machine, "models", "export", "--to", "h") == {"hf"}


def test_completion_installs_scripts(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZSH", "ZSH_CUSTOM", "NANO_INFERENCE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shells.installed(tmp_path) == []
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", "--shell", shell, "--print"]) == 0
        printed = capsys.readouterr().out
        assert shells.installed(tmp_path) == [] or shell != "bash"
        assert main(["completion", "--shell", shell]) == 0
        path = Path(capsys.readouterr().out.strip())
        assert path.is_relative_to(tmp_path) and path.read_text(encoding="utf-8") == printed.removesuffix("\n")
    assert shells.installed(tmp_path) == ["bash", "zsh", "fish"]
    assert "nano-inference" in (tmp_path / ".bashrc").read_text()


def test_undetected_shell_is_one_line(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent process is PowerShell."""
    (tmp_path / "ps").write_text("#!/bin/sh\necho pwsh\n")
    (tmp_path / "ps").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ZSH_VERSION", "BASH_VERSION", "FISH_VERSION"):
        monkeypatch.delenv(name, raising=False)
    assert main(["completion"]) == 2
    assert "give --shell bash, --shell zsh or --shell fish" in capsys.readouterr().err
