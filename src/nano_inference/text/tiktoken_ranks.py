"""Read tiktoken's text format, without tiktoken: a line per token, its bytes in base64, a space, its rank.

Llama 3's original `tokenizer.model` and Qwen 1's `qwen.tiktoken` are such files (openai/tiktoken, load.py).
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from nano_inference.support.files import is_present, open_buffered
from nano_inference.types import ModelError


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


def read_ranks(path: Path) -> dict[bytes, int]:
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
