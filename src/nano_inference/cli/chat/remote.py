"""Chat with a running OpenAI-compatible server. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any
from urllib.parse import quote

from nano_inference.cli.arguments import SERVED
from nano_inference.cli.chat import loop
from nano_inference.cli.chat.conversation import (
    DROPPED,
    NUM_ALTERNATIVES,
    Piece,
    Question,
    Reply,
    ServerError,
    ShownToken,
    Write,
    fit_turns,
)
from nano_inference.cli.chat.http import Address, CutOff, Refused, error_of, get_json, read_address, stream_json
from nano_inference.cli.options import ChatOptions, Common
from nano_inference.cli.sampling import AnswerStats, Sampling, plain_value, print_defaults, with_defaults
from nano_inference.cli.terminal import Interrupts, Stopped, note, one_line
from nano_inference.text.chat import Message
from nano_inference.text.generation_config import CHAT_FIELDS, CHAT_MAX_TOKENS
from nano_inference.text.stream import repeats
from nano_inference.types import BadRequest, SamplingParams

_FAILED = 1
_NOT_SENT = ("logprobs_mode", "pooling", "prompt_logprobs", "raw_logprobs", "sampling_mask")
"""Sampling fields whose results a chat stream cannot carry."""
_OWNER = "nano-inference"
"""`owned_by` of models of this package's server, which accepts fields that other servers may reject."""


def run(options: ChatOptions, model: str, sampling: Sampling, common: Common) -> int:
    """Choose the server's model and chat with it; return the exit code."""
    address = read_address(options.server or "", options.api_key)
    try:
        backend = open_server(address, None if model == SERVED else model)
        if address.exposes_key:
            note(f"[the API key is sent to {address.url} unencrypted: the URL is not https://]")
        note(f"[{backend.model} at {address.url}]", common.quiet)
        if backend.is_ours:
            print_defaults(sampling, backend.defaults, "the server's", common.quiet)
        return loop.run(options, backend, with_defaults(sampling, backend.defaults), common)
    except ServerError as error:
        note(f"nano-inference: {error}")
        return _FAILED


def open_server(address: Address, wanted: str | None) -> RemoteBackend:
    """Return the server's model `wanted`, or its only or default model. Raises `BadRequest`, `ServerError`."""
    cards = _cards(address, is_needed=wanted is None)
    names = [one_line(str(card.get("id", ""))) for card in cards]
    own = [card for card in cards if not card.get("parent")]  # cards with a parent are aliases
    if wanted is None:
        if len(own) != 1 and not (own and all(map(_is_ours, own))):  # the first one of this package's server
            raise BadRequest("--model", f"must name one of the server's models: {', '.join(names) or 'it lists none'}")
        wanted = str(own[0].get("id", ""))
    card: Mapping[str, Any] = next((card for card in cards if card.get("id") == wanted), {})
    if _mapping(card.get("status")).get("value", "loaded") != "loaded":
        note(f"[the server loads {one_line(wanted)}]")
        for _ in stream_json(address, "/models/load", {"model": wanted}):
            pass
        card = _mapping(get_json(address, f"/models/{quote(wanted, safe='')}"))
    length: Any = card.get("max_model_len")
    defaults: dict[str, Any] = {"max_tokens": CHAT_MAX_TOKENS}
    if _is_ours(card):
        defaults = {name: value for name, value in _mapping(card.get("chat_defaults")).items() if name in CHAT_FIELDS}
        try:
            SamplingParams(**defaults)
        except ValueError as error:
            raise ServerError(f"the server's chat_defaults are invalid: {one_line(str(error))}") from None
    return RemoteBackend(
        address=address,
        model=wanted,
        defaults=defaults,
        context=length if isinstance(length, int) else None,
        is_ours=_is_ours(card),
        calculator=_is_ours(card) and card.get("calculator") is True,
        choices=tuple(one_line(str(card.get("id", ""))) for card in own),
        accepted=frozenset(names),
    )


def _is_ours(card: Mapping[str, Any]) -> bool:
    return card.get("owned_by") == _OWNER


def _cards(address: Address, *, is_needed: bool) -> list[dict[str, Any]]:
    """Return the server's list of models; if the model is known, a server may lack the route."""
    try:
        data = get_json(address, "/models")
    except Refused:
        if is_needed:
            raise
        return []
    cards = data.get("data") if isinstance(data, dict) else None
    if not isinstance(cards, list):
        raise ServerError(f"{address.url}/models: not an OpenAI-compatible server")
    return [card for card in cards if isinstance(card, dict)]


@dataclass(slots=True)
class RemoteBackend:
    """Answers with a server. Stores the server's token counts and whether it has a calculator."""

    address: Address
    model: str
    defaults: Mapping[str, Any]
    """Sampling fields sent unless the user sets them: chat defaults of this package's server, else a length limit."""
    context: int | None = None
    is_ours: bool = False  # True for this package's server, which returns masks and weight versions
    calculator: bool = False  # True to request the model's calculator
    choices: tuple[str, ...] = ()  # the server's models without aliases, as shown
    accepted: frozenset[str] = frozenset()  # the server's models and their aliases
    num_tokens: int | None = None  # length of the conversation after the last answer
    tokens_per_char: float = 0.0  # tokens per character of the last request and answer; 0 if unknown

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts that /model prints."""
        context = "unknown" if self.context is None else f"{self.context} tokens"
        facts = {"model": one_line(self.model), "context": context, "backend": f"server {self.address.url}"}
        return {**facts, "models": ", ".join(self.choices)} if len(self.choices) > 1 else facts

    def switch(self, model: str) -> Mapping[str, Any]:
        """Use another model of the server, which may have to load it; return its default sampling fields."""
        if self.accepted and model not in self.accepted:
            raise BadRequest("/model", f"must be followed by one of the server's models: {', '.join(self.choices)}")
        other = open_server(self.address, model)
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))
        return self.defaults if self.is_ours else {}

    def count(self, turns: tuple[Message, ...], system: str | None) -> int | None:
        """Return the token count that the server reported with the last answer."""
        return self.num_tokens if turns else 0

    def answer(self, question: Question, interrupts: Interrupts, write: Write) -> Reply:
        """Answer; the oldest turns are dropped if the server rejects the conversation as too long."""
        turns = question.turns
        if self.context is not None:  # tokens are estimated, since the tokenizer is the server's
            max_tokens = question.sampling.params.max_tokens
            turns = fit_turns(
                turns, max_tokens, self.context, lambda turns: self.tokens_per_char * _num_chars(turns, question.system)
            )
        while True:
            try:
                return self._once(question, turns, interrupts, write)
            except Refused as error:
                if error.code == "context_length_exceeded" and len(turns) > 2:
                    turns = turns[2:]
                    note(DROPPED.format(2))
                elif error.param == "calculator" and self.calculator:
                    self.calculator = False  # the server was restarted with another model
                else:
                    raise

    def _once(self, question: Question, turns: tuple[Message, ...], interrupts: Interrupts, write: Write) -> Reply:
        """Send one request and stream its answer. Raises `ServerError` if no text arrived."""
        body = self._body(question, turns)
        partial, failure = PartialReply(start=time.perf_counter()), None
        try:
            with closing(stream_json(self.address, "/chat/completions", body, partial.add_headers)) as events:
                while partial.finish_reason != "repetition":
                    with interrupts.raising():
                        event = next(events, ...)
                    if event is ...:
                        break
                    if pieces := partial.add_event(event):
                        write(pieces)
                    if partial.finish_reason is None and repeats(partial.units):
                        partial.finish_reason = "repetition"
        except ServerError as error:
            if partial.finish_reason is None or not isinstance(error, CutOff):
                if not partial.text:
                    raise
                failure = str(error)
        except Stopped:
            pass
        write(())
        reply = partial.reply(turns, question, failure)
        self.num_tokens = partial.total()
        if self.num_tokens is not None:
            self.tokens_per_char = self.num_tokens / max(1, _num_chars([*turns, reply.message], question.system))
        return reply

    def _body(self, question: Question, turns: tuple[Message, ...]) -> dict[str, Any]:
        """Return the request body, with the sampling fields that the user set and the chat defaults."""
        params, named = question.sampling
        if wrong := sorted(named.intersection(_NOT_SENT)):
            raise BadRequest("", f"{wrong[0]} is not available in a chat with a server")
        system: list[Message] = [] if question.system is None else [{"role": "system", "content": question.system}]
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *turns], "stream": True}
        body["stream_options"] = {"include_usage": True}
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        sent = (named | self.defaults.keys()) - {"max_tokens", "logprobs"}
        body |= {name: plain_value(params, name) for name in sorted(sent)}
        if question.has_tokens:
            body |= {"logprobs": True, "top_logprobs": max(NUM_ALTERNATIVES, params.logprobs or 0)}
        if self.is_ours:
            body |= {"return_token_ids": True, "reasoning_format": "none"}
            body |= {"calculator": True} if self.calculator else {}
        return body


@dataclass(slots=True)
class PartialReply:
    """The received part of an answer. Times are of `time.perf_counter`."""

    start: float
    first: float | None = None
    texts: list[str] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)
    """Kind and text of each part, for answers with a calculator."""
    tokens: list[ShownToken] = field(default_factory=list)
    units: list[Any] = field(default_factory=list)  # token ids; texts of a server that sends none
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None
    max_new_tokens: int | None = None  # limit of the answer in tokens, if the context has less room than requested

    @property
    def text(self) -> str:
        """Text of the answer."""
        return "".join(self.texts)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Read the limit that this package's server sends if the context has less room than requested."""
        most = headers.get("x-max-tokens", "")
        self.max_new_tokens = int(most) if most.isascii() and most.isdecimal() and len(most) < 10 else None

    def add_event(self, event: Any) -> list[Piece]:
        """Add an event; return the text that it adds. Raises `ServerError` for an error event."""
        error = error_of(event)
        if error is not None:
            raise ServerError(f"the server failed: {one_line(error[0])}")
        if not isinstance(event, dict):
            raise ServerError(f"the server sent an invalid event: {one_line(str(event), 80)!r}")
        self.usage = _mapping(event.get("usage")) or self.usage
        choices = event.get("choices")
        choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
        delta = _mapping(choice.get("delta")) or _mapping(choice.get("message"))
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = one_line(choice["finish_reason"], 60)
        spans = choice.get("weight_versions")
        last = _mapping(spans[-1]) if isinstance(spans, list) and spans else {}
        if last.get("number", 1) and "version" in last:
            self.version = one_line(str(last["version"]), 60)
        # OpenAI's log-probabilities; this package's mask is 0 for forced tokens, and may be shorter.
        entries, mask = _list(_mapping(choice.get("logprobs")).get("content")), _list(choice.get("mask"))
        for i, entry in enumerate(entries):
            tops = _list(_mapping(entry).get("top_logprobs"))
            (text, logprob), *others = (_logprob_of(_mapping(one)) for one in (entry, *tops))
            top = tuple((name, value) for name, value in others if value is not None)
            self.tokens.append(ShownToken(text, logprob, i < len(mask) and mask[i] == 0, top))
        content, ids = delta.get("content"), choice.get("token_ids")
        self.units += ids if isinstance(ids, list) else [content]
        if not isinstance(content, str) or not content:
            return []
        self.first = self.first or time.perf_counter()
        given = map(_mapping, _list(delta.get("parts")))
        parts = [(str(part.get("type")), _without_surrogates(str(part.get("text", "")))) for part in given]
        content = _without_surrogates(content)
        self.texts.append(content)
        self.parts += parts or [("text", content)]
        return _pieces(content, parts)

    def total(self) -> int | None:
        """Return the tokens of prompt and answer; None if the server does not report them."""
        prompt, new = _count(self.usage, "prompt_tokens"), _count(self.usage, "completion_tokens")
        return None if prompt is None or new is None else prompt + new

    def reply(self, turns: tuple[Message, ...], question: Question, failure: str | None) -> Reply:
        """Return the answer."""
        now, cached = time.perf_counter(), _count(_mapping(self.usage.get("prompt_tokens_details")), "cached_tokens")
        most = self.max_new_tokens
        content: Any = self.text
        if any(kind != "text" for kind, _ in self.parts):  # so that the calculator's calls are encoded as calls
            runs = groupby(self.parts, key=lambda part: part[0])
            content = [{"type": kind, "text": "".join(text for _, text in run)} for kind, run in runs]
        return Reply(
            message={"role": "assistant", "content": content},
            kept=turns,
            finish_reason=self.finish_reason,
            cut_by=None if most is None else f"the model's context is full after {most} tokens",
            stats=AnswerStats(
                num_prompt=_count(self.usage, "prompt_tokens"),
                num_cached=cached,
                num_new=_count(self.usage, "completion_tokens"),
                first_token_after=(self.first or now) - self.start,
                seconds=now - self.start,
                seed=question.sampling.params.seed,
                version=self.version,
            ),
            tokens=tuple(self.tokens),
            failure=failure,
        )


def _logprob_of(entry: Mapping[str, Any]) -> tuple[str, float | None]:
    value = entry.get("logprob")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _without_surrogates(str(entry.get("token", ""))), min(float(value or 0), 0.0) if is_number else None


def _pieces(content: str, parts: Sequence[tuple[str, str]]) -> list[Piece]:
    """Split a text into the model's pieces and the calculator's results, which are `parts` in the text's order."""
    pieces: list[Piece] = []
    error = at = 0
    for kind, text in parts:
        found = content.find(text, at)
        if found < 0:
            break
        at = found + len(text)
        if kind == "python_output":
            pieces += [Piece(content[error:found]), Piece(text, is_forced=True)]
            error = at
    return [piece for piece in [*pieces, Piece(content[error:])] if piece.text]


def _num_chars(turns: Sequence[Message], system: str | None) -> int:
    contents = [message["content"] for message in turns]
    parts = [part["text"] for content in contents if isinstance(content, list) for part in content]
    texts = [system or "", *parts, *(content for content in contents if isinstance(content, str))]
    return sum(map(len, texts))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _without_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON can contain but no encoding can write."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
