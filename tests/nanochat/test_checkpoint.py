"""What a checkpoint's files say about their origin: git_commit, unknown fields, damaged tokenizers."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from nano_inference.nanochat import Engine, get_tokenizer, load_model
from nano_inference.nanochat.checkpoint import Inferred
from nano_inference.nanochat.files import find_files
from nano_inference.nanochat.format import open_nanochat
from nano_inference.types import ModelError
from tests.nanochat.talkative import Uniform
from tests.nanochat.tiny import PATTERN, SPECIAL_IDS, base_meta, model_config, write_checkpoint, write_tokenizer


def opened(path: Path, *overrides: str, **selection: Any) -> Inferred:
    files = find_files(path, **selection)
    assert files is not None
    inferred = open_nanochat(files, overrides).inferred
    assert isinstance(inferred, Inferred)
    return inferred


def experiment(path: Path, generation: str, commit: str) -> Path:
    """Write an experiment whose meta.json names a commit."""
    write_tokenizer(path / "tokenizer")
    (path / "meta.json").write_text(json.dumps({"name": path.name, "git_commit": commit}))
    write_checkpoint(path / "d2" / "base", generation, meta=base_meta(generation))
    return path


@pytest.mark.parametrize(
    ("commit", "generation", "softcap", "rope_dtype"),
    [
        ("e7ed208", "G2", 15.0, "bfloat16"),
        ("aba30cb0354edde5ea0bc8a8ab9ba8b5dd35b8ec", "G2s", 20.0, "bfloat16"),
        ("1076f9705", "G2s", 20.0, "float32"),
    ],
)
def test_commit_decides_between_soft_caps(
    tmp_path: Path, commit: str, generation: str, softcap: float, rope_dtype: str
) -> None:
    other = "G2s" if generation == "G2" else "G2"
    found = opened(experiment(tmp_path / "first", other, commit))
    assert (found.constants.generation, found.constants.softcap) == (generation, softcap)
    assert found.constants.rope_dtype == rope_dtype and found.reasons["generation"] == f"git_commit {commit}"
    assert not found.warnings
    by_hand = opened(tmp_path / "first", "softcap=17", "rope_dtype=float32")
    assert (by_hand.constants.softcap, by_hand.constants.rope_dtype) == (17.0, "float32")
    assert opened(tmp_path / "first", "generation=G3").constants.generation == "G3"


def test_commit_in_the_checkpoints_meta_file_is_used(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_checkpoint(tmp_path, "G2", meta={"git_commit": "b07604e"})
    assert opened(tmp_path).constants.generation == "G2s"


@pytest.mark.parametrize("commit", ["1234567", "e7ed2", "master", 7, None])
def test_unknown_commit_changes_nothing(tmp_path: Path, commit: object) -> None:
    write_tokenizer(tmp_path)
    write_checkpoint(tmp_path, "G2", meta={"git_commit": commit})
    found = opened(tmp_path)
    assert found.constants.generation == "G2" and "soft cap 15 is assumed" in found.warnings[0]


@pytest.mark.parametrize("generation", ["G0", "G1", "G2e", "G3", "G4"])
def test_weights_decide_where_they_are_unambiguous(tmp_path: Path, generation: str) -> None:
    found = opened(experiment(tmp_path / "first", generation, "aba30cb"))
    assert found.constants.generation == generation


def test_unknown_fields_of_model_config_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model_config("G4", rotary_percent=0.5, dropout=0.0)
    write_tokenizer(tmp_path / "tokenizer")
    write_checkpoint(tmp_path / "base_checkpoints" / "d4", "G4", config=config)
    load_model("base", "cpu", "eval", base_dir=tmp_path)
    warning = capsys.readouterr().err.splitlines()[-1]
    names = "'dropout', 'rotary_percent'"
    assert warning == f"warning: model_config has fields of no known generation, which are not used: {names}"
    many = model_config("G4", **{f"field{index}": 1 for index in range(7)})
    write_checkpoint(tmp_path / "base_checkpoints" / "d5", "G4", config=many)
    load_model("base", "cpu", "eval", base_dir=tmp_path, model_tag="d5")
    assert "'field4' and 2 more" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "FIFO"])
@pytest.mark.parametrize("folder", [".", "tokenizer"])
def test_tokenizer_that_is_no_file_is_one_line(tmp_path: Path, folder: str, make: Callable[[Path], None]) -> None:
    write_checkpoint(tmp_path / "base_checkpoints" / "d4", "G4")
    place = tmp_path / "base_checkpoints" / "d4" if folder == "." else tmp_path / folder
    place.mkdir(exist_ok=True)
    make(place / "tokenizer.pkl")
    for read in (lambda: load_model("base", "cpu", "eval", base_dir=tmp_path), lambda: get_tokenizer(place)):
        with pytest.raises(
            ModelError, match=r"^\S+tokenizer\.pkl: cannot be read: is a (directory|FIFO), not a"
        ) as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("absent", ["python_start", "output_end", "assistant_end"])
def test_engine_names_special_token_that_tokenizer_lacks(tmp_path: Path, absent: str) -> None:
    special = {f"<|{name}|>": token for name, token in SPECIAL_IDS.items() if name != absent}
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(name="rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    engine = Engine(Uniform(265), get_tokenizer(tmp_path))
    for ask in (engine.generate_batch, lambda *tokens, **options: next(engine.generate(*tokens, **options))):
        with pytest.raises(ModelError, match=rf"^tokenizer: has no special token <\|{absent}\|>, which"):
            ask([256, 72], max_tokens=2)
