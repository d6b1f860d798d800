"""The table of tokenizer kinds, and the function that loads a tokenizer.

Sources are a directory with tokenizer.json or a tiktoken file, and a GGUF file's metadata; packages add more. Files
that would run code (pickles, Python files) raise an error that names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nano_inference.support.files import is_present, path_of
from nano_inference.support.plugins import table
from nano_inference.text.fast import hf_tokenizer
from nano_inference.text.gguf_vocab import gguf_tokenizer
from nano_inference.text.kinds import TOKENIZERS_GROUP, Tokenizer, TokenizerKind, TokenizerSource
from nano_inference.text.tiktoken_file import find_ranks, tiktoken_tokenizer
from nano_inference.types import ModelError

__all__ = ["Tokenizer", "installed_tokenizers", "kind_of", "load_tokenizer"]


def installed_tokenizers() -> Mapping[str, TokenizerKind]:
    """Return the tokenizer kinds of this package and of installed packages, by name. Raises `PluginError`."""
    return table(TOKENIZERS_GROUP, OWN_TOKENIZERS, TokenizerKind)


def load_tokenizer(source: TokenizerSource, kinds: Mapping[str, TokenizerKind] | None = None) -> Tokenizer:
    """Load the tokenizer of a source. Raises `ModelError` naming the unusable file.

    `kinds` defaults to the installed ones; the last row that reads the directory loads it, so that rows of other
    packages have precedence. Raises `MissingPackage`, a `ModelError`, if the kind needs a package that is missing.
    """
    if source.gguf is not None:
        return gguf_tokenizer(source.gguf, source.path)
    directory = path_of(source.path, "tokenizer")
    if not directory.is_dir():
        raise ModelError(f"{source.path}: no such directory")
    kinds = installed_tokenizers() if kinds is None else kinds
    kind = kind_of(directory, kinds)
    if kind is None:
        raise ModelError(_why_none(directory, [one.title for one in kinds.values()]))
    return kind.load(directory)


def kind_of(directory: Path, kinds: Mapping[str, TokenizerKind]) -> TokenizerKind | None:
    """Return the last of `kinds` that reads a directory, else None."""
    return next((one for one in reversed([*kinds.values()]) if one.reads(directory)), None)


OWN_TOKENIZERS: Mapping[str, TokenizerKind] = {
    "tiktoken": TokenizerKind(
        title="a tiktoken file",
        description="tiktoken",
        reads=lambda directory: find_ranks(directory) is not None,
        load=tiktoken_tokenizer,
    ),
    "huggingface": TokenizerKind(
        title="tokenizer.json",
        description="tokenizer.json",
        reads=lambda directory: is_present(directory / "tokenizer.json"),
        load=hf_tokenizer,
    ),
}
"""The kinds of this package."""


def _why_none(directory: Path, titles: list[str]) -> str:
    """Return the error message for a directory without a tokenizer of these titles."""
    if (directory / "tokenizer.model").is_file():
        return (
            f"{directory / 'tokenizer.model'}: a SentencePiece model alone cannot be read; convert it once with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes tokenizer.json"
        )
    for pattern, what in (("*.pkl", "a pickle"), ("*.pickle", "a pickle"), ("tokenization_*.py", "Python code")):
        found = sorted(directory.glob(pattern))
        if found:
            return f"{found[0]}: {what} is not run to get a tokenizer; convert it to tokenizer.json"
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return (
            f"{directory / 'vocab.json'}: a vocabulary without its pre-tokenizer is ambiguous; "
            "save the tokenizer as tokenizer.json with transformers"
        )
    return f"{directory}: no tokenizer: neither {', '.join(titles[:-1])} nor {titles[-1]}"
