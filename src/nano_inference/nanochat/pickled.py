"""nanochat's tokenizer.pkl, a pickled tiktoken.Encoding, read without unpickling it.

Its state is a dict of name, pat_str, mergeable_ranks and special_tokens. Protocol 2 encodes bytes as calls of
`_codecs.encode` with Latin-1 text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tiktoken

from nano_inference.loading.fields import shown
from nano_inference.loading.pickle_data import Named, PickleError, read_data
from nano_inference.nanochat.dialogue import ASSISTANT_END, BOS_TOKENS
from nano_inference.nanochat.files import FILE_NAME
from nano_inference.support.files import open_buffered
from nano_inference.text.fast import no_panic
from nano_inference.text.tiktoken_file import TiktokenTokenizer
from nano_inference.types import MissingFile, ModelError

_ENCODING, _TO_BYTES = "tiktoken.core Encoding", "_codecs encode"
MAX_FILE = 1 << 23  # most bytes of a file; a vocabulary of 65,536 takes about 1 MB, in protocol 2 about 2 MB
MAX_ENTRIES = 1 << 18  # most entries of a dict
MAX_SPECIAL = 1 << 16  # ids after the ranks among which special tokens must be
_PROBES = ("What is 12 + 34?\n\n  It's 3 r's in strawberry.", "naïve 世界 🙂\t\r\n 1234567", " " * 50 + "a" * 200)
_FIELDS = ("name", "pat_str", "mergeable_ranks", "special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledEncoding:
    """Fields of a tiktoken.Encoding."""

    name: str
    pat_str: str
    mergeable_ranks: Mapping[bytes, int]
    special_tokens: Mapping[str, int]


def nanochat_tokenizer(directory: Path) -> TiktokenTokenizer:
    """Load a directory's tokenizer.pkl. Raises `ModelError` naming the file if it is not one of nanochat's."""
    path = directory / FILE_NAME
    core = read_encoding(path)
    bos = next((text for text in BOS_TOKENS if text in core.special_tokens_set), None)
    if bos is None:
        raise ModelError(f"{path}: has neither of the special tokens {' and '.join(BOS_TOKENS)}")
    return from_encoding(core, bos)


def from_encoding(core: tiktoken.Encoding, bos: str) -> TiktokenTokenizer:
    """Return the tokenizer of an encoding; it prepends the special token `bos` to texts.

    End tokens are <|assistant_end|> and `bos`, as in nanochat's engine.
    """
    special = {text: core.encode_single_token(text) for text in core.special_tokens_set}
    eos = ASSISTANT_END if ASSISTANT_END in special else bos
    return TiktokenTokenizer(
        core=core,
        vocab_size=core.max_token_value + 1,
        bos_id=special[bos],
        eos_ids=tuple(dict.fromkeys((special[eos], special[bos]))),
        special_ids=frozenset(special.values()),
        named=MappingProxyType({"bos_token": bos, "eos_token": eos}),
        adds_bos=True,
    )


def read_encoding(path: Path) -> tiktoken.Encoding:
    """Return the encoding in a tokenizer.pkl. Raises `ModelError` naming the file and the problem."""
    fields = read_fields(path)
    try:
        encoding = encoding_of(fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(f"{path}: tiktoken refuses it: {error}") from None
    for text in _PROBES:  # its pattern must split them without losses
        try:
            with no_panic(f"a text of {len(text)} characters"):
                is_whole = encoding.decode(encoding.encode_ordinary(text)) == text
        except Exception as error:  # ValueError at the limit of backtracking
            raise ModelError(f"{path}: its pattern fails: {error}") from None
        if not is_whole:
            raise ModelError(f"{path}: its pattern loses parts of a text")
    return encoding


def encoding_of(fields: PickledEncoding) -> tiktoken.Encoding:
    """Return a tiktoken.Encoding with these fields."""
    return tiktoken.Encoding(
        fields.name,
        pat_str=fields.pat_str,
        mergeable_ranks=dict(fields.mergeable_ranks),
        special_tokens=dict(fields.special_tokens),
    )


def token_sizes(fields: PickledEncoding) -> list[int]:
    """Return the number of bytes of each id, 0 for special tokens: the contents of nanochat's token_bytes.pt."""
    sizes = [0] * (max(*fields.mergeable_ranks.values(), *fields.special_tokens.values()) + 1)
    for word, token in fields.mergeable_ranks.items():
        sizes[token] = len(word)
    return sizes


def read_fields(path: Path) -> PickledEncoding:
    """Return the checked fields of a tokenizer.pkl. Raises `ModelError` naming the file and the problem."""
    try:
        with open_buffered(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE:
                raise PickleError(f"the file has more than {MAX_FILE} bytes")
            found = read_data(file.read(), frozenset({_ENCODING, _TO_BYTES}))
        if not isinstance(found, Named) or found.name != _ENCODING or found.arguments:
            raise PickleError("it is not one tiktoken.Encoding")
        return _fields_of(found.state)
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else ModelError
        raise kind(f"{path}: cannot be read: {error.strerror}") from None
    except PickleError as error:
        raise ModelError(f"{path}: not nanochat's pickled tiktoken.Encoding: {error}") from None


def _fields_of(state: object) -> PickledEncoding:
    if isinstance(state, str):
        raise PickleError(f"it only names the registered encoding {shown(state)}, whose ranks tiktoken would download")
    if not isinstance(state, dict) or set(state) != set(_FIELDS):
        raise PickleError(f"its state is not {', '.join(_FIELDS)}")
    for name, kind in zip(_FIELDS, (str, str, dict, dict), strict=True):
        if not isinstance(state[name], kind):
            raise PickleError(f"{name} is {type(state[name]).__name__}, not {kind.__name__}")
    if not state["pat_str"]:
        raise PickleError("pat_str is empty")
    # Ranks: bytes -> 0, 1, 2, …, each once; every byte has one.
    ranks = {_as_bytes(word): rank for word, rank in state["mergeable_ranks"].items()}
    if len(ranks) > MAX_ENTRIES:
        raise PickleError(f"mergeable_ranks has more than {MAX_ENTRIES} entries")
    if not all(type(word) is bytes and word and type(rank) is int for word, rank in ranks.items()):
        raise PickleError("mergeable_ranks does not map bytes to integers")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise PickleError(f"the ranks are not 0 to {len(ranks) - 1}, each once")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise PickleError(f"the byte {lacking[0]:#04x} has no token")
    # Special tokens: text -> an id after the ranks, each once.
    special = state["special_tokens"]
    if not all(type(text) is str and text and type(token) is int for text, token in special.items()):
        raise PickleError("special_tokens does not map text to integers")
    if len(set(special.values())) != len(special):
        raise PickleError("two special tokens have one id")
    outside = [text for text, token in special.items() if not len(ranks) <= token < len(ranks) + MAX_SPECIAL]
    if outside:
        raise PickleError(f"the id of special token {shown(outside[0])} is not among the {MAX_SPECIAL} after the ranks")
    return PickledEncoding(**{**state, "mergeable_ranks": ranks})


def _as_bytes(word: Any) -> Any:
    """Return the bytes of a call of `_codecs.encode`; any other value as it is."""
    if not isinstance(word, Named) or word.name != _TO_BYTES:
        return word
    match word.arguments:
        case (str(text), "latin1") if max(text, default="") <= "\xff":
            return text.encode("latin-1")
    raise PickleError("it calls _codecs.encode other than for bytes")
