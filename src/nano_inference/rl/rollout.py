"""Multi-turn rollouts for trainers: the model samples a turn, an environment appends tokens, and so on.

The prompt of every turn is the sequence of all earlier token ids. Nothing is decoded and encoded again, so the trainer
gets exactly the tokens that the model saw and sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby
from typing import Any, Literal

from nano_inference.core.seeds import derive_seed
from nano_inference.engine import InferenceEngine, Progress
from nano_inference.support.checks import check_int, from_known, token_ids
from nano_inference.types import FinishReason, SamplingParams, TokenProgram, TrainingSample

SegmentKind = Literal["prompt", "sampled", "forced", "environment"]
RolloutFinish = FinishReason | Literal["max_turns"]
"""Why a rollout ended: "stop" if the environment ended it, "length" if there was no room for another turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens of one origin: the prompt, sampled, forced by a token program, or from the environment."""

    kind: SegmentKind
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """0.0 unless the kind is "sampled"."""
    token_versions: tuple[int, ...]
    """The weight version with which the engine sampled or forced each token; -1 for other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A sample of the model and the tokens that the environment appended."""

    sample: TrainingSample
    """The sample without its prompt, which is all tokens before it; `Rollout.samples` includes the prompt."""
    observation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt and its turns. `loss_mask`, `logprobs` and `token_versions` have one entry for each of `tokens`."""

    prompt_tokens: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    finish_reason: RolloutFinish | None = None
    """None while the rollout is running."""
    prompt_index: int = 0
    """Index of the prompt in the run."""
    sample_index: int = 0
    """Index among the rollouts of the same prompt."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for turns from engines of different lineages."""
        names = list(dict.fromkeys(turn.sample.lineage for turn in self.turns if turn.sample.lineage is not None))
        if len(names) > 1:
            raise ValueError(
                f"turns: their samples have the lineages {names[0]!r} and {names[1]!r}, whose weight versions are "
                "unrelated; sample all turns of a rollout with one engine, or with engines of one EngineConfig.lineage"
            )

    @property
    def lineage(self) -> str | None:
        """The lineage of `token_versions`; None if no turn has one."""
        return next((turn.sample.lineage for turn in self.turns if turn.sample.lineage is not None), None)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids: the prompt, then each turn with its observation."""
        parts = (part for turn in self.turns for part in (turn.sample.completion_tokens, turn.observation))
        return tuple(chain(self.prompt_tokens, *parts))

    @property
    def completion_tokens(self) -> tuple[int, ...]:
        """All token ids after the prompt."""
        return self.tokens[len(self.prompt_tokens) :]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The maximal runs of one origin, in order; a run never spans two turns."""
        parts = [_input_segment("prompt", self.prompt_tokens)]
        for turn in self.turns:
            sample, end = turn.sample, 0
            for is_sampled, run in groupby(sample.mask):
                start, end = end, end + len(list(run))
                parts.append(
                    Segment(
                        kind="sampled" if is_sampled else "forced",
                        tokens=sample.completion_tokens[start:end],
                        logprobs=sample.logprobs[start:end],
                        token_versions=sample.token_versions[start:end],
                    )
                )
            parts += [_input_segment("environment", turn.observation)] if turn.observation else []
        return tuple(parts)

    @property
    def segment_spans(self) -> tuple[tuple[int, int, SegmentKind], ...]:
        """The start, end and kind of each segment, as indices into `tokens`."""
        spans: list[tuple[int, int, SegmentKind]] = []
        end = 0
        for segment in self.segments:
            start, end = end, end + len(segment.tokens)
            spans.append((start, end, segment.kind))
        return tuple(spans)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for sampled tokens; 0 for the prompt, forced tokens and the environment's tokens."""
        return tuple(int(segment.kind == "sampled") for segment in self.segments for _ in segment.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of sampled tokens; 0.0 for all others."""
        return tuple(chain.from_iterable(segment.logprobs for segment in self.segments))

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The weight version of each sampled or forced token; -1 for all others."""
        return tuple(chain.from_iterable(segment.token_versions for segment in self.segments))

    @property
    def samples(self) -> tuple[TrainingSample, ...]:
        """The sample of each turn with its full prompt, as the engine returned it."""
        samples: list[TrainingSample] = []
        prompt = self.prompt_tokens
        for turn in self.turns:
            samples.append(replace(turn.sample, prompt_tokens=prompt))
            prompt += turn.sample.completion_tokens + turn.observation
        return tuple(samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        turns = [{"sample": turn.sample.to_dict(), "observation": turn.observation} for turn in self.turns]
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"turns": turns}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rollout:
        """Build from the result of `to_dict`, also after conversion to JSON and back."""
        turns = tuple(
            Turn(sample=TrainingSample.from_dict(turn["sample"]), observation=tuple(turn["observation"]))
            for turn in data["turns"]
        )
        return from_known(cls, {**data, "prompt_tokens": tuple(data["prompt_tokens"]), "turns": turns})


Environment = Callable[[Rollout], Iterable[int] | None]
"""Receives a rollout after each of its turns; returns the token ids to append, or None to end the rollout."""


def start(prompt_tokens: Collection[int], *, prompt_index: int = 0, sample_index: int = 0) -> Rollout:
    """Return a rollout without turns. Raises `ValueError` for an invalid prompt."""
    prompt = token_ids(f"prompts[{prompt_index}]", prompt_tokens)
    if not prompt:
        raise ValueError(f"prompts[{prompt_index}] must hold at least one token")
    return Rollout(prompt_tokens=prompt, prompt_index=prompt_index, sample_index=sample_index)


def extend(rollout: Rollout, sample: TrainingSample) -> Rollout:
    """Return the rollout with a sample as its next turn. Raises `ValueError` unless its prompt is `rollout.tokens`."""
    tokens = rollout.tokens
    if sample.prompt_tokens != tokens:
        pairs = zip(sample.prompt_tokens, tokens, strict=False)
        shorter = min(len(sample.prompt_tokens), len(tokens))
        position = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), shorter)
        raise ValueError(
            f"the sample's prompt of {len(sample.prompt_tokens)} tokens is not the rollout's {len(tokens)}: "
            f"they differ at position {position}"
        )
    turn = Turn(sample=replace(sample, prompt_tokens=()))
    return replace(rollout, turns=(*rollout.turns, turn), finish_reason=None)


def observe(rollout: Rollout, tokens: Iterable[int]) -> Rollout:
    """Return the rollout with tokens of the environment appended to its last turn."""
    new = token_ids("the environment's tokens", tokens if isinstance(tokens, Collection) else tuple(tokens))
    if not rollout.turns:
        raise ValueError("the rollout has no turn yet: pass these tokens as part of the prompt")
    *before, last = rollout.turns
    return replace(rollout, turns=(*before, replace(last, observation=last.observation + new)), finish_reason=None)


def to_trl(rollouts: Iterable[Rollout]) -> dict[str, list[list[int]] | list[list[float]]]:
    """Return the columns for TRL's `rollout_func`; `env_mask` is 1 for sampled tokens.

    Raises `ValueError` for raw log-probabilities: TRL takes them for those at its temperature.
    """
    each = [(rollout, len(rollout.prompt_tokens)) for rollout in rollouts]
    if any(turn.sample.logprobs_mode == "raw" for rollout, _ in each for turn in rollout.turns):
        raise ValueError("rollouts: logprobs_mode must be processed or tempered, got 'raw'")
    return {
        "prompt_ids": [list(rollout.prompt_tokens) for rollout, _ in each],
        "completion_ids": [list(rollout.completion_tokens) for rollout, _ in each],
        "logprobs": [list(rollout.logprobs[size:]) for rollout, size in each],
        "env_mask": [list(rollout.loss_mask[size:]) for rollout, size in each],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """The settings of all turns of a run."""

    params: SamplingParams
    max_turns: int
    max_tokens: int  # most tokens of a rollout, including its prompt
    program: TokenProgram | None
    adapter: str | None

    def __post_init__(self) -> None:
        check_int("max_turns", self.max_turns, 1)
        if self.params.max_tokens == 0:
            raise ValueError("max_tokens must be >= 1: each turn samples at least one token")
        if self.params.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs: every turn would score all earlier tokens again; use engine.score at the end"
            )


def run_rollouts(
    engine: InferenceEngine,
    prompts: Seq[Seq[int]],
    environment: Environment,
    sampling_params: SamplingParams | None = None,
    *,
    num_samples_per_prompt: int = 1,
    max_turns: int,
    max_tokens_total: int | None = None,
    program: TokenProgram | None = None,
    adapter: str | None = None,
    progress: Progress | None = None,
    resume: Seq[Rollout] = (),
) -> list[Rollout]:
    """Return the rollouts of `resume`, then those of all prompts, in order, `num_samples_per_prompt` for each prompt.

    A rollout's next turn starts as soon as the environment has returned, independently of the other rollouts. The
    environment is called after every turn, also a truncated one, but not after an abort. A rollout ends when the
    environment returns None ("stop"); when it returns tokens after turn `max_turns` ("max_turns"); when these leave no
    room for another token in `max_tokens_total` (which includes the prompt), the model's length or the whole cache
    ("length"); or when the turn was aborted ("abort"). These last tokens are dropped, so that a rollout ends with a
    sampled turn. If the environment returns no tokens (`()`), the model continues.

    `resume`: rollouts of an earlier call. Those that were aborted continue after the last token of their interrupted
    turn, whose earlier tokens keep their versions and log-probabilities; with the same settings and weights, the result
    equals an uninterrupted run. Others are returned as they are, also those that a program's error ended. New prompts
    are numbered after theirs.

    With a seed, sampling depends only on the seed, the prompt's and the sample's index, and the absolute position.
    `program` is restarted for every turn. Other requests run in the same steps; their samples are not affected. The
    environment may use the engine. An exception, from the environment or by Ctrl-C, aborts this call's requests and is
    re-raised. Raises `ValueError` for invalid arguments before anything runs.
    """
    kv = engine.parts.kv
    max_tokens = min(engine.parts.max_model_len, kv.num_blocks * kv.block_size)
    if max_tokens_total is not None:
        check_int("max_tokens_total", max_tokens_total, 2)
        max_tokens = min(max_tokens, max_tokens_total)
    params = sampling_params or SamplingParams()
    rules = _Rules(params=params, max_turns=max_turns, max_tokens=max_tokens, program=program, adapter=adapter)
    first = 1 + max((rollout.prompt_index for rollout in resume), default=-1)
    rollouts = [*resume, *_starts(prompts, num_samples_per_prompt, rules.max_tokens, first)]
    return engine.exclusively(lambda: _take_turns(engine, rollouts, environment, rules, progress))


def _take_turns(
    engine: InferenceEngine,
    rollouts: list[Rollout],
    environment: Environment,
    rules: _Rules,
    progress: Progress | None,
) -> list[Rollout]:
    """Run all rollouts to their ends, as one exclusive call of the engine."""
    pending: dict[int, int] = {}  # request ids -> indices of rollouts
    for index, rollout in enumerate(rollouts):
        has_failed = bool(rollout.turns) and rollout.turns[-1].sample.stop_reason is not None
        if rollout.finish_reason is None or (rollout.finish_reason == "abort" and not has_failed):
            # An aborted last turn is taken off, and continued from its sample.
            is_partial = rollout.finish_reason is not None and bool(rollout.turns)
            partial = rollout.samples[-1] if is_partial else None
            turns = rollout.turns[:-1] if is_partial else rollout.turns
            rollouts[index] = replace(rollout, turns=turns, finish_reason=None)
            pending[_request_turn(engine, rollouts[index], rules, partial)] = index
    while pending:
        for request_id in engine.wait_for_any(pending, progress):
            index = pending.pop(request_id)
            (sample,) = engine.collect(request_id)
            rollout = rollouts[index] = _observe_turn(extend(rollouts[index], sample), environment, rules)
            if rollout.finish_reason is None:
                pending[_request_turn(engine, rollout, rules)] = index
    return rollouts


def _starts(prompts: Seq[Seq[int]], num_samples: int, max_tokens: int, first: int) -> list[Rollout]:
    """Return the rollouts before their first turns; `first` is the number of the first prompt.

    Raises `ValueError` for prompts that leave no room for a turn.
    """
    check_int("num_samples_per_prompt", num_samples, 1)
    if isinstance(prompts, str | bytes) or not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be a list of lists of token ids, got {type(prompts).__name__}")
    for index, prompt in enumerate(prompts):
        if len(start(prompt, prompt_index=index).tokens) >= max_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens; a rollout may have {max_tokens}, including sampled tokens "
                "(the minimum of max_tokens_total, max_model_len and the size of the KV cache)"
            )
    return [
        start(prompt, prompt_index=first + index, sample_index=sample)
        for index, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def _observe_turn(rollout: Rollout, environment: Environment, rules: _Rules) -> Rollout:
    """Call the environment after a turn; return the rollout with its tokens, or with a finish reason."""
    if rollout.turns[-1].sample.finish_reason == "abort":
        return replace(rollout, finish_reason="abort")
    answer = environment(rollout)
    if answer is None:
        return replace(rollout, finish_reason="stop")
    answered = observe(rollout, answer)
    if len(rollout.turns) >= rules.max_turns:
        return replace(rollout, finish_reason="max_turns")
    return answered if len(answered.tokens) < rules.max_tokens else replace(rollout, finish_reason="length")


def _input_segment(kind: SegmentKind, tokens: tuple[int, ...]) -> Segment:
    size = len(tokens)
    return Segment(kind=kind, tokens=tokens, logprobs=(0.0,) * size, token_versions=(-1,) * size)


def _request_turn(
    engine: InferenceEngine, rollout: Rollout, rules: _Rules, partial: TrainingSample | None = None
) -> int:
    """Queue a rollout's next turn and return its request id; the request is aborted if this call ends early.

    `partial`: the turn's tokens so far.
    """
    params = rules.params
    room = rules.max_tokens - len(rollout.tokens)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = params.seed
    if seed is not None:
        seed = derive_seed(derive_seed(seed, rollout.prompt_index), rollout.sample_index)
    params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens), seed=seed)
    return engine.add_request(
        rollout.tokens, params, program=rules.program, adapter=rules.adapter, partial=partial, for_call=True
    )
