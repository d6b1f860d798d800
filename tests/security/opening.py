"""Open all parts of a model: configuration, every weight, tokenizer, chat template."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.text.chat import encode_chat, load_chat_template
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest, ModelError
from tests.security.mutants import Seed

MAX_MESSAGE = 1000
TEXTS = ("hello world, the fox\n\n  12 日本 🙂<|im_end|>", " " * 40 + "x" * 40)
MESSAGES = ({"role": "user", "content": "hello <|im_end|> the fox"}, {"role": "assistant", "content": ""})


class Wrong(Exception):
    """A refusal that is not what a user should read."""


def open_model(path: Path) -> None:
    """Open a model's files and read everything that they hold. Raises `ModelError`."""
    checkpoint = open_checkpoint(path)
    read_weights(checkpoint)
    use_tokenizer(checkpoint.tokenizer)


def read_weights(checkpoint: Checkpoint) -> None:
    """Read every weight as float32; one without values has a shape that memory need not be able to hold."""
    for source in checkpoint.sources.values():
        if math.prod(source.shape):
            source.read_into(torch.empty(source.shape))


def use_tokenizer(source: TokenizerSource) -> None:
    """Load a tokenizer and its chat template, and use both; what they refuse is the caller's fault then."""
    tokenizer = load_tokenizer(source)
    template = load_chat_template(source, tokenizer)
    for text in TEXTS:
        try:
            tokenizer.decode(tokenizer.encode(text))
        except BadRequest as error:
            check_message(str(error), "")
    if template is not None:
        try:
            encode_chat(template, tokenizer, MESSAGES)
        except BadRequest as error:
            check_message(str(error), "")


def attempt(seed: Seed, path: Path) -> bool:
    """Open a damaged seed; return whether it was refused. Anything but a `ModelError` of one line comes out."""
    try:
        if seed.tokenizer_only:
            use_tokenizer(TokenizerSource(str(path.parent)))
        else:
            open_model(path if seed.opens_file else path.parent)
    except ModelError as error:
        check_message(str(error), str(path.parent))
        return True
    return False


def check_message(text: str, directory: str) -> None:
    """Raise `Wrong` unless a refusal is one short line that names the directory and no address in memory."""
    if "\n" in text or len(text) > MAX_MESSAGE or directory not in text or " at 0x" in text:
        raise Wrong(f"a message of {len(text)} characters: {text[:300]!r}")
