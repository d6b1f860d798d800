"""Finished samples and their increments: `TrainingSample`, `Delta` and the records in them. All frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Literal, NamedTuple

from nano_inference.support.checks import brief_repr, check_int, check_label, from_known
from nano_inference.support.errors import BadRequest
from nano_inference.support.frozen import FrozenDict

FinishReason = Literal["stop", "length", "abort"]
LogprobsMode = Literal["raw", "tempered", "processed"]
StopReason = int | str
"""What stopped a sample: a token id, a stop string, or a text that its matcher returned."""
WeightLabel = int | str
"""The trainer's name for a version of the weights, such as a training step."""
SamplingMask = tuple[int, ...] | None
"""Ids that could be sampled at a position, ascending; None if all could, () if the token was forced."""


class TokenLogprob(NamedTuple):
    """A token and its log-probability at one position."""

    token: int
    logprob: float


TopLogprobs = tuple[TokenLogprob, ...]
"""Most probable tokens at one position, in descending order."""


class VersionSpan(NamedTuple):
    """Completion tokens [start, end) that were sampled with one version of the weights."""

    version: int
    start: int
    end: int
    label: WeightLabel | None
    """The trainer's name for the version; None if it has none."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, without a label that is None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def spans_of(versions: Iterable[int], labels: Mapping[int, WeightLabel]) -> tuple[VersionSpan, ...]:
    """Return the maximal runs of equal versions, in order; `labels` maps versions to the trainer's names."""
    spans: list[VersionSpan] = []
    start = 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append(VersionSpan(version, start, end, labels.get(version)))
        start = end
    return tuple(spans)


_ALIGNED = ("logprobs", "mask", "token_versions", "ref_logprobs", "top_logprobs", "raw_logprobs", "sampling_masks")
"""Fields of a `TrainingSample` with one entry for each completion token."""
_FLAT = (
    *("prompt_tokens", "completion_tokens", "logprobs", "mask", "token_versions", "ref_logprobs", "raw_logprobs"),
    *("prompt_logprobs", "prompt_ranks", "embedding", "adapter_versions"),
)
"""Fields of a `TrainingSample` that are sequences of plain values."""
_SPAN_KEYS = ({"version", "start", "end"}, {"version", "start", "end", "label"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One finished sample with everything a trainer needs. Raises `ValueError` when its fields disagree.

    `completion_tokens`, `logprobs`, `mask` and `token_versions` are aligned. Log-probabilities are finite; their
    distribution is `logprobs_mode`. Those of the prompt ignore truncation, penalties and bias: raw in the mode "raw",
    otherwise tempered. A token of probability 0 has -9999.
    """

    request_id: int
    sample_index: int
    """Index among the request's samples, from 0."""
    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """0.0 where a token was forced."""
    mask: tuple[int, ...]
    """1 where the model sampled the token, 0 where it was forced."""
    token_versions: tuple[int, ...]
    """Version of the weights for each token: the number of installations before it."""
    weight_version: int
    """The oldest of `token_versions`; without tokens, the version at the sample's end."""
    lineage: str | None = field(default=None, compare=False)
    """Equal versions mean equal weights only within one lineage, which is `EngineConfig.lineage` or random for each
    engine. None skips the check on resumption. Ignored by `==`."""
    finish_reason: FinishReason
    stop_reason: StopReason | None = None
    """The token id or string that stopped it, or an abort's cause; None for the model's end token and for a length."""
    seed: int | None = None
    """Sampling depends only on logits, seed, `sample_index` and position. Set even if the request had none."""
    version_labels: Mapping[int, WeightLabel] = field(default_factory=dict, hash=False)
    """The trainer's names for `token_versions`."""
    adapter: str | None = None
    """Name of the adapter that computed it with the weights; None is the model alone."""
    adapter_versions: tuple[WeightLabel, ...] = ()
    """Version of the adapter for each completion token; empty without an adapter."""
    logprobs_mode: LogprobsMode = "processed"
    """The distribution of `logprobs` and `top_logprobs`."""
    ref_logprobs: tuple[float, ...] | None = None
    """Log-probabilities of the completion under a reference model; the caller sets it, from `score`."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    """Most probable tokens at each position, if requested; tokens of probability 0 are left out."""
    raw_logprobs: tuple[float, ...] | None = None
    """Log-probabilities under the unmodified logits at temperature 1, if requested; 0.0 where a token was forced."""
    sampling_masks: tuple[SamplingMask, ...] | None = None
    """Tokens that could be sampled at each position, if requested. Log-softmax of the tempered logits over these ids
    gives `logprobs` in the mode "processed"."""
    prompt_logprobs: tuple[float, ...] | None = None
    """Of prompt tokens from index 1 on (the first has no predecessor), if requested."""
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    prompt_ranks: tuple[int, ...] | None = None
    """Rank of prompt tokens from index 1 on, 1 for the most probable token; None if the runner does not compute it."""
    embedding: tuple[float, ...] | None = None
    """The prompt's last hidden states after the final norm, pooled: float32 values, all of `weight_version`. None
    unless requested, and if the sample ended before it was computed."""
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V was cached when the sample first started."""
    num_preemptions: int = 0
    text: str | None = None
    """The completion without special tokens and stop strings, if requested."""
    __repr__ = brief_repr

    def __post_init__(self) -> None:
        size = len(self.completion_tokens)
        for name in _ALIGNED:
            values = getattr(self, name)
            if values is not None and len(values) != size:
                raise BadRequest(name, f"must hold one entry for each of {size} completion tokens, got {len(values)}")
        num_versions = len(self.adapter_versions)
        if num_versions != (0 if self.adapter is None else size):
            wanted = "must be empty without an adapter" if self.adapter is None else f"must have {size} entries"
            raise BadRequest("adapter_versions", f"{wanted}, got {num_versions}")
        for name in ("lineage", "adapter"):
            if not isinstance(getattr(self, name), str | None):
                raise BadRequest(name, f"must be a string or None, got {getattr(self, name)!r}")
        given = self.version_labels
        labels = {version: given[version] for version in sorted(set(self.token_versions)) if version in given}
        for version, label in labels.items():
            check_label(f"version_labels[{version}]", label)
        object.__setattr__(self, "version_labels", FrozenDict(labels))

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingSample.from_dict, (self.to_dict(),)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The maximal runs of completion tokens of one version, in order; they cover the completion."""
        return spans_of(self.token_versions, self.version_labels)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; versions and labels become `weight_versions`, a list of spans."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        del out["token_versions"], out["version_labels"]
        out["weight_versions"] = [span.to_dict() for span in self.version_spans]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingSample:
        """Build from the form of `to_dict`, before or after JSON; a list `token_versions` may replace its spans."""
        plain = dict(data)
        if "weight_versions" in plain:
            if "token_versions" in plain:
                raise BadRequest(
                    "weight_versions", "weight_versions and token_versions are alternatives; give one of them"
                )
            spans = read_spans(plain.pop("weight_versions"), len(plain.get("completion_tokens", ())))
            plain["token_versions"] = [span.version for span in spans for _ in range(span.start, span.end)]
            plain["version_labels"] = {span.version: span.label for span in spans if span.label is not None}
        elif "version_labels" in plain:  # JSON keys are strings
            plain["version_labels"] = {int(version): label for version, label in plain["version_labels"].items()}
        for name in _FLAT:
            if plain.get(name) is not None:
                plain[name] = tuple(plain[name])
        for name in ("top_logprobs", "prompt_top_logprobs"):
            if plain.get(name) is not None:
                plain[name] = tuple(tuple(TokenLogprob(*pair) for pair in top) for top in plain[name])
        if plain.get("sampling_masks") is not None:
            plain["sampling_masks"] = tuple(m if m is None else tuple(m) for m in plain["sampling_masks"])
        return from_known(cls, plain)


def read_spans(spans: Sequence[Mapping[str, Any]], num_tokens: int) -> list[VersionSpan]:
    """Return spans from JSON. Raises `ValueError` unless they are adjacent and cover all tokens."""
    found: list[VersionSpan] = []
    end = 0
    for data in spans:
        if not isinstance(data, Mapping) or set(data) not in _SPAN_KEYS:
            raise BadRequest("weight_versions", f"a span has version, start, end and perhaps a label, got {data!r}")
        span = VersionSpan(data["version"], data["start"], data["end"], data.get("label"))
        check_int("weight_versions: a version", span.version, 0)
        check_int("weight_versions: a start", span.start, end, end)
        check_int("weight_versions: an end", span.end, end + 1, num_tokens)
        found.append(span)
        end = span.end
    if end != num_tokens:
        raise BadRequest("weight_versions", f"must cover {num_tokens} tokens, got {end}")
    return found


class Prefill(NamedTuple):
    """How much of a prompt is computed before the first token."""

    num_cached: int
    """Tokens whose K/V was cached when the sample started."""
    num_computed: int
    """Tokens with K/V after the step, the cached ones included; lower than before if the sample was preempted."""
    logprobs: tuple[float, ...] | None = None
    """`prompt_logprobs` of the sample, in the delta with its first tokens."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens that one step added to one sample; the last delta of a sample contains the whole sample."""

    request_id: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    mask: tuple[int, ...]
    versions: tuple[int, ...]
    """Version of the weights for each token."""
    adapter_versions: tuple[WeightLabel, ...] = ()
    """Version of the adapter for each token; empty without an adapter."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    raw_logprobs: tuple[float, ...] | None = None
    sampling_masks: tuple[SamplingMask, ...] | None = None
    sample: TrainingSample | None = None
    """Set in the sample's last delta."""
    prefill: Prefill | None = None
    """Set up to the first tokens if the request has `reports_prefill`."""
    __repr__ = brief_repr

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample ended; None before its last delta."""
        return self.sample.finish_reason if self.sample else None
