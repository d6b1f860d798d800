"""Sources of an option's value: command line, environment variable, files, the model, built-in defaults."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nano_inference.cli.app import build_app
from nano_inference.cli.arguments import walk_commands
from tests.cli.commands import Capture, run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all options from the environment, and pydantic from the imported modules.

    If pydantic is imported, cyclopts validates values with it and rejects some that the configurations accept.
    """
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)
    for name in list(os.environ):
        if name.startswith("NANO_INFERENCE_"):
            monkeypatch.delenv(name)


def parse(page: str) -> dict[str, Any]:
    """Return the options that --print-config prints as set."""
    (table,) = [line.strip("[]") for line in page.splitlines() if line.startswith("[")]
    found: Any = tomllib.loads(page)
    for word in table.split("."):
        found = found[word]
    return dict(found)


def settings(capsys: Capture, *argv: str) -> dict[str, Any]:
    """Return the options that a command line's --print-config prints as set."""
    return parse(run(capsys, *argv, "--print-config")[0])


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return str(path)


# ---- environment variables


@pytest.mark.parametrize(
    ("command", "name", "text", "value"),
    [
        ("serve", "port", "9000", 9000),
        ("serve", "served-model-name", "a", ["a"]),
        ("chat", "temperature", "0.5", 0.5),
        ("generate", "max-tokens", "none", "none"),
    ],
)
def test_options_are_read_from_the_environment(
    command: str, name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv(f"NANO_INFERENCE_{name.replace('-', '_').upper()}", text)
    assert settings(capsys, command)[name] == value


def test_secret_of_the_environment_is_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("NANO_INFERENCE_API_KEY", "a-long-secret")
    page, _ = run(capsys, "serve", "--print-config")
    assert "# api-key is set, and not shown" in page and "a-long-secret" not in page


# ---- files


def test_precedence_of_sources(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source sets only options that the sources before it do not set."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "nano-inference" / "config.toml"
    own.parent.mkdir()
    own_keys = ("top-k", "max-tokens", "seed", "min-tokens", "block-size")
    write(own, "".join(f"{key} = 2\n" for key in own_keys))
    named = write(tmp_path / "named.toml", "top-k = 3\nmax-tokens = 3\nseed = 3\n[generate]\nmin-tokens = 3\n")
    monkeypatch.setenv("NANO_INFERENCE_MAX_TOKENS", "4")
    monkeypatch.setenv("NANO_INFERENCE_SEED", "4")
    found = settings(capsys, "generate", "x", "--seed", "5", "--config", named, "-m", "calculator")
    assert found["seed"] == 5
    assert found["max-tokens"] == 4
    assert found["top-k"] == 3 and found["min-tokens"] == 3
    assert found["block-size"] == 2
    assert not {"temperature", "top-p"} & set(found), "the model's own"
    write(tmp_path / "named.toml", "temperature = 0.5\n")
    assert settings(capsys, "chat", "--config", named, "-m", "calculator")["temperature"] == 0.5


def test_innermost_table_takes_precedence(tmp_path: Path, capsys: Capture) -> None:
    text = "quiet = true\noverride = 'a=1'\n[models]\noverride = ['b=2']\n[models.info]\noverride = ['c=3', 'd=4']\n"
    file = write(tmp_path / "c.toml", text)
    wanted = {("models", "info"): ["c=3", "d=4"], ("models", "export", "x", "y"): ["b=2"], ("bench",): ["a=1"]}
    for argv, value in wanted.items():
        found = settings(capsys, *argv, "--config", file)
        assert found["override"] == value and found["quiet"] is True


def test_keys_of_other_commands_are_ignored(tmp_path: Path, capsys: Capture) -> None:
    file = write(tmp_path / "c.toml", "port = 9000\nmax_tokens = 'none'\n[chat]\nsystem = 'be brief'\n")
    assert settings(capsys, "serve", "--config", file)["port"] == 9000
    found = settings(capsys, "chat", "--config", file)
    assert found["system"] == "be brief" and found["max-tokens"] == "none" and "port" not in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nport = ", "is not TOML in UTF-8: Invalid value"),
        ("# a\n[serve]\n\nprot = 1\n", ": serve.prot is not an option; did you mean port?"),
        ("[serv]\nport = 1\n", ": serv is not a command; did you mean serve?"),
        ("[chat]\nport = 1\n", ": chat.port is not an option"),
        ("port = 'eighty'\n", "Invalid value for [port] from file"),
        ("[serve.port]\nx = 1\n", ": serve.port is not a command"),
        ("config = 'x'\n", "config can only be set on the command line or in the environment"),
        ("print-config = true\n", "print-config can only be set on the command line"),
        ("port = 99999\n", "port must be in [0, 65535], got 99999 (file "),
    ],
)
def test_invalid_file_is_one_line(tmp_path: Path, capsys: Capture, text: str, said: str) -> None:
    file = write(tmp_path / "c.toml", text)
    out, err = run(capsys, "serve", "--config", file, "--print-config", code=2)
    assert out == "" and err.count("\n") == 1 and file in err and said in err


def test_unreadable_file_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "latin.toml").write_bytes(b'host = "\xe9"\n')
    (tmp_path / "large.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    os.mkfifo(tmp_path / "pipe.toml")
    said = {
        "latin.toml": "is not TOML in UTF-8",
        "large.toml": "1048577 bytes are too many for a configuration file (limit 1048576)",
        "pipe.toml": "is a FIFO, not a regular file",
        ".": "is a directory, not a regular file",
        "none.toml": "No such file or directory",
    }
    for name, text in said.items():
        _, err = run(capsys, "doctor", "--config", str(tmp_path / name), code=2)
        assert err.count("\n") == 1 and text in err and str(tmp_path / name) in err
    assert settings(capsys, "serve", "--config", os.devnull) == {}


def test_api_key_in_readable_file_is_rejected(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "c.toml"
    write(file, "[serve]\napi-key = ['a-long-secret']\n")
    out, _ = run(capsys, "serve", "--config", str(file), "--print-config")
    assert "a-long-secret" not in out and "# api-key is set, and not shown" in out
    file.chmod(0o640)
    for command in ("serve", "chat"):
        _, err = run(capsys, command, "--config", str(file), "--print-config", code=2)
        assert "api-key may be read by others than its owner (mode 640): chmod 600" in err and "secret" not in err


def test_error_names_environment_variable(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_INFERENCE_PORT", "99999")
    assert "NANO_INFERENCE_PORT must be in [0, 65535], got 99999" in run(capsys, "serve", "--print-config", code=2)[1]
    _, err = run(capsys, "serve", "--port", "99999", "--print-config", code=2)
    assert err == "nano-inference: --port must be in [0, 65535], got 99999\n"


# ---- --print-config


@pytest.mark.parametrize("path", [path for path, _ in walk_commands(build_app())], ids="-".join)
def test_print_config_output_is_an_equivalent_file(path: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    page, err = run(capsys, *path, "--print-config")
    assert err == "" and page.startswith(f"[{'.'.join(path)}]\n")
    file = write(tmp_path / "c.toml", page)
    assert parse(page) == {} and run(capsys, *path, "--config", file, "--print-config")[0] == page
    lines = [line.removeprefix("# ") for line in page.splitlines() if " = " in line]
    every = write(tmp_path / "every.toml", "\n".join([page.splitlines()[0], *lines]))
    again = run(capsys, *path, "--config", every, "--print-config")[0]
    found = {key: value for key, value in tomllib.loads("\n".join(lines)).items() if key != "device-type"}
    assert {key: value for key, value in parse(again).items() if key != "device-type"} == found


def test_print_config_comments_out_model_defaults(capsys: Capture) -> None:
    """Read as a file, it would win over the model."""
    page, _ = run(capsys, "generate", "x", "--top-k", "0", "--print-config")
    found = tomllib.loads(page)["generate"]
    assert found["top-k"] == 0 and not {"temperature", "top-p", "min-p", "repetition-penalty"} & set(found)
    assert "\n# top-p depends on the model\n" in page
    assert settings(capsys, "chat", "-m", "calculator") == {"model": "calculator"}


def test_print_config_escapes_values(tmp_path: Path, capsys: Capture) -> None:
    text = 'say "é\\n"\t\x7f # no comment'
    argv = ("generate", "x", "--system", text, "--stop", text, "--stop", "b", "--max-tokens", "none", "--n", "2")
    page, _ = run(capsys, *argv, "--stop-token-ids", "7", "--stop-token-ids", "5", "--print-config")
    data = tomllib.loads(page)["generate"]
    assert data["system"] == text and data["stop"] == [text, "b"] and data["max-tokens"] == "none"
    assert data["stop-token-ids"] == [5, 7]
    file = write(tmp_path / "c.toml", page)
    again, _ = run(capsys, "generate", "x", "--config", file, "--print-config")
    assert tomllib.loads(again)["generate"] == data
