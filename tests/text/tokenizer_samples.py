"""Small trained tokenizers of both spellings, and texts that are difficult for tokenizers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nano_inference.text.fast import CHAR_OF_BYTE

WORDS = [
    "the quick brown fox jumps over the lazy dog 12345 hello world, it's don't we'll",
    "def main(args):\n    return [x ** 2 for x in range(10)]\n\n\nclass A:\n\tpass\n",
    "naïve café über straße 日本語 中文 العربية हिन्दी emoji 😀 👩‍👩‍👧",
] * 4

ODD = (
    "",
    " ",
    "hello world",
    "  two  spaces   and more    ",
    "12345 1 2 3.14 1,000,000 ٣٤٥ ½ ²",
    "don't DON'T we'LL I'm",
    "naïve café e\u0301 \u0300x",
    "日本語 中文字符 한국어",
    "العربية שלום",
    "👩‍👩‍👧 😀🏽 🇩🇪",
    "\x00\x01\x7f\x1b[0m\u200b\u2028\ufeff",
    "tab\tnew\nline\r\nend\n\n\n  x",
    "def f(x):\n        return x**2  # ok\n",
    "▁under ▁ Ġ Ċ <0x41> </s",
    "\U0010ffff\ue000",
    "a" * 300,
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """Return a small byte-level BPE with ChatML's special tokens."""
    return Tokenizer.from_str(_trained_byte_level())


def sentencepiece_like() -> Tokenizer:
    """Return a small BPE with SentencePiece's spelling, in the form of Llama 2's tokenizer.json."""
    return Tokenizer.from_str(_trained_sentencepiece())


# Cached, because the trainer breaks ties by the order of a hash table, so that two trainings differ.
@cache
def _trained_byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(CHAR_OF_BYTE.values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer.to_str()


@cache
def _trained_sentencepiece() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "<s>", "$B"], special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str()


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """Write a tokenizer as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(base | config), encoding="utf-8")
    return directory
