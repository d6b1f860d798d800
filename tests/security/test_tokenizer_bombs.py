"""Tokenizer files that make a short text enormous: refused in one line when they are read, or bounded by the text.

Each bomb is loaded and used in a process of its own with a limit of memory and of time: what is not refused aborts it.
"""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nano_inference.text import tokenizer_limits
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.text.tokenizer_limits import check_pattern, checked_growth, longest_text
from nano_inference.types import BadRequest, ModelError
from tests.security.model_seeds import sentencepiece_json, tokenizer_json

GUARD_S = 120
"""Seconds until a process counts as frozen."""
CHILD = """
import resource, sys
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.text.kinds import TokenizerSource
from nano_inference.types import BadRequest, ModelError
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    tokenizer = load_tokenizer(TokenizerSource(sys.argv[1]))
    print(len(tokenizer.encode("a" * 2000)), "ids")
    print(len(tokenizer.decode(range(tokenizer.vocab_size))) < 1 << 24)
except (ModelError, BadRequest) as error:
    print(type(error).__name__, error)
"""
State = dict[str, Any]


def text(pattern: str, content: str) -> State:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def regex(pattern: str, content: str) -> State:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def sequence(*parts: State) -> State:
    return {"type": "Sequence", "normalizers": list(parts)}


def nested(part: State, depth: int) -> State:
    for _ in range(depth):
        part = sequence(part)
    return part


def charsmap(replacement: bytes) -> str:
    return base64.b64encode(struct.pack("<I", 4) + bytes(4) + replacement + b"\0").decode()


NORMALIZERS: dict[str, State] = {
    "eight times sixteen": sequence(*[text("a", "a" * 16)] * 8),
    "nested": nested(sequence(*[nested(text("a", "a" * 16), 3)] * 8), 20),
    "without types": {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 16}] * 8},
    "a prefix of 10 MB": {"type": "Prepend", "prepend": "x" * 10_000_000},
    "a prefix without a type": {"prepend": "x" * 10_000_000},
    "prefixes": sequence(*[{"type": "Prepend", "prepend": "x" * 999}] * 9),
    "a replacement of 10 MB": text("a", "x" * 10_000_000),
    "a pattern that matches nothing": sequence(*[regex("", "xxxxxxxx")] * 9),
    "a pattern of one letter": sequence(*[regex("[a-z]", "a" * 16)] * 8),
    "forms": sequence(*[text("a", "\ufdfa"), {"type": "NFKC"}, regex(".", "a")] * 4),
    "many characters for one": sequence(*[regex("x?", "aaa")] * 16),
}


def changed(change: Callable[[State], None], start: Callable[[], State] = tokenizer_json) -> bytes:
    whole = start()
    change(whole)
    return json.dumps(whole).encode()


def write(directory: Path, data: bytes) -> TokenizerSource:
    (directory / "tokenizer.json").write_bytes(data)
    return TokenizerSource(str(directory))


def outcome(directory: Path, data: bytes) -> str:
    """What a process with 2 GiB says when it loads and uses a tokenizer."""
    write(directory, data)
    command = [sys.executable, "-c", CHILD, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_normalizer_that_expands_is_refused_when_it_is_read(name: str, tmp_path: Path) -> None:
    said = outcome(tmp_path, changed(lambda whole: whole.update(normalizer=NORMALIZERS[name])))
    assert said.startswith(f"ModelError {tmp_path}/tokenizer.json: normalizer "), said
    assert "(limit 4096)" in said and said.count("\n") == 1 and len(said) < 500


def many_added(whole: State) -> None:
    whole["added_tokens"] += [{**whole["added_tokens"][0], "id": 10**6 + i, "content": f"t{i}"} for i in range(70_000)]


def long_added(whole: State) -> None:
    whole["added_tokens"][0]["content"] = "x" * 10_000_000


def grown_added(whole: State) -> None:
    whole["normalizer"] = sequence(*[text("a", "a" * 16)] * 2)
    entry = {**whole["added_tokens"][0], "normalized": True}
    whole["added_tokens"] += [{**entry, "id": 10**6 + i, "content": f"{i}{'a' * 4000}"} for i in range(500)]


def long_piece(whole: State) -> None:
    whole["model"]["vocab"]["x" * 10_000_000] = len(whole["model"]["vocab"])


def long_suffix(whole: State) -> None:
    whole["model"]["end_of_word_suffix"] = "x" * 10_000_000


def repeated_text(whole: State) -> None:
    whole["post_processor"]["single"] = [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000


def repeated_twice(whole: State) -> None:
    twice = {**whole["post_processor"], "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 8}
    whole["post_processor"] = {"type": "Sequence", "processors": [twice] * 9}


def many_ids(whole: State) -> None:
    special = next(iter(whole["post_processor"]["special_tokens"].values()))
    special["ids"], special["tokens"] = special["ids"] * 100_000, special["tokens"] * 100_000


def many_levels(whole: State) -> None:
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [level] * 40}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (many_added, "added tokens are too many"),
        (long_added, "an added token has 10000000 characters"),
        (grown_added, "too many for this tokenizer"),
        (long_piece, "a piece of the vocabulary has a length of 10000000"),
        (long_suffix, "a piece of the vocabulary has a length of 10000000"),
        (repeated_text, "post_processor repeats the text 100000 times"),
        (repeated_twice, "post_processor repeats the text"),
        (many_ids, "post_processor puts 100000 ids around a text"),
        (many_levels, "pre_tokenizer ByteLevel makes up to 4 bytes of one byte"),
    ],
)
def test_other_parts_that_expand_are_refused_when_they_are_read(
    change: Callable[[State], None], says: str, tmp_path: Path
) -> None:
    said = outcome(tmp_path, changed(change))
    assert said.startswith(f"ModelError {tmp_path}/tokenizer.json: "), said
    assert says in said and said.count("\n") == 1 and len(said) < 500


def test_a_charsmap_grows_by_its_longest_replacement() -> None:
    def change(whole: State) -> None:
        whole["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 5000)}

    with pytest.raises(ModelError, match="normalizer Precompiled makes up to 5000 bytes of one byte"):
        checked_growth(changed(change), "m")


def test_a_part_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two a reader takes is its own affair: the check could see one and the library use the other."""
    data = tokenizer_json()
    del data["normalizer"]
    twice = f'{{"normalizer": {json.dumps(NORMALIZERS["eight times sixteen"])}, "normalizer": null, '
    with pytest.raises(ModelError, match="an object has a name twice"):
        load_tokenizer(write(tmp_path, (twice + json.dumps(data)[1:]).encode()))


def test_padding_and_truncation_of_the_file_do_nothing(tmp_path: Path) -> None:
    def change(whole: State) -> None:
        rest = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
        whole["padding"] = {"strategy": {"Fixed": 10**9}, "pad_to_multiple_of": 10**9, **rest}
        whole["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 1}

    said = outcome(tmp_path, changed(change))
    assert said.endswith("ids\nTrue\n") and int(said.split()[0]) > 3


def grower(directory: Path) -> Tokenizer:
    """A tokenizer that makes 256 bytes of one: it loads, and takes short texts."""
    return load_tokenizer(write(directory, changed(lambda whole: whole.update(normalizer=text("a", "b" * 128)))))


def test_a_tokenizer_that_grows_much_takes_short_texts_only(tmp_path: Path) -> None:
    tokenizer = grower(tmp_path)
    assert tokenizer.encode("fox a") and longest_text(256) == 1 << 16
    for parse_special in (True, False):
        with pytest.raises(BadRequest, match="the text has 65537 bytes; this model's tokenizer takes 65536 at most"):
            tokenizer.encode("x" * ((1 << 16) + 1), parse_special=parse_special)


@pytest.mark.parametrize("start", [tokenizer_json, sentencepiece_json])
def test_the_families_are_taken_with_texts_of_any_length(start: Callable[[], State]) -> None:
    growth = checked_growth(changed(lambda whole: None, start), "m")
    assert growth <= tokenizer_limits.HARMLESS_GROWTH and longest_text(growth) is None


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*a){25}", "([a-z]+)*!$", r"(?:\p{L}+)*", r"(\p{L}{2,})+", "((a*)b)*", r"([^\]]+x)+"]
)
def test_a_pattern_with_nested_repeats_is_refused_when_it_is_read(pattern: str, tmp_path: Path) -> None:
    def change(whole: State) -> None:
        whole["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}

    with pytest.raises(ModelError, match=r"tokenizer\.json: pre_tokenizer Split: the pattern .* repeats a group"):
        load_tokenizer(write(tmp_path, changed(change)))


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?i:'s|'t|'re)?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}{1,3}(?=(?:\d{3})*\b)",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        r"\(a+\)+",
        "(a|b)+",
        "(a+){1,3}",
        "[(a+)+]*",
    ],
)
def test_patterns_of_the_families_are_not_refused(pattern: str) -> None:
    check_pattern(pattern, "m")


def test_gguf_and_tiktoken_files_are_held_to_the_same_pieces(tmp_path: Path) -> None:
    pieces = ["x" * 5000]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.merges": ["a b"]}
    with pytest.raises(ModelError, match=r"^m\.gguf: a piece of the vocabulary has a length of 5000 \(limit 4096\)"):
        load_tokenizer(TokenizerSource("m.gguf", metadata))
    tokens = [bytes([byte]) for byte in range(256)] + [b"x" * 5000]
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    (tmp_path / "a.tiktoken").write_bytes(b"".join(lines))
    with pytest.raises(ModelError, match=r"a\.tiktoken: a piece of the vocabulary has a length of 5000"):
        load_tokenizer(TokenizerSource(str(tmp_path)))
    (tmp_path / "a.tiktoken").write_bytes(
        b"".join(base64.b64encode(t) + f" {i}\n".encode() for i, t in enumerate(tokens[:256]))
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": "(a+)+$"}))
    with pytest.raises(ModelError, match=r"a\.tiktoken: the pattern .* repeats a group"):
        load_tokenizer(TokenizerSource(str(tmp_path)))
