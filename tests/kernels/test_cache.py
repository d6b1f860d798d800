"""The cache of compiled libraries: damaged ones are recompiled, ones that others could have written are not loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano_inference.build import kernels_here
from nano_inference.executors.cpu.compile import (
    CannotCompile,
    CannotKeep,
    best_isa,
    compile_library,
    compiled_library,
    cpu_flags,
)
from nano_inference.loading.catalog import default_cache
from tests.kernels.steps import in_child
from tests.kernels.test_compile import fake_compiler, num_compiles

Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_library_is_recompiled(tmp_path: Path, name: str) -> None:
    environ = fake_compiler(tmp_path, "echo made > $out")
    path = compile_library("generic", tmp_path / "cache", environ)
    DAMAGES[name](path)
    again = compile_library("generic", tmp_path / "cache", environ)
    assert again == path and again.read_text() == "made\n" and num_compiles(tmp_path) == 2
    assert again.stat().st_mode & 0o022 == 0 and list(path.parent.iterdir()) == [path]
    assert compile_library("generic", tmp_path / "cache", environ) == path and num_compiles(tmp_path) == 2


def test_damaged_library_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading an empty library raises; loading a truncated one ends a process by SIGBUS: the load is in a child."""
    good = compile_library(best_isa(cpu_flags()), default_cache(os.environ), os.environ)
    script = fake_compiler(tmp_path, f"cp {good} $out")["CC"]
    monkeypatch.setenv("NANO_INFERENCE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", script)
    compile_library(best_isa(cpu_flags()), tmp_path, os.environ)
    for size in (0, 8192):
        for path in (tmp_path / "kernels").glob("*.so"):
            os.truncate(path, size)
        assert in_child(lambda: kernels_here()["code"] == best_isa(cpu_flags())) == 0
    assert num_compiles(tmp_path) == 3


def test_empty_compiler_output_raises(tmp_path: Path) -> None:
    with pytest.raises(CannotCompile, match="made an empty file"):
        compile_library("generic", tmp_path / "cache", fake_compiler(tmp_path, ": > $out"))
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@pytest.mark.parametrize("level", ["kernels", "cache", "above"])
@pytest.mark.parametrize("how", ["world", "group", "owner"])
def test_cache_writable_by_others_is_not_used(tmp_path: Path, temporary: Path, level: str, how: str) -> None:
    environ = fake_compiler(tmp_path, "echo made > $out")
    above = tmp_path / "above"
    planted = compile_library("generic", above / "cache", environ)
    folder = {"kernels": planted.parent, "cache": above / "cache", "above": above}[level]
    if how == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(folder, 12345, 12345)
    else:
        os.chown(folder, -1, 1 if os.getuid() == 0 else -1)  # not the private group of the user
        folder.chmod(0o777 if how == "world" else 0o775)
    if how == "group" and folder.stat().st_gid == os.getgid():
        pytest.skip("the only group here is this user's private one")
    with pytest.raises(CannotKeep, match=f"not used for compiled code: {folder} "):
        compile_library("generic", above / "cache", environ)
    with compiled_library("generic", above / "cache", environ) as path:
        assert path.read_text() == "made\n" and path.is_relative_to(temporary)
    assert list(temporary.iterdir()) == [] and planted.exists()


def test_sticky_parent_directory_is_accepted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    environ = fake_compiler(tmp_path, "echo made > $out")
    (shared / "cache").mkdir()
    assert compile_library("generic", shared / "cache", environ).is_relative_to(shared)
    (shared / "kernels").mkdir()
    (shared / "kernels").chmod(0o1777)
    with pytest.raises(CannotKeep, match="is writable by others"):
        compile_library("generic", shared, environ)


def test_symlink_into_writable_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "real").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "cache").symlink_to("open/real")
    with pytest.raises(CannotKeep, match=f"{tmp_path / 'open'} is writable by others"):
        compile_library("generic", tmp_path / "cache", fake_compiler(tmp_path, "echo made > $out"))


def test_unwritable_cache_uses_and_removes_a_temporary_folder(tmp_path: Path, temporary: Path) -> None:
    environ = fake_compiler(tmp_path, "echo made > $out")
    (tmp_path / "file").write_text("")
    for _ in range(3):
        with compiled_library("generic", tmp_path / "file", environ) as made:
            assert made.read_text() == "made\n" and made.is_relative_to(temporary)
        assert list(temporary.iterdir()) == []
    with (
        pytest.raises(CannotCompile, match="failed"),
        compiled_library("generic", tmp_path / "file", fake_compiler(tmp_path, "exit 1")),
    ):
        pass
    assert list(temporary.iterdir()) == []


def test_concurrent_compilations_do_not_interfere(tmp_path: Path) -> None:
    environ = fake_compiler(tmp_path, "echo made > $out")
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: compile_library("generic", tmp_path / "cache", environ), range(16)))
    (path,) = found
    assert path.read_text() == "made\n" and list(path.parent.iterdir()) == [path]
