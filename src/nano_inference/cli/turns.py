"""One turn of a chat: stream the answer and add it to the conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nano_inference.cli.conversation import ChatBackend, Conversation, Question, Reply
from nano_inference.cli.render import open_output
from nano_inference.cli.terminal import Interrupts, no_echo, note
from nano_inference.cli.token_view import show_tokens
from nano_inference.text.chat import Message

_LENGTH_LIMIT = "--max-tokens or the context's limit reached"


class Chat(NamedTuple):
    """Constant parts of a chat."""

    backend: ChatBackend
    plain: bool = False
    quiet: bool = False


def answer_message(chat: Chat, conversation: Conversation, line: str) -> Conversation:
    """Answer a message; return the conversation with both."""
    return answer_turns(chat, conversation, (*conversation.turns, {"role": "user", "content": line}))


def answer_turns(chat: Chat, conversation: Conversation, turns: tuple[Message, ...]) -> Conversation:
    """Answer a conversation whose last message is the user's; return it with the answer.

    Raises `BadRequest` and `ServerError`, as `ChatBackend.answer` does.
    """
    question = Question(
        turns=turns, system=conversation.system, sampling=conversation.sampling, has_tokens=conversation.shows_tokens
    )
    with Interrupts() as interrupts, no_echo(), open_output(chat.plain) as output:
        reply = chat.backend.answer(question, interrupts, output.write)
    _print_end(reply, interrupts.pressed, conversation.shows_tokens, chat.quiet)
    turns = (*reply.kept, reply.message) if reply.message.get("content") or not reply.failure else conversation.turns
    return replace(conversation, turns=turns, last=reply, has_failed=reply.failure is not None)


def _print_end(reply: Reply, was_stopped: bool, shows_tokens: bool, quiet: bool) -> None:
    """Print how an answer ended and its statistics."""
    if reply.failure is not None:
        note(f"nano-inference: {reply.failure}")
    elif was_stopped:
        note("[stopped]")
    elif reply.finish_reason == "repetition":
        note("[stopped: the answer repeats itself]", quiet)
    elif reply.finish_reason == "length":
        note(f"[cut off: {reply.cut_by or _LENGTH_LIMIT}]", quiet)
    if shows_tokens:
        show_tokens(reply.tokens)
    note(reply.stats.summary(), quiet)
