"""Tokenizers of directories: compared with transformers, special tokens, unusable files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tiktoken_file import LLAMA3_WORDS
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import BadRequest, ModelError
from tests.text.tokenizer_samples import ODD, byte_level, save

transformers = pytest.importorskip("transformers")


def load(directory: Path) -> Tokenizer:
    return load_tokenizer(TokenizerSource(str(directory)))


@pytest.mark.parametrize("kind", ["chatml_dir", "llama_dir"])
def test_ids_and_text_equal_those_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    ours, theirs = load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for text in (*ODD, *(f"a{special}b {special}\n" for special in theirs.all_special_tokens)):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.special_ids == {token for token, entry in theirs.added_tokens_decoder.items() if entry.special}
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("kind", ["chatml_dir", "llama_dir"])
def test_special_tokens_can_be_encoded_as_text(kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    ours = load(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for special in (ours.token_text(token) for token in sorted(ours.special_ids)):
        text = f"x {special}user"
        ids = ours.encode(text, add_special=False, parse_special=False)
        assert not ours.special_ids & set(ids)
        assert ours.decode(ids, skip_special=False) == text
        assert ids == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.special_ids & set(ours.encode(text, add_special=False))


@pytest.mark.parametrize("kind", ["chatml_dir", "llama_dir"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_bytes_of_tokens_are_the_text(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    ours = load_cached(request, kind)
    ids = ours.encode(text, add_special=False, parse_special=False)
    data = b"".join(ours.token_bytes(token) for token in ids)
    prefix = b" " if ours.drops_space and text else b""
    assert data == prefix + text.replace("▁", " " if ours.drops_space else "▁").encode()


def load_cached(request: pytest.FixtureRequest, kind: str) -> Tokenizer:
    return load(request.getfixturevalue(kind))


@pytest.mark.parametrize("token", [-1, 10**6, 2**70])
def test_unknown_id_is_refused(chatml_dir: Path, token: int) -> None:
    with pytest.raises(BadRequest, match="not in the vocabulary"):
        load(chatml_dir).token_bytes(token)


def test_lone_surrogate_is_refused(chatml_dir: Path) -> None:
    with pytest.raises(BadRequest, match="surrogate at character 1"):
        load(chatml_dir).encode("a\ud800")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    core = byte_level()
    core.enable_truncation(max_length=2)
    core.enable_padding(length=4)
    assert len(load(save(core, tmp_path)).encode("hello world 1234567")) > 4


def test_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    directory = save(byte_level(), tmp_path, eos_token="<|im_end|>")
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert load(directory).eos_ids == (2, 0)


@pytest.mark.parametrize("bos,eos", [(True, False), (False, True), (True, True), (False, False)])
def test_add_bos_and_eos_as_in_transformers(tmp_path: Path, bos: bool, eos: bool) -> None:
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    directory = save(byte_level(), tmp_path, add_bos_token=bos, add_eos_token=eos, **names)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert load(directory).encode("hello") == theirs("hello")["input_ids"]


def test_added_tokens_of_tokenizer_config(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    entry = {"content": "<|tool|>", "special": True}
    directory = save(byte_level(), tmp_path, added_tokens_decoder={str(size): entry})
    assert load(directory).encode("<|tool|>") == [size]
    directory = save(byte_level(), tmp_path, added_tokens_decoder={str(size + 5): entry})
    with pytest.raises(ModelError, match="cannot have the id"):
        load(directory)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.pkl", b"\x80\x04.", "not nanochat's pickled tiktoken.Encoding"),
        ("vocab.pkl", b"\x80\x04.", "a pickle is not run"),
        ("tokenization_evil.py", b"raise SystemExit", "Python code is not run"),
        ("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>\x15", "SentencePiece model alone"),
        ("tokenizer.json", b"{", "not a tokenizer.json"),
        ("readme.txt", b"", "no tokenizer"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_unsupported_decoder_is_refused(tmp_path: Path) -> None:
    core = byte_level()
    state = json.loads(core.to_str()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelError, match="WordPiece is not supported"):
        load(tmp_path)


def ranks() -> dict[bytes, int]:
    words = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b" w", b"hello", b"12", b"123"]
    return {word: rank for rank, word in enumerate(words)}


def write_ranks(path: Path, table: dict[bytes, int]) -> None:
    path.write_bytes(b"".join(base64.b64encode(word) + b" %d\n" % rank for word, rank in table.items()))


@pytest.mark.parametrize("name", ["tokenizer.model", "some.tiktoken"])
def test_tiktoken_file_defaults_to_llama_3(tmp_path: Path, name: str) -> None:
    write_ranks(tmp_path / name, ranks())
    ours = load(tmp_path)
    plain = tiktoken.Encoding("x", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks(), special_tokens={})
    for text in ODD:
        assert ours.encode(text, add_special=False) == plain.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    first = len(ranks())
    assert ours.bos_id == first and ours.encode("hello")[0] == first and ours.vocab_size == first + 256
    assert ours.token_text(first + 255) == "<|reserved_special_token_247|>"
    assert ours.eos_ids == (first + 1, first + 9)
    assert ours.encode("<|eot_id|>", add_special=False) == [first + 9]
    assert ours.decode(ours.encode("<|eot_id|>", parse_special=False)) == "<|eot_id|>"


def test_tiktoken_file_with_a_config(tmp_path: Path) -> None:
    write_ranks(tmp_path / "x.tiktoken", ranks())
    first = len(ranks())
    config = {"added_tokens_decoder": {str(first + 3): {"content": "<|end|>"}}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load(tmp_path)
    assert ours.eos_ids == (first + 3,) and ours.bos_id is None and ours.encode("hello") == [260]
    with pytest.raises(BadRequest):
        ours.token_bytes(first)


SPECIAL_LISTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a list": ({"extra_special_tokens": ["<in vocab>", "<added>"]}, {}),
    "names": ({"extra_special_tokens": {"image_token": "<added>", "box_token": "<in vocab>"}}, {}),
    "before version 5": ({"additional_special_tokens": ["<in vocab>", "<added>"]}, {}),
    "one of two lists": ({"extra_special_tokens": ["<added>"], "additional_special_tokens": ["<in vocab>"]}, {}),
    "a role of its own": ({"image_token": "<added>"}, {}),
    "the map": ({}, {"additional_special_tokens": ["<in vocab>"], "image_token": "<added>"}),
    "the map beside added tokens": ({"added_tokens_decoder": {}}, {"image_token": "<added>"}),
}


@pytest.mark.parametrize("case", SPECIAL_LISTS)
def test_tokens_that_only_a_list_calls_special_are_hidden_as_by_transformers(case: str, tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: i for i, char in enumerate([*alphabet, "<in vocab>"])}, [])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    core.add_tokens([tokenizers.AddedToken("<added>", special=False, normalized=False)])
    core.save(str(tmp_path / "tokenizer.json"))
    config, special_map = SPECIAL_LISTS[case]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(TokenizerSource(str(tmp_path)))
    ids = [core.token_to_id(text) for text in ("<in vocab>", "<eos>", "<added>")]
    for skip in (True, False):
        assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
    text = "a<added>b<in vocab><eos>"
    assert ours.encode(text) == theirs.encode(text)
