"""Error messages: one line with the option as the user gave it, the limit, and what to do."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

from nano_inference.cli import main
from nano_inference.cli.arguments import size_of
from tests.cli.commands import Capture, refused

TOO_MUCH = "100TiB"


@pytest.fixture(autouse=True)
def no_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove pydantic from the imported modules; otherwise cyclopts validates values with it."""
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)


@pytest.fixture
def base_model(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model without its chat template."""
    directory = tmp_path / "base"
    shutil.copytree(tiny, directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"no_template"'))
    return directory


def misshapen(model: Path, directory: Path) -> Path:
    """Return a copy of a model that can be opened, but whose weights are refused when they are loaded."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] - 1}))
    return directory


def given(place: str, key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Set an option on the command line, in the environment or in a file; return the command line's words."""
    if place == "flag":
        return (f"--{key}", value)
    if place == "environment":
        monkeypatch.setenv(f"NANO_INFERENCE_{key.replace('-', '_').upper()}", value)
        return ()
    (tmp_path / "c.toml").write_text(f'{key} = "{value}"\n')
    return ("--config", str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("3 MB", 3_000_000),
        ("3MiB", 3 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 << 29),
        ("100GiB", 100 << 30),
        ("1TiB", 1 << 40),
        *((text, None) for text in ("", "GiB", "1.5", "0.3B", "-1KiB", "1GiBs", "1e9", "one", "1.GiB", "٣GiB")),
    ],
)
def test_size_of_parses_units(text: str, size: int | None) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize(
    ("place", "name"),
    [("flag", "--kv-cache-bytes"), ("environment", "NANO_INFERENCE_KV_CACHE_BYTES"), ("file", "kv-cache-bytes")],
)
def test_cache_larger_than_memory_is_rejected_before_loading(
    place: str, name: str, tiny: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = given(place, "kv-cache-bytes", TOO_MUCH, tmp_path, monkeypatch)
    model = misshapen(tiny, tmp_path / "model")
    line = refused(capsys, "generate", "hello", "--model", str(model), "--device", "cpu", *words)
    assert line.startswith(f"{name}: {100 << 40} bytes (102400.0 GiB) are more than the available memory, ")
    assert "give a smaller size" in line and ("c.toml" in line) == (place == "file")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serve", "--max-n", "0"), "--max-n must be in [1, 65536], got 0"),
        (("serve", "--kv-cache-bytes", "plenty"), "--kv-cache-bytes must be bytes, or a size such as 512MiB or 2GB"),
        (("serve", "--port", "0", "--host", "0.0.0.0"), "--host 0.0.0.0 can be reached from other machines: set --api"),
        (("serve", "--root-path", "llm"), "--root-path must begin with a slash"),
        (("serve", "--port", "70000"), "--port must be in [0, 65535], got 70000"),
        (("serve", "--port", "0", "--api-key", "short"), "--api-key: key 1 is shorter than 8 characters"),
        (("serve", "--weights-dir", "x"), "--weights-dir is for a trainer: it needs --enable-rl"),
        (("generate", "a", "--max-tokens", "-1"), "--max-tokens must be"),
        (("generate", "a", "--device", "tpu"), "--device must be auto, cpu, cuda, cuda:N or mps, got 'tpu'"),
        (("generate", "a", "--kernels", "off", "--dtype", "int8"), "--dtype=int8: the kernels are off"),
        (("generate", "a b " * 40, "--max-model-len", "16", "--quiet"), "prompt has "),
    ],
)
def test_rejection_names_the_flag(words: tuple[str, ...], expected: str, tiny: Path, capsys: Capture) -> None:
    model = ("--model", str(tiny)) if words[0] == "generate" else ()
    line = refused(capsys, *words, *model)
    assert line.startswith(expected) and "max_model_len" not in line


def test_value_equal_to_a_field_name_is_unchanged(capsys: Capture) -> None:
    line = refused(capsys, "serve", "--port", "0", "--host", "insecure")
    assert line.startswith("--host insecure can be reached from other machines: ") or "insecure: cannot listen" in line


@pytest.mark.parametrize(
    ("place", "name"), [("flag", "--port"), ("environment", "NANO_INFERENCE_PORT"), ("file", "port")]
)
def test_port_in_use_names_its_source(
    place: str, name: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = given(place, "port", port, tmp_path, monkeypatch)
        if place == "file":
            (tmp_path / "c.toml").write_text(f"port = {port}\n")
        line = refused(capsys, "serve", *words)
    expected = f"{name} {port}: another program listens on 127.0.0.1:{port}; set {name} to another one, or 0 for any"
    assert line.startswith(expected)


def test_base_model_is_rejected_before_loading(base_model: Path, tmp_path: Path, capsys: Capture) -> None:
    said = "is a base model: it has no chat template"
    model = misshapen(base_model, tmp_path / "model")
    assert said in refused(capsys, "chat", "--model", str(model), "-p", "hello")
    line = refused(capsys, "chat", "--model", str(base_model), "-p", "hello")
    assert said in line
    command = line[line.index("nano-inference generate") :].split(" 'Once")[0].split()
    assert main([*command[1:], "Once upon a time", "--max-tokens", "2"]) == 0


def test_context_above_the_models_limit_is_printed(tiny: Path, capsys: Capture) -> None:
    words = ("generate", "hello", "--model", str(tiny), "--max-tokens", "2", "--kv-cache-bytes", "64MiB")
    assert main([*words, "--max-model-len", "100000"]) == 0
    assert "[context 32768 tokens, the model's limit: --max-model-len 100000 is more]" in capsys.readouterr().err
    assert main(words) == 0
    assert "the model's limit" not in capsys.readouterr().err


def test_cache_smaller_than_context_is_printed(tiny: Path, capsys: Capture) -> None:
    assert main(["generate", "hello", "--model", str(tiny), "--max-tokens", "2", "--kv-cache-bytes", "16KiB"]) == 0
    assert "tokens, the size of the KV cache (--kv-cache-bytes sets it)]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--max-tokens", "3"), "--max-tokens 3 reached"),
        (("--max-tokens", "500", "--max-model-len", "40"), "prompt and answer fill the context of 40 tokens"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate", "batch"])
def test_length_limit_of_answer_is_printed(
    command: str, words: tuple[str, ...], expected: str, tiny: Path, capsys: Capture
) -> None:
    chosen = {"chat": ("chat", "-p", "hi"), "generate": ("generate", "hi"), "batch": ("generate", "hi", "--n", "2")}
    assert main([*chosen[command], "--model", str(tiny), "--ignore-eos", *words]) == 0
    count = "2 " if command == "batch" else ""
    assert f"[{count}cut off: {expected}]" in capsys.readouterr().err
