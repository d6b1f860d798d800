"""`tokenize`: token ids of a text, and the text of ids."""

from __future__ import annotations

import json
import sys

from nano_inference.cli.options import Common
from nano_inference.cli.place import fetch, tokenizer_source
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import BadRequest


def show_ids(text: str | None, add_special: bool, as_json: bool, model: str, common: Common) -> int:
    """Print the ids of a text, or of stdin if it is None; `as_json` adds the text of each token."""
    if text is None and sys.stdin.isatty():
        raise BadRequest("", "no text: give one, or pipe it in")
    tokenizer = _open(model, common)
    ids = tokenizer.encode(sys.stdin.read() if text is None else text, add_special=add_special)
    if as_json:
        pieces = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        print(json.dumps({"token_ids": ids, "pieces": pieces, "count": len(ids)}))
    else:
        print(*ids)
    return 0


def show_text(ids: tuple[int, ...], as_json: bool, model: str, common: Common) -> int:
    """Print the text of ids, including special tokens."""
    tokenizer = _open(model, common)
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise BadRequest("--decode", f"token id {token} is not in [0, {tokenizer.vocab_size - 1}]")
    text = tokenizer.decode(ids, skip_special=False)
    print(json.dumps({"token_ids": ids, "text": text}) if as_json else text)
    return 0


def _open(model: str, common: Common) -> Tokenizer:
    return load_tokenizer(tokenizer_source(fetch(model, common)))
