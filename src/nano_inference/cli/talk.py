"""The records of a conversation, and the one Protocol between whoever talks and whoever answers. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

from nano_inference.chat_defaults import CHAT_FIELDS, described
from nano_inference.cli.options import NOT_TYPED_BY_HAND
from nano_inference.cli.terminal import Interrupts, note
from nano_inference.text.chat import Message
from nano_inference.types import FinishReason, SamplingParams

NUM_ALTERNATIVES = 5
"""How many of the likeliest tokens /tokens shows at a position."""
_PLAIN = SamplingParams()


class ServerError(RuntimeError):
    """A server could not be reached, refused a request or answered with something else. One printable line."""


class Piece(NamedTuple):
    """A piece of an answer's text."""

    text: str
    is_forced: bool = False
    """A tool said it, not the model."""


Write = Callable[[Sequence[Piece]], None]


class ShownToken(NamedTuple):
    """A token of an answer, for a reader."""

    text: str
    logprob: float | None
    """Natural logarithm of its probability."""
    is_forced: bool = False
    top: tuple[tuple[str, float], ...] = ()
    """The likeliest tokens at its place and their log-probabilities, likeliest first."""


class Sampling(NamedTuple):
    """How answers are drawn, and which of the fields somebody asked for: a server has defaults of its own."""

    params: SamplingParams = _PLAIN
    named: frozenset[str] = frozenset()


class Took(NamedTuple):
    """What an answer took. None stands for what a server does not tell."""

    num_prompt: int | None
    num_cached: int | None
    num_new: int | None
    first_token_after: float
    """Seconds."""
    seconds: float
    seed: int | None = None
    version: str | None = None
    """The weights that drew it, when they are not those the model was loaded with."""

    def line(self) -> str:
        """Say it in one line."""
        facts = [f"first token after {self.first_token_after:.2f} s"]
        if self.num_new is not None:
            facts.insert(0, f"{self.num_new} generated")
        if self.num_prompt is not None:
            cached = "" if self.num_cached is None else f" ({self.num_cached} cached)"
            facts.insert(0, f"{self.num_prompt} prompt tokens{cached}")
        after_first = self.seconds - self.first_token_after
        if self.num_new is not None and self.num_new > 1 and after_first > 0:
            facts.append(f"{(self.num_new - 1) / after_first:.1f} tokens/s")
        facts += [] if self.seed is None else [f"seed {self.seed}"]
        facts += [] if self.version is None else [f"weights {self.version}"]
        return f"[{', '.join(facts)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an answer is wanted to."""

    turns: tuple[Message, ...]
    """The last one is the user's."""
    system: str | None = None
    sampling: Sampling = Sampling()
    has_tokens: bool = False
    """Tell the tokens' probabilities, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, whole or as far as it came."""

    message: Message
    """For the next turn."""
    kept: tuple[Message, ...]
    """The turns that were answered: all, or the newest, when the model has no room for all."""
    finish_reason: FinishReason | str | None
    took: Took
    tokens: tuple[ShownToken, ...] = ()
    cut_by: str | None = None
    """What ended it, when that was a length and is known."""
    failure: str | None = None
    """Why it did not come to its end: one printable line."""


class Answerer(Protocol):
    """Who answers: an engine of this process, or a server."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What /model shows, by name: `model`, `context` and `backend`, and what else is known."""

    def count(self, turns: tuple[Message, ...], system: str | None) -> int | None:
        """Return how many tokens a conversation takes; None when that is not known."""

    def answer(self, ask: Question, interrupts: Interrupts, write: Write) -> Reply:
        """Answer, and write it while it comes; Ctrl-C (`interrupts`) ends it with what it has.

        Raises `BadRequest` for what the model cannot do, `ServerError` when nothing came at all.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation so far."""

    sampling: Sampling
    first_sampling: Sampling
    """What `/set NAME default` goes back to."""
    system: str | None = None
    turns: tuple[Message, ...] = ()
    shows_tokens: bool = False
    last: Reply | None = None
    is_over: bool = False
    has_failed: bool = False
    """The last answer ended with a failure of the server."""
    has_bare_words: bool = False
    """Whether "quit", "exit" and "clear" are commands without their slash."""


def sampling_fields() -> tuple[str, ...]:
    """Return the names of what can be set by hand."""
    return tuple(f.name for f in fields(SamplingParams) if f.name not in NOT_TYPED_BY_HAND)


def asked_for(params: SamplingParams, given: frozenset[str]) -> Sampling:
    """Return how to draw, and what of it somebody asked for, who gave the fields in `given`.

    What everybody gets was asked for where models and servers have defaults of their own, and by nobody elsewhere.
    """
    differing = {name for name in sampling_fields() if getattr(params, name) != getattr(_PLAIN, name)}
    return Sampling(params, frozenset(differing | (given & set(CHAT_FIELDS))))


def with_defaults(sampling: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    """Return the sampling with defaults for the fields that the user did not name. Raises `ValueError` for bad ones."""
    unnamed = {name: value for name, value in defaults.items() if name not in sampling.named}
    return sampling._replace(params=replace(sampling.params, **unnamed))


def print_defaults(sampling: Sampling, defaults: Mapping[str, Any], source: str, quiet: bool) -> None:
    """Print the defaults of a chat that are in force: those of fields that the user did not name."""
    unnamed = defaults.keys() - sampling.named
    if unnamed:
        named = {name: getattr(sampling.params, name) for name in sampling.named & defaults.keys()}
        note(f"[chat defaults: {described({**defaults, **named}, source, unnamed)}; /set changes them]", quiet)


def plain_value(params: SamplingParams, name: str) -> Any:
    """Return a field as a plain JSON value."""
    return params.to_dict()[name]
