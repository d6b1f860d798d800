"""A tokenizer over the `tokenizers` library, with its own exact table from ids to bytes.

The library's decoder is not used: it cannot give the bytes of one token, and a stream of text must be the same text
as the decoding of the whole.
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

from nano_inference.text.tokenizer_limits import longest_text
from nano_inference.types import BadRequest, ModelError

Spelling = Literal["byte_level", "sentencepiece"]
"""How a piece spells its bytes: GPT-2's table of 256 printable characters, or SentencePiece's `▁` and `<0xAB>`."""

SPACE_MARK = "▁"
_SHOWN = 200


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's spelling of bytes (openai/gpt-2, encoder.py): printable Latin-1 stands for itself, the rest
    follow from U+0100 on in the order of their values."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


BYTE_OF_CHAR: Mapping[str, int] = MappingProxyType(_byte_of_char())
CHAR_OF_BYTE: Mapping[int, str] = MappingProxyType({byte: char for char, byte in BYTE_OF_CHAR.items()})
_LATIN: Mapping[int, int] = MappingProxyType(
    dict.fromkeys(range(256), 256) | {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}
)
"""Code point -> byte; what stands for none becomes a character that Latin-1 has not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FastTokenizer:
    """Text to ids and back. Safe to share between threads: nothing changes after it is built."""

    core: tokenizers.Tokenizer
    literal: tokenizers.Tokenizer
    """The same, but special tokens in a text are plain text to it."""
    spelling: Spelling
    vocab_size: int
    """One more than the largest id."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """The tokens that end a text, the tokenizer's own first."""
    special_ids: frozenset[int]
    """Tokens that are no text: they are skipped in decoding."""
    drops_space: bool
    """A decoded text loses one leading space: SentencePiece put it there."""
    named: Mapping[str, str]
    """The special tokens that have a role: `bos_token`, `eos_token`, … to their text."""
    added: Mapping[int, str]
    """Tokens matched as they stand, before the text is cut up; their bytes are their text's."""
    doubles: Mapping[int, str]
    """Ids whose piece also belongs to another id; the library knows only one of them."""
    growth: int = 1
    """Bytes that normalizer and pre-tokenizer make of one byte at most (`tokenizer_limits`)."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text. `add_special`: with what the model wants before and after (BOS, EOS).

        With `parse_special=False` the text of a special token is spelled out like any other text, so that it cannot
        forge a turn. Raises `BadRequest` for a text that is no Unicode (a lone surrogate) or that may grow too large.
        """
        core = self.core if parse_special else self.literal
        check_unicode(text)
        check_text_size(text, self.growth)
        with no_panic(f"a text of {len(text)} characters"):
            # A batch of one: the library holds Python's lock while it encodes a single text, seconds for a long one.
            return core.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD. Raises `BadRequest` for an unknown id."""
        skipped = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_space else text

    def token_text(self, token: int) -> str:
        """Return the piece of an id as the vocabulary spells it. Raises `BadRequest` for an unknown id."""
        piece = self.doubles.get(token)
        if piece is None and 0 <= token < self.vocab_size:
            piece = self.core.id_to_token(token)
        if piece is None:
            raise BadRequest(f"token id {token} is not in the vocabulary of {self.vocab_size}")
        return piece

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that an id writes; a special token's are its text's. `BadRequest` for an unknown id."""
        text = self.added.get(token)
        if text is not None:
            return text.encode()
        return piece_bytes(self.token_text(token), self.spelling)


def piece_bytes(piece: str, spelling: Spelling) -> bytes:
    """Return the bytes that a piece of the vocabulary stands for."""
    if spelling == "sentencepiece":
        byte = byte_piece(piece)
        return piece.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])
    try:
        return piece.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def byte_piece(piece: str) -> int | None:
    """Return the byte that SentencePiece's `<0xAB>` stands for; None for any other piece."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    digits = piece[3:5]
    return int(digits, 16) if all(d in "0123456789ABCDEFabcdef" for d in digits) else None


@contextmanager
def no_panic(what: str) -> Iterator[None]:
    """Raise `BadRequest` where a library's Rust panics: a pattern's stack overflows, or it backtracks too often."""
    try:
        yield
    except BaseException as error:
        if _is_panic(error):
            raise BadRequest(f"{what} that the tokenizer's pattern cannot cut") from None
        raise


@contextmanager
def refused_files(where: str, what: str) -> Iterator[None]:
    """Raise `ModelError`, one line that begins with `where`, for whatever a library makes of a damaged file."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:  # the libraries raise bare Exception, and panic
        if isinstance(error, Exception) or _is_panic(error):
            raise ModelError(f"{where}: {what}: {shown(error)}") from None
        raise


def _is_panic(error: BaseException) -> bool:
    """Whether this is a panic of Rust code: not an `Exception`, and its class is not to be imported."""
    return type(error).__name__ == "PanicException"


def shown(value: object) -> str:
    """Return a value of a file, or what a library says of it, as one short line."""
    text = str(value) if isinstance(value, BaseException) else ascii(value)
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def check_unicode(text: str) -> None:
    """Raise `BadRequest` when a text holds a lone surrogate, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None


def check_text_size(text: str, growth: int) -> None:
    """Raise `BadRequest` when a tokenizer of this growth may make too many bytes of a text."""
    longest = longest_text(growth)
    if longest is not None and len(text) * 4 > longest and len(text.encode()) > longest:
        raise BadRequest(f"the text has {len(text.encode())} bytes; this model's tokenizer takes {longest} at most")


def fast_tokenizer(
    core: tokenizers.Tokenizer,
    *,
    where: str,
    spelling: Spelling,
    drops_space: bool,
    named: Mapping[str, str],
    eos_ids: Iterable[int] = (),
    doubles: Mapping[int, str] = MappingProxyType({}),
    growth: int = 1,
) -> FastTokenizer:
    """Finish a tokenizer: collect its special tokens and build the copy that does not parse them.

    `eos_ids` come after the one that `named` tells. Raises `ModelError` naming `where` when the parts disagree.
    """
    core.no_truncation()
    core.no_padding()
    added = core.get_added_tokens_decoder()
    ids = [id_of(core, named.get(role)) for role in ("bos_token", "eos_token")]
    ends = [token for token in (ids[1], *eos_ids) if token is not None]
    return FastTokenizer(
        core=core,
        literal=_literal_twin(core, added, where),
        spelling=spelling,
        vocab_size=max(_size(core), max(doubles, default=-1) + 1),
        bos_id=ids[0],
        eos_ids=tuple(dict.fromkeys(ends)),
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        drops_space=drops_space,
        named=MappingProxyType(dict(named)),
        added=MappingProxyType({token: entry.content for token, entry in added.items()}),
        doubles=MappingProxyType(dict(doubles)),
        growth=growth,
    )


def id_of(core: tokenizers.Tokenizer, text: str | None) -> int | None:
    """Return the id of a piece, None for none."""
    return None if text is None else core.token_to_id(text)


def set_bos_eos(core: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let the tokenizer put these before and after a text; None puts nothing."""
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(text, core.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
    core.post_processor = tokenizers.processors.TemplateProcessing(single=parts, special_tokens=special)


def _literal_twin(core: tokenizers.Tokenizer, added: Mapping[int, AddedToken], where: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that shares the model (so it costs nothing) and spells special tokens out.

    The library's own switch for this is a setting of the whole object: two threads could not differ in it.
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
    """Return a component of a `tokenizers.Tokenizer` as the JSON that it is saved as; empty for None."""
    if part is None:
        return {}
    state: dict[str, Any] = json.loads(part.__getstate__())  # type: ignore[arg-type]
    return state
