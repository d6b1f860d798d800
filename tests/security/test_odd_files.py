"""Irregular files, folders with the name of a model, and invalid paths give a one-line error without waiting."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine, save_weights, weights_in
from nano_inference.cli.serve import served_name
from nano_inference.loading.catalog import DEFAULT_MODEL, default_cache, find_builtin, pull, resolve
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.nanochat.files import nanochat_home
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.security import load_admin_keys, load_keys
from nano_inference.server.trainers.places import place_of, weights_root
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import ModelError
from tests.cases import failures
from tests.security.model_seeds import configs, hf_files, nanochat_files, own_nanochat, sharded_files, tiktoken_file
from tests.security.mutants import seeds
from tests.security.opening import open_model, use_tokenizer

Make = Callable[[Path], object]


def make_socket(path: Path) -> None:
    """A socket's name has at most 108 bytes, so it is made beside and moved."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


KINDS: Mapping[str, Make] = {
    "FIFO": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
}
HF = hf_files(configs()[0])
DIRECTORIES: Mapping[str, Mapping[str, bytes]] = {
    "hf": {**HF, "chat_template.jinja": b"{{ messages }}", "special_tokens_map.json": b"{}"},
    "template in JSON": {**HF, "chat_template.json": b'{"chat_template": "{{ messages }}"}'},
    "sharded": sharded_files(),
    "nanochat": nanochat_files("G4"),
    "own nanochat": own_nanochat(),
    "GGUF": {"model.gguf": seeds()["GGUF"].files["model.gguf"]},
}
FILES = [(name, file) for name, files in DIRECTORIES.items() for file in files]


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Opening a FIFO would wait for ever; an alarm ends that."""

    def give_up(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def test_irregular_files_are_refused_by_name(tmp_path: Path) -> None:
    def check(model: str, file: str, kind: str) -> None:
        directory = write(tmp_path / f"{model}-{file}-{kind}", DIRECTORIES[model])
        (directory / file).unlink()
        KINDS[kind](directory / file)
        with pytest.raises(ModelError) as caught:
            open_model(directory)
        message = str(caught.value)
        is_named = f"{directory / file}: cannot be read: is a" in message
        # A directory called model_000650.pt may hold anything.
        is_absent = "no config.json and no .gguf file" in message
        assert "\n" not in message and (is_named or (kind == "directory" and is_absent))

    assert failures(check, [(model, file, kind) for model, file in FILES for kind in KINDS]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokens.tiktoken", "tokenizer.model", "tokenizer.pkl", "tokenizer.json"])
def test_a_tokenizer_that_is_no_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    assert tiktoken_file()
    KINDS[kind](tmp_path / name)
    with pytest.raises(ModelError, match=r"cannot be read: is a"):
        use_tokenizer(TokenizerSource(str(tmp_path)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    for name in ("model.gguf", "model_000001.pt"):
        KINDS[kind](tmp_path / name)
        if kind != "directory":
            with pytest.raises(ModelError):
                open_checkpoint(tmp_path / name)
            with pytest.raises(ModelError):
                resolve(str(tmp_path / name), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_an_update_that_are_no_file_are_refused(tmp_path: Path, kind: str) -> None:
    directory = write(tmp_path / "model", {**sharded_files(), "READY": b""})
    file = directory / "model-00001-of-00002.safetensors"
    file.unlink()
    KINDS[kind](file)
    with pytest.raises(ModelError, match="cannot be read: is a"):
        list(weights_in(directory, marker=None))


@pytest.mark.parametrize("name", ["default", DEFAULT_MODEL, "SmolLM2-135M-Instruct", "calculator", "Calculator"])
def test_a_folder_does_not_take_the_place_of_a_known_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_model_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, HF)
    builtin = find_builtin(name)
    wanted = builtin.directory if builtin else default_model_path
    assert resolve(name, default_cache(os.environ)) == wanted
    assert resolve(f"./{name}", tmp_path) == Path(name), "a path is asked for by a separator"
    with pytest.raises(ModelError, match="is a local path"):
        pull(f"./{name}", tmp_path)


def test_a_folder_needs_a_separator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine", HF)
    (tmp_path / "x.gguf").write_bytes(b"")
    (tmp_path / "model_000005.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"^mine: not the name of a model \(\./mine is a path\)$"):
        resolve("mine", tmp_path)
    assert resolve("./mine", tmp_path) == Path("mine") and resolve(f"{tmp_path}/mine", tmp_path) == tmp_path / "mine"
    assert resolve("x.gguf", tmp_path) == Path("x.gguf"), "no known name ends so"
    assert resolve("model_000005.pt", tmp_path) == Path("model_000005.pt")
    assert served_name("./mine", Path("mine")) == "mine"


def test_existing_name_with_separator_is_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a hub id is spelled the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    write(tmp_path / "org" / "name", HF)
    assert resolve("org/name", tmp_path) == Path("org/name")


LONG, NUL, HOME = "x/" * 2500, "a\0b", "~unknown-user-name/x"
BAD = {LONG: "4095", "/tmp/" + "y" * 300: "255", NUL: "zero byte", HOME: "home directory"}
TAKING: Mapping[str, Callable[[str], object]] = {
    "model (engine)": lambda path: InferenceEngine(EngineConfig(model_path=path, device="cpu")),
    "model (checkpoint)": open_checkpoint,
    "model (catalog)": lambda path: resolve(path, Path("/nothing")),
    "tokenizer": lambda path: load_tokenizer(TokenizerSource(path)),
    "weights": lambda path: list(weights_in(path)),
    "directory": lambda path: save_weights({}, path),
    "weights_dir": weights_root,
    "api_key_file": lambda path: load_keys(ServerConfig(api_key_file=path)),
    "admin_key_file": lambda path: load_admin_keys(ServerConfig(admin_key_file=path, enable_rl=True)),
    "NANO_INFERENCE_CACHE": lambda path: default_cache({"NANO_INFERENCE_CACHE": path}),
    "NANOCHAT_BASE_DIR": lambda path: nanochat_home({"NANOCHAT_BASE_DIR": path}),
}


@pytest.mark.parametrize("name", TAKING)
@pytest.mark.parametrize("path", BAD, ids=["long", "long part", "zero byte", "unknown home"])
def test_too_long_path_error_states_limit(name: str, path: str) -> None:
    with pytest.raises(ValueError, match=f"^{name.partition(' ')[0]}: .*{BAD[path]}") as caught:
        TAKING[name](path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_client_gets_error_for_too_long_path(tmp_path: Path) -> None:
    for path in (LONG, "y" * 300, NUL):
        with pytest.raises(ApiError) as caught:
            place_of(tmp_path, path, "weight_dir")
        assert caught.value.status == 400 and len(str(caught.value)) < 1000
