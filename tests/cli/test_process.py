"""Commands as processes: imports, pipes, locales, terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="needs a Unix terminal")

from tests.cli.screen import terminal
from tests.forking import Forks
from tests.warm import Forker

_HEAVY = ("torch", "transformers", "gguf", "tokenizers", "rich.progress", "huggingface_hub")
_SPY = f"""
import sys
from nano_inference.cli import main
code = main(sys.argv[1:])
print("imported:", [name for name in {_HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """A process that has imported the commands, and nothing that one of them imports when it is used."""
    with Forks(["nano_inference.cli.app"], environment={"XDG_CONFIG_HOME": "/no/such/directory"}) as one:
        yield one


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["chat", "--help"],
        ["serve", "--help"],
        ["generate", "--print-config"],
        ["doctor", "--help"],
        ["models", "info", "--help"],
    ],
)
def test_quick_commands_import_no_heavy_module(argv: list[str], forks: Forks) -> None:
    done = forks.run(_SPY, *argv)
    first = "[generate]" if "--print-config" in argv else "Usage: nano-inference"
    assert done.returncode == 0 and done.stdout.startswith(first) and "imported: []" in done.stderr


def test_tokenize_imports_no_torch(tiny: Path, forks: Forks) -> None:
    done = forks.run(_SPY, "tokenize", "hello", "-m", str(tiny))
    assert done.returncode == 0 and done.stdout.split()
    assert "torch" not in done.stderr and "tokenizers" in done.stderr


def test_models_list_imports_no_torch(tmp_path: Path, forks: Forks) -> None:
    done = forks.run(_SPY, "models", "list", "--json", "--cache", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[") and "torch" not in done.stderr


def test_unencodable_output_is_replaced(tiny: Path) -> None:
    command = [sys.executable, "-m", "nano_inference", "tokenize", "--model", str(tiny)]
    ids = subprocess.run([*command, "é!"], capture_output=True, text=True, check=True).stdout.split()
    narrow = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--decode", *ids], capture_output=True, text=True, env=narrow, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "?!\n", "")


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat_in_a_dumb_terminal(forker: Forker, tiny: Path) -> None:
    varied = ("-t", "2", "--top-p", "1", "--min-p", "0")  # an answer that repeats itself would end
    options = ("--max-model-len", "32768", "--max-tokens", "30000", "--ignore-eos", *varied)
    with terminal("chat", "-m", str(tiny), *options, forker=forker, rows=50, columns=160, TERM="dumb") as screen:
        screen.prompt()
        screen.send("hello\r")
        screen.wait_below("> hello")
        screen.send("\x03")
        screen.wait("[stopped]")
        screen.ask("/help")
        screen.wait("/clear")
        screen.send("\x04")
        assert screen.leave() == 0


@pytest.mark.slow
def test_banner_wraps_facts_but_not_the_command(forker: Forker) -> None:
    """A wrapped command could not be copied."""
    with terminal("serve", "--model", "calculator", "--port", "0", forker=forker, rows=40, columns=60) as screen:
        screen.wait_raw('"calculator": true}\'\r\n')
        rows = screen.text().splitlines()
        assert max(map(len, rows)) <= 60 and "  http://127.0.0.1:" in screen.text()
        (command,) = [line for line in screen.raw.decode().split("\r\n") if line.startswith("  curl -N ")]
        assert len(command) > 120 and command.endswith("}'") and '"temperature": 0' in command
        screen.send("\x03")
        assert screen.leave() == 0
