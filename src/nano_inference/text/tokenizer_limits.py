"""How much longer a tokenizer can make a text, computed from its file before any text goes through it.

The library has no limit of its own: eight normalizers that write 16 letters for one make 4 GB of each letter, and the
allocation that fails ends the process. Each part's growth is bounded from above in bytes; growths multiply. Sources of
the constants: Unicode Standard Annex 15 (normalization forms), the parts' own definitions (huggingface/tokenizers).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import tokenizers

from nano_inference.types import ModelError

MAX_GROWTH = 4096
"""Most bytes that normalizer and pre-tokenizer together may make of one byte."""
HARMLESS_GROWTH = 12
"""Up to this growth texts of any length are taken; the families that are known to work have 2 to 12."""
MAX_GROWN = 16 << 20
"""Bytes that a text may grow to with a tokenizer of a larger growth; encoding takes 130 bytes of memory for each."""
MAX_PIECE = 4096
"""Characters (bytes for tiktoken) of one piece or added token, which is also what one token can decode to."""
MAX_ADDED = 1 << 16
"""Added tokens."""
MAX_ADDED_CHARS = 4 << 20
"""Characters of all added tokens together."""
MAX_TEMPLATE_IDS = 256
"""Ids that a post-processor may put around a text."""
MAX_REPEAT = 4
"""Times that a pattern may repeat a group with an open repeat inside."""

_FIXED_GROWTH: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("NFC", "NFD"), 3),
        **dict.fromkeys(("NFKC", "NFKD"), 11),
        **dict.fromkeys(("Strip", "StripAccents", "Nmt"), 1),
        "Lowercase": 2,
        "BertNormalizer": 6,  # NFD, lower case, spaces around Chinese characters
        "ByteLevel": 2,
    }
)
_STUB_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_MAX_PARTS = 64
"""Names in an object that is not a vocabulary."""


def checked_growth(data: bytes, where: str) -> int:
    """Return how many bytes at most a tokenizer.json makes of one byte.

    Raises `ModelError` naming the file for a part that exceeds a limit, and `ValueError` for what is no JSON.
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
    """Return how many bytes a text may have for a tokenizer of that growth, None for any number."""
    return None if growth <= HARMLESS_GROWTH else MAX_GROWN // growth


def check_pieces(pieces: Iterable[str | bytes], where: str) -> None:
    """Raise `ModelError` for a vocabulary with a piece of more than `MAX_PIECE`."""
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE:
        raise ModelError(f"{where}: a piece of the vocabulary has a length of {longest} (limit {MAX_PIECE})")


def check_added(texts: Sequence[str], where: str, growth: int = 1) -> None:
    """Raise `ModelError` for too many, too long or, once they are normalized, too large added tokens."""
    if len(texts) > MAX_ADDED:
        raise ModelError(f"{where}: {len(texts)} added tokens are too many (limit {MAX_ADDED})")
    longest, total = max(map(len, texts), default=0), sum(map(len, texts))
    if longest > MAX_PIECE:
        raise ModelError(f"{where}: an added token has {longest} characters (limit {MAX_PIECE})")
    if total > MAX_ADDED_CHARS or total * growth > MAX_GROWN:
        raise ModelError(f"{where}: the added tokens have {total} characters, too many for this tokenizer")


def check_pattern(pattern: str, where: str) -> None:
    """Raise `ModelError` for a pattern that repeats what itself has an open repeat: `(a+)+` backtracks without end."""
    if _has_nested_repeats(pattern):
        shown = ascii(pattern[:80])
        raise ModelError(
            f"{where}: the pattern {shown} repeats a group that has a repeat inside, which takes endless time"
        )


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; refuse one that names a part twice, of which two readers could take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs) and len(pairs) < _MAX_PARTS:
        raise ValueError("an object has a name twice")
    return found


def _canonical(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts as the library itself writes them: it also reads forms in which a part's type is left out."""
    names = ("version", "normalizer", "pre_tokenizer", "post_processor")
    stub = {name: state[name] for name in names if name in state}
    core = tokenizers.Tokenizer.from_str(json.dumps({**stub, "added_tokens": [], "model": _STUB_MODEL}))
    parts: dict[str, Any] = json.loads(core.to_str())
    return parts


def _checked_part_growth(parts: Mapping[str, Any], where: str) -> int:
    """Return the growth of normalizer and pre-tokenizer together."""
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
    """Yield the parts of nested sequences."""
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
    """Return how many bytes one part makes of one byte at most."""
    kind = part.get("type")
    if kind == "Replace":
        return _growth_of_replace(part)
    if kind == "Prepend":
        return 1 + _size(part.get("prepend"))  # before each piece between two added tokens, which may be one byte
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
    return 1 + 2 * size  # a pattern may match the empty text, before and after each byte


def _growth_of_charsmap(charsmap: object) -> int:
    """Return the length of the longest replacement: a trie's size, the trie, replacements that end with a zero byte."""
    try:
        blob = base64.b64decode(str(charsmap))
        (size,) = struct.unpack_from("<I", blob)
    except (binascii.Error, struct.error):
        return 1  # the library refuses it
    return max(1, *map(len, blob[4 + size :].split(b"\0")))


def _check_post_processor(part: Any, where: str) -> None:
    """Refuse a post-processor that repeats the text or puts many ids around it."""
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
    """Return a model's pieces: the names of an object, or the first of each pair (Unigram)."""
    if isinstance(vocab, dict):
        return vocab
    pairs = vocab if isinstance(vocab, list) else []
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]


def _size(text: object) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 1


def _has_nested_repeats(pattern: str) -> bool:
    """Return True if a group that is repeated more than `MAX_REPEAT` times has an open repeat inside."""
    has_repeat = [False]
    """For the whole pattern and each group that is not closed: whether such a repeat is inside."""
    at, is_behind_quantifier = 0, False
    while at < len(pattern):
        quantifier = None if is_behind_quantifier else _QUANTIFIER.match(pattern, at)
        is_behind_quantifier = quantifier is not None
        if quantifier is not None:
            has_repeat[-1] |= _is_open(quantifier)
            at = quantifier.end()
        elif pattern[at] == "(":
            has_repeat.append(False)
            at += 1
        elif pattern[at] == ")" and len(has_repeat) > 1:
            inner, outer = has_repeat.pop(), _QUANTIFIER.match(pattern, at + 1)
            if inner and outer is not None and _is_open(outer):
                return True
            has_repeat[-1] |= inner
            at += 1
        else:
            at = _after_atom(pattern, at)
    return False


def _is_open(quantifier: re.Match[str]) -> bool:
    """Return True for a quantifier without a small limit."""
    if quantifier.group() in "?*+":
        return quantifier.group() != "?"
    low, comma, high = quantifier.groups()
    most = high if comma else low
    return not most or len(most) > 3 or int(most) > MAX_REPEAT


def _after_atom(pattern: str, at: int) -> int:
    """Return the place after an escape, a class of characters or one character."""
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
    """Return the place after a class of characters, which may hold further ones."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        depth += (char == "[") - (char == "]")
        at += 2 if char == "\\" else 1
        if depth == 0:
            return at
    return at
