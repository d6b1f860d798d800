"""Tokenizers over the `tokenizers` library that decode each id to its exact bytes, and their loader for directories.

The library's decoder is not used, because it cannot return the bytes of one token; streamed text must equal the
decoding of the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken

from nano_inference.support.files import MAX_JSON_BYTES, is_present, read_file, read_json_object, shown
from nano_inference.types import BadRequest, ModelError

Spelling = Literal["byte_level", "sentencepiece"]
"""A piece's spelling of bytes: GPT-2's 256 printable characters, or SentencePiece's `▁` and `<0xAB>`."""

SPACE_MARK = "▁"
_PREFIX = re.compile(rb'"(?:continuing_subword_prefix|[^"\\]*\\u00[^"]*)"\s*:\s*"[^"]')
"""A non-empty continuing_subword_prefix, its name plain or escaped: the library aborts if a piece does not match it."""
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_ITSELF = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_OF_CHAR: Mapping[str, int] = {chr(byte): byte for byte in _ITSELF} | {
    chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _ITSELF)
}
"""GPT-2's characters for bytes (openai/gpt-2, encoder.py): printable Latin-1 characters for their own bytes, U+0100 and
following for the others, in order."""
CHAR_OF_BYTE: Mapping[int, str] = {byte: char for char, byte in BYTE_OF_CHAR.items()}
_LATIN: Mapping[int, int] = dict.fromkeys(range(256), 256) | {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}
"""Maps code points to bytes; a Latin-1 character that is not in the table becomes 256, which Latin-1 cannot encode."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FastTokenizer:
    """Implements `kinds.Tokenizer`, which documents the shared members. Immutable, so safe to share between threads."""

    core: tokenizers.Tokenizer
    literal: tokenizers.Tokenizer  # a copy of `core` that encodes the texts of special tokens as plain text
    spelling: Spelling
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    drops_space: bool
    named: Mapping[str, str]
    added: Mapping[int, str]
    """Added tokens and their texts, which are matched before the text is split; a token's bytes are its text's."""
    doubles: Mapping[int, str]
    """Ids whose piece also has a smaller id, with their pieces; the library knows only that id."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text; with `add_special` including BOS and EOS as the model's post-processor adds them.

        With `parse_special=False` the text of a special token is encoded as plain text, so that it cannot forge a turn.
        Raises `BadRequest` for a text with a lone surrogate.
        """
        core = self.core if parse_special else self.literal
        check_unicode(text)
        with no_panic(f"a text of {len(text)} characters"):
            # A batch of one, because `encode` would hold the GIL, for a long text for seconds.
            return core.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD. Raises `BadRequest` for an unknown id."""
        skipped = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_space else text

    def token_text(self, token: int) -> str:
        """Return an id's piece as spelled in the vocabulary. Raises `BadRequest` for an unknown id."""
        piece = self.doubles.get(token)
        if piece is None and 0 <= token < self.vocab_size:
            piece = self.core.id_to_token(token)
        if piece is None:
            raise BadRequest("", f"token id {token} is not in the vocabulary of {self.vocab_size}")
        return piece

    def token_bytes(self, token: int) -> bytes:
        """Return an id's bytes; an added token's are those of its text. Raises `BadRequest` for an unknown id."""
        text = self.added.get(token)
        if text is not None:
            return text.encode()
        return piece_bytes(self.token_text(token), self.spelling)


def piece_bytes(piece: str, spelling: Spelling) -> bytes:
    """Return the bytes of a piece of the vocabulary."""
    if spelling == "sentencepiece":
        byte = byte_piece(piece)
        return piece.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])
    try:
        return piece.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def byte_piece(piece: str) -> int | None:
    """Return the byte of a SentencePiece piece `<0xAB>`; None for any other piece."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    digits = piece[3:5]
    return int(digits, 16) if all(d in "0123456789ABCDEFabcdef" for d in digits) else None


@contextmanager
def no_panic(what: str) -> Iterator[None]:
    """Turn a Rust panic of a library (a regex's stack overflow or excessive backtracking) into `BadRequest`."""
    try:
        yield
    except BaseException as error:
        if _is_panic(error):
            raise BadRequest("", f"{what} that the tokenizer's pattern cannot cut") from None
        raise


@contextmanager
def refused_files(where: str, what: str) -> Iterator[None]:
    """Turn any error or panic of a library into a one-line `ModelError` that starts with `where`."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:  # the libraries raise bare Exception, and panic
        if isinstance(error, Exception) or _is_panic(error):
            raise ModelError(f"{where}: {what}: {shown(error)}") from None
        raise


def _is_panic(error: BaseException) -> bool:
    """Return True for a panic of Rust code: its class is not an `Exception` and cannot be imported."""
    return type(error).__name__ == "PanicException"


def check_unicode(text: str) -> None:
    """Raise `BadRequest` if a text contains a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("", f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None


def fast_tokenizer(
    core: tokenizers.Tokenizer,
    *,
    where: str,
    spelling: Spelling,
    drops_space: bool,
    named: Mapping[str, str],
    eos_ids: Iterable[int] = (),
    doubles: Mapping[int, str] = MappingProxyType({}),
) -> FastTokenizer:
    """Build a `FastTokenizer`: collect the special tokens and make the copy that does not parse them.

    `eos_ids` follow the id of `named["eos_token"]`. Raises `ModelError` naming `where` if the ids do not fit.
    """
    core.no_truncation()
    core.no_padding()
    added = core.get_added_tokens_decoder()
    # The copy ignores added tokens in texts: the library's switch applies to an object as a whole, for all threads.
    literal = tokenizers.Tokenizer(core.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(core, part) is not None:
            setattr(literal, part, getattr(core, part))
    literal.add_tokens([added[token] for token in sorted(added)])
    literal.encode_special_tokens = True
    for token, entry in added.items():
        if literal.token_to_id(entry.content) != token:
            raise ModelError(f"{where}: added token {entry.content!r} cannot have the id {token}")
    size = core.get_vocab_size()
    if not size or core.id_to_token(size - 1) is None or core.id_to_token(size) is not None:
        size = max(core.get_vocab().values(), default=-1) + 1  # the ids have gaps
    bos, eos = (core.token_to_id(named[role]) if role in named else None for role in ("bos_token", "eos_token"))
    ends = [token for token in (eos, *eos_ids) if token is not None]
    return FastTokenizer(
        core=core,
        literal=literal,
        spelling=spelling,
        vocab_size=max(size, max(doubles, default=-1) + 1),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(ends)),
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        drops_space=drops_space,
        named=MappingProxyType(dict(named)),
        added=MappingProxyType({token: entry.content for token, entry in added.items()}),
        doubles=MappingProxyType(dict(doubles)),
    )


def set_bos_eos(core: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Set the tokens that the tokenizer adds before and after a text; None for no token."""
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(text, core.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
    core.post_processor = tokenizers.processors.TemplateProcessing(single=parts, special_tokens=special)


def hf_tokenizer(directory: Path) -> FastTokenizer:
    """Load a directory's tokenizer.json. Raises `ModelError` naming the damaged or unsupported file.

    Only the post-processor of tokenizer.json adds tokens before and after a text: as in transformers 5,
    `add_bos_token` and `add_eos_token` of tokenizer_config.json are ignored.
    """
    path = directory / "tokenizer.json"
    data = read_file(path, MAX_JSON_BYTES, "a tokenizer's file")
    with refused_files(str(path), "not a tokenizer.json that can be read"):
        if _PREFIX.search(data):
            raise ModelError(f"{path}: continuing_subword_prefix is not supported (ByteLevel, SentencePiece)")
        core = tokenizers.Tokenizer.from_buffer(data)
    config = read_json(directory / "tokenizer_config.json")
    special_map = read_json(directory / "special_tokens_map.json")
    named = named_tokens(config, special_map)
    further, listed_special = _further_special(config, special_map)
    with refused_files(str(path), "the tokenizer cannot be built"):
        # Add the tokens that only tokenizer_config.json lists; mark those with a name and the listed ones as special.
        special = {**further, **named}
        entries_by_id = config.get("added_tokens_decoder")
        entries = (
            [(token_number(key), value) for key, value in entries_by_id.items()]
            if isinstance(entries_by_id, dict)
            else []
        )
        for token, entry in sorted(entries, key=lambda pair: -1 if pair[0] is None else pair[0]):
            if token is None or not isinstance(entry, dict):
                raise ModelError(f"{path}: added_tokens_decoder of tokenizer_config.json must map ids to objects")
            text = _content(entry)
            if text is None or core.token_to_id(text) is not None:
                continue
            flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
            core.add_tokens([AddedToken(text, normalized=bool(entry.get("normalized", False)), **flags)])
            if core.token_to_id(text) != token:
                raise ModelError(
                    f"{path}: added token {shown(text)} of tokenizer_config.json cannot have the id {token}"
                )
        added = {entry.content: entry.special for entry in core.get_added_tokens_decoder().values()}
        unmarked = [text for text in special.values() if not added.get(text)] + [
            text for text in listed_special if text not in added
        ]
        unmarked = [text for text in unmarked if core.token_to_id(text) is not None]
        core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in unmarked])
        spelling, drops_space = _spelling(core, path)
        return fast_tokenizer(
            core,
            where=str(path),
            spelling=spelling,
            drops_space=drops_space,
            named=named,
            eos_ids=end_ids(directory),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if the file is missing. Raises `ModelError` for anything else."""
    return read_json_object(path, has_unique_names=False) if is_present(path) else {}


def named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens' texts by role; `config` (tokenizer_config.json) has precedence over the map."""
    found = {role: _content(config.get(role, special_map.get(role))) for role in ROLES}
    return {role: text for role, text in found.items() if text}


def token_number(key: str) -> int | None:
    """Return the token id that a JSON object's key denotes, None for any other key."""
    return int(key) if key.isascii() and key.isdigit() and len(key) < 11 else None


def end_ids(directory: Path) -> tuple[int, ...]:
    """Return `eos_token_id` (one id or a list) of generation_config.json and config.json."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        found += [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    return tuple(dict.fromkeys(found))


def _content(token: object) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _further_special(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the special tokens without a role: those with a name, and a list.

    As in transformers 5, the map counts only without added_tokens_decoder, a token of the list stays as it is if it is
    an added token, and `additional_special_tokens` are those before version 5.
    """
    found: dict[str, str] = {}
    listed: list[str] = []
    for source in (config,) if "added_tokens_decoder" in config else (special_map, config):
        extra, older = source.get("extra_special_tokens"), source.get("additional_special_tokens")
        named = {key: value for key, value in source.items() if key.endswith("_token") and key not in ROLES}
        for more in (extra, source.get("model_specific_special_tokens")):
            named |= more if isinstance(more, dict) else {}
        found |= {key: text for key, value in named.items() if (text := _content(value)) is not None}
        values = extra if isinstance(extra, list) and extra else older if isinstance(older, list) else []
        listed = [text for value in values if (text := _content(value)) is not None] or listed
    return found, listed


def _spelling(core: tokenizers.Tokenizer, path: Path) -> tuple[Spelling, bool]:
    """Return how pieces spell their bytes, and True if decoding drops a leading space, from the decoder."""
    state: dict[str, Any] = {} if core.decoder is None else json.loads(core.decoder.__getstate__())
    waiting, parts = [state] if state else [], list[dict[str, Any]]()
    while waiting:  # sequences may contain sequences
        part = waiting.pop(0)
        if part.get("type") == "Sequence":
            waiting = [*part["decoders"], *waiting]
        else:
            parts.append(part)
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level", False
    replaced = [(part["pattern"], part["content"]) for part in parts if part["type"] == "Replace"]
    is_sentencepiece = all(one == ({"String": "▁"}, " ") for one in replaced)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and is_sentencepiece:
        strips = any(one["type"] == "Strip" and one["content"] == " " and one["start"] == 1 for one in parts)
        spaces = (one for one in parts if one["type"] == "Metaspace")
        return "sentencepiece", strips or any(one.get("prepend_scheme", "always") != "never" for one in spaces)
    raise ModelError(
        f"{path}: decoder {', '.join(sorted(kinds)) or 'none'} is not supported (ByteLevel, SentencePiece)"
    )
