"""Public records, all frozen, and errors. No torch, no I/O.

A caller passes an `EngineRequest` and receives `Delta`s and `TrainingSample`s (`samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

from nano_inference.support.checks import (
    SEEDS,
    brief_repr,
    check_fields,
    checked,
    checked_bias,
    checked_stops,
    from_known,
    integer,
    number,
    token_ids,
)
from nano_inference.support.errors import BadRequest as BadRequest
from nano_inference.support.errors import CacheFull as CacheFull
from nano_inference.support.errors import EngineBusy as EngineBusy
from nano_inference.support.errors import EngineDead as EngineDead
from nano_inference.support.errors import EnginePaused as EnginePaused
from nano_inference.support.errors import MissingFile as MissingFile
from nano_inference.support.errors import ModelError as ModelError
from nano_inference.support.errors import UpdateBusy as UpdateBusy
from nano_inference.support.errors import UpdateCancelled as UpdateCancelled
from nano_inference.support.errors import WeightError as WeightError
from nano_inference.support.frozen import FrozenDict
from nano_inference.support.samples import Delta as Delta
from nano_inference.support.samples import FinishReason as FinishReason
from nano_inference.support.samples import LogprobsMode as LogprobsMode
from nano_inference.support.samples import Prefill as Prefill
from nano_inference.support.samples import SamplingMask as SamplingMask
from nano_inference.support.samples import StopReason as StopReason
from nano_inference.support.samples import TokenLogprob as TokenLogprob
from nano_inference.support.samples import TopLogprobs as TopLogprobs
from nano_inference.support.samples import TrainingSample as TrainingSample
from nano_inference.support.samples import VersionSpan as VersionSpan
from nano_inference.support.samples import WeightLabel as WeightLabel
from nano_inference.support.samples import read_spans as read_spans
from nano_inference.support.samples import spans_of as spans_of

Pooling = Literal["mean", "last"]
OnRunning = Literal["keep", "recompute", "abort", "wait"]
"""What a weight update does to started requests: keep their K/V, recompute it, abort them, or wait for their end."""
OnAdapter = Literal["keep", "continue"]
"""The adapter with which started requests of a reloaded one go on: the one they have, or the new one with their K/V."""
PauseMode = Literal["keep", "wait", "abort"]
UpdateState = Literal["idle", "staging", "staged", "failed"]

PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
SMALLEST_TEMPERATURE = 2.0**-126
"""float32's smallest normal number; a temperature below it counts as 0."""


class Matcher(Protocol):
    """Receives a sample's tokens and may stop it or forbid tokens: stop strings, grammars. One object a sample."""

    def advance(self, token: int) -> StopReason | None:
        """Take the sample's next token; return the reason if it must stop now, else None."""

    def mask(self) -> bytes | None:
        """Return the tokens allowed next, one bit each, lowest id in the lowest bit; None allows all."""


MatcherFactory = Callable[[], Matcher]


class TokenProgram(Protocol):
    """Forces tokens into a sample, for example a tool's output. Pure: the sequence stores the state.

    Forced tokens are not compared with stop ids. An exception ends the sample as "abort".
    """

    def start(self) -> object:
        """Return the state before the first sampled token."""

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Take a sampled token; return the next state and the tokens to force after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample the tokens of one request. Raises `ValueError` naming an invalid field.

    The fields are applied in this order: penalties, logit_bias, allowed ids and masks, temperature, top-k, top-p on
    the renormalised rest, min-p, then one uniform from (seed, sample index, absolute position).
    """

    temperature: float = checked(1.0, number(0, 100))
    """0 is exact argmax; the lowest id wins a tie. A value below `SMALLEST_TEMPERATURE` becomes 0."""
    max_tokens: int | None = checked(256, integer(0))
    """Most tokens to add, forced ones included; 0 only scores the prompt; None is the room that is left."""
    min_tokens: int = checked(0, integer(0))
    """Stop tokens are banned before this many tokens."""
    top_k: int = checked(0, integer(-1))
    """0 (or -1) is off."""
    top_p: float = checked(1.0, number(0, 1, open_low=True))
    """1 is off."""
    min_p: float = checked(0.0, number(0, 1))
    """Excludes tokens less probable than min_p times the most probable one; 0 is off."""
    repetition_penalty: float = checked(1.0, number(0.01, 100))
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = checked(0.0, number(-2, 2))
    """Subtracted once from the logit of every token in the output."""
    frequency_penalty: float = checked(0.0, number(-2, 2))
    """Subtracted from a token's logit once for each occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Collection[int] | None = None
    """If given, no other token can be sampled."""
    stop_token_ids: Collection[int] = ()
    """Stop after one of these, in addition to the model's end tokens."""
    stop: tuple[str, ...] | str = ()
    """Stop when the output contains one of these strings."""
    ignore_eos: bool = False
    """Do not stop at the model's end tokens."""
    seed: int | None = checked(None, integer(*SEEDS))
    """None takes the engine's seed, or fresh entropy."""
    logprobs: int | None = checked(None, integer(0))
    """How many of the most probable tokens to report at each position; the sampled token is always reported."""
    logprob_token_ids: Sequence[int] = ()
    """Also report these tokens at each position, before the most probable ones; requires logprobs."""
    prompt_logprobs: int | None = checked(None, integer(0))
    """If given, report the log-probabilities of prompt tokens, and this many alternatives for each."""
    logprobs_mode: LogprobsMode | None = None
    """The distribution of reported log-probabilities; None takes the engine's."""
    raw_logprobs: bool = False
    """Also report log-probabilities of the unmodified logits at temperature 1."""
    sampling_mask: bool = False
    """Also report which tokens could be sampled at each position."""
    pooling: Pooling | None = None
    """Return an embedding of the prompt; requires max_tokens=0 and no log-probabilities."""
    __repr__ = brief_repr

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        self._check_pooling()
        put = object.__setattr__
        put(self, "temperature", self.temperature if self.temperature >= SMALLEST_TEMPERATURE else 0.0)
        put(self, "top_k", max(0, self.top_k))
        put(self, "stop_token_ids", frozenset(token_ids("stop_token_ids", self.stop_token_ids)))
        put(self, "logprob_token_ids", token_ids("logprob_token_ids", self.logprob_token_ids))
        if self.logprob_token_ids and self.logprobs is None:
            raise BadRequest("logprob_token_ids", "logprob_token_ids needs logprobs, which may be 0")
        put(self, "logit_bias", FrozenDict(checked_bias(self.logit_bias)))
        put(self, "stop", checked_stops(self.stop))
        if self.allowed_token_ids is not None:
            allowed = frozenset(token_ids("allowed_token_ids", self.allowed_token_ids))
            if not allowed:
                raise BadRequest("allowed_token_ids", "must not be empty; leave it out to allow every token")
            put(self, "allowed_token_ids", allowed)

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        if self.max_tokens != 0:
            raise BadRequest("max_tokens", f"must be 0 with pooling, got {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                raise BadRequest(name, f"must be left out with pooling, got {getattr(self, name)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return from_known, (SamplingParams, self.to_dict())  # names no `getattr`, see `parallel.links`

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        out["stop_token_ids"] = sorted(self.stop_token_ids)
        out["stop"] = list(self.stop)
        out["logprob_token_ids"] = list(self.logprob_token_ids)
        if self.allowed_token_ids is not None:
            out["allowed_token_ids"] = sorted(self.allowed_token_ids)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Build from the form of `to_dict`. Raises `ValueError` naming an unknown field."""
        return from_known(cls, data)


class Beginning(NamedTuple):
    """For a prompt that ends in the first tokens of an answer."""

    num_tokens: int = 0
    """How many of the prompt's last tokens belong to the answer: presence and frequency penalties count them."""
    sample_index: int = 0
    """Offset of the sample indices that sampling depends on: the index of the sample that is continued."""


FROM_THE_PROMPT = Beginning()
"""The prompt contains no part of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request for samples of one prompt, in token ids. Checked when it is queued, which may raise `BadRequest`."""

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    salt: str = ""
    """Cache namespace: only requests with equal salts share prefixes."""
    make_matcher: MatcherFactory | None = None
    """Makes a matcher for each sample; cannot be combined with `params.stop`."""
    program: TokenProgram | None = None
    adapter: str | None = None
    """Name of a loaded adapter (`load_adapter`) that computes the request with the model; None is the model alone."""
    partial: TrainingSample | None = None
    """An unfinished sample of this prompt ("abort" or "length") to resume; output equals an uninterrupted run."""
    beginning: Beginning = FROM_THE_PROMPT
    score_start: int = 0
    """First position with a prompt log-probability, if `params.prompt_logprobs` is given."""
    score_params: SamplingParams | None = None
    """The tokens from `score_start` on are an answer that was sampled with these parameters, and are scored so."""
    is_streamed: bool = False
    """A client reads tokens as they come: a step samples only a few of a row (`core.scheduler.STREAM_LOOKAHEAD`)."""
    reports_prefill: bool = False
    """Each step that computes tokens of the prompt returns a delta with `Delta.prefill`, also if it samples none."""
    __repr__ = brief_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Counters of one step, for metrics and progress bars."""

    num_rows: int = 0
    num_computed: int = 0
    """Tokens computed by the model, rejected draft tokens included."""
    num_sampled: int = 0
    num_preempted: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    weight_version: int = 0
    num_drafted: int = 0
    """Draft tokens among `num_computed`."""
    num_accepted: int = 0
    """Accepted draft tokens."""
    num_state_snapshots: int = 0
    """Snapshots of recurrent states that prompts can start from."""
    num_state_hits: int = 0
    """Sequences that started from a snapshot."""
    __repr__ = brief_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything that one step of the engine produced."""

    deltas: tuple[Delta, ...]
    samples: tuple[TrainingSample, ...]
    stats: StepStats
    started: tuple[tuple[int, int], ...] = ()
    """(request id, sample index) of sequences that left the queue, also again after preemption."""
    __repr__ = brief_repr

    def after(self, deltas: Iterable[Delta]) -> StepResult:
        """Return the result with deltas from just before the step put in front."""
        before = tuple(deltas)
        ended = tuple(delta.sample for delta in before if delta.sample is not None)
        return replace(self, deltas=before + self.deltas, samples=ended + self.samples) if before else self


class SequenceView(NamedTuple):
    """A copy of what a sample in progress holds."""

    seq_id: int
    request_id: int
    token_ids: tuple[int, ...]  # prompt and completion
    num_prompt_tokens: int
    num_computed: int  # tokens whose K/V is in the cache
    block_ids: tuple[int, ...]


class WeightInfo(NamedTuple):
    """The installed weights."""

    version: int
    """Number of installations since the start."""
    label: WeightLabel | None
    """The trainer's name for them."""
    update: UpdateState
    """State of the latest update."""


class AdapterInfo(NamedTuple):
    """A loaded adapter."""

    name: str
    version: WeightLabel
    """The trainer's name for this load."""
    rank: int
    """The largest of its matrices."""
    num_bytes: int
    source: str
    """The directory that it was loaded from; empty for tensors."""
    num_requests: int = 0
    """Open requests that use it."""
