"""tokenizer.pkl: pickles written by CPython are read, all others are refused, and no code is run."""

from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path

import pytest
import tiktoken

from nano_inference.nanochat import pickled as nanochat_pickle
from nano_inference.nanochat.pickled import read_encoding, read_fields
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tiktoken_file import TiktokenTokenizer
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import ModelError
from tests.nanochat.attacks import calls, state, with_state, wrong_states
from tests.nanochat.samples import PATTERN, RANKS, SPECIAL, encoding, write_pickle


def load(directory: Path) -> TiktokenTokenizer:
    tokenizer = load_tokenizer(TokenizerSource(str(directory)))
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", ["c", "python", "optimized"])
def test_real_pickles_are_read(tmp_path: Path, protocol: int, pickler: str) -> None:
    data = (pickle._dumps if pickler == "python" else pickle.dumps)(encoding(), protocol=protocol)
    (tmp_path / "tokenizer.pkl").write_bytes(pickletools.optimize(data) if pickler == "optimized" else data)
    fields = read_fields(tmp_path / "tokenizer.pkl")
    assert fields.name == "rustbpe" and fields.pat_str == PATTERN
    assert list(fields.mergeable_ranks) == list(RANKS) and list(fields.mergeable_ranks.values()) == [*range(len(RANKS))]
    assert fields.special_tokens == {text: len(RANKS) + index for index, text in enumerate(SPECIAL)}
    ours, theirs = read_encoding(tmp_path / "tokenizer.pkl"), pickle.loads(data)
    assert ours.encode("hello  world 日本 12345 <|bos|>", allowed_special="all") == theirs.encode(
        "hello  world 日本 12345 <|bos|>", allowed_special="all"
    )


def test_tokenizer_of_a_directory(tmp_path: Path) -> None:
    write_pickle(tmp_path, encoding())
    ours = load(tmp_path)
    first = len(RANKS)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (first, (first + 4, first), first + 9)
    assert ours.special_ids == frozenset(range(first, first + 9))
    assert dict(ours.named) == {"bos_token": "<|bos|>", "eos_token": "<|assistant_end|>"}
    assert ours.encode("hello") == [first, RANKS.index(b"hello")]
    assert not ours.special_ids & set(ours.encode("<|bos|>", add_special=False, parse_special=False))


def test_bos_of_an_openai_encoding(tmp_path: Path) -> None:
    special = {"<|endoftext|>": len(RANKS) + 3}
    write_pickle(tmp_path, pickle_of(special_tokens=special))
    ours = load(tmp_path)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (len(RANKS) + 3, (len(RANKS) + 3,), len(RANKS) + 4)
    write_pickle(tmp_path, pickle_of(special_tokens={"<|start|>": len(RANKS)}))
    with pytest.raises(ModelError, match=r"tokenizer.pkl: has neither .*<\|bos\|> and <\|endoftext\|>"):
        load(tmp_path)


def pickle_of(**changes: object) -> tiktoken.Encoding:
    return tiktoken.Encoding(**state(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["", r"\w+"])
def test_pattern_that_loses_text_is_refused(tmp_path: Path, pattern: str) -> None:
    content = {**state(), "pat_str": pattern}
    (tmp_path / "tokenizer.pkl").write_bytes(with_state(content))
    with pytest.raises(ModelError, match=r"tokenizer\.pkl: .*(pat_str is empty|loses parts)"):
        load(tmp_path)


@pytest.mark.parametrize("name", list(calls(Path("x"))))
def test_calls_are_refused_and_not_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    data = calls(marker)[name]
    (tmp_path / "tokenizer.pkl").write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer.pkl: not nanochat's pickled"):
        load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("name", list(wrong_states()))
def test_wrong_states_are_named(tmp_path: Path, name: str) -> None:
    content, message = wrong_states()[name]
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(with_state(content))
    with pytest.raises(ModelError, match=message) as error:
        read_encoding(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_too_large_and_non_regular_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.pkl"
    with path.open("wb") as file:
        file.truncate(nanochat_pickle.MAX_FILE + 1)
    with pytest.raises(ModelError, match=f"more than {nanochat_pickle.MAX_FILE} bytes"):
        read_fields(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is a FIFO, not a regular file"):
        read_fields(path)
    with pytest.raises(ModelError, match=r"nothing\.pkl: cannot be read"):
        read_fields(tmp_path / "nothing.pkl")


def test_number_of_entries_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanochat_pickle, "MAX_ENTRIES", 1000)
    ranks = {number.to_bytes(3, "big"): number for number in range(nanochat_pickle.MAX_ENTRIES + 1)}
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(with_state(state(mergeable_ranks=ranks, special_tokens={"<|bos|>": len(ranks)})))
    with pytest.raises(ModelError, match=f"more than {nanochat_pickle.MAX_ENTRIES} entries"):
        read_fields(path)
