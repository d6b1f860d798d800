"""Public records, all frozen, and errors; no torch, no I/O, no decisions.

A caller passes an `EngineRequest` and gets `Delta`s and `TrainingSample`s. The records in between are internal:
`sequence.Sequence`, the only mutable one, and the `Row` and `RowResult` of each step (`runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

from nano_inference.checks import (
    check_bool,
    check_int,
    check_label,
    check_number,
    checked_bias,
    checked_stops,
    from_known,
    token_ids,
)
from nano_inference.frozen import FrozenDict

FinishReason = Literal["stop", "length", "abort"]
LogprobsMode = Literal["raw", "tempered", "processed"]
Pooling = Literal["mean", "last"]
StopReason = int | str
"""What stopped a sample: the token id, or the text of a stop string or the name of a matcher's verdict."""
WeightLabel = int | str
"""A trainer's own name for the weights it installed: a step, a checkpoint."""
SamplingMask = tuple[int, ...] | None
"""The ids that could be drawn at a position, rising; None where no token was forbidden, () where one was forced."""

OnRunning = Literal["keep", "recompute", "abort", "wait"]
"""What an update does to sequences that run: go on with their K/V, compute it again, end now, or end first."""
PauseMode = Literal["keep", "wait", "abort"]
UpdateState = Literal["idle", "staging", "staged", "failed"]

ON_RUNNING: tuple[OnRunning, ...] = ("keep", "recompute", "abort", "wait")
PAUSE_MODES: tuple[PauseMode, ...] = ("keep", "wait", "abort")
LOGPROBS_MODES: tuple[LogprobsMode, ...] = ("raw", "tempered", "processed")
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


class BadRequest(ValueError):
    """The request asks for what cannot be done. The only error that is a client's fault; it names the field."""


class EngineBusy(RuntimeError):
    """The call was refused because another thread uses the engine, or because it came from inside a step.

    Nothing was changed, and the call that runs is unaffected.
    """


class EngineDead(RuntimeError):
    """The engine was shut down, or the thread that drove it failed, and it takes no more work; the cause is chained."""


class EnginePaused(RuntimeError):
    """Asked to wait for samples while `pause` or `sleep` holds the engine: they would never come."""


class CacheFull(RuntimeError):
    """More KV blocks were asked for than are free; nothing was taken."""


class ModelError(ValueError):
    """A model's files cannot be used: missing, damaged, of an unknown architecture. One line, naming the file."""


class WeightError(ValueError):
    """New weights cannot be used: a wrong name, shape or value, a failed sender. The old ones serve on."""


class UpdateBusy(RuntimeError):
    """New weights are being gathered, or wait for a step boundary; there is one update at a time."""


class Matcher(Protocol):
    """Follows one sample and may stop it or forbid tokens: stop strings, grammars. Built outside the engine.

    One object belongs to one sample; it is never shared, and it survives preemption with the sample's tokens.
    """

    def advance(self, token: int) -> StopReason | None:
        """Take the next token of the sample; return why it must stop now, or None."""

    def mask(self) -> bytes | None:
        """Return the tokens allowed next, one bit each, lowest id in the lowest bit; None allows all."""


MatcherFactory = Callable[[], Matcher]


class TokenProgram(Protocol):
    """Forces tokens into a sample (tools). Pure: the state travels with the sequence.

    Forced tokens are not tested against stop ids; a failure here ends its own sample as "abort".
    """

    def start(self) -> object:
        """Return the state before the first sampled token."""

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        """Take a sampled token; return the next state and the tokens to append after it, which are not sampled."""


MODELS_OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling fields for which a model's files may name the default (`generation_config.json`), as vLLM reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw the tokens of one request. Raises `ValueError` naming the field when a value makes no sense.

    The order in which the fields act is fixed (spec 9): penalties, logit_bias, allowed ids and masks, temperature,
    top-k, top-p on the renormalised rest, min-p, then one uniform from (seed, sample index, absolute position).
    """

    temperature: float = 1.0
    """0 is exact argmax, the lowest id on a tie."""
    max_tokens: int | None = 256
    """Tokens to add, forced ones included; 0 scores the prompt only; None means as many as there is room for."""
    min_tokens: int = 0
    """Stop tokens cannot be drawn before this many tokens."""
    top_k: int = 0
    """0 (or -1) is off."""
    top_p: float = 1.0
    """1 is off."""
    min_p: float = 0.0
    """Drops tokens less likely than min_p times the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for every time it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of the named tokens."""
    allowed_token_ids: Collection[int] | None = None
    """When given, nothing else can be drawn."""
    stop_token_ids: Collection[int] = ()
    """Stop after one of these, besides the model's own end tokens."""
    stop: tuple[str, ...] | str = ()
    """Stop when one of these strings has been written."""
    ignore_eos: bool = False
    """Do not stop at the model's own end tokens."""
    seed: int | None = None
    """None draws from the operating system's entropy."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each sampled position; the sampled one's is always there."""
    prompt_logprobs: int | None = None
    """0 or more asks for the log-probabilities of the prompt's tokens and that many alternatives."""
    logprobs_mode: LogprobsMode | None = None
    """Which distribution log-probabilities speak of; None takes the engine's."""
    raw_logprobs: bool = False
    """Also report the model's own log-probabilities: temperature 1, nothing penalised, biased or cut."""
    sampling_mask: bool = False
    """Also report which tokens could be drawn at each position."""
    pooling: Pooling | None = None
    """"mean" or "last": report an embedding of the prompt, which takes max_tokens=0 and no log-probabilities."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_counts()
        self._check_pooling()
        put = object.__setattr__
        put(self, "top_k", max(0, self.top_k))
        put(self, "stop_token_ids", frozenset(token_ids("stop_token_ids", self.stop_token_ids)))
        put(self, "logit_bias", FrozenDict(checked_bias(self.logit_bias)))
        put(self, "stop", checked_stops(self.stop))
        if self.allowed_token_ids is not None:
            allowed = frozenset(token_ids("allowed_token_ids", self.allowed_token_ids))
            if not allowed:
                raise ValueError("allowed_token_ids must not be empty; leave it out to allow every token")
            put(self, "allowed_token_ids", allowed)

    def _check_ranges(self) -> None:
        check_number("temperature", self.temperature, 0, 100)
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.logprobs_mode is not None and self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {self.logprobs_mode!r}")

    def _check_counts(self) -> None:
        for name in ("ignore_eos", "raw_logprobs", "sampling_mask"):
            check_bool(name, getattr(self, name))
        check_int("top_k", self.top_k, -1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if self.max_tokens != 0:
            raise ValueError(f"max_tokens must be 0 with pooling, got {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} must be left out with pooling, got {getattr(self, name)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingParams.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        out["stop_token_ids"] = sorted(self.stop_token_ids)
        out["stop"] = list(self.stop)
        if self.allowed_token_ids is not None:
            out["allowed_token_ids"] = sorted(self.allowed_token_ids)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Build from `to_dict`'s form; an unknown field is a `ValueError`."""
        params: SamplingParams = from_known(cls, data)
        return params


class TokenLogprob(NamedTuple):
    """One alternative at a position."""

    token: int
    logprob: float


TopLogprobs = tuple[TokenLogprob, ...]
"""Alternatives at one position, likeliest first."""


class VersionSpan(NamedTuple):
    """A run of completion tokens [start, end) that were drawn with one version of the weights."""

    version: int
    start: int
    end: int
    label: WeightLabel | None
    """What the trainer calls the version; None when it gave it no name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, the label left out when there is none."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def spans_of(versions: Iterable[int], labels: Mapping[int, WeightLabel]) -> tuple[VersionSpan, ...]:
    """Return the longest runs of one version, in order; `labels` are what the trainer calls versions."""
    spans: list[VersionSpan] = []
    start = 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append(VersionSpan(version, start, end, labels.get(version)))
        start = end
    return tuple(spans)


_ALIGNED = ("logprobs", "mask", "token_versions", "ref_logprobs", "top_logprobs", "raw_logprobs", "sampling_masks")
"""Fields of a `TrainingSample` with an entry for every completion token."""
_FLAT = (
    *("prompt_tokens", "completion_tokens", "logprobs", "mask", "token_versions", "ref_logprobs", "raw_logprobs"),
    *("prompt_logprobs", "prompt_ranks", "embedding"),
)
"""Fields of a `TrainingSample` that hold plain numbers."""
_SPAN_KEYS = ({"version", "start", "end"}, {"version", "start", "end", "label"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One finished sample with all that a trainer must know of it. Raises `ValueError` when its fields disagree.

    `completion_tokens`, `logprobs`, `mask` and `token_versions` are aligned. Log-probabilities are finite and of the
    distribution that `logprobs_mode` names. Those of the prompt know no truncation, penalty or bias: raw, or else
    tempered; a token that the model gives no chance at all has -9999.
    """

    request_id: int
    sample_index: int
    """Which of the request's n samples this is, from 0."""
    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the sampled tokens; 0.0 where a token was forced."""
    mask: tuple[int, ...]
    """1 where the model drew the token, 0 where a tool forced it."""
    token_versions: tuple[int, ...]
    """The weights each token was drawn with: how many installations there had been."""
    weight_version: int
    """The oldest of `token_versions`; the weights in force at the end when there are none."""
    lineage: str | None = field(default=None, compare=False)
    """Whose versions `token_versions` counts: equal numbers mean equal weights only within one lineage. An engine has
    one of its own, or `EngineConfig.lineage`; None in samples of earlier releases, or when the caller vouches. Not
    compared: samples of two engines with the same contents are equal."""
    finish_reason: FinishReason
    stop_reason: StopReason | None = None
    """The token id or the string that stopped it; None for the model's own end token or a length."""
    seed: int | None = None
    """What its draws depend on besides `sample_index` and position, also where the request named none."""
    version_labels: Mapping[int, WeightLabel] = field(default_factory=dict, hash=False)
    """What the trainer called those of `token_versions` that it named."""
    logprobs_mode: LogprobsMode = "processed"
    """Which distribution `logprobs` and `top_logprobs` speak of."""
    ref_logprobs: tuple[float, ...] | None = None
    """Of the completion under a reference model, when the trainer adds them."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    """Alternatives at each position, when asked for; what has no chance at all is left out."""
    raw_logprobs: tuple[float, ...] | None = None
    """Of the sampled tokens under the model's own logits (temperature 1, nothing adjusted or cut), when asked for; 0.0
    where a token was forced."""
    sampling_masks: tuple[SamplingMask, ...] | None = None
    """Which tokens could be drawn at each position, when asked for. The tempered logits' log-softmax over these ids
    alone is `logprobs` in the mode "processed"."""
    prompt_logprobs: tuple[float, ...] | None = None
    """Of prompt tokens 1 and on (the first has no predecessor), when asked for."""
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    prompt_ranks: tuple[int, ...] | None = None
    """Of prompt tokens 1 and on: 1 where no token was likelier, and so on; None where the runner does not say."""
    embedding: tuple[float, ...] | None = None
    """The prompt's last hidden states, after the model's final norm, pooled as `SamplingParams.pooling` says: float32
    values, all of `weight_version`. None unless asked for, or when the sample did not get that far."""
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V came from the cache at first admission."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        size = len(self.completion_tokens)
        for name in _ALIGNED:
            values = getattr(self, name)
            if values is not None and len(values) != size:
                raise ValueError(f"{name} must hold one entry for each of {size} completion tokens, got {len(values)}")
        if self.lineage is not None and not isinstance(self.lineage, str):
            raise ValueError(f"lineage must be a string or None, got {self.lineage!r}")
        given = self.version_labels
        labels = {version: given[version] for version in sorted(set(self.token_versions)) if version in given}
        for version, label in labels.items():
            check_label(f"version_labels[{version}]", label)
        object.__setattr__(self, "version_labels", FrozenDict(labels))

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingSample.from_dict, (self.to_dict(),)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The longest runs of completion tokens of one version, in order; together they are the whole completion."""
        return spans_of(self.token_versions, self.version_labels)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; versions and labels as `weight_versions`, a list of spans."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        del out["token_versions"], out["version_labels"]
        out["weight_versions"] = [span.to_dict() for span in self.version_spans]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingSample:
        """Build from `to_dict`'s form, or from that form after a trip through JSON.

        The versions may also come as the plain list `token_versions`.
        """
        plain = dict(data)
        if "weight_versions" in plain:
            if "token_versions" in plain:
                raise ValueError("weight_versions and token_versions say the same; give one of them")
            spans = read_spans(plain.pop("weight_versions"), len(plain.get("completion_tokens", ())))
            plain["token_versions"] = [span.version for span in spans for _ in range(span.start, span.end)]
            plain["version_labels"] = {span.version: span.label for span in spans if span.label is not None}
        elif "version_labels" in plain:  # whose keys JSON has turned into text
            plain["version_labels"] = {int(version): label for version, label in plain["version_labels"].items()}
        for name in _FLAT:
            if plain.get(name) is not None:
                plain[name] = tuple(plain[name])
        for name in ("top_logprobs", "prompt_top_logprobs"):
            if plain.get(name) is not None:
                plain[name] = tuple(tuple(TokenLogprob(*pair) for pair in top) for top in plain[name])
        if plain.get("sampling_masks") is not None:
            plain["sampling_masks"] = tuple(m if m is None else tuple(m) for m in plain["sampling_masks"])
        sample: TrainingSample = from_known(cls, plain)
        return sample


def read_spans(spans: Sequence[Mapping[str, Any]], num_tokens: int) -> list[VersionSpan]:
    """Return spans from JSON, or raise `ValueError` unless each begins where the last ended and all are covered."""
    found: list[VersionSpan] = []
    end = 0
    for data in spans:
        if not isinstance(data, Mapping) or set(data) not in _SPAN_KEYS:
            raise ValueError(f"weight_versions: a span has version, start, end and perhaps a label, got {data!r}")
        span = VersionSpan(data["version"], data["start"], data["end"], data.get("label"))
        check_int("weight_versions: a version", span.version, 0)
        check_int("weight_versions: a start", span.start, end, end)
        check_int("weight_versions: an end", span.end, end + 1, num_tokens)
        found.append(span)
        end = span.end
    if end != num_tokens:
        raise ValueError(f"weight_versions must cover {num_tokens} tokens, got {end}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sample; the last one carries the whole sample."""

    request_id: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    mask: tuple[int, ...]
    versions: tuple[int, ...]
    """The weights each of the tokens was drawn with."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    raw_logprobs: tuple[float, ...] | None = None
    """As in the sample; None unless asked for."""
    sampling_masks: tuple[SamplingMask, ...] | None = None
    """As in the sample; None unless asked for."""
    sample: TrainingSample | None = None
    """Set on the sample's last delta."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample ended, on its last delta."""
        return self.sample.finish_reason if self.sample else None


class Beginning(NamedTuple):
    """Where a request's samples begin, when somebody else wrote or drew what stands before them."""

    num_tokens: int = 0
    """So many last tokens of the prompt are the answer's first: presence and frequency penalties count them."""
    sample_index: int = 0
    """The number under which the first sample is drawn: that of a sample that it goes on with."""


FROM_THE_PROMPT = Beginning()
"""Nothing of an answer is there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What is asked of one prompt: ids only. It is checked when it is queued, and refused with `BadRequest` then."""

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    salt: str = ""
    """Cache namespace: requests share prefixes only within one."""
    make_matcher: MatcherFactory | None = None
    """Makes a matcher for each sample; not together with `params.stop`."""
    program: TokenProgram | None = None
    partial: TrainingSample | None = None
    """An unfinished sample of this prompt ("abort" or "length") to continue; the result equals an uninterrupted run."""
    beginning: Beginning = FROM_THE_PROMPT
    score_start: int = 0
    """First position whose prompt log-probability is reported, when `params.prompt_logprobs` asks for any."""


class SeqView(NamedTuple):
    """What the scheduler may know of a sequence: counts, never tokens."""

    id: int
    num_tokens: int
    num_computed: int
    """Tokens whose K/V exists; for a waiting sequence, those the cache would give."""
    num_blocks: int
    """Blocks held; for a waiting sequence, whole blocks the cache would give."""
    num_private: int = 0
    """Of the held blocks, those that nobody else holds."""
    idle_hit: int = 0
    """Of the blocks that the cache would give, those that lie in the free list."""
    next_key: object = None
    """Names the block this sequence computes next; two with one key would compute the same K/V."""
    max_new: int = 1
    """Tokens it may still add."""
    num_drafts: int = 0
    """Tokens that were guessed to come next."""
    draft_chance: float = 0.0
    """How probable each of them is to be right when those before it are."""


class Work(NamedTuple):
    """One sequence's part in a step."""

    id: int
    num_tokens: int
    """Tokens to compute, from `num_computed` on."""
    num_blocks: int
    """Fresh blocks to take."""
    num_sampled: int
    """At most this many tokens may be drawn; 0 while the sequence is still behind after this step."""
    num_drafts: int = 0
    """Guessed tokens to compute behind those, at each of which a further token is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """A plan for one step: which sequences compute how many tokens with how many fresh blocks."""

    prefill_seqs: tuple[int, ...]
    """Ids that catch up: more than one token, or one that does not end in a draw."""
    decode_seqs: tuple[int, ...]
    """Ids that compute their last token and draw the next."""
    preempted_seqs: tuple[int, ...]
    """Ids that give their blocks back, youngest first."""
    work: tuple[Work, ...]
    """Every scheduled sequence, oldest first."""


class CacheAllocation(NamedTuple):
    """The blocks of a prompt; the first `cached_length` tokens already have their K/V."""

    block_ids: tuple[int, ...]
    cached_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Counts of one step, for metrics and progress bars."""

    num_rows: int
    num_computed: int
    """Tokens that went through the model, wrong guesses included."""
    num_sampled: int
    num_preempted: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    weight_version: int
    num_drafted: int = 0
    """Guessed tokens among `num_computed`."""
    num_accepted: int = 0
    """Those of them that were drawn as well, and so kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything that one step of the engine gives back."""

    deltas: tuple[Delta, ...]
    samples: tuple[TrainingSample, ...]
    stats: StepStats
    started: tuple[tuple[int, int], ...] = ()
    """(request id, sample index) of the sequences that left the queue; a preempted one leaves it again."""

    def after(self, deltas: Iterable[Delta]) -> StepResult:
        """Return the same with what happened just before the step put in front."""
        before = tuple(deltas)
        if not before:
            return self
        ended = tuple(delta.sample for delta in before if delta.sample is not None)
        return replace(self, deltas=before + self.deltas, samples=ended + self.samples)


class WeightInfo(NamedTuple):
    """The weights in force."""

    version: int
    """How many times weights were installed since the start."""
    label: WeightLabel | None
    """What the trainer called them."""
    update: UpdateState
    """Where the next update stands."""
