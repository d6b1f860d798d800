"""Extend a chat with new messages without encoding its earlier turns again.

Sampled tokens are kept, because encoding their text may give other ids. To find the tokens between the assistant's turn
and the next one, a made-up chat with a one-word answer and the new messages is rendered; all that follows the word is
the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from nano_inference.text.chat import ChatTemplate, Message, check_messages, encode_chat, render
from nano_inference.text.kinds import Rendering, Tokenizer
from nano_inference.types import ModelError

_NOTHING: Mapping[str, Any] = {}
_QUESTION: Message = {"role": "user", "content": "question"}


def encode_chat_delta(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    sampled: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] = _NOTHING,
) -> list[int]:
    """Return the ids to append after an assistant's turn: the end of that turn, the new messages, the next header.

    `sampled` are the turn's tokens. If they end with the template's end-of-turn token, or another of the tokenizer's
    end tokens in its place, the result starts after it; otherwise the turn was truncated and the result ends it. Pass
    all tokens since the first prompt to have the earlier turns checked as well.

    The text of the prompt, the turns and the results together equals the template's rendering of the whole chat, except
    for spaces that the template adds around an answer or strips from it. Raises `ModelError`, a `ValueError`, showing
    the difference, for a template that changes an earlier turn once messages follow it (drops its thinking, moves the
    tools); `BadRequest` as `encode_chat` does.
    """

    def chat(answer: str, more: Sequence[Message]) -> list[Message]:
        return [_QUESTION, {"role": "assistant", "content": answer}, *more]

    def text_of(answer: str, more: Sequence[Message]) -> str:
        return render(template, chat(answer, more), replace(rendering, add_generation_prompt=bool(more)))

    rendering = Rendering(tools=tools, extra=extra)
    check_messages(messages)
    answer = tokenizer.decode(sampled, skip_special=False)  # only compared, never encoded
    before, after = text_of(answer, ()), text_of(answer, messages)
    if not after.startswith(before):
        at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
        raise ModelError(
            f"{template.where}: the chat template rewrites earlier turns when messages follow, so the sampled tokens "
            f"cannot be kept: {before[at : at + 40]!r} becomes {after[at : at + 40]!r}"
        )
    word = next(word for i in count() if (word := f"answer{i}") not in after)
    head, _, delta = text_of(word, messages).partition(word)
    added = after[len(before) :]
    if not (after.endswith(delta) and delta.endswith(added)):
        raise ModelError(f"{template.where}: in this chat template the text after an answer depends on the answer")
    ids = encode_chat(template, tokenizer, chat(word, messages), rendering)
    head_ids = tokenizer.encode(head + word, add_special=False)
    if ids[: len(head_ids)] != head_ids:
        raise ModelError(f"{template.where}: this tokenizer joins the end of an answer with what follows it")
    # Drop the end of turn if `sampled` ends with one; `tail` is the template's, as text.
    ids, tail = ids[len(head_ids) :], delta.removesuffix(added)
    ends = tokenizer.special_ids.union(tokenizer.eos_ids)
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    if end is None or not sampled or tokenizer.decode(ids[:end]).strip():
        return ids
    is_same = sampled[-1] == ids[end]
    is_another = sampled[-1] in tokenizer.eos_ids and tail.lstrip().startswith(tokenizer.token_text(ids[end]))
    return ids[end + 1 :] if is_same or is_another else ids
