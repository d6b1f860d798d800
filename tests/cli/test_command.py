"""Commands that an installed package adds or replaces by entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nano_inference.cli import main
from nano_inference.cli.command import OWN_COMMANDS, Command, installed_commands

Capture = pytest.CaptureFixture[str]

CODE = """
from typing import Annotated
from cyclopts import Group, Parameter
from nano_inference.cli.command import Command


def fill(app, commands, arguments):
    for argument in arguments:
        if argument.field_info.name == "name" and not argument.tokens:
            from nano_inference.cli.arguments import fill as set_option
            set_option(argument, "you", "greeting")


def hello(*, name: Annotated[str, Parameter(group=Group("Greeting"))]):
    print("hello", name)
    return 3


def doctor():
    print("all is well")
    return 0


HELLO = Command(words="hello", target="greeting:hello", text="Greet.", fill=fill)
SHOW = Command(words="models hello", target="greeting:hello", text="Greet a model.")
DOCTOR = Command(words="doctor", target="greeting:doctor", text="Say that all is well.")
"""
POINTS = "[nano_inference.commands]\nhello = greeting:HELLO\nshow = greeting:SHOW\ndoctor = greeting:DOCTOR\n"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package."""
    info = tmp_path / "greeting-1.0.dist-info"
    info.mkdir()
    (tmp_path / "greeting.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "greeting", raising=False)


def test_package_command_runs_with_filled_options(capsys: Capture) -> None:
    assert main(["hello"]) == 3 and capsys.readouterr().out == "hello you\n"
    assert main(["hello", "--name", "Ada"]) == 3 and capsys.readouterr().out == "hello Ada\n"
    assert main(["models", "hello", "--name", "Ada"]) == 3 and capsys.readouterr().out == "hello Ada\n"


def test_help_lists_package_command_and_heading(capsys: Capture) -> None:
    assert main(["--help"]) == 0 and "│ hello        Greet. " in capsys.readouterr().out
    assert main(["hello", "--help"]) == 0 and "╭─ Greeting ─" in capsys.readouterr().out


def test_package_command_replaces_built_in_one(capsys: Capture) -> None:
    assert main(["doctor"]) == 0 and capsys.readouterr().out == "all is well\n"
    words = [one.words for one in installed_commands()]
    assert words.index("doctor") == [one.words for one in OWN_COMMANDS].index("doctor") and len(words) == len({*words})


@pytest.mark.parametrize("words", ["", "group name", "models pull twice"])
def test_command_rejects_unknown_group(words: str) -> None:
    with pytest.raises(ValueError, match="must be NAME or models NAME"):
        Command(words=words, target="a:b", text="")
