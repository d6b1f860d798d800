"""The prompt of llama.cpp's POST /infill: text between a prefix and a suffix, for models with tokens for it.

The prompt is the repository's name and its files (`input_extra`), if the model has tokens for them, then the prefix,
the suffix and the mark after which the model writes the middle. `prompt` is appended to the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nano_inference.server.dialects.llamacpp_body import InfillBody
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import check_text_length
from nano_inference.server.refusals import api_errors
from nano_inference.text.tokenizer import Tokenizer

_SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prefix": ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<PRE>", "<|fim▁begin|>", "[PREFIX]", "▁<PRE>"),
        "suffix": ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<SUF>", "<|fim▁hole|>", "[SUFFIX]", "▁<SUF>"),
        "middle": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<MID>", "<|fim▁end|>", "[MIDDLE]", "▁<MID>"),
        "repository": ("<|repo_name|>", "<|reponame|>", "<fim_repo>", "<reponame>", "<REPO>"),
        "file": ("<|file_sep|>", "<file_sep>", "<filename>"),
    }
)
"""Role -> how models spell its token; each has one of them."""
_REPOSITORY, _FILE = "repository", "current"
"""Names in the prompt, where a request names none."""


class FimTokens(NamedTuple):
    """Ids of a model's tokens for infilling; None for a token that it lacks."""

    prefix: int | None
    suffix: int | None
    middle: int | None
    repository: int | None
    file: int | None


def fim_tokens(tokenizer: Tokenizer) -> FimTokens:
    """Return the tokens of a model for infilling."""
    return FimTokens(**{role: _single(tokenizer, spellings) for role, spellings in _SPELLINGS.items()})


def infill_prompt(body: InfillBody, model: ServedModel) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and of the tokens with which a model starts another file: they end the answer.

    Raises `ApiError` naming a field for a model without the tokens that it needs, and for a prompt that is too long.
    """
    fim = fim_tokens(model.tokenizer)
    if fim.prefix is None or fim.suffix is None or fim.middle is None:
        raise ApiError(
            400, "input_prefix: the model has no tokens for infilling", param="input_prefix", code="unsupported_field"
        )
    others = [one.text for one in body.input_extra or ()]
    check_text_length([body.input_prefix, body.input_suffix, body.prompt or "", *others], "input_prefix", model)
    encode = model.tokenizer.encode
    bos = encode("", add_special=True)
    with api_errors("input_prefix"):
        prefix = encode(body.input_prefix + (body.prompt or ""), add_special=False, parse_special=False)
        suffix = encode(body.input_suffix, add_special=False, parse_special=False)
        extra = _extra(body, fim, model.tokenizer)
    ids = [*bos, *extra, fim.prefix, *prefix, fim.suffix, *suffix, fim.middle]
    return ids, [token for token in (fim.repository, fim.file) if token is not None]


def _extra(body: InfillBody, fim: FimTokens, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens before the prefix. Raises `ApiError` for files that the model has no token for."""
    if not body.input_extra:
        return []
    if fim.file is None:
        message = "input_extra: the model has no token that separates files"
        raise ApiError(400, message, param="input_extra", code="unsupported_field")

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    ids = [] if fim.repository is None else [fim.repository, *plain(f"{_REPOSITORY}\n")]
    for file in body.input_extra:
        ids += [fim.file, *plain(f"{file.filename}\n{file.text}")]
    return [*ids, fim.file, *plain(f"{_FILE}\n")]


def _single(tokenizer: Tokenizer, spellings: tuple[str, ...]) -> int | None:
    """Return the id of the first text that is one token; the token for unknown text is none."""
    for text in spellings:
        ids = tokenizer.encode(text, add_special=False)
        if len(ids) == 1 and tokenizer.token_bytes(ids[0]) == text.encode():
            return ids[0]
    return None
