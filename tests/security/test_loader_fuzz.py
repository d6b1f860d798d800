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
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference.executors.opening import load_model
from nano_inference.loading import gguf_file, safetensors_file
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.gguf_file import read_gguf
from nano_inference.loading.pt_file import read_pt
from nano_inference.loading.safetensors_file import read_header
from nano_inference.text.fast import refused_files
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest, ModelError
from tests.effort import some
from tests.nanochat.tiny import model_config, state_dict, write_checkpoint
from tests.security.model_seeds import (
    ARRAY,
    F32,
    STRING,
    U8,
    U32,
    Entry,
    GgufParts,
    Key,
    byte_level_vocabulary,
    configs,
    gemma_gguf,
    hf_files,
    llama_gguf,
    safetensors,
    saved,
    tiktoken_file,
    tokenizer_config,
    tokenizer_json,
    with_header,
    write_gguf,
)
from tests.security.mutants import NUMBERS, lay_out, mutant, records_of, seeds, zipped
from tests.security.opening import attempt

MUTANTS = {"GGUF": 400, "GGUF (SentencePiece)": 250, "safetensors": 300, "nanochat .pt": 60, "nanochat .pt (G1)": 60}
FEWER = 95
"""Of every other format."""
SAVED = saved({"a": torch.ones(2)})


@pytest.mark.parametrize("name", sorted(seeds()))
def test_a_whole_file_opens(name: str, tmp_path: Path) -> None:
    assert not attempt(seeds()[name], lay_out(seeds()[name], tmp_path))


@pytest.mark.parametrize("name", sorted(seeds()))
def test_a_damaged_file_loads_or_is_refused(name: str, tmp_path: Path) -> None:
    seed, count = seeds()[name], some(MUTANTS.get(name, FEWER))
    path, num_refused = lay_out(seed, tmp_path), 0
    for index in range(count):
        path.write_bytes(mutant(seed, 7, index))
        num_refused += attempt(seed, path)
    # A mutator that breaks nothing, or everything at once, tests nothing.
    assert count // 10 < num_refused <= count


def test_the_same_index_is_the_same_mutant() -> None:
    for seed in seeds().values():
        assert mutant(seed, 1, 2) == mutant(seed, 1, 2) != mutant(seed, 1, 3)


def refusal(path: Path, read: Callable[[Path], Any] = open_checkpoint) -> str:
    """Return the one line with which a file is refused."""
    with pytest.raises(ModelError) as caught:
        read(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000 and path.name in text
    return text


# ---- GGUF -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("sizes", "kind", "offset", "message"),
    [
        ((2**33, 2**33), 0, 0, "ends at byte"),
        ((2**62, 4), 0, 0, "ends at byte"),
        ((2**63, 2), 1, 0, "ends at byte"),
        ((2**64 - 1,), 0, 0, "ends at byte"),
        ((256, 2**58), 2, 0, "ends at byte"),
        ((8,), 0, 2**64 - 32, "ends at byte"),
        ((8,), 0, 64, "incomplete download? expected"),
        ((8, 0), 0, 0, "not blocks"),
        ((0,), 0, 0, "not blocks"),
        ((8,), 4, 0, "unknown type 4"),
        ((8,), 2**32 - 1, 0, "unknown type"),
    ],
)
def test_a_tensor_that_cannot_be_there(
    sizes: tuple[int, ...], kind: int, offset: int, message: str, gguf_path: Path
) -> None:
    write(gguf_path, GgufParts((), (Entry(b"t", sizes, kind, offset),), bytes(64)))
    assert message in refusal(gguf_path, read_gguf)


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


# ---- safetensors ----------------------------------------------------------------------------------------------------


def entry(offsets: tuple[int, int], shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry((0, 8)), "b": entry((4, 12))}, "overlaps"),
        ({"a": entry((0, 8)), "b": entry((0, 8))}, "overlaps"),
        ({"a": entry((0, 8)), "b": entry((12, 20))}, "does not follow"),
        ({"a": entry((4, 12))}, "does not follow"),
        ({"a": entry((0, 8), (2**63,))}, "shape"),
        ({"a": entry((0, 8), (2**62, 2**62))}, "its shape takes"),
        ({"a": entry((0, 8), (-2,))}, "shape"),
        ({"a": entry((0, 2**64 - 1))}, "data_offsets"),
        ({"a": entry((-8, 0))}, "data_offsets"),
        ({"a": entry((8, 0))}, "data_offsets"),
        ({"a": entry((2**62, 2**62 + 8))}, "does not follow"),
        ({"a": entry((0, 8), (0,))}, "its shape takes 0 bytes"),
        ({"a": entry((0, 8), dtype="F4")}, "dtype 'F4'"),
    ],
)
def test_wrong_safetensors_header_is_refused(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(with_header(json.dumps(header).encode(), bytes(20)))
    assert message in refusal(tmp_path / "x.safetensors", read_header)


@pytest.mark.parametrize("length", [16_000_001, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_of_more_than_16_megabytes_is_refused_unread(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(20_000_000)  # a hole: nothing is written
    assert f"a header of {length} bytes in a file of 20000000 (limit 16000000)" in refusal(path, read_header)


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


@pytest.mark.parametrize(
    "file", ["../w.safetensors", "/w.safetensors", "a/../../w.safetensors", "..", "w\0.safetensors"]
)
def test_an_index_leads_nowhere_else(file: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    files = hf_files(configs()[0])
    (tmp_path / "w.safetensors").write_bytes(files["model.safetensors"])
    (directory / "config.json").write_bytes(files["config.json"])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match=r"a shard must be a plain \.safetensors file name"):
        open_checkpoint(directory)


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


# ---- configurations that promise more than the files hold ------------------------------------------------------------


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


class NoneFilled(TorchDispatchMode):
    """Refuses operations that fill new memory with a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten.full, torch.ops.aten.ones, torch.ops.aten.zeros), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_layers", [10_001, 2**31 - 1])
def test_lambdas_are_not_filled_in_for_layers_beyond_count(num_layers: int, tmp_path: Path) -> None:
    state = state_dict("G1", model_config("G1"))
    del state["x0_lambdas"]
    write_checkpoint(tmp_path, "G1", config=model_config("G1", n_layer=num_layers), state=state)
    with NoneFilled(), pytest.raises(ModelError, match=r"n_layer must be an integer in \[1, 10000\]"):
        open_checkpoint(tmp_path)


def test_refused_pickle_gives_no_warning(tmp_path: Path) -> None:
    records = [(name, b"\x80\x02S'\\q'\n." if name.endswith("data.pkl") else data) for name, data in records_of(SAVED)]
    (tmp_path / "x.pt").write_bytes(zipped(records))
    refusal(tmp_path / "x.pt", read_pt)


# ---- tokenizers -----------------------------------------------------------------------------------------------------


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


def test_padding_and_truncation_of_a_tokenizer_file_do_nothing(tmp_path: Path) -> None:
    pad = {"strategy": {"Fixed": 4096}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    whole = json.dumps(tokenizer_json() | {"padding": pad, "truncation": cut}).encode()
    plain = json.dumps(tokenizer_json()).encode()
    (tmp_path / "plain").mkdir()
    text = "the quick brown fox"
    expected = tokenizer(tmp_path / "plain", {"tokenizer.json": plain}).encode(text)
    assert tokenizer(tmp_path, {"tokenizer.json": whole}).encode(text) == expected


class PanicException(BaseException):
    """As the libraries' own is, which cannot be imported."""


def test_a_panic_of_a_library_is_a_refusal_and_an_interrupt_is_none() -> None:
    with pytest.raises(ModelError, match=r"^m: broken: no entry found$"), refused_files("m", "broken"):
        raise PanicException("no entry\nfound")
    with pytest.raises(KeyboardInterrupt), refused_files("m", "broken"):
        raise KeyboardInterrupt


def test_an_unusable_text_is_the_callers_fault(tmp_path: Path) -> None:
    whole = tokenizer_json()
    whole["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a|aa)+$"}
    with pytest.raises(BadRequest, match="a text of 41 characters that the tokenizer's pattern cannot cut"):
        tokenizer(tmp_path, {"tokenizer.json": json.dumps(whole).encode()}).encode("a" * 40 + "!")


def test_safetensors_seeds_are_valid(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(safetensors({"a": ("F16", (2, 2), bytes(8)), "b": ("F32", (1,), bytes(4))}))
    assert {name: part.shape for name, part in read_header(tmp_path / "x").items()} == {"a": (2, 2), "b": (1,)}
