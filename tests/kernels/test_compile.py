"""Compilation of the kernels, and the `Library` class."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nano_inference.build import kernels_here
from nano_inference.executors.cpu import library as kernels
from nano_inference.executors.cpu import native
from nano_inference.executors.cpu.compile import (
    CannotCompile,
    CannotKeep,
    best_isa,
    compile_library,
    compiled_library,
    cpu_flags,
    options,
)
from nano_inference.executors.cpu.library import Library
from nano_inference.loading.catalog import default_cache
from tests.kernels.steps import have_ended, in_child, threads_here

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def fake_compiler(folder: Path, then: str) -> dict[str, str]:
    """Return an environment whose compiler logs its calls and runs the shell command `then`; "$out" is the output."""
    script = folder / "fakecc"
    script.write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/calls
[ "$1" = --version ] && echo fake 1.0 && exit 0
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
{then}
"""
    )
    script.chmod(0o755)
    return {"CC": str(script)}


def num_compiles(folder: Path) -> int:
    return sum(" -o " in line for line in (folder / "calls").read_text().splitlines())


def test_compiled_library_is_cached(tmp_path: Path) -> None:
    environ = fake_compiler(tmp_path, "echo made > $out")
    first = compile_library("generic", tmp_path / "cache", environ)
    assert first == compile_library("generic", tmp_path / "cache", environ)
    assert first.read_text() == "made\n" and num_compiles(tmp_path) == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name], "temporary files remain"
    other = compile_library("generic", tmp_path / "cache", environ, extra=("-g",))
    assert other != first and num_compiles(tmp_path) == 2
    assert first.parent.stat().st_mode & 0o077 == 0


def test_missing_compiler_raises_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(CannotCompile, match=r"^no C compiler \(nosuchcc\) was found; install one \(.*gcc|xcode"):
        compile_library("generic", tmp_path, {"CC": "nosuchcc"})
    with pytest.raises(CannotCompile, match=r"^no C compiler \(cc, gcc, clang\) was found; install"):
        compile_library("generic", tmp_path, {"PATH": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("echo In file; echo 'x.c:1: error: boom\nx.c:2: error: more' >&2; exit 1", "x.c:1: error: boom"),
        ("echo 'ld: killed\nlast' >&2; exit 1", "ld: killed"),
        ("exit 3", ""),
        (r"printf 'error: \351t\351\n' >&2; exit 1", "error: "),
    ],
)
def test_failing_compiler_raises_one_line_error(tmp_path: Path, then: str, reason: str) -> None:
    environ = fake_compiler(tmp_path, then)
    with pytest.raises(CannotCompile) as caught:
        compile_library("generic", tmp_path / "cache", environ)
    assert f"failed: {reason}" in str(caught.value) and "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_non_executable_compiler_raises_one_line_error(tmp_path: Path) -> None:
    script = tmp_path / "cc"
    script.write_bytes(b"\x7fELF nonsense")
    script.chmod(0o755)
    with pytest.raises(CannotCompile, match=r"^\S+ could not be run: .*$"):
        compile_library("generic", tmp_path, {"CC": str(script)})


def test_options_depend_on_cpu_flags() -> None:
    assert best_isa(frozenset()) == best_isa(AVX2 - {"fma"}) == "generic"
    assert best_isa(AVX2) == best_isa(AVX512 - {"avx512dq"}) == "avx2"
    assert best_isa(AVX512 | {"sse2"}) == "avx512"
    assert not [option for option in options("generic", AVX512) if option.startswith("-m")]
    assert {"-mavx2", "-mfma", "-mf16c"} <= set(options("avx2", AVX512))
    assert not [option for option in options("avx2", AVX512) if "512" in option]
    assert "-mavx512vnni" in options("avx512", AVX512 | {"avx512_vnni"})
    assert "-mavx512vnni" not in options("avx512", AVX512)
    assert "-mavxvnni" in options("avx2", AVX2 | {"avx_vnni"}) and "-mavxvnni" not in options("avx2", AVX2)
    assert best_isa(cpu_flags()) in ("avx512", "avx2", "generic")


# ---- Library --------------------------------------------------------------------------------------------------------


def test_ctypes_structures_match_the_library(library: Library, isa: str) -> None:
    assert library.isa == isa
    assert len(kernels.STRUCTS) == 10
    for which, struct in enumerate(kernels.STRUCTS):
        assert library.code.nano_sizes(which) == ctypes.sizeof(struct)
    assert library.code.nano_sizes(10) == -1


@pytest.mark.parametrize("threads", [0, -1, 257, 10**6])
def test_invalid_thread_count_raises(library: Library, threads: int) -> None:
    assert library.code.nano_pool_new(threads, 0) is None


def test_closed_library_creates_a_new_pool(library: Library) -> None:
    logits_BV = torch.randn(3, 100)
    before = native.draw(library, logits_BV, [0.0] * 3, [0.0] * 3, [True] * 3)
    library.close()
    library.close()
    assert native.draw(library, logits_BV, [0.0] * 3, [0.0] * 3, [True] * 3) == before


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list a process's threads")
def test_threads_end_with_the_library(library: Library) -> None:
    before = threads_here()
    own = Library(Path(library.code._name), 5)
    native.draw(own, torch.randn(3, 100), [0.0] * 3, [0.0] * 3, [True] * 3)
    started = threads_here() - before
    assert len(started) == 4
    del own
    gc.collect()
    assert have_ended(started)


def test_library_serialises_calls_of_two_threads(library: Library) -> None:
    """Engines that share weights also share a library, each in its own thread."""
    logits_BV = torch.randn(16, 5000)
    arguments = ([1.0] * 16, [0.3] * 16, [False] * 16)
    expected = native.draw(library, logits_BV, *arguments)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda _: native.draw(library, logits_BV, *arguments), range(200))
        assert all(one == expected for one in found)


def test_forked_child_creates_its_own_threads(library: Library) -> None:
    logits_BV = torch.randn(8, 1000)
    arguments = ([0.0] * 8, [0.0] * 8, [True] * 8)
    expected = native.draw(library, logits_BV, *arguments)
    assert in_child(lambda: native.draw(library, logits_BV, *arguments) == expected and library.close() is None) == 0
    assert native.draw(library, logits_BV, *arguments) == expected


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
