"""Limits on a tokenizer's file, above all on its growth: the most output bytes per input byte of its normalizers.

The `tokenizers` library has no such limit: eight normalizers that each replace one letter by 16 make 4 GB of a letter,
and the failed allocation ends the process. The growth is computed from the file before any text is encoded: an upper
bound for each part, multiplied. Sources of the constants: Unicode Standard Annex 15 (normalization forms) and the
definitions of the parts in huggingface/tokenizers.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import tokenizers

from nano_inference.types import ModelError

MAX_GROWTH = 4096
"""Limit on the growth of normalizer and pre-tokenizer together."""
HARMLESS_GROWTH = 12
"""Largest growth for which texts of any length are accepted; the known model families have 2 to 12."""
MAX_GROWN = 16 << 20
"""Limit on a text's bytes after growth, for larger growths; encoding takes 130 bytes of memory for each."""
MAX_PIECE = 4096
"""Limit on the characters (bytes for tiktoken) of a piece or added token, and so of what one token decodes to."""
MAX_ADDED = 1 << 16
"""Limit on the number of added tokens."""
MAX_ADDED_CHARS = 4 << 20
"""Limit on the characters of all added tokens together."""
MAX_TEMPLATE_IDS = 256
"""Limit on the ids that a post-processor adds to a text."""
MAX_REPEAT = 4
"""Largest number of repetitions of a regex group that contains an unbounded repeat."""

_FIXED_GROWTH: Mapping[str, int] = {
    **dict.fromkeys(("NFC", "NFD"), 3),
    **dict.fromkeys(("NFKC", "NFKD"), 11),
    **dict.fromkeys(("Strip", "StripAccents", "Nmt"), 1),
    "Lowercase": 2,
    "BertNormalizer": 6,  # NFD, lower case, spaces around Chinese characters
    "ByteLevel": 2,
}
_STUB_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_MAX_PARTS = 64
"""Objects with fewer names are checked for duplicate names; larger ones are vocabularies."""


def checked_growth(data: bytes, where: str) -> int:
    """Return the growth of a tokenizer.json.

    Raises `ModelError` naming the file if a part exceeds a limit, and `ValueError` for invalid JSON.
    """
    state = json.loads(data.decode("utf-8"), object_pairs_hook=_no_doubles)
    if not isinstance(state, dict):
        raise ValueError("a JSON object was expected")
    parts = _canonical(state)
    growth = _checked_part_growth(parts, where)
    added = state.get("added_tokens") or []
    texts = [entry.get("content") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    check_added([text for text in texts if isinstance(text, str)], where, growth)
    _check_post_processor(parts.get("post_processor"), where)
    model = state.get("model")
    check_pieces(_pieces_of(model.get("vocab")) if isinstance(model, dict) else (), where)
    suffix = model.get("end_of_word_suffix") if isinstance(model, dict) else None
    check_pieces([suffix] if isinstance(suffix, str) else (), where)
    return growth


def longest_text(growth: int) -> int | None:
    """Return the limit on a text's bytes for a tokenizer of that growth, None for no limit."""
    return None if growth <= HARMLESS_GROWTH else MAX_GROWN // growth


def check_pieces(pieces: Iterable[str | bytes], where: str) -> None:
    """Raise `ModelError` if a piece of the vocabulary is longer than `MAX_PIECE`."""
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE:
        raise ModelError(f"{where}: a piece of the vocabulary has a length of {longest} (limit {MAX_PIECE})")


def check_added(texts: Sequence[str], where: str, growth: int = 1) -> None:
    """Raise `ModelError` if the added tokens are too many or too long, also after their growth."""
    if len(texts) > MAX_ADDED:
        raise ModelError(f"{where}: {len(texts)} added tokens are too many (limit {MAX_ADDED})")
    longest, total = max(map(len, texts), default=0), sum(map(len, texts))
    if longest > MAX_PIECE:
        raise ModelError(f"{where}: an added token has {longest} characters (limit {MAX_PIECE})")
    if total > MAX_ADDED_CHARS or total * growth > MAX_GROWN:
        raise ModelError(f"{where}: the added tokens have {total} characters, too many for this tokenizer")


def check_pattern(pattern: str, where: str) -> None:
    """Raise `ModelError` for nested unbounded repeats such as `(a+)+`, whose backtracking takes exponential time."""
    if _has_nested_repeats(pattern):
        shown = ascii(pattern[:80])
        raise ModelError(
            f"{where}: the pattern {shown} repeats a group that contains a repeat, which takes exponential time"
        )


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise `ValueError` for a duplicate name, of which two parsers may take different values."""
    found = dict(pairs)
    if len(found) != len(pairs) and len(pairs) < _MAX_PARTS:
        raise ValueError("an object has a name twice")
    return found


def _canonical(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts as the library saves them, because it also reads forms in which a part has no type."""
    names = ("version", "normalizer", "pre_tokenizer", "post_processor")
    stub = {name: state[name] for name in names if name in state}
    core = tokenizers.Tokenizer.from_str(json.dumps({**stub, "added_tokens": [], "model": _STUB_MODEL}))
    parts: dict[str, Any] = json.loads(core.to_str())
    return parts


def _checked_part_growth(parts: Mapping[str, Any], where: str) -> int:
    """Return the growth of normalizer and pre-tokenizer together; raise `ModelError` if it exceeds the limit."""
    growth = 1
    for name in ("normalizer", "pre_tokenizer"):
        for part in _leaves(parts.get(name)):
            _check_part_pattern(part, f"{where}: {name} {part.get('type')}")
            own = _growth_of(part)
            growth *= own
            if growth > MAX_GROWTH:
                made = f"makes up to {own} bytes of one byte, all parts together {growth}"
                raise ModelError(f"{where}: {name} {part.get('type')} {made} (limit {MAX_GROWTH})")
    return growth


def _leaves(part: Any) -> Iterable[dict[str, Any]]:
    """Yield the parts inside nested sequences."""
    if not isinstance(part, dict):
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for name in ("normalizers", "pretokenizers", "processors"):
        for inner in part.get(name) or ():
            yield from _leaves(inner)


def _check_part_pattern(part: Mapping[str, Any], where: str) -> None:
    pattern = part.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(regex, str):
        check_pattern(regex, where)


def _growth_of(part: Mapping[str, Any]) -> int:
    """Return the growth of one part."""
    kind = part.get("type")
    if kind == "Replace":
        return _growth_of_replace(part)
    if kind == "Prepend":
        return 1 + _size(part.get("prepend"))  # before each text between two added tokens, which may be one byte
    if kind == "Metaspace":
        mark = _size(part.get("replacement"))
        return mark if part.get("prepend_scheme") == "never" else mark * (1 + mark)
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return 2 * _FIXED_GROWTH[kind]
    if kind == "Precompiled":
        return _growth_of_charsmap(part.get("precompiled_charsmap"))
    return _FIXED_GROWTH.get(str(kind), 1)


def _growth_of_replace(part: Mapping[str, Any]) -> int:
    pattern, size = part.get("pattern"), _size(part.get("content"))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1, -(-size // _size(text)))
    return 1 + 2 * size  # a pattern may match the empty string, before and after each byte


def _growth_of_charsmap(charsmap: object) -> int:
    """Return the bytes of the longest replacement. Format: size of a trie, the trie, zero-terminated replacements."""
    try:
        blob = base64.b64decode(str(charsmap))
        (size,) = struct.unpack_from("<I", blob)
    except (binascii.Error, struct.error):
        return 1  # the library raises an error for it
    return max(1, *map(len, blob[4 + size :].split(b"\0")))


def _check_post_processor(part: Any, where: str) -> None:
    """Raise `ModelError` for a post-processor that repeats the text or adds too many ids."""
    templates = [one for one in _leaves(part) if one.get("type") == "TemplateProcessing"]
    repeats = prod(max(1, sum("Sequence" in item for item in one["single"])) for one in templates)
    if repeats > 1:
        raise ModelError(f"{where}: post_processor repeats the text {repeats} times (limit 1)")
    ids = 0
    for one in templates:
        special = one["special_tokens"]
        names = [item["SpecialToken"]["id"] for item in one["single"] if "SpecialToken" in item]
        ids += sum(len(special[name]["ids"]) for name in names if name in special)
    if ids > MAX_TEMPLATE_IDS:
        raise ModelError(f"{where}: post_processor puts {ids} ids around a text (limit {MAX_TEMPLATE_IDS})")


def _pieces_of(vocab: object) -> Iterable[str]:
    """Return a model's pieces: the names of an object, or the first element of each pair (Unigram)."""
    if isinstance(vocab, dict):
        return vocab
    pairs = vocab if isinstance(vocab, list) else []
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]


def _size(text: object) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 1


def _has_nested_repeats(pattern: str) -> bool:
    """Return True if a group that repeats more than `MAX_REPEAT` times contains an unbounded repeat."""
    has_repeat = [False]
    """For the whole pattern and each open group: True if it contains an unbounded repeat."""
    at, is_after_quantifier = 0, False
    while at < len(pattern):
        quantifier = None if is_after_quantifier else _QUANTIFIER.match(pattern, at)
        is_after_quantifier = quantifier is not None
        if quantifier is not None:
            has_repeat[-1] |= _is_unbounded(quantifier)
            at = quantifier.end()
        elif pattern[at] == "(":
            has_repeat.append(False)
            at += 1
        elif pattern[at] == ")" and len(has_repeat) > 1:
            inner, outer = has_repeat.pop(), _QUANTIFIER.match(pattern, at + 1)
            if inner and outer is not None and _is_unbounded(outer):
                return True
            has_repeat[-1] |= inner
            at += 1
        else:
            at = _after_atom(pattern, at)
    return False


def _is_unbounded(quantifier: re.Match[str]) -> bool:
    """Return True for a quantifier without a limit of at most `MAX_REPEAT`."""
    if quantifier.group() in "?*+":
        return quantifier.group() != "?"
    low, comma, high = quantifier.groups()
    most = high if comma else low
    return not most or len(most) > 3 or int(most) > MAX_REPEAT


def _after_atom(pattern: str, at: int) -> int:
    """Return the index after an escape, a character class or one character."""
    if pattern[at] == "[":
        return _after_class(pattern, at)
    if pattern[at] != "\\":
        return at + 1
    is_named = pattern[at + 1 : at + 2] in ("p", "P", "x", "u", "k") and pattern[at + 2 : at + 3] == "{"
    return _after(pattern, "}", at) if is_named else at + 2


def _after(text: str, end: str, at: int) -> int:
    found = text.find(end, at)
    return len(text) if found < 0 else found + 1


def _after_class(pattern: str, at: int) -> int:
    """Return the index after a character class, which may contain nested ones."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        depth += (char == "[") - (char == "]")
        at += 2 if char == "\\" else 1
        if depth == 0:
            return at
    return at
