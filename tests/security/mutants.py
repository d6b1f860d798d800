"""Damages model files on purpose: from one seed the same mutants on every machine, each named by its format and index.

A mutant is made on one of four levels: bytes, numbers (lengths, offsets, counts), JSON values, or records of a file
(metadata keys, tensors, opcodes, zip entries), so that what lies behind the first check is reached too.
"""

from __future__ import annotations

import io
import json
import pickletools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from tests.security.model_seeds import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I32,
    STRING,
    U32,
    U64,
    Entry,
    GgufParts,
    Key,
    configs,
    gemma_gguf,
    hf_files,
    llama_gguf,
    nanochat_files,
    own_nanochat,
    sentencepiece_json,
    sharded_files,
    tiktoken_file,
    tokenizer_config,
    tokenizer_json,
    with_header,
    write_gguf,
)

NUMBERS = (0, 1, 2, 3, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
DEEP = "@deep@"
"""Placeholder for nested lists, which `json.dumps` cannot write."""
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**63), 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), "", "x", "a" * 300, "\ud800"),
    *("\0", "²", "../x", "<|im_end|>", "{{ 1 }}", "{% for %}", "$A", "▁", "nan", [], {}, [[]], [1, 2, 3], {"a": 1}),
    *([0] * 1000, {"type": "ByteLevel"}, {"Regex": "("}, {"String": ""}, {"content": "x"}, {"id": 0}, DEEP),
)

Mutate = Callable[[Random], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A whole model directory of which one file is damaged."""

    name: str
    files: Mapping[str, bytes]
    target: str
    """The file that is damaged."""
    mutate: Mutate
    opens_file: bool = False
    """Whether the file itself is opened, not the directory."""
    tokenizer_only: bool = False
    """Whether there is no model around the tokenizer."""


def byte_mutant(random: Random, data: bytes, last: int | None = None) -> bytes:
    """Return the bytes with some changed, cut, doubled or moved, all before `last`."""
    end = max(1, min(len(data), last or len(data)))
    copy, at = bytearray(data), random.randrange(end)
    length = random.randrange(1, 1 + random.choice((8, 64, 1024)))
    choice = random.randrange(8)
    if choice == 0:
        copy[at] ^= 1 << random.randrange(8)
    elif choice == 1:
        for _ in range(random.choice((1, 2, 4, 16))):
            copy[random.randrange(end)] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
    elif choice == 2:
        width = random.choice((1, 2, 4, 8))
        copy[at : at + width] = packed_number(random.choice(NUMBERS), width)
    elif choice == 3:
        del copy[at:]
    elif choice == 4:
        del copy[at : at + length]
    elif choice == 5:
        copy[at:at] = copy[at : at + length]
    elif choice == 6:
        start = random.randrange(end)
        copy[at : at + length] = data[start : start + length]
    else:
        copy[at:at] = random.randbytes(length)
    return bytes(copy)


def packed_number(value: int, width: int) -> bytes:
    """Return the lowest bytes of a number."""
    return (value % (1 << (8 * width))).to_bytes(width, "little")


def number_mutant(random: Random, data: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes with one to three of the numbers at `spans` (offset, width) replaced."""
    copy = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at, width = random.choice(spans)
        old = int.from_bytes(data[at : at + width], "little")
        other_at, other_width = random.choice(spans)
        other = int.from_bytes(data[other_at : other_at + other_width], "little")
        around = (old + 1, old - 1, old * 2, -old, other, random.randrange(40))
        copy[at : at + width] = packed_number(random.choice((*NUMBERS, *around)), width)
    return bytes(copy)


def json_mutant(random: Random, data: bytes) -> bytes:
    """Return a JSON text with values replaced, left out, doubled, renamed or moved; one in six as bytes."""
    if random.randrange(6) == 0:
        return byte_mutant(random, data)
    value = json.loads(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change(random, value)
    text = json.dumps(value)
    depth = random.choice((10, 100, 900, random.randrange(900, 1000), 100_000))
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
    if random.randrange(20) == 0:
        at = text.find("{") + 1
        text = text[:at] + text[at : text.find(",") + 1] + text[at:]
    return text.encode()


def _change(random: Random, value: Any) -> None:
    """Change one place of a JSON value, the higher levels more often."""
    place = value
    while True:
        if not isinstance(place, list | dict) or not place:
            return
        key = random.choice(list(place)) if isinstance(place, dict) else random.randrange(len(place))
        if not isinstance(place[key], list | dict) or not place[key] or random.randrange(4) == 0:
            break
        place = place[key]
    choice = random.randrange(9)
    if choice < 5:
        place[key] = random.choice(ODD_VALUES)
    elif choice == 5:
        del place[key]
    elif choice == 6 and isinstance(place, list):
        place.insert(random.randrange(len(place) + 1), place[key])
    elif choice == 6 and isinstance(place, dict):
        place[random.choice(("x", "", "\ud800", f" {key}", "a" * 999))] = place.pop(key)
    elif choice == 7:
        place[key] = [place[key]]
    else:
        place[key] = _near(random, place[key])


def _near(random: Random, value: Any) -> Any:
    """Return a value of another kind or a little beside."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return random.choice((str(value), value[1:] if isinstance(value, str | list) else None, 7))
    small = value if abs(value) < 2**64 else 7  # an earlier change may have made it larger than a float
    return random.choice((small + 1, small - 1, small * 2, -small, small + 0.5, float(small), str(small)))


ODD_KEYS: tuple[Key, ...] = (
    *(Key(b"", kind, value) for kind in (U32, I32, U64) for value in (0, 1, 2, 2**31 - 1)),
    *(Key(b"", U64, value) for value in (2**31, 2**63, 2**64 - 1)),
    *(Key(b"", I8, -1), Key(b"", I32, -(2**31)), Key(b"", BOOL, True), Key(b"", BOOL, False)),
    *(Key(b"", kind, value) for kind in (F32, F64) for value in (0.0, -1.0, 0.5, 1e30, float("inf"), float("nan"))),
    *(
        Key(b"", STRING, value)
        for value in (b"", b"x", b"\xff\xfe", b"a" * 999, b"$A", b"{{ x", b"llama", b"gpt2", b"\0")
    ),
    *(Key(b"", ARRAY, [], STRING), Key(b"", ARRAY, [b""], STRING), Key(b"", ARRAY, [b"a b", b"c"], STRING)),
    *(Key(b"", ARRAY, [1, 2, 3], U32), Key(b"", ARRAY, [2.0, float("nan")], F32), Key(b"", ARRAY, [True], BOOL)),
)


def gguf_mutant(random: Random, parts: GgufParts, data: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    """Return a GGUF file with numbers, keys, tensors or bytes changed."""
    choice = random.randrange(20)
    if choice < 7:
        return number_mutant(random, data, spans)
    if choice < 10:
        return byte_mutant(random, data, last=spans[-1][0] + 8)
    if choice < 12:
        return byte_mutant(random, data)
    for _ in range(random.choice((1, 1, 2))):
        part = random.randrange(5)
        if part < 3:
            parts = replace(parts, keys=_changed(random, parts.keys, lambda key: _changed_key(random, key)))
        else:
            parts = replace(parts, table=_changed(random, parts.table, lambda entry: _changed_entry(random, entry)))
    return bytes(write_gguf(parts).data)


def _changed(random: Random, records: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return records with one changed, left out, doubled, or two exchanged."""
    out = list(records)
    if not out:
        return ()
    at, other = random.randrange(len(out)), random.randrange(len(out))
    choice = random.randrange(8)
    if choice < 5:
        out[at] = change(out[at])
    elif choice == 5:
        del out[at]
    elif choice == 6:
        out.insert(other, out[at])
    else:
        out[at], out[other] = replace(out[other], name=out[at].name), replace(out[at], name=out[other].name)
    return tuple(out)


def _changed_key(random: Random, key: Key) -> Key:
    if key.kind == ARRAY and key.value and random.randrange(2):
        items, at = list(key.value), random.randrange(len(key.value))
        choice = random.randrange(5)
        if choice == 0:
            del items[at]
        elif choice == 1:
            items.insert(at, items[random.randrange(len(items))])
        elif choice == 2:
            items[at] = items[random.randrange(len(items))]
        elif choice == 3:
            items = items[:at]
        elif key.item_kind == STRING:
            items[at] = random.choice((b"", b" ", b"a b c", b"\xff", b"$A", b"a" * 999, b"<|im_end|>", b"x:y"))
        else:
            items[at] = type(items[at])(random.choice((0, 1, 2, 3, 4, 5, 6, 7, 100)))
        return replace(key, value=items)
    if random.randrange(10) == 0:
        return replace(key, name=random.choice((b"", b"\xff", key.name + b"x", b"general.architecture")))
    return replace(random.choice(ODD_KEYS), name=key.name)


def _changed_entry(random: Random, entry: Entry) -> Entry:
    sizes, end = entry.sizes or (1,), entry.offset + 32
    changes: Sequence[tuple[str, Sequence[Any]]] = (
        ("sizes", [(number, *sizes[1:]) for number in (0, 1, 32, sizes[0] * 2, sizes[0] // 2, sizes[0] + 1, 2**63)]),
        ("sizes", (sizes[::-1], (*sizes, 1), (1, *sizes), sizes[:1], (*sizes, 2), (), sizes * 3, (sizes[0], *sizes))),
        ("kind", (random.randrange(42), random.randrange(42), 2**31, 2**32 - 1)),
        ("offset", (0, end, max(0, end - 64), 2**63, 2**64 - 32, 31, entry.offset * 2)),
        ("name", (b"", b"\xff", b"blk.0.attn_q.weight", b"blk.9999.attn_k.weight", b"blk.0.attn_q.bias")),
        ("name", (entry.name + b"x", b"output.weight", b"token_embd.weight")),
    )
    field, values = random.choice(changes)
    return replace(entry, **{field: random.choice(values)})


def safetensors_mutant(random: Random, data: bytes) -> bytes:
    """Return a safetensors file whose header or bytes are changed."""
    length = int.from_bytes(data[:8], "little")
    choice = random.randrange(10)
    if choice == 0:
        return number_mutant(random, data, [(0, 8)])
    if choice < 3:
        return byte_mutant(random, data, last=8 + length)
    if choice == 3:
        return byte_mutant(random, data)
    return with_header(json_mutant(random, data[8 : 8 + length]), data[8 + length :])


@cache
def opcode_spans(data: bytes) -> tuple[tuple[int, int], ...]:
    """Return where each opcode of a pickle begins and ends."""
    starts = [position for _, _, position in pickletools.genops(data) if position is not None]
    return tuple(zip(starts, [*starts[1:], len(data)], strict=True))


def pickle_mutant(random: Random, data: bytes) -> bytes:
    """Return a pickle with opcodes or their arguments changed."""
    spans = opcode_spans(data)
    (start, end), (other, other_end) = random.choice(spans), random.choice(spans)
    choice = random.randrange(8)
    if choice < 2:
        return byte_mutant(random, data)
    if choice == 2 and end - start > 1:
        width = min(end - start - 1, random.choice((1, 2, 4, 8)))
        return data[: start + 1] + packed_number(random.choice(NUMBERS), width) + data[start + 1 + width :]
    if choice == 3:
        return data[:start] + data[end:]
    if choice == 4:
        return data[:start] + data[other:other_end] + data[start:]
    if choice == 5:
        return data[:start] + data[other:other_end] + data[end:]
    return data[:start] + random.randbytes(1) + data[start + (choice == 6) :]


@cache
def records_of(data: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the names and contents of a zip file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return tuple((name, archive.read(name)) for name in archive.namelist())


def zip_mutant(random: Random, data: bytes) -> bytes:
    """Return what torch.save wrote with its pickle, its records or its directory changed."""
    choice = random.randrange(10)
    if choice == 0:
        return byte_mutant(random, data)
    if choice < 3:  # the directory of the zip file is its end
        tail = sum(46 + len(name) + 40 for name, _ in records_of(data))
        return data[:-tail] + byte_mutant(random, data[-tail:])
    records = list(records_of(data))
    at = random.randrange(len(records))
    if choice < 8:
        at = next(i for i, (name, _) in enumerate(records) if name.endswith("data.pkl"))
        records[at] = (records[at][0], pickle_mutant(random, records[at][1]))
    elif choice == 8:
        records[at] = (records[at][0], byte_mutant(random, records[at][1] or b"\0"))
    else:
        other = random.randrange(len(records))
        records[at], records[other] = (records[at][0], records[other][1]), (records[other][0], records[at][1])
        if random.randrange(2):
            del records[random.randrange(len(records))]
    return zipped(records, zipfile.ZIP_DEFLATED if random.randrange(30) == 0 else zipfile.ZIP_STORED)


def zipped(records: Sequence[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file of records, aligned as torch wants them by their names' padding alone."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return out.getvalue()


def gguf_seed(name: str, parts: GgufParts) -> Seed:
    """Return a GGUF file as a seed."""
    whole = write_gguf(parts)
    data, spans = bytes(whole.data), tuple(whole.numbers)
    return Seed(
        name=name,
        files={"model.gguf": data},
        target="model.gguf",
        mutate=lambda random: gguf_mutant(random, parts, data, spans),
        opens_file=True,
    )


def file_seed(
    name: str,
    files: Mapping[str, bytes],
    target: str,
    mutate: Callable[[Random, bytes], bytes],
    *,
    tokenizer_only: bool = False,
) -> Seed:
    """Return a directory as a seed."""
    data = files[target]
    return Seed(
        name=name, files=files, target=target, mutate=lambda random: mutate(random, data), tokenizer_only=tokenizer_only
    )


def config_seed() -> Seed:
    """Return a directory whose config.json is one of many families'."""
    texts = [json.dumps(config).encode() for config in configs()]
    return replace(
        file_seed("config.json", hf_files(configs()[0]), "config.json", json_mutant),
        mutate=lambda random: json_mutant(random, random.choice(texts)),
    )


def tokenizer_seeds() -> list[Seed]:
    """Return the tokenizers' files without a model around them."""
    config = {"tokenizer_config.json": json.dumps(tokenizer_config()).encode()}
    byte_level = {"tokenizer.json": json.dumps(tokenizer_json()).encode(), **config}
    sentencepiece = {"tokenizer.json": json.dumps(sentencepiece_json()).encode()}
    ranks = {"tokenizer.model": tiktoken_file()}
    roles = {"pat_str": r"\s+|\S+", "bos_token": "<b>", "added_tokens_decoder": {"259": {"content": "<b>"}}}
    own = {**ranks, "tokenizer_config.json": json.dumps(roles).encode()}
    return [
        file_seed("tokenizer.json", byte_level, "tokenizer.json", json_mutant, tokenizer_only=True),
        file_seed("tokenizer.json (SentencePiece)", sentencepiece, "tokenizer.json", json_mutant, tokenizer_only=True),
        file_seed("tokenizer_config.json", byte_level, "tokenizer_config.json", json_mutant, tokenizer_only=True),
        file_seed("tiktoken", ranks, "tokenizer.model", byte_mutant, tokenizer_only=True),
        file_seed("tiktoken's config", own, "tokenizer_config.json", json_mutant, tokenizer_only=True),
    ]


def nanochat_seeds() -> list[Seed]:
    """Return nanochat's own files and its safetensors."""
    latest, first = nanochat_files("G4"), nanochat_files("G1")
    own = own_nanochat()
    return [
        file_seed("nanochat .pt", latest, "model_000650.pt", zip_mutant),
        file_seed("nanochat .pt (G1)", first, "model_000650.pt", zip_mutant),
        file_seed("nanochat meta", latest, "meta_000650.json", json_mutant),
        file_seed("tokenizer.pkl", latest, "tokenizer.pkl", pickle_mutant),
        file_seed("nanochat config.json", own, "config.json", json_mutant),
    ]


@cache
def seeds() -> Mapping[str, Seed]:
    """Return every seed by its name."""
    hf = hf_files(configs()[0])
    found = [
        gguf_seed("GGUF", llama_gguf()),
        gguf_seed("GGUF (SentencePiece)", gemma_gguf()),
        file_seed("safetensors", hf, "model.safetensors", safetensors_mutant),
        config_seed(),
        file_seed("generation_config.json", hf, "generation_config.json", json_mutant),
        file_seed("index.json", sharded_files(), "model.safetensors.index.json", json_mutant),
        *tokenizer_seeds(),
        *nanochat_seeds(),
    ]
    return MappingProxyType({seed.name: seed for seed in found})


def mutant(seed: Seed, number: int, index: int) -> bytes:
    """Return one mutant of a seed; `number` is the run's."""
    return seed.mutate(Random(f"{seed.name}/{number}/{index}"))


def lay_out(seed: Seed, directory: Path) -> Path:
    """Write a seed's whole files; return the file that is to be damaged."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in seed.files.items():
        (directory / name).write_bytes(data)
    return directory / seed.target
