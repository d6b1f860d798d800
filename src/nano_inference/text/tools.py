"""Special tokens by text, and token programs resumed after the first tokens of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nano_inference.text.kinds import Tokenizer
from nano_inference.types import BadRequest, TokenProgram


@dataclass(frozen=True, slots=True)
class ResumedProgram:
    """A `types.TokenProgram` that starts after the first tokens of an answer, which the request contains."""

    program: TokenProgram
    state: object

    def start(self) -> object:
        """Return the state after those tokens."""
        return self.state

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Add a sampled token; return the new state and the tokens to force."""
        return self.program.step(state, token)


def resume_program(program: TokenProgram, tokens: Sequence[int]) -> tuple[ResumedProgram, tuple[int, ...]]:
    """Return a program resumed after an answer's first tokens, and the forced tokens missing at their end.

    Raises `BadRequest` if `tokens` differ from those that the program forces.
    """
    state, at = program.start(), 0
    missing: tuple[int, ...] = ()
    while at < len(tokens):
        state, forced = program.step(state, tokens[at])
        given = tuple(tokens[at + 1 : at + 1 + len(forced)])
        if given != tuple(forced[: len(given)]):
            raise BadRequest("answer_token_ids", "other tokens stand where the calculator forces its result")
        missing, at = tuple(forced[len(given) :]), at + 1 + len(forced)
    return ResumedProgram(program, state), missing


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens' ids by text."""
    return {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
