"""Loads nanochat's tokenizer.pkl. Imports tiktoken, which `--help` does without."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import tiktoken

from nano_inference.nanochat.names import ASSISTANT_END, BOS_TOKENS, FILE_NAME
from nano_inference.nanochat.pickled import read_encoding
from nano_inference.text.tiktoken_file import TiktokenTokenizer
from nano_inference.types import ModelError


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
