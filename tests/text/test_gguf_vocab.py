"""Tokenizers from GGUF metadata, compared with the trained ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as CoreTokenizer

from nano_inference.text.gguf_vocab import PRE_TOKENIZERS, gguf_tokenizer
from nano_inference.types import BadRequest, ModelError
from tests.text.tokenizer_samples import ODD, SPECIALS, byte_level, sentencepiece_like


def pieces_of(core: CoreTokenizer) -> tuple[str, ...]:
    return tuple(core.id_to_token(token) for token in range(core.get_vocab_size()))


def byte_level_metadata(**more: Any) -> dict[str, Any]:
    """Return the metadata that a converter would write for the small byte-level tokenizer."""
    core = byte_level()
    pieces = pieces_of(core)
    merges = json.loads(core.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": tuple(3 if piece in SPECIALS else 1 for piece in pieces),
        "tokenizer.ggml.merges": tuple(" ".join(merge) for merge in merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """Return the metadata of the small SentencePiece-like tokenizer; a piece's score is minus its merge's rank."""
    core = sentencepiece_like()
    pieces = pieces_of(core)
    merges = [a + b for a, b in json.loads(core.to_str())["model"]["merges"]]
    rank = {piece: place for place, piece in reversed(list(enumerate(merges)))}
    types = (2, 3, 3, *(6,) * 256, *(1,) * (len(pieces) - 259))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": tuple(-float(rank.get(piece, 10**6)) for piece in pieces),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def test_byte_level_ids_equal_those_of_the_trained_tokenizer() -> None:
    core, ours = byte_level(), gguf_tokenizer(byte_level_metadata(), "m.gguf")
    for text in (*ODD, "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text) == core.encode(text).ids, text
        assert ours.decode(ours.encode(text)) == core.decode(core.encode(text).ids), text
    assert ours.special_ids == {0, 1, 2} and ours.bos_id == 1 and ours.eos_ids == (2, 0)
    assert ours.named == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert not ours.special_ids & set(ours.encode("<|im_end|>", parse_special=False))


def test_sentencepiece_ids_equal_those_of_the_trained_tokenizer() -> None:
    core, ours = sentencepiece_like(), gguf_tokenizer(sentencepiece_metadata(), "m.gguf")
    for text in (*ODD, "a</s>b"):
        assert ours.encode(text) == core.encode(text).ids, text
        assert ours.decode(ours.encode(text, add_special=False)) == text.replace("▁", " ").replace("</s>", " "), text
    assert ours.encode("hello")[0] == 1 and ours.eos_ids == (2,) and ours.drops_space
    assert ours.token_bytes(3 + 0xAB) == b"\xab"


def test_flags_for_bos_eos_and_the_leading_space() -> None:
    plain = gguf_tokenizer(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False), "m.gguf")
    assert plain.token_text(plain.encode("hello")[0])[0] != "▁" and not plain.drops_space
    assert plain.decode(plain.encode(" hello")) == " hello"
    both = gguf_tokenizer(byte_level_metadata(add_bos_token=True, add_eos_token=True), "m.gguf")
    assert both.encode("1")[0] == 1 and both.encode("1")[-1] == 2
    assert gguf_tokenizer(byte_level_metadata(pre="llama-bpe"), "m.gguf").encode("1")[0] == 1


def test_user_defined_tokens_are_matched_first_but_are_text() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ("<think>", "<|eot_id|>")
    metadata["tokenizer.ggml.token_type"] += (4, 3)
    ours = gguf_tokenizer(metadata, "m.gguf")
    last = ours.vocab_size - 1
    assert ours.encode("<think>") == [last - 1] and last - 1 not in ours.special_ids
    assert ours.eos_ids == (2, 0, last)
    assert gguf_tokenizer(metadata | {"tokenizer.ggml.eot_token_id": 0}, "m.gguf").eos_ids == (2, 0, last)


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize(
    "end", ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<turn|>", "[EOS]"]
)
def test_turn_ends_of_llama_cpp_end_an_answer_and_are_special(end: str, kind: int) -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"] += (end,)
    metadata["tokenizer.ggml.token_type"] += (kind,)
    metadata["tokenizer.ggml.scores"] += (0.0,)
    ours = gguf_tokenizer(metadata, "m.gguf")
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert ours.eos_ids == (2, last) and last in ours.special_ids and ours.encode(end)[-1] == last


def test_end_of_a_message_is_no_end_where_the_answer_has_several() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"] += ("<|end|>", "<|return|>", "<|call|>")
    metadata["tokenizer.ggml.token_type"] += (3, 3, 3)
    metadata["tokenizer.ggml.scores"] += (0.0, 0.0, 0.0)
    size = len(metadata["tokenizer.ggml.tokens"])
    assert gguf_tokenizer(metadata, "m.gguf").eos_ids == (2, size - 2, size - 1)


def test_whole_words_are_one_token_with_ignore_merges() -> None:
    metadata = byte_level_metadata(pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] += ("zqzq",)
    metadata["tokenizer.ggml.token_type"] += (1,)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert gguf_tokenizer(metadata, "m.gguf").encode("zqzq") == [last]
    assert last not in gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "smaug-bpe"}, "m.gguf").encode("zqzq")


def test_duplicate_piece_keeps_both_ids() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ("Ġ",)
    metadata["tokenizer.ggml.token_type"] += (5,)
    ours = gguf_tokenizer(metadata, "m.gguf")
    assert ours.token_bytes(ours.vocab_size - 1) == b" " and ours.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    assert ours.encode("  ") == gguf_tokenizer(byte_level_metadata(), "m.gguf").encode("  ")
    with pytest.raises(BadRequest):
        ours.token_text(ours.vocab_size)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "a 123's", ["a", " ", "1", "2", "3", "'s"]),
        ("gpt-2", "a 123's \n\nb", ["a", " 123", "'s", " \n", "\n", "b"]),
        ("llama-bpe", "a 12345 (x)\n\n b'LL", ["a", " ", "123", "45", " (", "x", ")\n\n", " b", "'LL"]),
        ("qwen2", "x=12\n  y", ["x", "=", "1", "2", "\n", " ", " y"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("default", "a, 1234", ["a", ",", " ", "123", "4"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
    ],
)
def test_pre_tokenizers_split_as_published(pre: str, text: str, words: list[str]) -> None:
    core = gguf_tokenizer(byte_level_metadata(pre=pre), "m.gguf").core
    cuts = [text[a:b] for _, (a, b) in core.pre_tokenizer.pre_tokenize_str(text)]
    assert cuts == words


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_every_byte(pre: str) -> None:
    ours = gguf_tokenizer(byte_level_metadata(pre=pre, add_bos_token=False), "m.gguf")
    for text in ODD:
        assert ours.decode(ours.encode(text)) == text, (pre, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert' is not supported; known: gpt2, llama"),
        ({"pre": "martian"}, "pre-tokenizer 'martian'"),
        ({"merges": ("ab",)}, "not two pieces"),
        ({"merges": ("Ġ nonsense",)}, "do not fit"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokens": (1, 2)}, "not a list of strings"),
        ({"token_type": (1,)}, "token types"),
        ({"bos_token_id": 10**6}, "outside of"),
    ],
)
def test_damaged_or_unknown_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^m.gguf: .*{message}"):
        gguf_tokenizer(byte_level_metadata(**change), "m.gguf")


def test_sentencepiece_without_scores_or_bytes_is_refused() -> None:
    with pytest.raises(ModelError, match="scores is missing"):
        gguf_tokenizer(sentencepiece_metadata(scores=None), "m.gguf")
    metadata = sentencepiece_metadata()
    pieces = tuple("<gone>" if p == "<0x0A>" else p for p in metadata["tokenizer.ggml.tokens"])
    with pytest.raises(ModelError, match="<0x0A>"):
        gguf_tokenizer(metadata | {"tokenizer.ggml.tokens": pieces}, "m.gguf")
