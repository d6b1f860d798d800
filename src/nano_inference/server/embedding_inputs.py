"""The forms of the `input` of POST /v1/embeddings: OpenAI's, and those of llama.cpp's server.

llama.cpp also takes lists of texts and ids together, and objects: {"prompt_string": text} and {"content": parts}, where
each part is {"type": "text", "text": text}. A list that contains an id is one input; any other list is several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nano_inference.server.schema import MAX_PROMPTS, TokenId, TokenIds
from nano_inference.text.tokenizer import Tokenizer

_MAX_PIECES = 1 << 20


def _plain(value: Any) -> Any:
    """Return the input with each object replaced by its text, before validation. Rejects too many inputs.

    The union below would report a mismatch of each of its members instead.
    """
    if not isinstance(value, list):
        return _text_of(value)
    is_single = any(isinstance(one, int) for one in value)
    if len(value) > MAX_PROMPTS and not is_single:
        raise PydanticCustomError("too_long", "must have at most {limit} entries", {"limit": MAX_PROMPTS})
    if is_single and any(isinstance(one, str) for one in value):
        _check_pieces(value)
    return [_text_of(one) for one in value] if any(isinstance(one, dict) for one in value) else value


def _check_pieces(value: list[Any]) -> None:
    for index, one in enumerate(value):
        if isinstance(one, bool) or not isinstance(one, int | str):
            message = "entry {index} of an input of ids and texts must be one of them"
            raise PydanticCustomError("embedding_input", message, {"index": index})


def _text_of(value: Any) -> Any:
    """Return the text of llama.cpp's objects, and another value as it is. Rejects such objects with other contents."""
    if not isinstance(value, dict) or not {"prompt_string", "content"} & set(value):
        return value
    if set(value) == {"prompt_string"}:
        return value["prompt_string"]
    if set(value) != {"content"}:
        raise PydanticCustomError("embedding_input", "an object must have prompt_string or content, and nothing else")
    parts = value["content"] if isinstance(value["content"], list) else [None]
    texts = [one.get("text") for one in parts if isinstance(one, dict) and one.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("embedding_input", "content must be a list of parts of type text, each with a text")
    return "".join(map(str, texts))


Text = str  # may be empty for a model whose tokenizer adds tokens to it
Pieces = Annotated[list[TokenId | Text], Field(min_length=1, max_length=_MAX_PIECES, fail_fast=True)]
"""One input made of token ids and texts."""
Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Pieces
    | Annotated[list[Text | TokenIds | Pieces], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    BeforeValidator(_plain),
]


def inputs_by_field(given: Any) -> list[tuple[str, Any]]:
    """Return (field name for errors, text or pieces) of each input."""
    if isinstance(given, str) or any(isinstance(one, int) for one in given):
        return [("input", given)]
    return [(f"input.{index}", one) for index, one in enumerate(given)]


def ids_of(given: str | Sequence[int | str], tokenizer: Tokenizer, *, add_special: bool) -> Sequence[int]:
    """Return the ids of an input; special tokens are added only to a text at its beginning."""
    if isinstance(given, str):
        return tokenizer.encode(given, add_special=add_special)
    ids: list[int] = []
    for index, piece in enumerate(given):
        is_first = index == 0
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special=add_special and is_first)
    return ids
