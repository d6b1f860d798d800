"""What a command reads: the place of its model and tokenizer, and its prompts. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from nano_inference.cli.options import Common
from nano_inference.cli.terminal import bar
from nano_inference.loading.catalog import default_cache, names_path, resolve
from nano_inference.loading.gguf_file import read_gguf
from nano_inference.loading.listing import only_gguf
from nano_inference.support.checks import token_ids
from nano_inference.support.files import exists, is_present, path_of
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import installed_tokenizers
from nano_inference.types import BadRequest

Prompt = str | list[Any] | tuple[int, ...]  # a text, a list of messages, or token ids
_LIKE_OPTION = re.compile(r"--?[A-Za-z][\w-]*(=.*)?")
_KEYS = ("prompt", "messages", "token_ids")


def read_prompts(argument: str | None, file: str | None) -> list[Prompt]:
    """Return the prompts of a command: its argument, the lines of a file, or piped stdin as one prompt."""
    if argument is not None and _LIKE_OPTION.fullmatch(argument):
        raise BadRequest("", f"unknown option {argument} (pipe in a prompt that looks like an option)")
    if argument is not None and file is not None:
        raise BadRequest("", "give a prompt or --file, not both")
    if file is not None:
        prompts = parse_lines(read_text(file), file)
        if not prompts:
            raise BadRequest(file, "contains no prompts")
        return prompts
    if argument in (None, "-"):
        if argument is None and sys.stdin.isatty():
            raise BadRequest("", "no prompt: give one, or --file, or pipe a text in")
        return [sys.stdin.read()]
    return [str(argument)]


def read_text(name: str) -> str:
    """Return a UTF-8 file's text; "-" is stdin."""
    if name == "-":
        return sys.stdin.read()
    try:
        return path_of(name, "--file").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(name, f"is not UTF-8: {error}") from None


def parse_lines(text: str, where: str) -> list[Prompt]:
    """Return one prompt per non-blank line; a line that begins with "{" is a JSON object."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [
        parse_object(line, f"{where}:{number}") if line.lstrip().startswith("{") else line.removesuffix("\r")
        for number, line in lines
    ]


def parse_object(line: str, where: str) -> Prompt:
    """Return the prompt of a JSON object with exactly one of "prompt", "messages", "token_ids"."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise BadRequest(where, f"a line that begins with {{ must be JSON: {error}") from None
    if len(data) != 1 or not set(data) <= set(_KEYS):
        raise BadRequest(
            where, f"{where}: must have exactly one of {', '.join(_KEYS)}, has {', '.join(map(str, data)) or 'none'}"
        )
    ((key, value),) = data.items()
    if key == "token_ids":
        return token_ids(f"{where}: token_ids", value)
    if not isinstance(value, str if key == "prompt" else list):
        raise BadRequest(where, f"{key} must be a {'string' if key == 'prompt' else 'list'}")
    prompt: str | list[Any] = value
    return prompt


def cache_of(common: Common) -> Path:
    """Return the directory of fetched models."""
    return path_of(common.cache, "--cache") if common.cache else default_cache(os.environ)


def fetch(name: str, common: Common) -> Path:
    """Return a model's path, fetching the model if it is not in the cache."""
    with bar(f"fetching {name}", is_bytes=True, quiet=common.quiet) as progress:
        return resolve(name, cache_of(common), progress=progress)


def for_any_directory(name: str, path: Path) -> str:
    """Return a model's name for a process with another current directory: `path`, made absolute, for a local model."""
    return str(path.absolute()) if names_path(name) and exists(path_of(name, "model")) else name


def tokenizer_source(path: Path) -> TokenizerSource:
    """Return a model's tokenizer: files next to config.json, an installed kind's, or a GGUF file's metadata."""
    if path.is_dir() and is_present(path / "config.json"):
        return TokenizerSource(str(path))
    for kind in reversed([*installed_tokenizers().values()]):
        if (source := kind.find(path)) is not None:
            return source
    file = read_gguf(only_gguf(path) if path.is_dir() else path)
    return TokenizerSource(str(file.path), file.metadata)
