"""`--help`: every option of a command on one page that fits the terminal."""

from __future__ import annotations

import pytest

from nano_inference.cli import main
from nano_inference.cli.app import build_app
from nano_inference.cli.arguments import options_of, walk_commands

Capture = pytest.CaptureFixture[str]
COMMANDS = [path for path, _ in walk_commands(build_app())]
OPTIONS = {
    path: options_of(app.assemble_argument_collection(parse_docstring=True)) for path, app in walk_commands(build_app())
}


def page(capsys: Capture, *argv: str, code: int = 0) -> str:
    """Return a help page."""
    found = main(argv)
    out, err = capsys.readouterr()
    assert found == code, err
    return out if code == 0 else err


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_page_fits_the_terminal(path: tuple[str, ...], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = page(capsys, *path, "--help").splitlines()
    assert max(map(len, lines)) <= 60 and lines[0].startswith(f"Usage: nano-inference {' '.join(path)}")


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_page_lists_every_option(path: tuple[str, ...], capsys: Capture) -> None:
    text = page(capsys, *path, "--help")
    assert {option.name for option in OPTIONS[path]} <= set(text.split())


def test_other_forms_print_the_same_page(capsys: Capture) -> None:
    path = COMMANDS[-1]
    assert page(capsys, *path, "-h") == page(capsys, "--help", *path) == page(capsys, *path, "--help")


def test_every_option_has_help() -> None:
    for path, options in OPTIONS.items():
        for option in options:
            assert option.parameter.help, (path, option.name)
