"""Constants that a checkpoint's git_commit decides, and what is said about files that are odd."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from nano_inference.nanochat import Engine, get_tokenizer
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


@pytest.mark.parametrize(
    ("weights", "commit", "generation", "softcap", "rope_dtype"),
    [
        ("G2s", "e7ed208", "G2", 15.0, "bfloat16"),
        ("G2", "aba30cb0354edde5ea0bc8a8ab9ba8b5dd35b8ec", "G2s", 20.0, "bfloat16"),
        ("G2", "1076f9705", "G2s", 20.0, "float32"),
        ("G3", "aba30cb", "G3", 15.0, "float32"),  # the weights decide
        ("G2e", "aba30cb", "G2e", 15.0, "bfloat16"),
    ],
)
@pytest.mark.parametrize("is_in_experiment", [True, False])
def test_commit_decides_between_soft_caps(
    tmp_path: Path, weights: str, commit: str, generation: str, softcap: float, rope_dtype: str, is_in_experiment: bool
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "meta.json").write_text(json.dumps({"git_commit": commit if is_in_experiment else None}))
    given = {} if is_in_experiment else {"git_commit": commit}
    write_checkpoint(tmp_path / "d2" / "base", weights, meta=base_meta(weights) | given)
    found = opened(tmp_path)
    assert (found.constants.generation, found.constants.softcap) == (generation, softcap)
    assert found.constants.rope_dtype == rope_dtype and not found.warnings
    assert (found.reasons["generation"] == f"git_commit {commit}") == (generation in ("G2", "G2s"))
    by_hand = opened(tmp_path, "softcap=17", "rope_dtype=float32")
    assert (by_hand.constants.softcap, by_hand.constants.rope_dtype) == (17.0, "float32")


@pytest.mark.parametrize("commit", ["1234567", "e7ed2", "master", 7, None])
def test_unknown_commit_changes_nothing(tmp_path: Path, commit: object) -> None:
    write_checkpoint(write_tokenizer(tmp_path), "G2", meta={"git_commit": commit})
    found = opened(tmp_path)
    assert found.constants.generation == "G2" and "soft cap 15 is assumed" in found.warnings[0]


def test_unknown_fields_of_model_config_are_named(tmp_path: Path) -> None:
    config = model_config("G4", **{f"field{index}": 1 for index in range(7)})
    write_checkpoint(write_tokenizer(tmp_path), "G4", config=config)
    (warning,) = opened(tmp_path).warnings
    assert warning.startswith("model_config has fields of no known generation, which are not used: 'field0', ")
    assert warning.endswith("'field4' and 2 more")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "FIFO"])
def test_tokenizer_that_is_no_file_is_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write_checkpoint(tmp_path, "G4")
    make(tmp_path / "tokenizer.pkl")
    for read in (lambda: opened(tmp_path), lambda: get_tokenizer(tmp_path)):
        with pytest.raises(ModelError, match=r"^\S+tokenizer\.pkl: cannot be read: is a (directory|FIFO), not a"):
            read()


def test_engine_names_special_token_that_tokenizer_lacks(tmp_path: Path) -> None:
    special = {f"<|{name}|>": token for name, token in SPECIAL_IDS.items() if name != "output_end"}
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(name="rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    with pytest.raises(ModelError, match=r"^tokenizer: has no special token <\|output_end\|>, which"):
        Engine(Uniform(265), get_tokenizer(tmp_path)).generate_batch([256, 72], max_tokens=2)
