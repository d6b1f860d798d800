"""Checks everything that a world returned against the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from differential.asks import PlannedRequest
from differential.oracle import TOLERANCE, Distribution, DrawContext, Interval, Oracle, uniform
from differential.rules import Columns, Reference, columns_of, is_consistent, joined
from differential.worlds import World
from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.types import Beginning, TopLogprobs

MAX_REPLAYS = 2
SHOWN = 12
Groups = list[tuple[tuple[int, ...], list[int]]]
"""The versions of the K/V before the last draw, and the places of the draws that read it or a start of it."""


@dataclass
class Differences:
    """How far the engine's log-probabilities lie from the oracle's."""

    count: int = 0
    worst: float = 0.0

    def add(self, value: float, interval: Interval) -> float:
        """Take one difference; return how far the value lies outside the interval."""
        distance = abs(value - min(max(value, interval.low), interval.high))
        self.count += 1
        self.worst = max(self.worst, distance) if distance == distance else float("inf")
        return distance if distance == distance else float("inf")


@dataclass
class Verdict:
    """What a world came to."""

    faults: list[str] = field(default_factory=list)
    differences: dict[str, Differences] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def fault(self, what: str) -> None:
        """Note something that must not be."""
        self.counts["faults"] += 1
        if len(self.faults) < SHOWN:
            self.faults.append(what)

    def compare(self, kind: str, value: float, interval: Interval | None, where: str) -> None:
        """Compare one log-probability."""
        if interval is None:
            self.fault(f"{where}: {kind} {value:.6f} of a token that cannot be drawn")
            return
        distance = self.differences.setdefault(kind, Differences()).add(value, interval)
        if not distance <= TOLERANCE:
            self.fault(f"{where}: {kind} {value:.6f}, expected {interval.low:.6f}, off by {distance:.2e}")


@dataclass(frozen=True, slots=True)
class Case:
    """A sample, what was asked, and a reference that has followed it."""

    sample: TrainingSample
    ask: PlannedRequest
    columns: Columns
    reference: Reference
    where: str

    @property
    def index(self) -> int:
        """The sample index of its draws."""
        return self.sample.sample_index + self.ask.beginning.sample_index


class Judge:
    """Owns the oracle of one world and its verdict."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.oracle = Oracle(world.models)
        self.verdict = Verdict()
        self._pure: set[tuple[int, int]] = set()
        """(Request, sample index) of completions of one version."""
        self._replayable: list[tuple[TrainingSample, int]] = []
        """Samples of one version, K/V included."""

    def run(self) -> Verdict:
        """Check everything."""
        world = self.world
        for sample in world.samples:
            self._check_sample(sample, "sample")
        for view in world.ended_streams:
            for _, deltas in sorted(view.seen.items()):
                if (last := deltas[-1].sample) is not None:
                    if columns_of(last) != joined(deltas):
                        self.verdict.fault(f"stream {view.request_id}: the deltas are not the sample")
                    self._check_sample(last, "stream")
        self._check_replays()
        self.verdict.counts["preemptions"] += sum(sample.num_preemptions for sample in world.samples)
        self.verdict.counts["windows ahead"] += world.engine.overlaps.get("ahead", 0)
        self.verdict.counts["drafts"] += world.recorder.num_drafts if world.recorder is not None else 0
        return self.verdict

    # ---- one sample

    def _check_sample(self, sample: TrainingSample, kind: str) -> None:
        """Check each token of a sample, its prompt and its end."""
        ask, columns = self.world.asked[sample.request_id], columns_of(sample)
        case = Case(sample, ask, columns, Reference(ask, self.world.checkpoint.eos), where_of(sample, kind))
        self.verdict.counts["samples"] += 1
        num_old = len(ask.partial.completion_tokens) if ask.partial is not None else 0
        if ask.partial is not None and columns_of(ask.partial) != columns.first(num_old):
            self.verdict.fault(f"{case.where}: a resumed sample changed what it had")
        problem = is_consistent(case.reference, columns)
        if problem is not None:
            self.verdict.fault(f"{case.where}: {problem}")
            return
        self._check_end(case)
        versions = columns.versions[num_old:]
        if list(versions) != sorted(versions) or any(version < ask.version for version in versions):
            self.verdict.fault(f"{case.where}: versions {versions} of a request queued under {ask.version}")
            return
        draws = [i for i in case.reference.draws if i >= num_old]
        groups = self._groups(case, draws)
        for path, places in groups:
            tokens = (*ask.prompt, *columns.tokens)[: len(path)]
            first = len(ask.prompt) + places[0] - 1
            logits_KV = self.oracle.logits(tokens, path, len(tokens) - first)
            for place in places:
                self._check_draw(case, place, logits_KV[len(ask.prompt) + place - 1 - first])
        if sample.prompt_logprobs is not None:
            self._check_prompt(case, sample.prompt_logprobs)
        # whether one version computed all of the completion and all the K/V that it read
        is_known = len(draws) == sum(len(places) for _, places in groups)
        used = {version for path, _ in groups for version in path} | set(columns.versions)
        parent = (ask.partial.request_id, ask.partial.sample_index) if ask.partial is not None else None
        if is_known and len(used) == 1 and (parent is None or parent in self._pure):
            self._pure.add((sample.request_id, sample.sample_index))
            if sample.finish_reason != "abort":
                self._replayable.append((sample, columns.versions[0]))

    def _groups(self, case: Case, draws: Sequence[int]) -> Groups:
        """Return the draws by the weights of the K/V that they read: the versions of all positions before the last."""
        found: dict[tuple[int, ...], list[int]] = {}
        whole = (*case.ask.prompt, *case.columns.tokens)
        for place in draws:
            version = case.columns.versions[place]
            end = len(case.ask.prompt) + place
            renewed = [v for v, how in self.world.plans.items() if how != "keep" and v <= version]
            floor = max([case.ask.version, *renewed])  # the oldest weights whose K/V the token may have read
            path: tuple[int, ...] | None = (version,) * end if floor == version else None
            if self.world.recorder is not None:
                path = self._recorded(case, whole[:end], version, floor)
            if path is None:
                self.verdict.counts["tokens over unknown K/V"] += 1
            else:
                found.setdefault(path, []).append(place)
        return merged(found)

    def _recorded(self, case: Case, tokens: tuple[int, ...], version: int, floor: int) -> tuple[int, ...] | None:
        """Return the versions of the K/V that a token was drawn after, as the recorder saw them."""
        assert self.world.recorder is not None
        where = f"{case.where} position {len(tokens)}"
        node = self.world.recorder.draws.get((case.sample.request_id, case.index), {}).get(len(tokens))
        seen, path = ((), ()) if node is None else node.path()
        if node is None or seen != tokens or node.version != version:
            self.verdict.fault(f"{where}: its last draw was of another text or version than {version}")
            return None
        if min(path) < floor:
            self.verdict.fault(f"{where}: read K/V of version {min(path)}, though {floor} replaced it")
        self.verdict.counts["tokens over mixed K/V"] += len(set(path)) > 1
        return path

    def _check_draw(self, case: Case, place: int, logits_V: Tensor) -> None:
        ask, columns, where = case.ask, case.columns, f"{case.where} token {place}"
        params, token = ask.params, columns.tokens[place]
        context = DrawContext(
            params=params,
            mode=params.logprobs_mode or self.world.config.logprobs_mode,
            history=(*ask.prompt, *columns.tokens[:place]),
            num_prompt=len(ask.prompt) - ask.beginning.num_tokens,
            banned=case.reference.banned(place),
            mask=case.reference.masks[place],
            uniform=uniform(case.sample.seed, case.index, len(ask.prompt) + place),
        )
        distribution = Distribution(logits_V, context)
        self.verdict.counts["tokens"] += 1
        if columns.sampling_masks is not None and not distribution.accept_mask(columns.sampling_masks[place]):
            self.verdict.fault(f"{where}: the sampling mask is not what truncation leaves")
        mode = f"{context.mode}{' greedy' if distribution.is_greedy else ''}"
        self.verdict.compare(mode, columns.logprobs[place], distribution.interval(token), where)
        if columns.raw_logprobs is not None:
            value = float(distribution.raw_V[token])
            self.verdict.compare("raw_logprobs", columns.raw_logprobs[place], Interval(value, value), where)
        if not distribution.is_drawable(token):
            self.verdict.fault(f"{where}: {token} is not the token at the uniform (or the best)")
        if columns.top_logprobs is not None and params.logprobs:
            self._check_top(columns.top_logprobs[place], params.logprobs, distribution, where)

    def _check_top(self, top: TopLogprobs, count: int, distribution: Distribution, where: str) -> None:
        """The alternatives are the likeliest, in order."""
        value_V = distribution.top()
        num_left = int((value_V > -torch.inf).sum())
        is_cut = distribution.context.mode == "processed" and not distribution.is_greedy
        certain_V = distribution.certain_V if is_cut else value_V > -torch.inf
        is_exact = not is_cut or bool(certain_V.equal(distribution.possible_V))
        if len(top) != min(count, num_left) and (is_exact or len(top) > num_left):
            self.verdict.fault(f"{where}: {len(top)} alternatives, {min(count, num_left)} expected")
        for one in top:
            self.verdict.compare("top_logprobs", one.logprob, distribution.interval(one.token), where)
        self._check_order(top, value_V, certain_V, where)

    def _check_order(self, top: TopLogprobs, value_V: Tensor, certain_V: Tensor, where: str) -> None:
        values = [one.logprob for one in top]
        if values != sorted(values, reverse=True):
            self.verdict.fault(f"{where}: alternatives out of order")
        if top:
            left_V = value_V.masked_fill(~certain_V, -torch.inf)
            left_V = left_V.index_fill(0, torch.tensor([one.token for one in top]), -torch.inf)
            least = min(float(value_V[one.token]) for one in top)
            if float(left_V.max()) > least + TOLERANCE:
                self.verdict.fault(f"{where}: a likelier alternative is missing")

    # ---- the prompt, the end

    def _check_prompt(self, case: Case, values: Sequence[float]) -> None:
        """The prompt's log-probabilities are all of one version."""
        ask, sample, where = case.ask, case.sample, case.where
        versions = range(ask.version, self.world.engine.get_weight_version() + 1)
        if sample.finish_reason != "abort" and len(values) != len(ask.prompt) - 1:
            self.verdict.fault(f"{where}: {len(values)} of {len(ask.prompt) - 1} prompt_logprobs")
        if not values:
            return
        mode = ask.params.logprobs_mode or self.world.config.logprobs_mode
        temperature = 1.0 if mode == "raw" else ask.params.temperature or 1.0
        logp_TV, best = self._best_version(ask.prompt, values, temperature, versions)
        num_before = len(ask.partial.completion_tokens) if ask.partial is not None else 0
        # A resumed sample's prompt is scored again; its tokens are older.
        versions_after = sample.token_versions[num_before:]
        if versions_after and best > max(versions_after):
            self.verdict.fault(f"{where}: prompt_logprobs of version {best}, newer than all tokens")
        for i, value in enumerate(values):
            row_V = logp_TV[i]
            own = float(row_V[ask.prompt[i + 1]])
            at = f"{where} prompt {i + 1}"
            self.verdict.compare("prompt_logprobs", value, Interval(own, own), at)
            if sample.prompt_top_logprobs is not None:
                top = sample.prompt_top_logprobs[i]
                if len(top) != ask.params.prompt_logprobs:
                    self.verdict.fault(f"{at}: {len(top)} alternatives")
                for one in top:
                    expected = float(row_V[one.token])
                    self.verdict.compare("prompt_top_logprobs", one.logprob, Interval(expected, expected), at)
                self._check_order(top, row_V, torch.ones_like(row_V, dtype=torch.bool), at)
            if sample.prompt_ranks is not None:
                low = int((row_V > own + TOLERANCE).sum()) + 1
                high = int((row_V > own - TOLERANCE).sum()) + 1
                if not low <= sample.prompt_ranks[i] <= high:
                    self.verdict.fault(f"{at}: rank {sample.prompt_ranks[i]}, expected {low} to {high}")

    def _best_version(
        self, tokens: Sequence[int], values: Sequence[float], temperature: float, versions: range
    ) -> tuple[Tensor, int]:
        """Return the log-probabilities [K, V] of the version that the values of tokens[1:] fit best."""
        found: list[tuple[float, int, Tensor]] = []
        for version in versions:
            logits_TV = self.oracle.logits(tokens, (version,) * len(tokens), len(tokens))
            logp_KV = torch.log_softmax(logits_TV[: len(values)].double() / temperature, -1)
            own = logp_KV.gather(-1, torch.tensor(list(tokens[1 : 1 + len(values)]))[:, None])[:, 0]
            worst = float((own - torch.tensor(list(values), dtype=torch.float64)).abs().max())
            found.append((worst, version, logp_KV))
        _, version, logp_KV = min(found, key=lambda one: one[0])
        return logp_KV, version

    def _check_end(self, case: Case) -> None:
        """The finish reason is what the rules give, and the sample says what was asked for."""
        ask, sample, where, fault = case.ask, case.sample, case.where, self.verdict.fault
        reason, stop_reason = case.reference.end
        if sample.finish_reason == "abort":
            if sample.stop_reason is not None:
                fault(f"{where}: aborted: {sample.stop_reason}")
            elif sample.request_id not in self.world.may_abort:
                fault(f"{where}: ended as abort, which nothing asked for")
            elif reason is not None and ask.params.max_tokens:
                fault(f"{where}: ended as abort after it had ended as {reason}")
        elif (sample.finish_reason, sample.stop_reason) != (reason, stop_reason):
            fault(f"{where}: ended as {sample.finish_reason} {sample.stop_reason}, expected {reason} {stop_reason}")
        if sample.prompt_tokens != ask.prompt or (ask.params.seed is not None and sample.seed != ask.params.seed):
            fault(f"{where}: another prompt or seed than asked for")
        if sample.token_versions and sample.weight_version != min(sample.token_versions):
            fault(f"{where}: weight_version {sample.weight_version} of {sample.token_versions}")
        if not 0 <= sample.num_cached_tokens <= len(ask.prompt):
            fault(f"{where}: num_cached_tokens {sample.num_cached_tokens} of a prompt of {len(ask.prompt)}")
        wanted = {
            "raw_logprobs": ask.params.raw_logprobs,
            "sampling_masks": ask.params.sampling_mask,
            "top_logprobs": ask.params.logprobs is not None,
            "prompt_logprobs": ask.params.prompt_logprobs is not None,
        }
        for name, is_wanted in wanted.items():
            if (getattr(sample, name) is not None) != is_wanted:
                fault(f"{where}: {name} is {'missing' if is_wanted else 'there unasked'}")

    # ---- replay

    def _check_replays(self) -> None:
        """A sample of one version is what a fresh engine with these weights gives, alone."""
        chosen = self.world.rng.sample(self._replayable, min(MAX_REPLAYS, len(self._replayable)))
        if not chosen:
            return
        chosen.sort(key=lambda one: one[1])
        config = EngineConfig(
            model_path=str(self.world.checkpoint.directory),
            device="cpu",
            kernels=self.world.config.kernels,
            kv_cache_bytes=self.world.checkpoint.cache_bytes(512),
            max_model_len=self.world.config.max_model_len,
            logprobs_mode=self.world.config.logprobs_mode,
        )
        with InferenceEngine(config) as engine:
            held = 0
            for sample, version in chosen:
                if version != held:
                    weights = {k: v.detach() for k, v in self.world.models[version].named_parameters()}
                    engine.update_weights(weights, blocking=True)
                    held = version
                engine.flush_cache()
                self._check_replay(engine, sample)

    def _check_replay(self, engine: InferenceEngine, sample: TrainingSample) -> None:
        ask = self.world.asked[sample.request_id]
        params: SamplingParams = replace(ask.params, seed=sample.seed)
        start = Beginning(ask.beginning.num_tokens, ask.beginning.sample_index + sample.sample_index)
        rules = {"make_matcher": ask.rules, "program": ask.tool, "beginning": start}
        request_id = engine.add_request(ask.prompt, params, claim=True, **rules)
        engine.wait_for_any([request_id])
        (again,) = engine.collect(request_id)
        where = where_of(sample, "sample") + " alone"
        self.verdict.counts["replays"] += 1
        ours, theirs = columns_of(sample), columns_of(again)
        if self.world.path == "c":
            difference = ours.difference(theirs)
            if difference is not None:
                self.verdict.fault(f"{where}: {difference}")
        elif ours.tokens != theirs.tokens:  # torch's last bits depend on the batch; the oracle has judged the draw
            self.verdict.counts["replays that parted (torch)"] += 1
        ends = [(one.finish_reason, one.stop_reason) for one in (sample, again)]
        if ours.tokens == theirs.tokens and ends[0] != ends[1]:
            self.verdict.fault(f"{where}: ends as {ends[1]}, not {ends[0]}")


def where_of(sample: TrainingSample, kind: str) -> str:
    """Return a sample's name in faults."""
    return f"{kind} {sample.request_id}.{sample.sample_index}"


def merged(groups: dict[tuple[int, ...], list[int]]) -> Groups:
    """Put draws of one history together: a path that another one starts with needs no forward pass of its own."""
    found: Groups = []
    for path, places in sorted(groups.items(), key=lambda one: -len(one[0])):
        for longer, held in found:
            if longer[: len(path)] == path:
                held += places
                held.sort()
                break
        else:
            found.append((path, list(places)))
    return found
