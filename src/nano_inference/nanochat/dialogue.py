"""Converts conversations to nanochat's tokens with a training mask, and answer tokens to messages.

Layout of nanochat's `render_conversation`: bos, then alternately <|user_start|> text <|user_end|> and
<|assistant_start|> … <|assistant_end|>, without spaces. An assistant's content is text or a list of parts: text, python
(an expression for the calculator) and python_output (its result).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.nanochat.calculator import (
    OUTPUT_END,
    OUTPUT_START,
    PYTHON_END,
    PYTHON_START,
    PythonTool,
    python_tool,
)
from nano_inference.text.chat import with_one_system_message
from nano_inference.text.kinds import ANSWER, Message, Rendering, Tokenizer
from nano_inference.text.tool_format import special_tokens
from nano_inference.types import BadRequest

BOS_TOKENS = ("<|bos|>", "<|endoftext|>")  # nanochat's own, and that of OpenAI's encodings
USER_START, ASSISTANT_START, ASSISTANT_END = "<|user_start|>", "<|assistant_start|>", "<|assistant_end|>"

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
_Piece = tuple[str, bool, int]  # text, whether it is a special token, and its mask
_PARTS: Mapping[str, tuple[str, str, int]] = {  # kind of a part -> the tokens around it, and its mask
    "python": (PYTHON_START, PYTHON_END, 1),
    "python_output": (OUTPUT_START, OUTPUT_END, 0),
}


class OutOfTurn(BadRequest):
    """A message of the wrong role or kind for its position, for which nanochat raises `AssertionError`."""


def render_conversation(
    tokenizer: Tokenizer, conversation: Conversation, max_tokens: int | None = 2048
) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation and a mask: 1 for tokens to train on, else 0.

    Both are truncated to `max_tokens`. Raises `OutOfTurn` or `BadRequest` naming the wrong message.
    """
    special = special_tokens(tokenizer)
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    mask = [0] * len(ids)
    for text, is_special, is_learnt in _pieces(_messages(conversation)):
        ids += [_id(special, text)] if is_special else tokenizer.encode(text, add_special=False, parse_special=False)
        mask += [is_learnt] * (len(ids) - len(mask))
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
    return [*ids, _id(special_tokens(tokenizer), ASSISTANT_START)]


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
            ids += [_id(special, f"<|{role}_start|>"), *text, _id(special, f"<|{role}_end|>")]
    return [*ids, _id(special, ASSISTANT_START)]


def answer_message(tokenizer: Tokenizer, tokens: Iterable[int]) -> Message:
    """Return the assistant's message in generated tokens, up to its end token.

    The content is text, or a list of parts if the calculator was called; rendering the parts restores their special
    tokens. A truncated block counts as closed. Other special tokens are omitted.
    """
    special = special_tokens(tokenizer)
    kinds = {special.get(start): kind for kind, (start, _, _) in _PARTS.items()}
    ends = {special.get(end): kind for kind, (_, end, _) in _PARTS.items()}
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


def _id(special: Mapping[str, int], text: str) -> int:
    if text not in special:
        raise BadRequest("", f"the tokenizer has no special token {text}: it does not belong to a nanochat chat model")
    return special[text]


def _messages(conversation: Conversation) -> list[Message]:
    """Return a conversation's messages. Raises `BadRequest` unless each is an object with a role."""
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
    first, system = 0, ""
    if messages and messages[0]["role"] == "system":
        found = messages[0].get("content")
        if not isinstance(found, str):
            raise BadRequest("messages[0].content", f"must be a string, not {type(found).__name__}")
        first, system = 1, f"{found}\n\n"
    if len(messages) == first:
        raise OutOfTurn(f"messages[{first}]", f"messages[{first}] is missing: a user message is required")
    for index, message in enumerate(messages[first:], first):
        content, where = message.get("content"), f"messages[{index}].content"
        role = "assistant" if (index - first) % 2 else "user"
        if message["role"] != role:
            raise OutOfTurn(f"messages[{index}].role", f"must be {role}, got {message['role'][:80]!r}")
        if role == "user" and not isinstance(content, str):
            raise OutOfTurn(where, f"must be a string, not {type(content).__name__}")
        yield f"<|{role}_start|>", True, 0
        if isinstance(content, str):
            yield (system if index == first else "") + content, False, int(role == "assistant")
        elif isinstance(content, list | tuple):
            for place, part in enumerate(content):
                if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                    raise BadRequest(f"{where}[{place}]", "must be an object with a type and a text")
                kind = part.get("type")
                if kind == "text":
                    yield part["text"], False, 1
                elif not isinstance(kind, str) or kind not in _PARTS:
                    raise BadRequest(
                        f"{where}[{place}].type", f"must be text, python or python_output, got {kind!r:.80}"
                    )
                else:
                    before, after, mask = _PARTS[kind]
                    yield from ((before, True, mask), (part["text"], False, mask), (after, True, mask))
        else:
            raise BadRequest(where, f"must be a string or a list of parts, not {type(content).__name__}")
        yield f"<|{role}_end|>", True, int(role == "assistant")


@dataclass(frozen=True, slots=True)
class NanochatDialogue:
    """Dialogue of a nanochat model: calculator calls are parts of messages, and are encoded as special tokens."""

    tokenizer: Tokenizer
    tool: PythonTool | None
    any_order: bool = False  # accept user and assistant messages in any order, as nanochat's web server does

    @property
    def tool_template(self) -> str | None:
        """None: nanochat has no template."""
        return None

    def encode(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> list[int]:
        """Return the ids of messages, not truncated. Raises `BadRequest` for wrong messages or options.

        Messages must alternate unless `any_order`, which prompts for an answer and has no other options.
        """
        if rendering.tools or rendering.extra:
            raise BadRequest("", "nanochat's layout has no tools and no chat template variables")
        if len(messages) > 1 and messages[0].get("role") == "system":
            messages = with_one_system_message(messages) or messages
        if self.any_order:
            return render_turns(self.tokenizer, messages)
        if rendering.add_generation_prompt:
            if rendering.continue_final:
                raise BadRequest("", "continue_final_message and add_generation_prompt exclude each other")
            return render_for_completion(self.tokenizer, [*messages, {"role": "assistant", "content": ""}], None)
        if rendering.continue_final and messages[-1].get("role") != "assistant":
            raise BadRequest("", "continue_final_message requires a last message of the assistant")
        ids, _ = render_conversation(self.tokenizer, messages, None)
        return ids[:-1] if rendering.continue_final else ids

    def text(self, messages: Sequence[Message], rendering: Rendering = ANSWER) -> str:
        """Return the text of the ids, with special tokens."""
        return self.tokenizer.decode(self.encode(messages, rendering), skip_special=False)

    def knows(self, name: str) -> bool:
        """Return False: there are no template variables."""
        return False

    def answer(self, tokens: Sequence[int], text: str) -> Message:
        """Return the answer as a message: text, or parts if the calculator was called."""
        return answer_message(self.tokenizer, tokens)


def nanochat_dialogue(tokenizer: Tokenizer) -> NanochatDialogue | None:
    """Return the dialogue of a tokenizer with nanochat's user and assistant tokens, else None."""
    if not {USER_START, ASSISTANT_START} <= special_tokens(tokenizer).keys():
        return None
    return NanochatDialogue(tokenizer, python_tool(tokenizer))
