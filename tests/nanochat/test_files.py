"""Finding the checkpoint of a path, in every directory layout of nanochat."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nano_inference.nanochat import files
from nano_inference.nanochat.files import NanochatFiles, find_files
from nano_inference.types import MissingFile, ModelError


def checkpoint(directory: Path, *steps: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for step in steps or (1,):
        (directory / f"model_{step:06d}.pt").touch()
        (directory / f"meta_{step:06d}.json").write_text("{}")
        (directory / f"optim_{step:06d}_rank0.pt").touch()
    return directory


def tokenizer(directory: Path, name: str = "tokenizer.pkl") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).touch()
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return nanochat's base directory after a complete run."""
    checkpoint(tmp_path / "base_checkpoints" / "d20", 21400)
    checkpoint(tmp_path / "base_checkpoints" / "d34", 169150)
    checkpoint(tmp_path / "mid_checkpoints" / "d20", 765)
    checkpoint(tmp_path / "chatsft_checkpoints" / "d20", 650, 700)
    checkpoint(tmp_path / "chatrl_checkpoints" / "d20", 466)
    tokenizer(tmp_path / "tokenizer")
    return tmp_path


def found(path: Path, **named: object) -> NanochatFiles:
    one = find_files(path, **named)  # type: ignore[arg-type]
    assert one is not None
    assert one.weights.is_file() and one.meta.is_file()
    return one


def test_file_path_finds_its_meta_file(base: Path) -> None:
    path = base / "chatsft_checkpoints" / "d20" / "model_000650.pt"
    assert found(path) == NanochatFiles(
        weights=path,
        meta=path.with_name("meta_000650.json"),
        step=650,
        tokenizer=base / "tokenizer",
        source="sft",
        git_commit=None,
    )
    assert found(path, source="sft", model_tag="d20", step=650).step == 650


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"source": "base"}, "no checkpoint of the source base; there is sft"),
        ({"model_tag": "d34"}, "no model tag 'd34'; there is d20"),
        ({"step": 700}, "is step 650, but step 700 was requested"),
    ],
)
def test_options_must_agree_with_a_file_path(base: Path, named: dict[str, str], message: str) -> None:
    path = base / "chatsft_checkpoints" / "d20" / "model_000650.pt"
    with pytest.raises(ModelError, match=message) as caught:
        found(path, **named)
    assert str(path) in str(caught.value)


def test_flat_directory(tmp_path: Path) -> None:
    tokenizer(checkpoint(tmp_path / "nanochat", 650))
    files = found(tmp_path / "nanochat")
    assert (files.step, files.tokenizer, files.source) == (650, tmp_path / "nanochat", None)
    assert found(tmp_path / "nanochat", source="rl").source is None


def test_base_directory_defaults_to_sft(base: Path) -> None:
    files = found(base)
    assert files.weights == base / "chatsft_checkpoints" / "d20" / "model_000700.pt"
    assert (files.source, files.tokenizer) == ("sft", base / "tokenizer")


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("base", "base_checkpoints/d34/model_169150.pt"),
        ("mid", "mid_checkpoints/d20/model_000765.pt"),
        ("sft", "chatsft_checkpoints/d20/model_000700.pt"),
        ("rl", "chatrl_checkpoints/d20/model_000466.pt"),
    ],
)
def test_base_directory_with_source(base: Path, source: str, where: str) -> None:
    assert found(base, source=source).weights == base / where
    assert found(base, source=source).source == source


def test_single_source_is_selected_and_two_are_ambiguous(base: Path, tmp_path: Path) -> None:
    for name in ("chatsft_checkpoints", "mid_checkpoints", "chatrl_checkpoints"):
        (base / name).rename(tmp_path / f"away-{name}")
    assert found(base).source == "base"
    (tmp_path / "away-mid_checkpoints").rename(base / "mid_checkpoints")
    with pytest.raises(ModelError, match="ambiguous: name the source, one of base, mid"):
        found(base)


@pytest.mark.parametrize(
    ("tags", "chosen"),
    [
        (("d4", "d20", "d12"), "d20"),
        (("d24_jan29", "d20"), "d24_jan29"),
        (("d24_b", "d24_a", "x99"), "d24_a"),
        (("d9", "depth99", "d"), "d9"),
        (("d007", "d8"), "d8"),
    ],
)
def test_tag_with_largest_number_is_selected(tmp_path: Path, tags: tuple[str, ...], chosen: str) -> None:
    for tag in tags:
        checkpoint(tmp_path / tag)
    (tmp_path / "d999").mkdir()
    assert found(tmp_path).weights.parent.name == chosen


def test_latest_directory_is_selected_without_numbers(tmp_path: Path) -> None:
    for tag, seconds in (("a", 100), ("b", 300), ("c", 300), ("e", 200)):
        checkpoint(tmp_path / tag)
        os.utime(tmp_path / tag, (seconds, seconds))
    assert found(tmp_path).weights.parent.name == "b"


@pytest.mark.parametrize("tags", [("a", "b"), ("a",)])
def test_directory_that_vanishes_after_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: tuple[str, ...]
) -> None:
    for tag in tags:
        checkpoint(tmp_path / tag)
    listed = files._tags_by_source

    def vanishing(path: Path) -> Any:
        try:
            return listed(path)
        finally:
            shutil.rmtree(tmp_path / "a")

    monkeypatch.setattr(files, "_tags_by_source", vanishing)
    if "b" in tags:
        assert found(tmp_path).weights.parent.name == "b"
    else:
        with pytest.raises(MissingFile, match="no step"):
            found(tmp_path)


def test_highest_step_is_selected_numerically(tmp_path: Path) -> None:
    checkpoint(tmp_path, 999999, 1000000, 5)
    (tmp_path / "model_2000000.pt.tmp").touch()
    (tmp_path / "model_3000000.pt").mkdir()
    assert found(tmp_path).step == 1000000
    assert found(tmp_path, step=5).weights.name == "model_000005.pt"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"source": "base", "model_tag": "d12"}, "no model tag 'd12'; there is d20, d34"),
        ({"step": 3}, "no step 3; there is 650, 700"),
        ({"source": "chat"}, "source must be one of sft, rl, mid, base, got 'chat'"),
        ({"model_tag": "../../base_checkpoints/d20"}, "must be a plain directory name"),
        ({"model_tag": "a\\b"}, "must be a plain directory name"),
        ({"model_tag": "a\0"}, "must be a plain directory name"),
    ],
)
def test_missing_item_error_lists_existing_ones(base: Path, named: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        found(base, **named)
    assert str(base) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_meta_file_is_rejected(base: Path) -> None:
    directory = base / "chatsft_checkpoints" / "d20"
    (directory / "meta_000700.json").unlink()
    with pytest.raises(ModelError, match=r"model_000700\.pt: its meta file meta_000700\.json is missing"):
        found(base)
    assert found(base, step=650).step == 650


def test_other_paths_are_not_recognised(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "pytorch_model.pt", "model_x.pt", "model_1.pth", "a.gguf"):
        (tmp_path / name).touch()
        assert find_files(tmp_path / name) is None
    tokenizer(tmp_path / "tokenizer")
    assert find_files(tmp_path) is None
    assert find_files(tmp_path / "absent") is None
    assert find_files(tmp_path / ("x" * 5000)) is None
    assert find_files(Path("a\0b")) is None


@pytest.fixture
def experiments(tmp_path: Path) -> Path:
    """Return a directory in the experiments layout, with three experiments."""
    home = tmp_path / "experiments"
    for name in ("another", "default", "other"):
        checkpoint(home / name / "d12" / "base", 100)
        checkpoint(home / name / "d12" / "sft", 7)
        checkpoint(home / name / "d24" / "base", 200)
        tokenizer(home / name / "tokenizer")
        (home / name / "meta.json").write_text(json.dumps({"name": name, "git_commit": "0123abc" * 5}))
    return home


def test_experiments_layout_from_each_level(experiments: Path, tmp_path: Path) -> None:
    default = experiments / "default"
    for path in (tmp_path, experiments, default):
        files = found(path)
        assert files.weights == default / "d12" / "sft" / "model_000007.pt"
        assert (files.source, files.git_commit, files.tokenizer) == ("sft", "0123abc" * 5, default / "tokenizer")
    assert found(experiments, source="base").step == 200
    assert found(experiments, source="base", model_tag="d12").step == 100
    assert found(experiments / "other").tokenizer == experiments / "other" / "tokenizer"
    assert found(default / "d24").source == "base"
    assert found(default / "d12" / "base").source == "base"
    assert found(default / "d12" / "base", model_tag="d12").step == 100
    assert found(default / "d12" / "base" / "model_000100.pt").git_commit == "0123abc" * 5


def test_several_experiments_require_a_name(experiments: Path) -> None:
    (experiments / "default").rename(experiments / "mine")
    with pytest.raises(ModelError, match="several experiments; name the directory of one: another, mine, other"):
        found(experiments)
    for name in ("mine", "another"):
        (experiments / name).rename(experiments.parent / f"away-{name}")
    assert found(experiments).tokenizer == experiments / "other" / "tokenizer"


def test_both_layouts_together_are_ambiguous(experiments: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "base_checkpoints" / "d4")
    with pytest.raises(ModelError, match="contains both experiments/ and base_checkpoints/"):
        found(tmp_path)


def test_nearest_tokenizer_is_selected(base: Path) -> None:
    directory = base / "chatsft_checkpoints" / "d20"
    assert found(base).tokenizer == base / "tokenizer"
    tokenizer(base / "chatsft_checkpoints" / "tokenizer")
    assert found(base).tokenizer == base / "chatsft_checkpoints" / "tokenizer"
    tokenizer(directory / "tokenizer", "tokenizer.json")
    assert found(base).tokenizer == directory / "tokenizer"
    tokenizer(directory, "tokenizer.json")
    assert found(base).tokenizer == directory


def test_tokenizer_search_stops_at_the_base_directory(tmp_path: Path) -> None:
    tokenizer(tmp_path / "tokenizer")
    assert found(checkpoint(tmp_path / "a" / "b" / "c")).tokenizer == tmp_path / "tokenizer"
    assert found(checkpoint(tmp_path / "a" / "b" / "c" / "e")).tokenizer is None


def test_relative_paths_are_resolved(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base / "chatsft_checkpoints" / "d20")
    for path in (Path(), Path("model_000700.pt"), Path("../d20")):
        assert (found(path).source, found(path).tokenizer) == ("sft", base / "tokenizer")
    assert found(Path("../../base_checkpoints")).source == "base"


def test_symlinked_tag_keeps_its_path(base: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    far = checkpoint(tmp_path_factory.mktemp("disk") / "big")
    (base / "chatsft_checkpoints" / "d40").symlink_to(far, target_is_directory=True)
    files = found(base)
    assert (files.weights.parent.name, files.source, files.tokenizer) == ("d40", "sft", base / "tokenizer")


@pytest.mark.parametrize(
    ("where", "source", "tag"),
    [
        ("d20/chatsft_checkpoints", "sft", "d20"),
        ("d20/chatsft_checkpoints/d20", "sft", "d20"),
        ("d20/chatrl_checkpoints", "rl", "d20"),
    ],
)
def test_directories_of_sources_below_a_tag(tmp_path: Path, where: str, source: str, tag: str) -> None:
    directory = checkpoint(tmp_path / where)
    for path in (tmp_path, tmp_path / "d20", directory, directory / "model_000001.pt"):
        for wish in ({}, {"source": source}, {"source": source, "model_tag": tag}):
            files = found(path, **wish)
            assert (files.weights.parent, files.source) == (directory, source), (path, wish)
