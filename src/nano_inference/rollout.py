"""Multi-turn rollouts for trainers: the model writes, an environment answers, the tokens only ever grow.

The prompt of every turn is what stands already, id by id: nothing is decoded and encoded again, so what a trainer
learns from is what the model saw and drew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby
from typing import Any, Literal

from nano_inference.checks import check_int, from_known, token_ids
from nano_inference.engine import InferenceEngine, Progress
from nano_inference.sampling import derive_seed
from nano_inference.types import FinishReason, SamplingParams, TokenProgram, TrainingSample

SegmentKind = Literal["prompt", "sampled", "forced", "environment"]
RolloutFinish = FinishReason | Literal["max_turns"]
"""Why a rollout ended: "stop" when the environment said so, "length" when there was no room for another turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens of one origin: given at the start, drawn, forced by a token program, or the environment's."""

    kind: SegmentKind
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """0.0 where the kind is not "sampled"."""
    token_versions: tuple[int, ...]
    """The weights in force when the engine wrote the token; -1 for what was given to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model wrote, and what the environment answered."""

    sample: TrainingSample
    """Without its prompt, which is everything before it; `Rollout.samples` has it whole."""
    observation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt and the turns after it. `loss_mask`, `logprobs` and `token_versions` are aligned with `tokens`."""

    prompt_tokens: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    finish_reason: RolloutFinish | None = None
    """None while it goes on."""
    prompt_index: int = 0
    """Which of the prompts it is of."""
    sample_index: int = 0
    """Which of the prompt's rollouts it is."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for turns of engines whose weight versions are unrelated."""
        names = list(dict.fromkeys(turn.sample.lineage for turn in self.turns if turn.sample.lineage is not None))
        if len(names) > 1:
            raise ValueError(
                f"turns: their samples have the lineages {names[0]!r} and {names[1]!r}, whose weight versions are "
                "unrelated; draw all turns of a rollout with one engine, or with engines of one EngineConfig.lineage"
            )

    @property
    def lineage(self) -> str | None:
        """Whose versions `token_versions` counts; None without a turn that says so."""
        return next((turn.sample.lineage for turn in self.turns if turn.sample.lineage is not None), None)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids from the first of the prompt on: the prompt of the next turn."""
        parts = (part for turn in self.turns for part in (turn.sample.completion_tokens, turn.observation))
        return tuple(chain(self.prompt_tokens, *parts))

    @property
    def completion_tokens(self) -> tuple[int, ...]:
        """All ids after the prompt."""
        return self.tokens[len(self.prompt_tokens) :]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The longest runs of one origin, in order; the runs of two turns are never one."""
        parts = [_given("prompt", self.prompt_tokens)]
        for turn in self.turns:
            parts += _written(turn.sample)
            parts += [_given("environment", turn.observation)] if turn.observation else []
        return tuple(parts)

    @property
    def segment_spans(self) -> tuple[tuple[int, int, SegmentKind], ...]:
        """Where each segment begins and ends in `tokens`, and its kind."""
        spans: list[tuple[int, int, SegmentKind]] = []
        end = 0
        for segment in self.segments:
            start, end = end, end + len(segment.tokens)
            spans.append((start, end, segment.kind))
        return tuple(spans)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 where the model drew the token; 0 for the prompt, for forced tokens and for the environment's."""
        return tuple(int(segment.kind == "sampled") for segment in self.segments for _ in segment.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of the drawn tokens; 0.0 elsewhere."""
        return tuple(chain.from_iterable(segment.logprobs for segment in self.segments))

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The weights in force when the engine wrote each token; -1 for the prompt and the environment's."""
        return tuple(chain.from_iterable(segment.token_versions for segment in self.segments))

    @property
    def samples(self) -> tuple[TrainingSample, ...]:
        """Each turn as the engine gave it, with all that was asked for and the whole prompt it had."""
        whole: list[TrainingSample] = []
        prompt = self.prompt_tokens
        for turn in self.turns:
            whole.append(replace(turn.sample, prompt_tokens=prompt))
            prompt += turn.sample.completion_tokens + turn.observation
        return tuple(whole)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        turns = [{"sample": turn.sample.to_dict(), "observation": turn.observation} for turn in self.turns]
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"turns": turns}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rollout:
        """Build from `to_dict`'s form, or from that form after a trip through JSON."""
        turns = tuple(
            Turn(sample=TrainingSample.from_dict(turn["sample"]), observation=tuple(turn["observation"]))
            for turn in data["turns"]
        )
        rollout: Rollout = from_known(cls, {**data, "prompt_tokens": tuple(data["prompt_tokens"]), "turns": turns})
        return rollout


Environment = Callable[[Rollout], Iterable[int] | None]
"""Sees a rollout whose last turn was just written; returns the ids to append, or None to end it."""


def start(prompt_tokens: Collection[int], *, prompt_index: int = 0, sample_index: int = 0) -> Rollout:
    """Return a rollout of a prompt and no turn. Raises `ValueError` for what is no prompt."""
    prompt = token_ids(f"prompts[{prompt_index}]", prompt_tokens)
    if not prompt:
        raise ValueError(f"prompts[{prompt_index}] must hold at least one token")
    return Rollout(prompt_tokens=prompt, prompt_index=prompt_index, sample_index=sample_index)


def extend(rollout: Rollout, sample: TrainingSample) -> Rollout:
    """Return the rollout with a turn that was drawn after exactly its tokens; `ValueError` for any other."""
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
    """Return the rollout with tokens of the environment after its last turn; none leave it as it is."""
    new = token_ids("the environment's tokens", tokens if isinstance(tokens, Collection) else tuple(tokens))
    if not rollout.turns:
        raise ValueError("the model has written nothing yet: these tokens belong into the prompt")
    *before, last = rollout.turns
    return replace(rollout, turns=(*before, replace(last, observation=last.observation + new)), finish_reason=None)


def to_trl(rollouts: Iterable[Rollout]) -> dict[str, list[list[int]] | list[list[float]]]:
    """Return the columns that TRL's `rollout_func` gives back; `env_mask` is 1 where the model drew the token."""
    each = [(rollout, len(rollout.prompt_tokens)) for rollout in rollouts]
    return {
        "prompt_ids": [list(rollout.prompt_tokens) for rollout, _ in each],
        "completion_ids": [list(rollout.completion_tokens) for rollout, _ in each],
        "logprobs": [list(rollout.logprobs[size:]) for rollout, size in each],
        "env_mask": [list(rollout.loss_mask[size:]) for rollout, size in each],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What holds for every turn of a run."""

    params: SamplingParams
    max_turns: int
    max_tokens: int
    """Of a whole rollout, its prompt included."""
    program: TokenProgram | None


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
    progress: Progress | None = None,
) -> list[Rollout]:
    """Return the rollouts of all prompts, prompt-major: the n of a prompt stand together, in order.

    A rollout's next turn starts when the environment has answered its last one, whatever the others do. The environment
    is asked after every turn, also one that `max_tokens` cut short, but not after an abort. A rollout ends when it
    returns None ("stop"); when its tokens come after turn `max_turns`; when they leave no room for another token in
    `max_tokens_total` (the prompt included), the model or the whole cache ("length"); when the turn was aborted. Then
    these tokens are left out: a rollout ends with what the model wrote. Without tokens (`()`) the model just goes on.

    With a seed, the draws depend on it, on the rollout's place (prompt and sample) and on the absolute position alone.
    `program` starts anew with every turn. Other requests share the steps and their samples stay where they belong; the
    environment may use the engine. An exception on the way, the environment's or Ctrl-C, aborts what was asked here
    and passes on. Raises `ValueError` before anything runs for what makes no sense.
    """
    rules = _rules(engine, sampling_params or SamplingParams(), max_turns, max_tokens_total, program)
    rollouts = _starts(prompts, num_samples_per_prompt, rules.max_tokens)
    return engine.exclusively(lambda: _take_turns(engine, rollouts, environment, rules, progress))


def _take_turns(
    engine: InferenceEngine,
    rollouts: list[Rollout],
    environment: Environment,
    rules: _Rules,
    progress: Progress | None,
) -> list[Rollout]:
    """Run all rollouts to their ends, as one call of the engine: what it asks for ends with it."""
    pending = {_ask(engine, rollout, rules): place for place, rollout in enumerate(rollouts)}
    """Request id -> which of the rollouts."""
    while pending:
        for request_id in engine.wait_for_any(pending, progress):
            place = pending.pop(request_id)
            (sample,) = engine.collect(request_id)
            rollout = rollouts[place] = _take_turn(extend(rollouts[place], sample), environment, rules)
            if rollout.finish_reason is None:
                pending[_ask(engine, rollout, rules)] = place
    return rollouts


def _rules(
    engine: InferenceEngine,
    params: SamplingParams,
    max_turns: int,
    max_tokens_total: int | None,
    program: TokenProgram | None,
) -> _Rules:
    """Check what the turns have in common; find how long a rollout may become."""
    check_int("max_turns", max_turns, 1)
    if params.max_tokens == 0:
        raise ValueError("max_tokens must be >= 1: a turn draws something")
    if params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs: every turn would score all before it again; use engine.score at the end")
    kv = engine.parts.kv
    max_tokens = min(engine.parts.max_model_len, kv.num_blocks * kv.block_size)
    if max_tokens_total is not None:
        check_int("max_tokens_total", max_tokens_total, 2)
        max_tokens = min(max_tokens, max_tokens_total)
    return _Rules(params=params, max_turns=max_turns, max_tokens=max_tokens, program=program)


def _starts(prompts: Seq[Seq[int]], num_samples: int, max_tokens: int) -> list[Rollout]:
    """Return the rollouts before their first turns; refuse prompts that leave no room for one."""
    check_int("num_samples_per_prompt", num_samples, 1)
    if isinstance(prompts, str | bytes) or not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be a list of lists of token ids, got {type(prompts).__name__}")
    for index, prompt in enumerate(prompts):
        if len(start(prompt, prompt_index=index).tokens) >= max_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens; a rollout may have {max_tokens}, what is drawn included "
                "(the least of max_tokens_total, max_model_len and what the cache holds)"
            )
    return [
        start(prompt, prompt_index=index, sample_index=sample)
        for index, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def _take_turn(rollout: Rollout, environment: Environment, rules: _Rules) -> Rollout:
    """Ask the environment about a rollout's new turn; return it with the answer, or ended."""
    if rollout.turns[-1].sample.finish_reason == "abort":
        return replace(rollout, finish_reason="abort")
    answer = environment(rollout)
    if answer is None:
        return replace(rollout, finish_reason="stop")
    answered = observe(rollout, answer)
    if len(rollout.turns) >= rules.max_turns:
        return replace(rollout, finish_reason="max_turns")
    return answered if len(answered.tokens) < rules.max_tokens else replace(rollout, finish_reason="length")


def _turn_params(rollout: Rollout, rules: _Rules) -> SamplingParams:
    """The parameters of a rollout's next turn: its own seed, and no more tokens than there is room for."""
    params = rules.params
    room = rules.max_tokens - len(rollout.tokens)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = params.seed
    if seed is not None:
        seed = derive_seed(derive_seed(seed, rollout.prompt_index), rollout.sample_index)
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens), seed=seed)


def _given(kind: SegmentKind, tokens: tuple[int, ...]) -> Segment:
    """A segment of tokens that the engine was given."""
    size = len(tokens)
    return Segment(kind=kind, tokens=tokens, logprobs=(0.0,) * size, token_versions=(-1,) * size)


def _written(sample: TrainingSample) -> Iterator[Segment]:
    """Cut a sample where drawn tokens and forced ones meet."""
    end = 0
    for is_sampled, run in groupby(sample.mask):
        start, end = end, end + len(list(run))
        yield Segment(
            kind="sampled" if is_sampled else "forced",
            tokens=sample.completion_tokens[start:end],
            logprobs=sample.logprobs[start:end],
            token_versions=sample.token_versions[start:end],
        )


def _ask(engine: InferenceEngine, rollout: Rollout, rules: _Rules) -> int:
    """Queue a rollout's next turn; its sample waits for us, and it ends with the call that runs the rollouts."""
    return engine.add_request(rollout.tokens, _turn_params(rollout, rules), program=rules.program, for_call=True)
