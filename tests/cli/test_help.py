"""`--help`: every option of a command on one page that fits the terminal."""

from __future__ import annotations

from dataclasses import fields

import pytest

from nano_inference import SamplingParams
from nano_inference.cli import main
from nano_inference.cli.app import build_app
from nano_inference.cli.arguments import heading_of, options_of, walk_commands
from nano_inference.cli.help_texts import EXAMPLES, SAMPLING, VALUES
from nano_inference.text.generation_config import MODELS_OWN

Capture = pytest.CaptureFixture[str]
COMMANDS = [path for path, _ in walk_commands(build_app())]
OPTIONS = {path: options_of(app.assemble_argument_collection()) for path, app in walk_commands(build_app())}


def page(capsys: Capture, *argv: str, code: int = 0) -> str:
    """Return a help page."""
    found = main(argv)
    out, err = capsys.readouterr()
    assert found == code, err
    return out if code == 0 else err


def names_on(text: str) -> set[str]:
    """Return the options that have an entry on a page."""
    entries = [line for line in text.splitlines() if line.startswith("  -")]
    words = [word for line in entries for word in line.replace("--[no-]", "--").replace(",", " ").split()[:2]]
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_page_fits_the_terminal(
    path: tuple[str, ...], columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = page(capsys, *path, "--help").splitlines()
    texts = [line for line in lines if not line.startswith(("  nano-inference", "  echo", "Usage"))]
    assert max(map(len, texts)) <= columns and lines[0].startswith(f"Usage: nano-inference {' '.join(path)}")


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_page_lists_every_option(path: tuple[str, ...], capsys: Capture) -> None:
    text = page(capsys, *path, "--help")
    assert names_on(text) == {option.name for option in OPTIONS[path]}
    assert page(capsys, *path, "-h") == page(capsys, "--help", *path) == text


def test_every_option_has_help() -> None:
    for path, options in OPTIONS.items():
        for option in options:
            has_text = heading_of(option) == "Sampling" and option.field_info.name in SAMPLING
            assert has_text or option.parameter.help, (path, option.name)
    assert set(SAMPLING) < {field.name for field in fields(SamplingParams)}


def test_model_dependent_defaults_are_marked(capsys: Capture) -> None:
    for command in ("chat", "generate"):
        words = " ".join(page(capsys, command, "--help").split())
        assert "takes the most likely token (default: the model's, else 1)" in words
        assert words.count("(default: the model's, else ") == len(MODELS_OWN)


def test_help_texts_name_existing_options() -> None:
    every = {option.name[2:] for options in OPTIONS.values() for option in options}
    assert every >= set(VALUES)
    assert {tuple(name.split()) for name in EXAMPLES} <= set(COMMANDS)


def test_groups_list_their_commands(capsys: Capture) -> None:
    for argv in ((), ("--help",), ("models",), ("models", "--help")):
        text = page(capsys, *argv)
        wanted = [path[-1] for path in COMMANDS if path[:-1] == tuple(word for word in argv if word != "--help")]
        assert all(f"\n  {name} " in text for name in wanted) and "Commands:" in text
        assert ("--version" in text) == ("models" not in argv)


def test_help_of_an_unknown_command_is_refused(capsys: Capture) -> None:
    assert "nonsense" in page(capsys, "nonsense", "--help", code=2)
