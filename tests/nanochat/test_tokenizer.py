"""nanochat's tokenizer interface, with a small tokenizer."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiktoken
import torch

from nano_inference.nanochat.tokenizer import (
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    MissingPackage,
    RustBPETokenizer,
    get_token_bytes,
    get_tokenizer,
)
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer

WORDS = [bytes([byte]) for byte in range(256)] + [b"he", b"hel", b"hell", b"hello", " é".encode()]
FIRST = len(WORDS)
TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "text", "text": "é"}, {"type": "python", "text": "1+1"}]},
]


def encoding(name: str = "rustbpe") -> tiktoken.Encoding:
    ranks = {word: rank for rank, word in enumerate(WORDS)}
    special = {text: FIRST + index for index, text in enumerate(SPECIAL_TOKENS)}
    return tiktoken.Encoding(name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture
def ours() -> RustBPETokenizer:
    return RustBPETokenizer(encoding(), "<|bos|>")


def test_tokenizer_properties(ours: RustBPETokenizer) -> None:
    assert ours.get_vocab_size() == FIRST + 9 and ours.get_special_tokens() == set(SPECIAL_TOKENS)
    assert ours.get_bos_token_id() == ours.bos_token_id == ours.encode_special("<|bos|>") == FIRST
    assert [ours.encode_special(text) for text in SPECIAL_TOKENS] == [*range(FIRST, FIRST + 9)]
    assert ours.id_to_token(FIRST + 1) == "<|user_start|>" and ours.id_to_token(WORDS.index(b"hello")) == "hello"
    assert ours.decode_single_token_bytes(0xC3) == b"\xc3" and ours.id_to_token(0xC3) == "\ufffd"
    with pytest.raises(KeyError):
        ours.encode_special("<|nothing|>")


def test_texts_and_lists_of_texts(ours: RustBPETokenizer) -> None:
    hello = [WORDS.index(b"hello")]
    assert ours.encode("hello") == ours("hello") == hello
    assert ours.encode("hello", prepend="<|bos|>", append=7) == [FIRST, *hello, 7]
    assert ours.encode("hello", prepend=0) == [0, *hello]
    rows = ours.encode(["hello", "", "he"], prepend=FIRST, append="<|assistant_end|>", num_threads=2)
    assert rows == [[FIRST, *hello, FIRST + 4], [FIRST, FIRST + 4], [FIRST, 256, FIRST + 4]]
    assert ours.encode([]) == [] and max(ours.encode("a<|python_start|>1")) < FIRST, "a text has no special tokens"
    assert ours.decode([0xE2, 104, FIRST]) == "\ufffdh<|bos|>"
    for wrong in (5, None, b"x", ["x", 5]):
        with pytest.raises(ValueError, match="text must be a string or a list of strings"):
            ours.encode(wrong)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["rustbpe", "gpt2"])
def test_saved_tokenizer_is_read_here_and_by_nanochat(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enc = encoding(name)
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, name, enc)  # tiktoken would pickle it as its name
    saved = RustBPETokenizer(enc, "<|bos|>")
    saved.save(tmp_path / "new" / "tokenizer")
    path = tmp_path / "new" / "tokenizer" / "tokenizer.pkl"
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, name)
    theirs = pickle.loads(path.read_bytes())
    for read in (
        get_tokenizer(str(path.parent)),
        RustBPETokenizer.from_directory(path.parent),
        RustBPETokenizer(theirs, "<|bos|>"),
    ):
        assert read.encode("hello é 12") == saved.encode("hello é 12") and read.get_vocab_size() == FIRST + 9
        assert read.get_special_tokens() == set(SPECIAL_TOKENS) and read.get_bos_token_id() == FIRST


def test_token_bytes(tmp_path: Path, ours: RustBPETokenizer) -> None:
    ours.save(tmp_path)
    sizes = get_token_bytes(directory=tmp_path)
    assert sizes.dtype == torch.int32 and sizes.shape == (FIRST + 9,)
    assert sizes.tolist() == [*(len(word) for word in WORDS), *[0] * 9]


def test_text_tokenizer_is_equivalent(tmp_path: Path, ours: RustBPETokenizer) -> None:
    ours.save(tmp_path)
    text: Tokenizer = ours.text
    loaded = load_tokenizer(TokenizerSource(str(tmp_path)))
    for same in (text, loaded):
        assert same.encode("hello") == [FIRST, *ours.encode("hello")]
        assert (same.bos_id, same.eos_ids, same.vocab_size) == (FIRST, (FIRST + 4, FIRST), ours.get_vocab_size())
        assert same.named == {"bos_token": "<|bos|>", "eos_token": "<|assistant_end|>"}


def test_conversations(ours: RustBPETokenizer) -> None:
    ids, mask = ours.render_conversation({"messages": TURNS})
    assert (ids, mask) == ours.render_conversation(TURNS)
    spelled = (
        "<|bos|><|user_start|>hello<|user_end|><|assistant_start|>é<|python_start|>1+1<|python_end|><|assistant_end|>"
    )
    assert ours.decode(ids) == spelled and sum(mask) == len(mask) - 5
    assert ours.render_conversation(TURNS, max_tokens=3) == (ids[:3], mask[:3])
    assert ours.render_for_completion(TURNS) == ids[:5]
    with pytest.raises(AssertionError, match="must be assistant"):
        ours.render_for_completion({"messages": TURNS[:1]})


@pytest.mark.parametrize(
    ("turns", "error"),
    [
        ([], AssertionError),
        ([{"role": "assistant", "content": "x"}], AssertionError),
        ([{"role": "user", "content": ["x"]}], AssertionError),
        ([{"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}], AssertionError),
        ([TURNS[0], {"role": "assistant", "content": 5}], ValueError),
        ([TURNS[0], {"role": "assistant", "content": [{"type": "image", "text": ""}]}], ValueError),
    ],
)
def test_errors_equal_upstream(ours: RustBPETokenizer, turns: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"messages\[\d\]") as caught:
        ours.render_conversation({"messages": turns})
    assert not (isinstance(caught.value, AssertionError) and isinstance(caught.value, ValueError))


def test_visualize_tokenization_colours(ours: RustBPETokenizer) -> None:
    red, green, grey, plain = "\033[91m", "\033[92m", "\033[90m", "\033[0m"
    assert ours.visualize_tokenization([FIRST, 104], [0, 1]) == f"{red}<|bos|>{plain}|{green}h{plain}"
    assert ours.visualize_tokenization([104], [1], with_token_id=True) == f"{green}h{plain}|{grey}(104){plain}"


class Trainer:
    """A stand-in for rustbpe's trainer, which records its arguments."""

    def train_from_iterator(self, texts: Iterator[str], vocab_size: int, pattern: str) -> None:
        self.pattern, self.size, self.first = pattern, vocab_size, next(texts)

    def get_pattern(self) -> str:
        return self.pattern

    def get_mergeable_ranks(self) -> list[tuple[list[int], int]]:
        assert self.first == "hello" and self.size == 260
        words = [[byte] for byte in range(256)] + [[*b"he"], [*b"ll"], [*b"hell"], [*b"hello"]]
        return [(word, rank) for rank, word in enumerate(words)]


def test_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = ModuleType("rustbpe")
    fake.Tokenizer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rustbpe", fake)
    trained = RustBPETokenizer.train_from_iterator(["hello", "hell"], 269)
    assert trained.get_vocab_size() == 269 and trained.encode("hello") == [259]
    assert trained.encode_special("<|bos|>") == 260 and trained.encode_special("<|output_end|>") == 268
    trained.save(tmp_path)
    assert get_tokenizer(tmp_path).encode("12345 hello") == trained.encode("12345 hello")
    with pytest.raises(ValueError, match="vocab_size must be at least 265, got 264"):
        RustBPETokenizer.train_from_iterator(["hello"], 264)


def test_training_without_rustbpe_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    with pytest.raises(MissingPackage, match="needs the package rustbpe") as error:
        RustBPETokenizer.train_from_iterator(["x"], 300)
    assert isinstance(error.value, ImportError) and isinstance(error.value, ValueError)


def test_pretrained_ones_begin_with_their_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {word: rank for rank, word in enumerate(WORDS)}
    gpt2 = tiktoken.Encoding("x", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": FIRST})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": gpt2}.__getitem__)
    ours = RustBPETokenizer.from_pretrained("gpt2")
    assert ours.get_bos_token_id() == FIRST and ours.text.eos_ids == (FIRST,)
