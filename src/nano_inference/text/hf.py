"""Load tokenizers from Hugging Face directories: tokenizer.json and the small JSON files next to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from nano_inference.support.files import is_present, read_file
from nano_inference.text.fast import FastTokenizer, Spelling, fast_tokenizer, part_json, refused_files, shown
from nano_inference.types import ModelError

MAX_FILE = 64 << 20
"""Limit on the bytes of a JSON file; the largest known vocabularies have half. In memory it takes 13 times as many."""
_PREFIX = re.compile(rb'"(?:continuing_subword_prefix|[^"\\]*\\u00[^"]*)"\s*:\s*"[^"]')
"""A non-empty continuing_subword_prefix, its name plain or escaped: the library aborts if a piece does not match it."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def hf_tokenizer(directory: Path) -> FastTokenizer:
    """Load a directory's tokenizer.json. Raises `ModelError` naming the damaged or unsupported file.

    Only the post-processor of tokenizer.json adds tokens before and after a text: as in transformers 5,
    `add_bos_token` and `add_eos_token` of tokenizer_config.json are ignored.
    """
    path = directory / "tokenizer.json"
    data = read_file(path, MAX_FILE, "a tokenizer's file")
    with refused_files(str(path), "not a tokenizer.json that can be read"):
        if _PREFIX.search(data):
            raise ModelError(f"{path}: continuing_subword_prefix is not supported (ByteLevel, SentencePiece)")
        core = tokenizers.Tokenizer.from_buffer(data)
    config = read_json(directory / "tokenizer_config.json")
    special_map = read_json(directory / "special_tokens_map.json")
    named = named_tokens(config, special_map)
    further, listed = _further_special(config, special_map)
    with refused_files(str(path), "the tokenizer cannot be built"):
        _add_missing(core, config, {**further, **named}, listed, path)
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
    """Return the JSON object in a file, empty if the file is missing. Raises `ModelError` for anything else."""
    if not is_present(path):
        return {}
    text = read_file(path, MAX_FILE, "a tokenizer's file")
    try:
        data = json.loads(text.decode("utf-8"))
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {shown(error)}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object was expected, not {type(data).__name__}")
    return data


def named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens' texts by role; `config` (tokenizer_config.json) has precedence over the map."""
    found = {role: _content(config.get(role, special_map.get(role))) for role in ROLES}
    return {role: text for role, text in found.items() if text}


def token_number(key: str) -> int | None:
    """Return the token id that a JSON object's key denotes, None for any other key."""
    return int(key) if key.isascii() and key.isdigit() and len(key) < 11 else None


def end_ids(directory: Path) -> tuple[int, ...]:
    """Return `eos_token_id` (one id or a list) of generation_config.json and config.json."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        found += [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    return tuple(dict.fromkeys(found))


def _content(token: object) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _add_missing(
    core: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    named: Mapping[str, str],
    others: Sequence[str],
    path: Path,
) -> None:
    """Add the tokens that only tokenizer_config.json lists, and mark those with a name and `others` as special."""
    listed = config.get("added_tokens_decoder")
    entries = [(token_number(key), value) for key, value in listed.items()] if isinstance(listed, dict) else []
    for token, entry in sorted(entries, key=lambda pair: -1 if pair[0] is None else pair[0]):
        if token is None or not isinstance(entry, dict):
            raise ModelError(f"{path}: added_tokens_decoder of tokenizer_config.json must map ids to objects")
        text = _content(entry)
        if text is None or core.token_to_id(text) is not None:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        core.add_tokens([AddedToken(text, normalized=bool(entry.get("normalized", False)), **flags)])
        if core.token_to_id(text) != token:
            raise ModelError(f"{path}: added token {shown(text)} of tokenizer_config.json cannot have the id {token}")
    added = {entry.content: entry.special for entry in core.get_added_tokens_decoder().values()}
    unmarked = [text for text in named.values() if not added.get(text)] + [text for text in others if text not in added]
    unmarked = [text for text in unmarked if core.token_to_id(text) is not None]
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in unmarked])


def _further_special(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the special tokens without a role: those with a name, and a list.

    As in transformers 5, the map counts only without added_tokens_decoder, a token of the list stays as it is if it is
    an added token, and `additional_special_tokens` are those before version 5.
    """
    found: dict[str, str] = {}
    listed: list[str] = []
    for source in (config,) if "added_tokens_decoder" in config else (special_map, config):
        extra, older = source.get("extra_special_tokens"), source.get("additional_special_tokens")
        named = {key: value for key, value in source.items() if key.endswith("_token") and key not in ROLES}
        for more in (extra, source.get("model_specific_special_tokens")):
            named |= more if isinstance(more, dict) else {}
        found |= {key: text for key, value in named.items() if (text := _content(value)) is not None}
        values = extra if isinstance(extra, list) and extra else older if isinstance(older, list) else []
        listed = [text for value in values if (text := _content(value)) is not None] or listed
    return found, listed


def _spelling(core: tokenizers.Tokenizer, path: Path) -> tuple[Spelling, bool]:
    """Return how pieces spell their bytes, and True if decoding drops a leading space, from the decoder."""
    parts = list(_decoders(part_json(core.decoder)))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level", False
    replaced = [(part["pattern"], part["content"]) for part in parts if part["type"] == "Replace"]
    is_sentencepiece = all(one == ({"String": "▁"}, " ") for one in replaced)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and is_sentencepiece:
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


def _drops_space(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Strip":
        return bool(part["content"] == " " and part["start"] == 1)
    return bool(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
