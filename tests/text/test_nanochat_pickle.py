"""tokenizer.pkl: pickles written by CPython are read, all others are refused, and no code is run."""

from __future__ import annotations

import codecs
import os
import pickle
import pickletools
import random
from pathlib import Path

import pytest
import tiktoken
from nanochat_attacks import bombs, calls, state, with_state, wrong_states
from nanochat_samples import PATTERN, RANKS, SPECIAL, encoding, write_pickle

from nano_inference.nanochat import pickled as nanochat_pickle
from nano_inference.nanochat.pickled import read_encoding, read_fields
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tiktoken_file import TiktokenTokenizer
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import ModelError


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


def test_large_pickle_is_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    ranks = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(ranks) < 5000:  # more than one batch of a dict, and words longer than 255 bytes
        ranks.setdefault(rng.randbytes(rng.choice([2, 3, 5, 300])))
    table = {word: rank for rank, word in enumerate(ranks)}
    big = tiktoken.Encoding("big", pat_str=PATTERN, mergeable_ranks=table, special_tokens={"<|bos|>": 5000})
    for protocol in (2, 3, 4, 5):
        assert read_fields(write_pickle(tmp_path, big, protocol)).mergeable_ranks == table


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


class Encodes:
    """Pickles as a call of `_codecs.encode`."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return codecs.encode, self._arguments


def pickle_of(**changes: object) -> tiktoken.Encoding:
    return tiktoken.Encoding(**state(**changes))  # type: ignore[arg-type]


def test_pickle_has_precedence_over_tokenizer_json(tmp_path: Path) -> None:
    write_pickle(tmp_path, encoding())
    (tmp_path / "tokenizer.json").write_text("{")
    assert load(tmp_path).vocab_size == len(RANKS) + 9


@pytest.mark.parametrize("pattern", ["", r"\w+"])
def test_pattern_that_loses_text_is_refused(tmp_path: Path, pattern: str) -> None:
    content = {**state(), "pat_str": pattern}
    (tmp_path / "tokenizer.pkl").write_bytes(with_state(content))
    with pytest.raises(ModelError, match=r"tokenizer\.pkl: .*(pat_str is empty|loses parts)"):
        load(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_with_state_writes_a_valid_file(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(with_state(state(), protocol))
    assert load(tmp_path).vocab_size == len(RANKS) + 9


@pytest.mark.parametrize("name", list(calls(Path("x"))))
def test_calls_are_refused_and_not_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    data = calls(marker)[name]
    (tmp_path / "tokenizer.pkl").write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer.pkl: not nanochat's pickled"):
        load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.exec"])
def test_unpickling_runs_the_calls(tmp_path: Path, name: str) -> None:
    pickle.loads(calls(tmp_path / "marker")[name])
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", list(bombs()))
def test_bombs_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(bombs()[name])
    with pytest.raises(ModelError, match=r"tokenizer.pkl: not nanochat's pickled"):
        read_encoding(path)


@pytest.mark.parametrize("name", list(wrong_states()))
def test_wrong_states_are_named(tmp_path: Path, name: str) -> None:
    content, message = wrong_states()[name]
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(with_state(content))
    with pytest.raises(ModelError, match=message) as error:
        read_encoding(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


NAME = b"\x8c\x0dtiktoken.core\x8c\x08Encoding\x93"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (NAME + b")\x81}" + b"\x8c\x01a" + b"\x80\x04", r"opcode '\\x80' at byte 34"),
        (NAME + b")R" + b"0", "opcode '0'"),
        (NAME + b"K\x01\x85\x81", "not one tiktoken.Encoding"),
        (b"c_codecs\nencode\n)\x81", "not one tiktoken.Encoding"),
        (NAME, "not one tiktoken.Encoding"),
        (NAME + b")\x81" + NAME + b")\x81", "exactly one value"),
        (NAME + b")\x81\x8c\x01ab\x8c\x01bb", "sets the state of an instance twice"),
        (b"cos\nsystem\n)R", "it names 'os system'"),
    ],
)
def test_invalid_opcodes_are_refused(tmp_path: Path, body: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(b"\x80\x04" + body + b".")
    with pytest.raises(ModelError, match=message):
        read_fields(path)


@pytest.mark.parametrize(
    "arguments", [("a", "rot13"), ("\u0104", "latin1"), ("a",), (), (b"a", "latin1"), ("a", "latin1", 1)]
)
def test_calls_that_encode_no_bytes_are_refused(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    ranks = {Encodes(*arguments): 0}
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(with_state(state(mergeable_ranks=ranks)))
    with pytest.raises(ModelError, match=r"calls _codecs\.encode other than for bytes"):
        read_fields(path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.pkl"
    for protocol in (2, 4):
        data = pickle.dumps(encoding(), protocol=protocol)
        middle = range(400, len(data) - 400)  # repetitive content
        for size in (size for size in range(len(data)) if size not in middle):
            path.write_bytes(data[:size])
            with pytest.raises(ModelError):
                read_fields(path)


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "tokenizer.pkl"
    refused = 0
    for round_ in range(600):
        data = bytearray(pickle.dumps(encoding(), protocol=2 + round_ % 4))
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_encoding(path)
        except ModelError:
            refused += 1
    assert refused > 300


def test_random_opcodes_are_refused(tmp_path: Path) -> None:
    rng = random.Random(11)
    path = tmp_path / "tokenizer.pkl"
    opcodes = [info.code.encode("latin-1") for info in pickletools.opcodes]
    for _ in range(600):
        body = b"".join(rng.choice(opcodes) + rng.randbytes(rng.choice([0, 0, 1, 4])) for _ in range(40))
        path.write_bytes(
            b"\x80\x04" + rng.choice([b"", b"\x8c\x0dtiktoken.core\x8c\x08Encoding\x93)\x81"]) + body + b"."
        )
        with pytest.raises(ModelError):
            read_fields(path)


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


def test_number_of_entries_is_limited(tmp_path: Path) -> None:
    ranks = {number.to_bytes(3, "big"): number for number in range(nanochat_pickle.MAX_ENTRIES + 1)}
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(with_state(state(mergeable_ranks=ranks, special_tokens={"<|bos|>": len(ranks)})))
    with pytest.raises(ModelError, match=f"more than {nanochat_pickle.MAX_ENTRIES} entries"):
        read_fields(path)
