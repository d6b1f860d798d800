"""nanochat's model family and tokenizer, registered by entry points. No torch."""

from __future__ import annotations

from pathlib import Path

from nano_inference.models.families import Family
from nano_inference.nanochat.dialogue import nanochat_dialogue
from nano_inference.nanochat.files import FILE_NAME, find_files
from nano_inference.nanochat.program import program
from nano_inference.support.files import is_present
from nano_inference.support.packages import needed
from nano_inference.text.kinds import Tokenizer, TokenizerKind, TokenizerSource


def _load(directory: Path) -> Tokenizer:
    with needed(f"{directory / FILE_NAME}: nanochat's tokenizer"):
        from nano_inference.nanochat.pickled import nanochat_tokenizer
    return nanochat_tokenizer(directory)


def _find(path: Path) -> TokenizerSource | None:
    files = find_files(path)
    return None if files is None else TokenizerSource(str(files.tokenizer or files.weights.parent))


FAMILY = Family(program=program)  # all generations; `ModelConfig.terms` are `NanochatTerms`

TOKENIZER = TokenizerKind(
    title="nanochat's tokenizer.pkl",
    description="tiktoken (nanochat)",
    reads=lambda directory: is_present(directory / FILE_NAME),
    load=_load,
    find=_find,
    dialogue=nanochat_dialogue,
)
"""Takes precedence over a tokenizer.json in the same directory, as in nanochat."""
