"""Damaged model files of every format load or are refused in one line, and numbers that lie are caught by name.

The same mutants in hundred thousands, with limits of time and memory: benchmarks/reliability/fuzz_loaders.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from nano_inference.executors.opening import load_model
from nano_inference.loading import gguf_file, safetensors_file
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.gguf_file import read_gguf
from nano_inference.loading.safetensors_file import read_header
from nano_inference.text.fast import refused_files
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import ModelError
from tests.security.model_seeds import (
    ARRAY,
    F32,
    STRING,
    U8,
    U32,
    GgufParts,
    Key,
    byte_level_vocabulary,
    configs,
    gemma_gguf,
    llama_gguf,
    tiktoken_file,
    tokenizer_config,
    tokenizer_json,
    with_header,
    write_gguf,
)
from tests.security.mutants import NUMBERS, lay_out, mutant, seeds
from tests.security.opening import attempt

pytestmark = pytest.mark.slow

NUM_MUTANTS = 40


@pytest.mark.parametrize("name", sorted(seeds()))
def test_a_whole_file_opens(name: str, tmp_path: Path) -> None:
    assert not attempt(seeds()[name], lay_out(seeds()[name], tmp_path))


@pytest.mark.parametrize("name", sorted(seeds()))
def test_a_damaged_file_loads_or_is_refused(name: str, tmp_path: Path) -> None:
    seed = seeds()[name]
    path = lay_out(seed, tmp_path)
    num_refused = 0
    for index in range(NUM_MUTANTS):
        path.write_bytes(mutant(seed, 7, index))
        num_refused += attempt(seed, path)
    assert num_refused > 0, "a mutator that breaks nothing tests nothing"


def test_safetensors_that_the_library_refuses_are_refused(tmp_path: Path) -> None:
    seed, path = seeds()["safetensors"], tmp_path / "x.safetensors"
    for index in range(200):
        path.write_bytes(mutant(seed, 7, index))
        try:
            read_header(path)
        except ModelError:
            continue
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = {name: one for name, one in json.loads(data[8:end]).items() if name != "__metadata__"}  # not read
        path.write_bytes(with_header(json.dumps(header).encode(), data[end:]))
        with safe_open(path, framework="pt") as theirs:
            assert theirs.keys()


def refusal(path: Path, read: Callable[[Path], Any] = open_checkpoint) -> str:
    """Return the one line with which a file is refused."""
    with pytest.raises(ModelError) as caught:
        read(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000 and path.name in text
    return text


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


def write(path: Path, parts: GgufParts) -> Path:
    path.write_bytes(bytes(write_gguf(parts).data))
    return path


@pytest.mark.parametrize("number", NUMBERS)
def test_gguf_numbers_are_checked(number: int, gguf_path: Path) -> None:
    """Every count, length, size, type and offset of the header in turn; the values themselves are others' to check."""
    parts = GgufParts(gemma_gguf().keys[:3], gemma_gguf().table[:4], gemma_gguf().data)
    whole = write_gguf(parts)
    for at, width in whole.numbers:
        copy = bytearray(whole.data)
        copy[at : at + width] = (number % (1 << (8 * width))).to_bytes(width, "little")
        gguf_path.write_bytes(copy)
        try:
            tensors = read_gguf(gguf_path).tensors
        except ModelError:
            continue
        assert all(0 < tensor.offset <= tensor.offset + tensor.num_bytes <= len(copy) for tensor in tensors.values())


def test_too_many_tensors_keys_and_items_are_refused_by_their_count(gguf_path: Path) -> None:
    gguf_path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10**6, 0) + bytes(48 * 10**6))
    assert "1000000 tensors are announced, the limit is 100000" in refusal(gguf_path, read_gguf)
    gguf_path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10**6, 0) + bytes(100))
    assert "1000000 tensors are announced where 108 bytes can follow" in refusal(gguf_path, read_gguf)
    gguf_path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 10**6) + bytes(20 * 10**6))
    assert "1000000 metadata keys are announced, the limit is 65536" in refusal(gguf_path, read_gguf)


def test_the_items_of_all_arrays_are_counted_together(gguf_path: Path) -> None:
    def array(name: bytes, kind: int, count: int, data: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", ARRAY, kind, count) + data

    num_bytes = gguf_file.MAX_ITEMS - 4
    keys = [array(b"a", U8, num_bytes, bytes(num_bytes)), array(b"b", STRING, 4, bytes(8 * 4))]
    gguf_path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys))
    assert len(read_gguf(gguf_path).metadata) == 2
    keys.append(array(b"c", STRING, 1, bytes(8)))
    gguf_path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys))
    assert "1 strings are announced, the limit is 0" in refusal(gguf_path, read_gguf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_type": Key(b"", U32, 5)}, "token types"),
        ({"token_type": Key(b"", ARRAY, [1.0] * len(byte_level_vocabulary()[0]), F32)}, "token types"),
        ({"unknown_token_id": Key(b"", STRING, b"1")}, "unknown_token_id must be an integer"),
        ({"padding_token_id": Key(b"", ARRAY, [1], U32)}, "padding_token_id must be an integer"),
        ({"padding_token_id": Key(b"", F32, 1.5)}, "padding_token_id must be an integer"),
        ({"model": Key(b"", ARRAY, [b"long"] * 999, STRING)}, "tokenizer.ggml.model"),
        ({"pre": Key(b"", ARRAY, [b"smollm"], STRING)}, "pre-tokenizer"),
        ({"merges": Key(b"", ARRAY, [b"a" * 9999], STRING)}, "not two pieces"),
    ],
)
def test_tokenizer_metadata_of_a_wrong_kind(changes: Mapping[str, Key], message: str, gguf_path: Path) -> None:
    keys = {f"tokenizer.ggml.{name}".encode(): key for name, key in changes.items()}
    parts = llama_gguf()
    new = tuple(replace(keys.get(key.name, key), name=key.name) for key in parts.keys)
    write(gguf_path, replace(parts, keys=new))
    assert message in refusal(gguf_path, lambda path: load_tokenizer(open_checkpoint(path).tokenizer))


def test_more_than_a_hundred_thousand_tensors_are_refused(tmp_path: Path) -> None:
    assert safetensors_file.MAX_TENSORS == 100_000
    header = b"{" + b",".join(b'"%d":0' % i for i in range(100_001)) + b"}"
    (tmp_path / "x.safetensors").write_bytes(with_header(header, b""))
    assert "holds 100001 tensors (limit 100000)" in refusal(tmp_path / "x.safetensors", read_header)


def test_a_name_given_twice_among_many_is_found_in_one_pass(tmp_path: Path) -> None:
    """Counting each name over again took minutes here."""
    names = b",".join(b'"%d":0' % i for i in range(300_000))
    (tmp_path / "x.safetensors").write_bytes(with_header(b"{" + names + b',"299999":0}', b""))
    assert "the name '299999' occurs twice" in refusal(tmp_path / "x.safetensors", read_header)


def test_links_are_followed_because_hub_caches_are_made_of_them(tmp_path: Path) -> None:
    """A local directory is its owner's; what only a name in a file leads to is not (see the index above)."""
    blobs, model = tmp_path / "blobs", tmp_path / "snapshots"
    lay_out(seeds()["safetensors"], blobs)
    model.mkdir()
    for file in blobs.iterdir():
        (model / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert not attempt(seeds()["safetensors"], model / "model.safetensors")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 2**31 - 1},
        {"intermediate_size": 2**31 - 1},
        {"num_hidden_layers": 10_000},
        {"head_dim": 2**30},
        {"hidden_size": 2**30, "vocab_size": 2**30},
    ],
)
def test_memory_is_not_allocated_for_missing_weights(changes: dict[str, int], tmp_path: Path) -> None:
    path = lay_out(seeds()["config.json"], tmp_path)
    path.write_text(json.dumps({**configs()[0], **changes}))
    with pytest.raises(ModelError, match=r"makes a model of at least \d+ values, the files hold \d+"):
        open_checkpoint(tmp_path)


def test_a_little_too_much_is_refused_by_the_weights_name(tmp_path: Path) -> None:
    path = lay_out(seeds()["config.json"], tmp_path)
    path.write_text(json.dumps({**configs()[0], "intermediate_size": 63}))
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj\.weight: the checkpoint has the shape"):
        load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32, 64)


def tokenizer(directory: Path, files: Mapping[str, bytes]) -> Any:
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return load_tokenizer(TokenizerSource(str(directory)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "must map ids to objects"),
        ({"added_tokens_decoder": {"²": {"content": "a"}}}, "must map ids to objects"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, "must map ids to objects"),
        ({"added_tokens_decoder": {"1": "a"}}, "must map ids to objects"),
        ({"eos_token": "\ud800"}, "surrogates not allowed"),
        ({"chat_template": "\udfff"}, "surrogates not allowed"),
    ],
)
def test_a_tokenizer_config_of_a_wrong_kind(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.dumps({**tokenizer_config(), **changes}).encode()
    files = {"tokenizer.json": json.dumps(tokenizer_json()).encode(), "tokenizer_config.json": config}
    with pytest.raises(ModelError, match=message) as caught:
        tokenizer(tmp_path, files)
    assert len(str(caught.value)) < 1000


def test_a_smiley_spelled_as_two_surrogates_is_text(tmp_path: Path) -> None:
    config = json.dumps({**tokenizer_config(), "model_name": "🙂"}).encode()
    assert b"\\ud83d" in config
    files = {"tokenizer.json": json.dumps(tokenizer_json()).encode(), "tokenizer_config.json": config}
    assert tokenizer(tmp_path, files).eos_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # tiktoken finds an empty special token everywhere and never gets past it.
        ({"added_tokens_decoder": {"259": {"content": ""}}}, "added token 259 of tokenizer_config.json is empty"),
        ({"added_tokens_decoder": {"²": {"content": "a"}}}, "not beyond the 259 ranks"),
        ({"added_tokens_decoder": {"9999999999": {"content": "a"}}}, "tiktoken refuses it"),
        ({"pat_str": 7}, "pat_str of tokenizer_config.json must be a string"),
        ({"pat_str": "("}, "tiktoken refuses it"),
    ],
)
def test_a_tiktoken_config_of_a_wrong_kind(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    files = {"tokenizer.model": tiktoken_file(), "tokenizer_config.json": json.dumps(changes).encode()}
    with pytest.raises(ModelError, match=message):
        tokenizer(tmp_path, files)


@pytest.mark.parametrize("name", ["continuing_subword_prefix", "continuing\\u005fsubword_prefix"])
@pytest.mark.parametrize("prefix", ["x", "a" * 99])
def test_a_prefix_that_would_end_the_process_is_refused(name: str, prefix: str, tmp_path: Path) -> None:
    text = json.dumps(tokenizer_json()).replace('"continuing_subword_prefix": null', f'"{name}": "{prefix}"')
    assert f'"{name}": "{prefix}"' in text
    with pytest.raises(ModelError, match="continuing_subword_prefix is not supported"):
        tokenizer(tmp_path, {"tokenizer.json": text.encode()})


class PanicException(BaseException):
    """As the libraries' own is, which cannot be imported."""


def test_a_panic_of_a_library_is_a_refusal_and_an_interrupt_is_none() -> None:
    with pytest.raises(ModelError, match=r"^m: broken: no entry found$"), refused_files("m", "broken"):
        raise PanicException("no entry\nfound")
    with pytest.raises(KeyboardInterrupt), refused_files("m", "broken"):
        raise KeyboardInterrupt
