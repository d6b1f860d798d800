"""Sampling parameters of a command, which of them the user set, and statistics of an answer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from nano_inference.cli.options import WITHOUT_FLAG
from nano_inference.cli.terminal import note
from nano_inference.text.generation_config import CHAT_FIELDS, described
from nano_inference.types import SamplingParams

CHAT_HINT = "/set changes them"
_PLAIN = SamplingParams()


class Sampling(NamedTuple):
    """Sampling parameters, and the names of those that the user set; others may be replaced by defaults."""

    params: SamplingParams = _PLAIN
    named: frozenset[str] = frozenset()


class AnswerStats(NamedTuple):
    """Token counts and times of an answer; None for counts that a server does not report."""

    num_prompt: int | None
    num_cached: int | None
    num_new: int | None
    first_token_after: float  # seconds
    seconds: float
    seed: int | None = None
    version: str | None = None  # version of the weights, if they were updated after loading

    def summary(self) -> str:
        """Format the statistics as one line."""
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


def sampling_fields() -> tuple[str, ...]:
    """Return the sampling fields that have a flag."""
    return tuple(f.name for f in fields(SamplingParams) if f.name not in WITHOUT_FLAG)


def requested_sampling(params: SamplingParams, given: frozenset[str]) -> Sampling:
    """Return the sampling with the names of the fields that the user set, of which `given` are those with an origin.

    A given value equal to the built-in one counts only for the fields that chat defaults can replace.
    """
    differing = {name for name in sampling_fields() if getattr(params, name) != getattr(_PLAIN, name)}
    return Sampling(params, frozenset(differing | (given & set(CHAT_FIELDS))))


def with_defaults(sampling: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    """Return the sampling with defaults for fields that the user did not set. Raises `ValueError` for invalid ones."""
    unnamed = {name: value for name, value in defaults.items() if name not in sampling.named}
    return sampling._replace(params=replace(sampling.params, **unnamed))


def print_defaults(
    sampling: Sampling, defaults: Mapping[str, Any], source: str, quiet: bool, hint: str = CHAT_HINT
) -> None:
    """Print the chat defaults of fields that the user did not set, and how to change them."""
    unnamed = defaults.keys() - sampling.named
    if unnamed:
        named = {name: getattr(sampling.params, name) for name in sampling.named & defaults.keys()}
        note(f"[chat defaults: {described({**defaults, **named}, source, unnamed)}; {hint}]", quiet)


def plain_value(params: SamplingParams, name: str) -> Any:
    """Return a field as a plain JSON value."""
    return params.to_dict()[name]
