"""`Runner`: what the core needs of the thing that computes, and the records that it takes and gives. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nano_inference.types import EngineDead, LogprobsMode, SamplingMask, SamplingParams, TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's part in a forward pass, in plain integers; made by the engine, read by the runner."""

    id: int
    tokens: tuple[int, ...]
    """The tokens to compute; the last `num_drafts` of them are guesses."""
    prev_token: int
    """The token before the first of them; -1 at the start of a sequence."""
    start: int
    """The position of the first of them."""
    blocks: tuple[int, ...]
    num_sampled: int
    """Draw at most this many tokens after the last one; 0 draws none. With guesses it is 1: one token is drawn before
    each of them, and one after the last."""
    params: SamplingParams
    logprobs_mode: LogprobsMode
    seed: int
    sample_index: int
    request_id: int = 0
    banned: tuple[int, ...] = ()
    """Tokens that cannot be drawn now (end tokens before min_tokens)."""
    mask: bytes | None = None
    """The matcher's allowed tokens, one bit each."""
    history: tuple[int, ...] = ()
    """Prompt and output, when a penalty needs them."""
    num_prompt: int = 0
    """How many of `history` are the prompt's, without those with which the answer begins."""
    score_from: int | None = None
    """Report the log-probabilities of the tokens at this position and after, as far as this row computes them."""
    score_end: int = 0
    """The position after the last token to score."""
    next_token: int = -1
    """The known token after the last one (when scoring a prompt in chunks); -1 when there is none."""
    pool_from: int | None = None
    """Report the sum of the last hidden states at this position and after, as far as this row computes them."""
    num_drafts: int = 0
    """How many of `tokens` are guesses."""


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` slots of a block into another before the step (token-granular reuse)."""

    source: int
    target: int
    num_tokens: int


class DrawExtras(NamedTuple):
    """What a request may ask to know of a drawn token besides its log-probability."""

    raw_logprob: float | None = None
    """Under the model's own logits; None unless asked for."""
    sampling_mask: SamplingMask = None
    """The ids that could be drawn; None unless asked for, or when no token was forbidden."""


class RowResult(NamedTuple):
    """What the forward pass found for one row. Empty `tokens` when the row drew none."""

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    extras: tuple[DrawExtras, ...] = ()
    """One for each token; may be empty when the request asked for none."""
    scores: tuple[float, ...] = ()
    """Log-probabilities of the row's known tokens, from max(score_from, start + 1) on."""
    score_tops: tuple[TopLogprobs, ...] = ()
    score_ranks: tuple[int, ...] = ()
    """One for each of `scores`; may be empty."""
    pooled: tuple[float, ...] = ()
    """The sum of the hidden states [E] that `pool_from` asks for, in float32 and after the model's final norm."""


class Runner(Protocol):
    """A step in, drawn tokens out; every `executors.Executor` is one."""

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        """Compute the rows' K/V and draw what they ask for; a result for each row's id.

        `copies` are done first. `fresh` are the blocks taken in this step: whatever an ended sequence left in them must
        be cleared before they are read.
        """

    def free_cache(self) -> None:
        """Give the memory of the KV cache back."""

    def restore_cache(self) -> None:
        """Take it again, empty."""

    def recover(self) -> None:
        """Undo what an interrupted `run` left behind in this thread. Can be interrupted and called again."""


class ClosedRunner:
    """The runner of an engine that was shut down, after it let go of its model."""

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        """Refuse."""
        raise EngineDead("the engine was shut down")

    def free_cache(self) -> None:
        """There is none."""

    def restore_cache(self) -> None:
        """There is none."""

    def recover(self) -> None:
        """There is nothing to undo."""
