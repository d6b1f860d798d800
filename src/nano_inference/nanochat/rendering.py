"""Convert conversations to nanochat's tokens with a training mask, and answer tokens to messages.

Layout of nanochat's `render_conversation`: bos, then alternately <|user_start|> text <|user_end|> and
<|assistant_start|> … <|assistant_end|>, without spaces. An assistant's content is text or a list of parts: text, python
(an expression for the calculator) and python_output (its result).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nano_inference.nanochat.names import ASSISTANT_END
from nano_inference.nanochat.tool import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START
from nano_inference.text.chat import Message
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tools import special_tokens
from nano_inference.types import BadRequest

USER_START, USER_END, ASSISTANT_START = "<|user_start|>", "<|user_end|>", "<|assistant_start|>"

CHAT_TEMPLATE = """\
{%- set first = 1 if messages[0].role == "system" else 0 -%}
{%- if messages|length == first -%}
    {{- raise_exception("a user message must follow the system message") -}}
{%- endif -%}
{{- bos_token -}}
{%- for message in messages[first:] -%}
    {%- set role = "assistant" if loop.index0 % 2 else "user" -%}
    {%- if message.role != role -%}
        {{- raise_exception("messages must be user and assistant in turn, the first by the user") -}}
    {%- endif -%}
    {{- "<|" + role + "_start|>" -}}
    {%- if first and loop.first -%}
        {{- messages[0].content + "\\n\\n" -}}
    {%- endif -%}
    {{- message.content + "<|" + role + "_end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|assistant_start|>" -}}
{%- endif -%}
"""
"""The same layout as a chat template, for messages with text; does not truncate."""

Conversation = Mapping[str, Any] | Sequence[Message]  # an object with "messages", or the messages


class OutOfTurn(BadRequest):
    """A message of the wrong role or kind for its position, for which nanochat raises `AssertionError`."""


class _Piece(NamedTuple):
    text: str
    is_special: bool
    mask: int


def render_conversation(
    tokenizer: Tokenizer, conversation: Conversation, max_tokens: int | None = 2048
) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation and a mask: 1 for tokens to train on, else 0.

    Both are truncated to `max_tokens`. Raises `OutOfTurn` or `BadRequest` naming the wrong message.
    """
    special = special_tokens(tokenizer)
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    mask = [0] * len(ids)
    for piece in _pieces(_messages(conversation)):
        if piece.is_special:
            tokens = [_special(special, piece.text)]
        else:
            tokens = tokenizer.encode(piece.text, add_special=False, parse_special=False)
        ids += tokens
        mask += [piece.mask] * len(tokens)
    return ids[:max_tokens], mask[:max_tokens]


def render_for_completion(tokenizer: Tokenizer, conversation: Conversation, max_tokens: int | None = 2048) -> list[int]:
    """Return the tokens of a conversation without the assistant's last message, as a prompt for it.

    The prompt is truncated to `max_tokens`, then <|assistant_start|> is appended. Raises as `render_conversation`.
    """
    messages = _messages(conversation)
    if not messages or messages[-1]["role"] != "assistant":
        where = f"messages[{len(messages) - 1}].role" if messages else "the role of the last message"
        raise OutOfTurn(where, "must be assistant: that message is replaced by the completion")
    ids, _ = render_conversation(tokenizer, messages[:-1], max_tokens)
    return [*ids, _special(special_tokens(tokenizer), ASSISTANT_START)]


def render_turns(tokenizer: Tokenizer, messages: Iterable[Message]) -> list[int]:
    """Return the prompt of user and assistant messages in any order, as nanochat's web server: nothing is truncated.

    Messages without content are left out: an answer that failed is not an example of an empty answer. Raises
    `BadRequest` naming the wrong message.
    """
    special = special_tokens(tokenizer)
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for index, message in enumerate(messages):
        content, role = message.get("content"), message.get("role")
        if role not in ("user", "assistant"):
            raise BadRequest(f"messages[{index}].role", f"must be user or assistant, got {role!r:.80}")
        if not isinstance(content, str):
            raise BadRequest(f"messages[{index}].content", f"must be a string, not {type(content).__name__}")
        if content:
            text = tokenizer.encode(content, add_special=False, parse_special=False)
            ids += [_special(special, f"<|{role}_start|>"), *text, _special(special, f"<|{role}_end|>")]
    return [*ids, _special(special, ASSISTANT_START)]


def answer_message(tokenizer: Tokenizer, tokens: Iterable[int]) -> Message:
    """Return the assistant's message in generated tokens, up to its end token.

    The content is text, or a list of parts if the calculator was called; rendering the parts restores their special
    tokens. A truncated block counts as closed. Other special tokens are omitted.
    """
    special = special_tokens(tokenizer)
    kinds = {special.get(PYTHON_START): "python", special.get(OUTPUT_START): "python_output"}
    ends = {special.get(PYTHON_END): "python", special.get(OUTPUT_END): "python_output"}
    parts: list[tuple[str, list[int]]] = [("text", [])]
    for token in tokens:
        kind = parts[-1][0]
        if token in (special.get(ASSISTANT_END), tokenizer.bos_id):
            break
        if token in kinds:
            parts.append((kinds[token], []))
        elif ends.get(token) == kind:
            parts.append(("text", []))
        elif token not in tokenizer.special_ids:
            parts[-1][1].append(token)
    texts = [(kind, tokenizer.decode(ids)) for kind, ids in parts if ids or kind != "text"]
    if all(kind == "text" for kind, _ in texts):
        return {"role": "assistant", "content": "".join(text for _, text in texts)}
    return {"role": "assistant", "content": [{"type": kind, "text": text} for kind, text in texts]}


def tool_calls(message: Message) -> list[tuple[str, str | None]]:
    """Return the calculator expressions of a message, each with its result or None."""
    content = message.get("content")
    parts = [] if not isinstance(content, list | tuple) else [(part["type"], part["text"]) for part in content]
    after = [*parts[1:], ("text", "")]
    pairs = zip(parts, after, strict=False)
    return [
        (text, said if then == "python_output" else None) for (kind, text), (then, said) in pairs if kind == "python"
    ]


def _special(special: Mapping[str, int], text: str) -> int:
    if text not in special:
        raise BadRequest("", f"the tokenizer has no special token {text}: it does not belong to a nanochat chat model")
    return special[text]


def _messages(conversation: Conversation) -> list[Message]:
    """Return the messages of a conversation. Raises `BadRequest` unless each is an object with a role."""
    messages = conversation.get("messages") if isinstance(conversation, Mapping) else conversation
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise BadRequest(
            "messages", f'a conversation must be a list or have one as "messages", not {type(messages).__name__}'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}]", "must be an object with a role")
    return list(messages)


def _pieces(messages: list[Message]) -> Iterator[_Piece]:
    """Yield the texts and special tokens of messages; a leading system message is merged into the next one."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    if len(messages) == first:
        raise OutOfTurn(f"messages[{first}]", f"messages[{first}] is missing: a user message is required")
    for index, message in enumerate(messages[first:], first):
        content = message.get("content")
        role = "assistant" if (index - first) % 2 else "user"
        if message["role"] != role:
            raise OutOfTurn(f"messages[{index}].role", f"must be {role}, got {message['role'][:80]!r}")
        if role == "assistant":
            yield from _assistant(content, f"messages[{index}].content")
            continue
        if not isinstance(content, str):
            raise OutOfTurn(f"messages[{index}].content", f"must be a string, not {type(content).__name__}")
        system = _system(messages[0]) if first and index == first else ""
        yield from (_Piece(USER_START, True, 0), _Piece(system + content, False, 0), _Piece(USER_END, True, 0))


def _system(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadRequest("messages[0].content", f"must be a string, not {type(content).__name__}")
    return content + "\n\n"


def _assistant(content: object, where: str) -> Iterator[_Piece]:
    yield _Piece(ASSISTANT_START, True, 0)
    if isinstance(content, str):
        yield _Piece(content, False, 1)
    elif isinstance(content, list | tuple):
        for index, part in enumerate(content):
            yield from _part(part, f"{where}[{index}]")
    else:
        raise BadRequest(where, f"must be a string or a list of parts, not {type(content).__name__}")
    yield _Piece(ASSISTANT_END, True, 1)


def _part(part: object, where: str) -> Iterator[_Piece]:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise BadRequest(where, "must be an object with a type and a text")
    match part.get("type"):
        case "text":
            yield _Piece(part["text"], False, 1)
        case "python":
            yield from (_Piece(PYTHON_START, True, 1), _Piece(part["text"], False, 1), _Piece(PYTHON_END, True, 1))
        case "python_output":
            yield from (_Piece(OUTPUT_START, True, 0), _Piece(part["text"], False, 0), _Piece(OUTPUT_END, True, 0))
        case kind:
            raise BadRequest(f"{where}.type", f"must be text, python or python_output, got {kind!r:.80}")
