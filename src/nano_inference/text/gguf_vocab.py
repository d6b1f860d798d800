"""Build tokenizers from GGUF metadata (`tokenizer.ggml.*`, ggml-org/ggml docs/gguf.md) for the `tokenizers` library.

Supports the models "gpt2", byte-level BPE with a list of merges, and "llama", SentencePiece BPE, whose merges follow
from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from nano_inference.support.files import shown
from nano_inference.text.fast import (
    SPACE_MARK,
    FastTokenizer,
    byte_piece,
    fast_tokenizer,
    refused_files,
    set_bos_eos,
)
from nano_inference.types import ModelError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Token types of `tokenizer.ggml.token_type` (llama.cpp, llama_token_type); 1 is an ordinary piece."""

END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The roles `tokenizer.ggml.*_token_id` whose tokens end an answer."""
END_TEXTS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<eos>"),
        *("<|flush|>", "<|calls|>", "<turn|>", "<|tool_response>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    }
)
"""Tokens that end an answer by their text, in every file: converters write only one or two end tokens into it.

Those of llama.cpp (llama-vocab.cpp, special_eog_ids), without `</s>`, which is a tag of HTML in some vocabularies.
"""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"), (GPT2_WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", GPT2_WORDS)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), (LLAMA3_WORDS,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (QWEN2_WORDS,)),
    "qwen35": (QWEN35_WORDS,),
    "tekken": (TEKKEN_WORDS,),
}
"""Maps `tokenizer.ggml.pre` to patterns that split a text in turn, each the pieces of the one before.

Sources: llama.cpp's src/llama-vocab.cpp and the models' tokenizer.json files.
"""

WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Pre-tokenizers of models with `ignore_merges`: a word in the vocabulary is one token, whatever the merges."""

ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Pre-tokenizers for which `add_bos_token` defaults to true."""

_MISFIT = "the vocabulary and its merges do not fit"


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> FastTokenizer:
    """Build the tokenizer of a GGUF file. Raises `ModelError` naming the file and the missing or unsupported key."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{where}: tokenizer.ggml.model {shown(model)} is not supported; known: gpt2, llama")
    pieces = _strings(metadata, "tokens", where)
    given = metadata.get("tokenizer.ggml.token_type") or (1,) * len(pieces)
    if not isinstance(given, list | tuple) or len(given) != len(pieces) or any(type(one) is not int for one in given):
        raise ModelError(
            f"{where}: {len(pieces)} tokens, but not as many integers in the token types (tokenizer.ggml.token_type)"
        )
    types = [CONTROL if piece in END_TEXTS else kind for piece, kind in zip(pieces, given, strict=True)]
    vocab: dict[str, int] = {}  # of equal pieces the first id; `doubles` has the others
    doubles = {token: piece for token, piece in enumerate(pieces) if vocab.setdefault(piece, token) != token}
    if model == "gpt2":
        core, adds_bos = _byte_level(metadata, vocab, where), metadata.get("tokenizer.ggml.pre") in ADDS_BOS
    else:
        core, adds_bos = _sentencepiece(metadata, pieces, types, vocab, where), True
    named = _named(metadata, pieces, where)
    with refused_files(where, "the tokenizer cannot be built"):
        # Control and user-defined tokens are matched before the text is split. Except user-defined runs of
        # SentencePiece's space mark, which only merges create: no input contains that mark.
        marked = []
        for piece, kind in zip(pieces, types, strict=True):
            is_special = kind == CONTROL or (kind == UNKNOWN and byte_piece(piece) is None)
            if is_special or (kind == USER_DEFINED and (model == "gpt2" or SPACE_MARK not in piece)):
                marked.append(AddedToken(piece, special=is_special, normalized=False))
        core.add_tokens([token for token in marked if token.content])
        bos = named.get("bos_token") if _flag(metadata, "add_bos_token", adds_bos) else None
        eos = named.get("eos_token") if _flag(metadata, "add_eos_token", False) else None
        set_bos_eos(core, bos, eos)
        return fast_tokenizer(
            core,
            where=where,
            spelling="byte_level" if model == "gpt2" else "sentencepiece",
            drops_space=model == "llama" and _flag(metadata, "add_space_prefix", True),
            named=named,
            eos_ids=end_ids(metadata),
            doubles=doubles,
        )


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> Sequence[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list | tuple) or not values or not all(isinstance(v, str) for v in values):
        raise ModelError(f"{where}: tokenizer.ggml.{key} is missing or not a list of strings")
    return values


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], where: str) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"{where}: pre-tokenizer {shown(pre)} (tokenizer.ggml.pre) is not supported; known: {known}")
    merges = []
    for merge in _strings(metadata, "merges", where):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise ModelError(f"{where}: tokenizer.ggml.merges holds {shown(merge)}, which is not two pieces")
        merges.append((left, right))
    with refused_files(where, _MISFIT):
        core = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(
    metadata: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int], vocab: dict[str, int], where: str
) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    numbers = isinstance(scores, list | tuple) and all(type(score) in (int, float) for score in scores)
    if not isinstance(scores, list | tuple) or not numbers or len(scores) != len(pieces):
        raise ModelError(f"{where}: tokenizer.ggml.scores is missing or not one for each token")
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise ModelError(f"{where}: the vocabulary has no piece <0x{missing[0]:02X}> for that byte")
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    # SentencePiece joins the two neighbours whose concatenation has the highest score (google/sentencepiece,
    # bpe_model.cc), so every split of a piece into two pieces is a merge, best first.
    mergeable = {piece for piece, kind in zip(pieces, types, strict=True) if kind in (1, USER_DEFINED)}
    found = []
    for piece in (piece for piece in mergeable if len(piece) > 1):
        rank = (-scores[vocab[piece]], vocab[piece])
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found += [(*rank, vocab[a], vocab[b], a, b) for a, b in cuts if a in mergeable and b in mergeable]
    merges = [(left, right) for *_, left, right in sorted(found)]
    with refused_files(where, _MISFIT):
        bpe = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=unknown is not None, byte_fallback=True)
    core = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = _flag(metadata, "add_space_prefix", True)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if prefix else spaces
    core.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def _named(metadata: Mapping[str, Any], pieces: Sequence[str], where: str) -> dict[str, str]:
    """Return the special tokens' texts by role; SentencePiece files default to BOS 1 and EOS 2."""
    named = {}
    defaults = {"bos": 1, "eos": 2} if metadata["tokenizer.ggml.model"] == "llama" else {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and type(token) is not int:
            raise ModelError(f"{where}: tokenizer.ggml.{key}_token_id must be an integer, got {shown(token)}")
        token = defaults.get(role) if token is None else token
        if token is None:
            continue
        if not 0 <= token < len(pieces):
            raise ModelError(f"{where}: tokenizer.ggml.{key}_token_id is {token}, outside of {len(pieces)} tokens")
        named[f"{role}_token"] = pieces[token]
    return named


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{key}", default))


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end an answer: by their role, and by their text (`END_TEXTS`)."""
    pieces = metadata.get("tokenizer.ggml.tokens")
    pieces = pieces if isinstance(pieces, list | tuple) else ()
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in END_ROLES]
    found = {piece: token for token, piece in enumerate(pieces) if isinstance(piece, str) and piece in END_TEXTS}
    if {"<|return|>", "<|call|>"} <= found.keys() or {"<|calls|>", "<|flush|>"} <= found.keys():
        found.pop("<|end|>", None)  # ends a message there, and the answer has several
    ids = [token for token in named if type(token) is int and 0 <= token < (len(pieces) or 2**31)]
    return tuple(dict.fromkeys([*ids, *found.values()]))
