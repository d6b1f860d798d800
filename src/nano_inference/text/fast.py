"""A tokenizer over the `tokenizers` library that decodes each id to its exact bytes.

The library's decoder is not used, because it cannot return the bytes of one token; streamed text must equal the
decoding of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken

from nano_inference.types import BadRequest, ModelError

Spelling = Literal["byte_level", "sentencepiece"]
"""A piece's spelling of bytes: GPT-2's 256 printable characters, or SentencePiece's `▁` and `<0xAB>`."""

SPACE_MARK = "▁"
_SHOWN = 200


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's characters for bytes (openai/gpt-2, encoder.py): printable Latin-1 characters for their own bytes,
    U+0100 and following for the others, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()
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


def shown(value: object) -> str:
    """Return a file's value, or an exception's message, as one line of limited length."""
    text = str(value) if isinstance(value, BaseException) else ascii(value)
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


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
    ids = [id_of(core, named.get(role)) for role in ("bos_token", "eos_token")]
    ends = [token for token in (ids[1], *eos_ids) if token is not None]
    return FastTokenizer(
        core=core,
        literal=_literal_copy(core, added, where),
        spelling=spelling,
        vocab_size=max(_size(core), max(doubles, default=-1) + 1),
        bos_id=ids[0],
        eos_ids=tuple(dict.fromkeys(ends)),
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        drops_space=drops_space,
        named=MappingProxyType(dict(named)),
        added=MappingProxyType({token: entry.content for token, entry in added.items()}),
        doubles=MappingProxyType(dict(doubles)),
    )


def id_of(core: tokenizers.Tokenizer, text: str | None) -> int | None:
    """Return the id of a piece, None for None and for an unknown piece."""
    return None if text is None else core.token_to_id(text)


def set_bos_eos(core: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Set the tokens that the tokenizer adds before and after a text; None for no token."""
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(text, core.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
    core.post_processor = tokenizers.processors.TemplateProcessing(single=parts, special_tokens=special)


def _literal_copy(core: tokenizers.Tokenizer, added: Mapping[int, AddedToken], where: str) -> tokenizers.Tokenizer:
    """Return a copy, sharing the model's memory, that encodes special tokens as plain text.

    A copy, because the library's switch `encode_special_tokens` applies to the whole object, for all threads.
    """
    plain = tokenizers.Tokenizer(core.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(core, part) is not None:
            setattr(plain, part, getattr(core, part))
    plain.add_tokens([added[token] for token in sorted(added)])
    plain.encode_special_tokens = True
    for token, entry in added.items():
        if plain.token_to_id(entry.content) != token:
            raise ModelError(f"{where}: added token {entry.content!r} cannot have the id {token}")
    return plain


def _size(core: tokenizers.Tokenizer) -> int:
    size = core.get_vocab_size()
    if size and core.id_to_token(size - 1) is not None and core.id_to_token(size) is None:
        return size
    return max(core.get_vocab().values(), default=-1) + 1


def part_json(part: object) -> dict[str, Any]:
    """Return a component of a `tokenizers.Tokenizer` as saved in JSON; empty for None."""
    if part is None:
        return {}
    state: dict[str, Any] = json.loads(part.__getstate__())  # type: ignore[arg-type]
    return state
