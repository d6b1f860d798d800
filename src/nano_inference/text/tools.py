"""Special tokens by their text, and token programs behind an answer that has begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, TokenProgram


@dataclass(frozen=True, slots=True)
class Begun:
    """A `types.TokenProgram` behind the first tokens of an answer, which somebody else drew or chose."""

    program: TokenProgram
    state: object

    def start(self) -> object:
        """Return the state behind those tokens."""
        return self.state

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Take a sampled token, as the program does."""
        return self.program.step(state, token)


def behind(program: TokenProgram, tokens: Sequence[int]) -> tuple[Begun, tuple[int, ...]]:
    """Return a program behind an answer's first tokens, and what of its forced tokens they lack at their end.

    Raises `BadRequest` when they hold other tokens where the program forces some.
    """
    state, at = program.start(), 0
    missing: tuple[int, ...] = ()
    while at < len(tokens):
        state, forced = program.step(state, tokens[at])
        given = tuple(tokens[at + 1 : at + 1 + len(forced)])
        if given != tuple(forced[: len(given)]):
            raise BadRequest("answer_token_ids: other tokens stand where the calculator forces its result")
        missing, at = tuple(forced[len(given) :]), at + 1 + len(forced)
    return Begun(program, state), missing


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of every special token by its text."""
    return {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
