"""`chat`: the loop over messages and slash commands, for an engine in this process or a server."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from nano_inference.cli.conversation import ChatBackend, Conversation, Sampling, ServerError
from nano_inference.cli.lines import Input, open_reader
from nano_inference.cli.options import Common
from nano_inference.cli.slash_commands import COMMANDS, run_command
from nano_inference.cli.terminal import no_echo, note
from nano_inference.cli.turns import Chat, answer_message
from nano_inference.text.templates import TemplateLimit
from nano_inference.types import BadRequest

_BARE_WORDS = ("quit", "exit", "clear")
_FAILED = 1


class Options(NamedTuple):
    """Options of a chat."""

    system: str | None = None
    prompt: str | None = None  # if given, answer this message and exit
    has_bare_words: bool = False
    plain: bool = False  # do not render the Markdown of answers


def run(options: Options, backend: ChatBackend, sampling: Sampling, common: Common) -> int:
    """Chat until the input ends, or answer `prompt` alone; return the exit code."""
    chat = Chat(backend, options.plain, common.quiet)
    conversation = Conversation(
        sampling=sampling, first_sampling=sampling, system=options.system, has_bare_words=options.has_bare_words
    )
    if options.prompt is not None:
        conversation = answer_message(chat, conversation, options.prompt)
        return _FAILED if conversation.has_failed else 0
    reader = open_reader(COMMANDS)
    if reader.is_typed:
        note("/help lists the commands; Ctrl-D quits", common.quiet)
    with no_echo() if reader.can_edit else nullcontext():  # the editor echoes the input
        while not conversation.is_over and (entry := reader.read()) is not None:
            conversation = take_line(chat, conversation, entry)
    return _FAILED if conversation.has_failed and not reader.is_typed else 0


def take_line(chat: Chat, conversation: Conversation, entry: Input) -> Conversation:
    """Run a slash command or answer a message; return the new conversation."""
    line = entry.text.strip()
    if not line:
        return conversation
    if conversation.has_bare_words and line.lower() in _BARE_WORDS:
        line = f"/{line.lower()}"
    is_command = line.startswith("/") and not entry.is_message
    try:
        return run_command(chat, conversation, line) if is_command else answer_message(chat, conversation, line)
    except (BadRequest, ServerError, TemplateLimit) as error:
        note(f"nano-inference: {' '.join(str(error).split())}")  # fields as /set names them
        return replace(conversation, has_failed=isinstance(error, ServerError))
