"""`chat`: turns in a terminal, or lines of a pipe. The history is messages, rendered anew at each turn."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from nano_inference.cli.answer import statistics, stream_answer
from nano_inference.cli.generate import write_text
from nano_inference.cli.options import Common
from nano_inference.cli.session import Session, encode, open_session
from nano_inference.cli.terminal import Interrupts, note
from nano_inference.config import EngineConfig
from nano_inference.text.chat import Message
from nano_inference.text.dialogue import require
from nano_inference.types import BadRequest, SamplingParams

_HELP = """\
/clear        forget the conversation
/system TEXT  set the system message (nothing: the template's own) and forget the conversation
/help         this list
/exit         quit, as Ctrl-D does
Ctrl-C stops an answer; pressed again, or at the prompt, it quits."""
_BARE_WORDS: Mapping[str, str] = MappingProxyType({"quit": "/exit", "exit": "/exit", "clear": "/clear"})
_RESERVE = 512
"""Tokens kept free for an answer, when the model is long enough."""


class Wishes(NamedTuple):
    """How the user wants to talk."""

    system: str | None = None
    prompt: str | None = None
    """Answer this and leave."""
    has_bare_words: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation so far."""

    system: str | None = None
    turns: tuple[Message, ...] = ()
    is_over: bool = False
    has_bare_words: bool = False
    """Whether "quit", "exit" and "clear" are commands without their slash, as in nanochat's chat."""


def run(wishes: Wishes, config: EngineConfig, params: SamplingParams, common: Common) -> int:
    """Talk until the user leaves, or answer the one prompt that was given; return the exit code."""
    with open_session(config, common) as session:
        require(session.dialogue)
        talk = Talk(system=wishes.system, has_bare_words=wishes.has_bare_words)
        if wishes.prompt is not None:
            answer_turn(session, talk, wishes.prompt, params, common)
            return 0
        if sys.stdin.isatty():
            note("/help lists the commands; Ctrl-D quits", common.quiet)
        while not talk.is_over and (line := read_line()) is not None:
            talk = take_line(session, talk, line.strip(), params, common)
    return 0


def read_line() -> str | None:
    """Return the user's next line, None at the end of the input."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(ImportError):  # editing and history for `input`, where the platform has it
            importlib.import_module("readline")
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    return sys.stdin.readline() or None


def take_line(session: Session, talk: Talk, line: str, params: SamplingParams, common: Common) -> Talk:
    """Obey a line that begins with a slash, answer any other; return the conversation after it."""
    if not line:
        return talk
    if talk.has_bare_words and line.lower() in _BARE_WORDS:
        line = _BARE_WORDS[line.lower()]
    if not line.startswith("/"):
        try:
            return answer_turn(session, talk, line, params, common)
        except BadRequest as error:
            note(f"nano-inference: {error}")
            return talk
    word, _, rest = line.partition(" ")
    if word == "/exit":
        return replace(talk, is_over=True)
    if word == "/clear":
        return replace(talk, turns=())
    if word == "/system":
        return replace(talk, system=rest.strip() or None, turns=())
    note(_HELP if word == "/help" else f"{word}: no such command; /help lists them")
    return talk


def answer_turn(session: Session, talk: Talk, line: str, params: SamplingParams, common: Common) -> Talk:
    """Write the model's answer to a line; return the conversation with both in it."""
    turns = (*talk.turns, {"role": "user", "content": line})
    prompt, kept = fit(session, talk.system, turns, params)
    if len(kept) < len(turns):
        note(f"[the conversation is too long for the model: its oldest {len(turns) - len(kept)} messages were dropped]")
    with Interrupts() as interrupts:
        answer = stream_answer(session, prompt, params, interrupts, write_text, quiet=common.quiet)
        print(flush=True)
    if interrupts.pressed:
        note("[stopped]")
    elif answer.sample.finish_reason == "length":
        note("[cut off: --max-tokens or the model's length is reached]", common.quiet)
    note(statistics(answer), common.quiet)
    message = require(session.dialogue).answer(answer.sample.completion_tokens, answer.text)
    return replace(talk, turns=(*kept, message))


def fit(
    session: Session, system: str | None, turns: tuple[Message, ...], params: SamplingParams
) -> tuple[list[int], tuple[Message, ...]]:
    """Return the prompt of a conversation without its oldest turns, so that an answer has room; and what is left.

    The last message stays whatever its length: the engine says it when that alone is too long.
    """
    limit = session.engine.parts.max_model_len
    wanted = _RESERVE if params.max_tokens is None else min(params.max_tokens, _RESERVE)
    room = limit - min(wanted, limit // 4)
    prompt = encode(session, list(turns), system=system)
    if len(prompt) <= room:
        return prompt, turns
    # Some more than needed: the next turns then begin as this one does, and find its prefix in the cache.
    while len(prompt) > room * 3 // 4 and len(turns) > 2:
        turns = turns[2:]
        prompt = encode(session, list(turns), system=system)
    return prompt, turns
