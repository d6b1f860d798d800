"""`chat`: the loop over messages and slash commands, for an engine in this process or a server."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from nano_inference.cli.lines import Entered, open_reader
from nano_inference.cli.options import Common
from nano_inference.cli.talk import Answerer, Sampling, ServerError, Talk
from nano_inference.cli.talk_commands import COMMANDS, obey
from nano_inference.cli.terminal import no_echo, note
from nano_inference.cli.turns import Chat, answer_turn
from nano_inference.text.templates import TemplateLimit
from nano_inference.types import BadRequest

_BARE_WORDS = ("quit", "exit", "clear")
_FAILED = 1


class Options(NamedTuple):
    """Options of a chat."""

    system: str | None = None
    prompt: str | None = None
    """If given, answer this message and exit."""
    has_bare_words: bool = False
    plain: bool = False
    """Do not render the Markdown of answers."""


def run(wishes: Options, answerer: Answerer, sampling: Sampling, common: Common) -> int:
    """Chat until the input ends, or answer `prompt` alone; return the exit code."""
    chat = Chat(answerer, wishes.plain, common.quiet)
    talk = Talk(sampling=sampling, first_sampling=sampling, system=wishes.system, has_bare_words=wishes.has_bare_words)
    if wishes.prompt is not None:
        talk = answer_turn(chat, talk, wishes.prompt)
        return _FAILED if talk.has_failed else 0
    reader = open_reader(COMMANDS)
    if reader.is_typed:
        note("/help lists the commands; Ctrl-D quits", common.quiet)
    with no_echo() if reader.can_edit else nullcontext():  # the editor echoes the input
        while not talk.is_over and (entered := reader.read()) is not None:
            talk = take_line(chat, talk, entered)
    return _FAILED if talk.has_failed and not reader.is_typed else 0


def take_line(chat: Chat, talk: Talk, entered: Entered) -> Talk:
    """Run a slash command or answer a message; return the new conversation."""
    line = entered.text.strip()
    if not line:
        return talk
    if talk.has_bare_words and line.lower() in _BARE_WORDS:
        line = f"/{line.lower()}"
    is_command = line.startswith("/") and not entered.is_message
    try:
        return obey(chat, talk, line) if is_command else answer_turn(chat, talk, line)
    except (BadRequest, ServerError, TemplateLimit) as error:
        note(f"nano-inference: {' '.join(str(error).split())}")  # fields as /set names them
        return replace(talk, has_failed=isinstance(error, ServerError))
