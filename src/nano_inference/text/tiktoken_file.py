"""Tokenizers over tiktoken, and their loader for directories with a tiktoken file.

The file has a line per token: its bytes in base64, a space, its rank. Llama 3's original `tokenizer.model` and Qwen 1's
`qwen.tiktoken` are such files (openai/tiktoken, load.py).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nano_inference.support.files import is_present, open_buffered, shown
from nano_inference.support.packages import needed
from nano_inference.text.fast import (
    check_unicode,
    end_ids,
    named_tokens,
    no_panic,
    read_json,
    refused_files,
    token_number,
)
from nano_inference.text.gguf_vocab import LLAMA3_WORDS
from nano_inference.types import BadRequest, ModelError


def find_ranks(directory: Path) -> Path | None:
    """Return the directory's tiktoken file: a `*.tiktoken`, or a `tokenizer.model` in that format; None without one."""
    for path in sorted(directory.glob("*.tiktoken")):
        return path
    path = directory / "tokenizer.model"
    if not is_present(path):
        return None
    with open_buffered(path) as file:
        first = file.readline(4096)
    return path if _rank(first) is not None else None


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks by token bytes. Raises `ModelError` naming the file and the wrong line."""
    ranks: dict[bytes, int] = {}
    if not is_present(path):
        raise ModelError(f"{path}: no such file")
    with open_buffered(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            entry = _rank(line)
            if entry is None:
                raise ModelError(f"{path}: line {number} is not a token in base64 and its rank")
            ranks[entry[0]] = entry[1]
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path}: the ranks are not 0 to {len(ranks) - 1}, each once")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise ModelError(f"{path}: the byte {lacking[0]:#04x} has no token")
    return ranks


def _rank(line: bytes) -> tuple[bytes, int] | None:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit():
        return None
    try:
        return base64.b64decode(fields[0], validate=True), int(fields[1])
    except (binascii.Error, ValueError):
        return None


LLAMA3_SPECIALS: Mapping[int, str] = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
"""Llama 3's special tokens with a name, by their offset after the ranks (meta-llama/llama-models); there are 256."""
_LLAMA3_ROLES: Mapping[str, str] = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiktokenTokenizer:
    """Implements `kinds.Tokenizer`, which documents the members, over tiktoken."""

    core: Any  # a tiktoken.Encoding
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    named: Mapping[str, str]
    adds_bos: bool
    drops_space: bool = False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        check_unicode(text)
        allowed: set[str] = self.core.special_tokens_set if parse_special else set()
        with no_panic(f"a text of {len(text)} characters"):
            ids: list[int] = self.core.encode(text, allowed_special=allowed, disallowed_special=())
        return [self.bos_id, *ids] if add_special and self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        skipped = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        try:
            data: bytes = self.core.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            raise BadRequest("", f"token id {token} is not in the vocabulary of {self.vocab_size}") from None
        return data

    def token_text(self, token: int) -> str:
        """Return an id's text, with U+FFFD for invalid UTF-8: tiktoken has no other spelling."""
        return self.token_bytes(token).decode("utf-8", "replace")


def tiktoken_tokenizer(directory: Path) -> TiktokenTokenizer:
    """Load a directory's file with the special tokens and the pattern of tokenizer_config.json, else those of Llama 3.

    Raises `ModelError` naming the file if it is damaged or ids collide.
    """
    path = find_ranks(directory)
    assert path is not None, "`find_ranks` has found the file"
    with needed(f"{path}: tiktoken's file"):
        import tiktoken
    ranks = _read_ranks(path)
    config = read_json(directory / "tokenizer_config.json")
    # Special tokens are those of added_tokens_decoder in tokenizer_config.json, else Llama 3's 256.
    special: dict[str, int] = {}
    listed, first = config.get("added_tokens_decoder"), len(ranks)
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        text, token = entry.get("content") if isinstance(entry, dict) else None, token_number(key)
        if token is None or not isinstance(text, str) or token < first:
            raise ModelError(
                f"{path}: added token {shown(key)} of tokenizer_config.json is not beyond the {first} ranks"
            )
        if not text:  # tiktoken would match it at every position, in an endless loop
            raise ModelError(f"{path}: added token {token} of tokenizer_config.json is empty")
        special[text] = token
    if not special:
        numbers = count()  # of the tokens without a name
        names = (LLAMA3_SPECIALS.get(i) or f"<|reserved_special_token_{next(numbers)}|>" for i in range(256))
        special = {name: first + i for i, name in enumerate(names)}
    pattern = config.get("pat_str", LLAMA3_WORDS)
    if not isinstance(pattern, str):
        raise ModelError(f"{path}: pat_str of tokenizer_config.json must be a string, got {shown(pattern)}")
    with refused_files(str(path), "tiktoken refuses it"):
        core = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    named = named_tokens(config, read_json(directory / "special_tokens_map.json")) or {
        role: text for role, text in _LLAMA3_ROLES.items() if text in special
    }
    ends = [special.get(named.get("eos_token", "")), *end_ids(directory), special.get("<|eot_id|>")]
    return TiktokenTokenizer(
        core=core,
        vocab_size=core.max_token_value + 1,
        bos_id=special.get(named.get("bos_token", "")),
        eos_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        special_ids=frozenset(special.values()),
        named=MappingProxyType(named),
        adds_bos=bool(config.get("add_bos_token", "bos_token" in named)),
    )
