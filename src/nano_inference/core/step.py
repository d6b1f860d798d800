"""`Runner`: the interface of an executor as the core uses it, with its input and output records. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from nano_inference.types import LogprobsMode, SamplingMask, SamplingParams, TopLogprobs

UNREAD = -1
"""The token of a row whose first token only the device knows, see `Launch`."""


class RowState(NamedTuple):
    """The slots of recurrent states that a row uses; see `models.program.Program.states`."""

    slot: int  # receives the state after the row's last token
    source: int  # holds the state before the row's first token; not read if that is the sequence's first
    saves: tuple[tuple[int, int], ...] = ()
    """(number of tokens, slot), ascending: the slot also receives the state after that many tokens of the sequence."""


class Row(NamedTuple):
    """One sequence's part in a forward pass."""

    id: int
    tokens: tuple[int, ...]  # the tokens to compute; the last `num_drafts` are draft tokens
    prev_token: int  # the token before them; -1 at the start of a sequence
    start: int  # position of the first token
    blocks: tuple[int, ...]
    num_sampled: int
    """Most tokens to sample after the last one, each computed from those before; 0 samples none. With draft tokens it
    is 1: one token is sampled at the position before each of them, and one after the last."""
    params: SamplingParams
    logprobs_mode: LogprobsMode
    seed: int
    sample_index: int
    request_id: int = 0
    banned: tuple[int, ...] = ()  # tokens that cannot be sampled in this step (stop tokens before min_tokens)
    mask: bytes | None = None  # the matcher's mask, see `Matcher.mask`
    history: tuple[int, ...] = ()  # prompt and output, if a penalty needs them
    num_prompt: int = 0  # how many tokens of `history` are prompt, without `Beginning.num_tokens`
    score_from: int | None = None
    """Report the log-probabilities of known tokens from this position on that this row computes."""
    score_end: int = 0  # the position after the last token to score
    score_params: SamplingParams | None = None
    """The known tokens were sampled with these parameters: their log-probabilities are those of draws. None scores the
    model's logits, at the temperature of `params`."""
    next_token: int = -1  # the known token after the last one, scored at the end of a prompt chunk; -1 if there is none
    pool_from: int | None = None
    """Report the sum of the last hidden states from this position on that this row computes."""
    num_drafts: int = 0
    stop_ids: frozenset[int] = frozenset()  # tokens after which the sample ends: none needs to be sampled behind them
    state: RowState | None = None  # None for programs without recurrent states
    adapter: int = 0  # the number of the adapter that computes it, see `core.adapters`; 0 is none


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` slots of a block into another before the step."""

    source: int
    target: int
    num_tokens: int


class DrawExtras(NamedTuple):
    """Optional results for a sampled token."""

    raw_logprob: float | None = None  # log-probability under the unmodified logits; None unless requested
    sampling_mask: SamplingMask = None  # ids that could be sampled; None unless requested, and if all could be


class RowResult(NamedTuple):
    """Results of one row. `tokens` is empty if the row sampled none."""

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    extras: tuple[DrawExtras, ...] = ()  # one for each token; may be empty if the request needs none
    scores: tuple[float, ...] = ()  # log-probabilities of known tokens from position max(score_from, start + 1) on
    score_tops: tuple[TopLogprobs, ...] = ()
    score_ranks: tuple[int, ...] = ()  # one for each of `scores`; may be empty
    pooled: tuple[float, ...] = ()  # sum of the hidden states [E] from `pool_from` on, float32, after the final norm


class Launch(Protocol):
    """Starts a step without waiting for its results."""

    def __call__(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...], *, is_next: bool
    ) -> Callable[[], Mapping[int, RowResult]] | None:
        """Return a function that waits for what `Runner.run` returns; None if nothing was started.

        With `is_next`, each row continues the row of the same id in the last launch, which may still run: it starts
        with the token that that one sampled last, and samples none if that one has sampled a stop token.
        """


class Runner(Protocol):
    """Computes steps; every `executors.Executor` is one."""

    @property
    def failure(self) -> BaseException | None:
        """Return why no step can run any more; None while steps can."""

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        """Compute the rows' K/V and sample; return a result for each row id.

        `copies` are executed first. `fresh` are the blocks taken in this step: their old contents must never be read.
        """

    def commit_adapter(self, number: int, staged: Any) -> None:
        """Let rows use an adapter, which `Executor.stage_adapter` returned, under a number. Call between two steps."""

    def drop_adapter(self, number: int) -> None:
        """Free an adapter's memory: no later row uses the number. Call between two steps."""

    def free_cache(self) -> None:
        """Free the memory of the KV cache."""

    def restore_cache(self) -> None:
        """Allocate the memory of the KV cache again, without contents."""

    def recover(self) -> None:
        """Undo the effects of an interrupted `run`. Can be interrupted and called again."""
