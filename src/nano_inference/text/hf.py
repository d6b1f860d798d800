"""Hugging Face's tokenizer directories: tokenizer.json and the small JSON files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from nano_inference.text.fast import FastTokenizer, Spelling, fast_tokenizer, part_json
from nano_inference.types import ModelError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def hf_tokenizer(directory: Path) -> FastTokenizer:
    """Load a directory's tokenizer.json. Raises `ModelError` naming the file that is damaged or not supported.

    What stands before and after a text is tokenizer.json's post-processor alone: transformers 5 ignores
    `add_bos_token` and `add_eos_token` of tokenizer_config.json beside it.
    """
    path = directory / "tokenizer.json"
    core = _read_core(path)
    config = read_json(directory / "tokenizer_config.json")
    named = named_tokens(config, read_json(directory / "special_tokens_map.json"))
    _add_missing(core, config, named, path)
    spelling, drops_space = _spelling(core, path)
    return fast_tokenizer(
        core,
        where=str(path),
        spelling=spelling,
        drops_space=drops_space,
        named=named,
        eos_ids=end_ids(directory),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file, empty when there is none. Raises `ModelError` for anything else."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object was expected, not {type(data).__name__}")
    return data


def named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of every special token that has a role; tokenizer_config.json wins over the map."""
    found = {role: _content(config.get(role, special_map.get(role))) for role in ROLES}
    return {role: text for role, text in found.items() if text}


def end_ids(directory: Path) -> tuple[int, ...]:
    """Return the end tokens that generation_config.json names, else config.json (one id or a list)."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and all(type(token) is int for token in ids):
            return tuple(ids)
    return ()


def _content(token: object) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _read_core(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every damaged file
        raise ModelError(f"{path}: not a tokenizer.json that can be read: {error}") from None


def _add_missing(core: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], path: Path) -> None:
    """Add what only tokenizer_config.json knows: added tokens, and roles that tokenizer.json does not mark special."""
    listed = config.get("added_tokens_decoder")
    entries = sorted((int(key), value) for key, value in listed.items()) if isinstance(listed, dict) else []
    for token, entry in entries:
        text = _content(entry)
        if text is None or core.token_to_id(text) is not None:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        core.add_tokens([AddedToken(text, normalized=bool(entry.get("normalized", False)), **flags)])
        if core.token_to_id(text) != token:
            raise ModelError(f"{path}: added token {text!r} of tokenizer_config.json cannot have the id {token}")
    special = {entry.content for entry in core.get_added_tokens_decoder().values() if entry.special}
    unmarked = [text for text in named.values() if text not in special and core.token_to_id(text) is not None]
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in unmarked])


def _spelling(core: tokenizers.Tokenizer, path: Path) -> tuple[Spelling, bool]:
    """Tell from the decoder how pieces spell their bytes, and whether a text loses its leading space."""
    parts = list(_decoders(part_json(core.decoder)))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and _marks_space(parts):
        return "sentencepiece", any(_drops_space(part) for part in parts)
    raise ModelError(
        f"{path}: decoder {', '.join(sorted(kinds)) or 'none'} is not supported (ByteLevel, SentencePiece)"
    )


def _decoders(state: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    if state.get("type") == "Sequence":
        for part in state["decoders"]:
            yield from _decoders(part)
    elif state:
        yield dict(state)


def _marks_space(parts: Iterable[Mapping[str, Any]]) -> bool:
    return all(
        part["type"] != "Replace" or (part["pattern"] == {"String": "▁"} and part["content"] == " ") for part in parts
    )


def _drops_space(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Strip":
        return bool(part["content"] == " " and part["start"] == 1)
    return bool(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
