"""One turn of a chat: stream the answer and add it to the conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nano_inference.cli.render import open_page
from nano_inference.cli.talk import Answerer, Question, Reply, Talk
from nano_inference.cli.terminal import Interrupts, no_echo, note
from nano_inference.cli.token_view import show_tokens
from nano_inference.text.chat import Message

_SOME_LENGTH = "--max-tokens or the context's limit reached"


class Chat(NamedTuple):
    """Constant parts of a chat."""

    answerer: Answerer
    plain: bool = False
    quiet: bool = False


def answer_turn(chat: Chat, talk: Talk, line: str) -> Talk:
    """Answer a message; return the conversation with both."""
    return answer_turns(chat, talk, (*talk.turns, {"role": "user", "content": line}))


def answer_turns(chat: Chat, talk: Talk, turns: tuple[Message, ...]) -> Talk:
    """Answer a conversation whose last message is the user's; return it with the answer.

    Raises `BadRequest` and `ServerError`, as `Answerer.answer` does.
    """
    ask = Question(turns=turns, system=talk.system, sampling=talk.sampling, has_tokens=talk.shows_tokens)
    with Interrupts() as interrupts, no_echo(), open_page(chat.plain) as page:
        reply = chat.answerer.answer(ask, interrupts, page.write)
    _tell(reply, interrupts.pressed, talk.shows_tokens, chat.quiet)
    told = (*reply.kept, reply.message) if reply.message.get("content") or not reply.failure else talk.turns
    return replace(talk, turns=told, last=reply, has_failed=reply.failure is not None)


def _tell(reply: Reply, was_stopped: bool, shows_tokens: bool, quiet: bool) -> None:
    """Print how an answer ended and its statistics."""
    if reply.failure is not None:
        note(f"nano-inference: {reply.failure}")
    elif was_stopped:
        note("[stopped]")
    elif reply.finish_reason == "length":
        note(f"[cut off: {reply.cut_by or _SOME_LENGTH}]", quiet)
    if shows_tokens:
        show_tokens(reply.tokens)
    note(reply.took.line(), quiet)
