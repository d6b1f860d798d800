"""`chat`: the loop over messages and slash commands, for an engine in this process or a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference.cli.chat.conversation import (
    ChatBackend,
    Conversation,
    Question,
    ServerError,
    load_conversation,
    save_conversation,
)
from nano_inference.cli.chat.editor import Input, open_reader
from nano_inference.cli.chat.markdown import open_output, show_tokens, table
from nano_inference.cli.options import ChatOptions, Common
from nano_inference.cli.sampling import Sampling, plain_value, sampling_fields, with_defaults
from nano_inference.cli.terminal import Interrupts, no_echo, note, one_line
from nano_inference.support.checks import did_you_mean
from nano_inference.support.files import path_of
from nano_inference.text.chat import Message
from nano_inference.text.generation_config import CHAT_FIELDS
from nano_inference.text.templates import TemplateLimit
from nano_inference.types import BadRequest

_BARE_WORDS = ("quit", "exit", "clear")
_FAILED = 1
_LENGTH_LIMIT = "--max-tokens or the context's limit reached"
_MORE_HELP = (
    "To send several lines, paste them, or end each but the last with a backslash,",
    'or begin with """ and end with """.',
    "Ctrl-C stops an answer; pressed twice at an empty prompt, it quits.",
)
_SHOWN_FACTS = ("model", "context", "backend")  # facts that /show prints; /model prints all of them


class Chat(NamedTuple):
    """Constant parts of a chat."""

    backend: ChatBackend
    plain: bool = False
    quiet: bool = False


def run(options: ChatOptions, backend: ChatBackend, sampling: Sampling, common: Common) -> int:
    """Chat until the input ends, or answer `prompt` alone; return the exit code."""
    chat = Chat(backend, options.plain, common.quiet)
    conversation = Conversation(
        sampling=sampling, first_sampling=sampling, system=options.system, has_bare_words=options.has_bare_words
    )
    if options.prompt is not None:
        conversation = _answer(chat, conversation, options.prompt)
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
    try:
        if not line.startswith("/") or entry.is_message:
            return _answer(chat, conversation, line)
        word, _, rest = line.partition(" ")
        command = _TABLE.get(_ALIASES.get(word, word))
        if command is None:
            raise BadRequest(f"{one_line(word, 60)}", f"no such command{did_you_mean(word, _TABLE)}; /help lists them")
        return command.run(chat, conversation, rest.strip())
    except (BadRequest, ServerError, TemplateLimit) as error:
        note(f"nano-inference: {' '.join(str(error).split())}")  # fields as /set names them
        return replace(conversation, has_failed=isinstance(error, ServerError))


def _answer(chat: Chat, conversation: Conversation, line: str) -> Conversation:
    return _answer_turns(chat, conversation, (*conversation.turns, {"role": "user", "content": line}))


def _answer_turns(chat: Chat, conversation: Conversation, turns: tuple[Message, ...]) -> Conversation:
    """Answer a conversation whose last message is the user's; return it with the answer.

    Raises `BadRequest` and `ServerError`, as `ChatBackend.answer` does.
    """
    question = Question(
        turns=turns, system=conversation.system, sampling=conversation.sampling, has_tokens=conversation.shows_tokens
    )
    with Interrupts() as interrupts, no_echo(), open_output(chat.plain) as output:
        reply = chat.backend.answer(question, interrupts, output.write)
    if reply.failure is not None:
        note(f"nano-inference: {reply.failure}")
    elif interrupts.pressed:
        note("[stopped]")
    elif reply.finish_reason == "repetition":
        note("[stopped: the answer repeats itself]", chat.quiet)
    elif reply.finish_reason == "length":
        note(f"[cut off: {reply.cut_by or _LENGTH_LIMIT}]", chat.quiet)
    if conversation.shows_tokens:
        show_tokens(reply.tokens)
    note(reply.stats.summary(), chat.quiet)
    turns = (*reply.kept, reply.message) if reply.message.get("content") or not reply.failure else conversation.turns
    return replace(conversation, turns=turns, last=reply, has_failed=reply.failure is not None)


# ---- slash commands: each receives the conversation and its argument, and returns the new conversation


class Command(NamedTuple):
    """A slash command."""

    run: Callable[[Chat, Conversation, str], Conversation]
    usage: str  # argument
    help: str
    complete: Callable[[str], Sequence[str]] = lambda _text: ()  # returns completions of the argument


def _help(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    _print_rows({f"{name} {one.usage}".rstrip(): one.help for name, one in _TABLE.items() if one.help})
    for line in _MORE_HELP:
        note(line)
    return conversation


def _print_rows(rows: Mapping[str, str]) -> None:
    width = max(map(len, rows)) + 2
    for name, text in rows.items():
        note(f"{name:<{width}}{text}", indent=width)


def _set(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    if not rest:
        note("\n".join(_setting(conversation, name) for name in sampling_fields()))
        return conversation
    name, _, text = rest.partition(" ")
    name = name.replace("-", "_")
    if name not in sampling_fields():
        close = did_you_mean(name, sampling_fields())
        raise BadRequest("/set", f"no field {one_line(name, 60)!r}{close}; known: {', '.join(sampling_fields())}")
    text = text.strip()
    if not text:
        note(_setting(conversation, name))
        return conversation
    if text == "default":
        first = conversation.first_sampling
        return _with(conversation, name, getattr(first.params, name), first.named & {name})
    if name == "stop_token_ids" and not text.startswith(("[", "none")):
        text = f"[{','.join(text.replace(',', ' ').split())}]"
    value: Any = None if text == "none" else text
    with suppress(ValueError, RecursionError):
        value = json.loads(text)  # another text is a plain string
    return _with(conversation, name, value, frozenset({name}))


def _with(conversation: Conversation, name: str, value: Any, named: frozenset[str]) -> Conversation:
    """Return the conversation with a sampling field changed. Raises `BadRequest` for an invalid value."""
    sampling = conversation.sampling
    try:
        params = replace(sampling.params, **{name: value})
    except ValueError as error:
        raise BadRequest(name, one_line(str(error))) from None
    conversation = replace(conversation, sampling=Sampling(params, sampling.named - {name} | named))
    note(_setting(conversation, name))
    return conversation


def _setting(conversation: Conversation, name: str) -> str:
    value = json.dumps(plain_value(conversation.sampling.params, name)).replace("null", "none")
    return f"{name} = {value}{'' if name in conversation.sampling.named else ' (default)'}"


def _model(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    if rest:
        defaults = chat.backend.switch(rest)
        first = with_defaults(conversation.first_sampling, defaults)
        sampling = with_defaults(conversation.sampling, defaults)
        conversation = replace(conversation, first_sampling=first, sampling=sampling, last=None)
    _print_rows(chat.backend.facts)
    return conversation


def _show(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    facts = {name: value for name, value in chat.backend.facts.items() if name in _SHOWN_FACTS}
    count = chat.backend.count(conversation.turns, conversation.system)
    facts["conversation"] = f"{len(conversation.turns)} messages, {'unknown' if count is None else count} tokens"
    facts["system"] = conversation.system or "(the template's own)"
    lines = [f"{name}: {value}" for name, value in facts.items()]
    shown = conversation.sampling.named.union(CHAT_FIELDS)
    settings = [_setting(conversation, name) for name in sampling_fields() if name in shown]
    note("\n".join([*lines, f"sampling: {', '.join(settings)} (/set lists all)"]))
    return conversation


def _save(chat: Chat, conversation: Conversation, rest: str, *, overwrite: bool = False) -> Conversation:
    path = _path("/save", rest)
    save_conversation(path, conversation, chat.backend.facts["model"], overwrite=overwrite)
    note(f"{path}: {len(conversation.turns)} messages saved")
    return conversation


def _load(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    path = _path("/load", rest)
    conversation = load_conversation(path, conversation)
    note(f"{path}: {len(conversation.turns)} messages loaded")
    return conversation


def _path(command: str, text: str) -> Path:
    if not text:
        raise BadRequest("", f"{command} needs a file name")
    return path_of(text, command)


def _tokens(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    if rest in ("", "on", "off"):
        conversation = replace(conversation, shows_tokens=not conversation.shows_tokens if rest == "" else rest == "on")
        note(f"probabilities of tokens are {'shown' if conversation.shows_tokens else 'not shown'}")
        return conversation
    tokens = () if conversation.last is None else conversation.last.tokens
    if not tokens:
        raise BadRequest("/tokens", "the last answer has no probabilities; type /tokens on, then /regen")
    if rest == "last":
        show_tokens(tokens)
        return conversation
    number = _integer("/tokens", rest)
    if not 1 <= number <= len(tokens):
        raise BadRequest("/tokens", f"must be on, off, last or a number in [1, {len(tokens)}], got {number}")
    note(table(tokens, number))
    return conversation


def _seed(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    if not rest:
        note(_setting(conversation, "seed"))
        return conversation
    if rest == "off":
        return _with(conversation, "seed", None, frozenset())
    return _with(conversation, "seed", _integer("/seed", rest), frozenset({"seed"}))


def _regen(chat: Chat, conversation: Conversation, rest: str) -> Conversation:
    if len(conversation.turns) < 2:
        raise BadRequest("/regen", "there is no answer yet")
    sampling = conversation.sampling
    if rest:
        drawn = _with(conversation, "seed", _integer("/regen", rest), frozenset({"seed"}))
        return replace(_answer_turns(chat, drawn, conversation.turns[:-1]), sampling=sampling)
    return _answer_turns(chat, conversation, conversation.turns[:-1])


def _integer(command: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadRequest(command, f"must be followed by a whole number, got {one_line(text, 60)!r}") from None


def _files(text: str) -> list[str]:
    folder, slash, start = text.rpartition("/")
    with suppress(OSError, RuntimeError):
        found = sorted(Path(folder + slash).expanduser().iterdir())
        return [f"{folder}{slash}{path.name}{'/' * path.is_dir()}" for path in found if path.name.startswith(start)]
    return []


_TABLE: Mapping[str, Command] = {
    "/help": Command(_help, "", "Show this list."),
    "/model": Command(_model, "[NAME]", "Show the model, or choose another one of the server."),
    "/system": Command(
        lambda _, now, text: replace(now, system=text or None, turns=(), last=None),
        "TEXT",
        "Set the system message and start a new conversation.",
    ),
    "/set": Command(
        _set,
        "[NAME VALUE]",
        "List the sampling fields, or change one: /set top_k 40.",
        lambda text: [f"{name} " for name in sampling_fields() if name.startswith(text)],
    ),
    "/show": Command(_show, "", "Show the conversation's length and your settings."),
    "/save": Command(_save, "FILE", "Write the conversation to a new file; /save! overwrites.", _files),
    "/save!": Command(partial(_save, overwrite=True), "FILE", "", _files),
    "/load": Command(_load, "FILE", "Continue a saved conversation.", _files),
    "/clear": Command(
        lambda _, now, _rest: replace(now, turns=(), last=None), "", "Forget the conversation and start a new one."
    ),
    "/tokens": Command(_tokens, "[on|off|N]", "Show each token's probability, or token N's alternatives."),
    "/seed": Command(_seed, "[N|off]", "Set the random seed, so that answers can be repeated."),
    "/regen": Command(_regen, "[N]", "Answer the last message again (with seed N)."),
    "/exit": Command(lambda _, now, _rest: replace(now, is_over=True), "", "Quit. Ctrl-D and /bye do the same."),
}
_ALIASES: Mapping[str, str] = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}
COMMANDS: Mapping[str, Callable[[str], Sequence[str]]] = {name: command.complete for name, command in _TABLE.items()}
"""Maps each command to the completion of its argument."""
