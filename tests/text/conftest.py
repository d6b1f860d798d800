"""Directories with small tokenizers, written once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from tests.text.tokenizer_samples import byte_level, save, sentencepiece_like


@pytest.fixture(scope="session")
def chatml_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a byte-level tokenizer with an added token beyond the vocabulary."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return save(
        tokenizer,
        tmp_path_factory.mktemp("chatml"),
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>", "__type": "AddedToken"},
    )


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a SentencePiece-like tokenizer."""
    return save(
        sentencepiece_like(), tmp_path_factory.mktemp("llama"), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
