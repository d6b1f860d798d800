"""Random histories of a real model whose weights change: every token against a witness that knows its provenance.

The witness is Transformers, run a token at a time. The K/V of a position comes from the model of those weights under
which the engine computed it; a recorder around the engine's runner writes that down, slot by slot.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample, UpdateBusy, WeightError
from nano_inference.build import assemble
from nano_inference.core.cache import Hit, KVManager
from nano_inference.core.step import BlockCopy, Row, RowResult, Runner
from nano_inference.types import OnRunning
from nano_inference.weights.sync import WeightSyncManager
from tests.effort import some
from tests.sim.fakes import Calculator

TOLERANCE = 1e-4
VOCAB_SIZE = 60
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 4 * 4
"""Keys and values, two layers, two heads of four, float32."""
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
NUM_MODELS = 6
NUM_WORLDS = some(40)


# ---- who computed what


@dataclass(eq=False, slots=True)
class Node:
    """One computed position: its token, the weights it was computed with, what it could read. Equal ones are one."""

    parent: Node | None
    token: int
    version: int
    oldest: int
    """The oldest weights on the way here."""
    children: dict[tuple[int, int], Node] = field(default_factory=dict)

    def child(self, token: int, version: int) -> Node:
        """The position after this one, computed with these weights."""
        if (token, version) not in self.children:
            self.children[token, version] = Node(self, token, version, min(self.oldest, version))
        return self.children[token, version]

    def path(self) -> list[Node]:
        """All positions up to this one, the first first."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass
class Drawn:
    """A token, and the position from whose logits it was drawn."""

    node: Node
    token: int


@dataclass
class Track:
    """What the recorder knows of one sequence."""

    seed: int
    sample_index: int
    last: Node | None = None
    """The last position that it computed."""
    scored_at: dict[int, Node] = field(default_factory=dict)
    """Prompt position -> the position whose logits scored it, the last time that was done."""


class Recorder:
    """Wraps a runner and records, for each cache slot, the token and the weights of its K/V.

    Refuses, by assertion, whatever reads a slot that it must not read.
    """

    failure = None

    def __init__(self, inner: Runner, weights: WeightSyncManager, num_blocks: int, block_size: int) -> None:
        self.inner = inner
        self.weights = weights
        self.block_size = block_size
        self.root = Node(None, -1, -1, 1 << 30)
        self.slots: list[Node | None] = []
        self._num_slots = num_blocks * block_size
        self._num_started = 0
        """How many sequences began, or began again, since the last step."""
        self.plans: dict[int, OnRunning] = {}
        """Version -> its `on_running`."""
        self.version = 0
        self.oldest = 0
        """The oldest weights whose K/V anybody may still read."""
        self.tracks: dict[int, Track] = {}
        self.drawn: dict[tuple[int, int], list[Drawn]] = {}
        """(Seed, sample index) -> its draws in order; seeds are the requests' own."""
        self.counts: Counter[str] = Counter()
        self._make_slots()

    def _make_slots(self) -> None:
        self.slots = [None] * self._num_slots

    def free_cache(self) -> None:
        self.slots = []
        self.inner.free_cache()

    def recover(self) -> None:
        pass

    def restore_cache(self) -> None:
        self._make_slots()
        self.inner.restore_cache()

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        self.see_version()
        self._move(copies, fresh)
        before = [self._read(row) for row in rows]  # all reads first: nothing of this step may be relied upon
        elsewhere = sum(node is not self.tracks[row.id].last for row, node in zip(rows, before, strict=True))
        assert elsewhere <= self._num_started, "a row does not continue at its end"
        self._num_started = 0
        results = self.inner.run(rows, copies, fresh)
        for row, node in zip(rows, before, strict=True):
            self._write(row, node, results[row.id])
        return results

    def begin(self, hit: Hit) -> None:
        """Called when a sequence begins, or begins again: it may be given only what the weights in force computed."""
        self.see_version()
        self._num_started += 1
        size = self.block_size
        slots = [block * size + i for block in hit.blocks for i in range(size)]
        slots += [hit.partial_block * size + i for i in range(hit.partial_tokens)]
        for slot in slots:
            node = self.slots[slot]
            assert node is not None, "a hit on a slot that was never written"
            assert node.oldest >= self.version, "who began after an update is given older K/V"
        self.counts["hits"] += bool(slots)

    def see_version(self) -> None:
        """Record new weights: unless on_running is "keep", older K/V must not be read from now on."""
        while self.version < self.weights.version:
            self.version += 1
            if self.plans[self.version] != "keep":
                self.oldest = self.version

    def _move(self, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> None:
        """Clear and copy slots as the store does: every source is read before any write."""
        size = self.block_size
        copied = [(c, self.slots[c.source * size : c.source * size + c.num_tokens]) for c in copies]
        for block in fresh:
            self.slots[block * size : (block + 1) * size] = [None] * size
        for copy, nodes in copied:
            assert copy.target in fresh
            self.slots[copy.target * size : copy.target * size + copy.num_tokens] = nodes
            self.counts["copies"] += 1

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, row: Row) -> Node:
        """Follow what a row reads, and return its end."""
        self.tracks.setdefault(row.id, Track(row.seed, row.sample_index))
        node = self.root
        for position in range(row.start):
            found = self.slots[self._slot(row, position)]
            assert found is not None, "a row read a slot that was never written"
            assert found.parent is node, "a row read K/V of another text, or of another provenance"
            node = found
        assert node.oldest >= self.oldest, "K/V was read that the update should have ended"
        return node

    def _write(self, row: Row, node: Node, result: RowResult) -> None:
        """Write down what a row computed, scored and drew."""
        track = self.tracks[row.id]
        for position, token in enumerate(row.tokens, row.start):
            node = node.child(token, self.version)
            self.slots[self._slot(row, position)] = node
        track.last = node
        if row.score_from is not None and result.scores:
            first = max(row.score_from, row.start + 1)
            by_position = node.path()
            track.scored_at |= {p: by_position[p - 1] for p in range(first, first + len(result.scores))}
        if row.num_sampled:
            assert len(result.tokens) == 1
            self.drawn.setdefault((row.seed, row.sample_index), []).append(Drawn(node, result.tokens[0]))


class WatchedKV:
    """A KV manager that passes every hit to a recorder."""

    def __init__(self, kv: KVManager, recorder: Recorder) -> None:
        self._kv = kv
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def hold(self, hit: Hit) -> list[int]:
        self._recorder.begin(hit)
        return self._kv.hold(hit)


class Witness:
    """Transformers over one cache, to which several models write: each position is its own model's."""

    def __init__(self, models: Mapping[int, transformers.PreTrainedModel]) -> None:
        self.models = models
        self._cache = transformers.DynamicCache()
        self._path: list[Node] = []
        self._logits: dict[Node, torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, node: Node) -> torch.Tensor:
        """Return the float32 logits [V] after a position."""
        if node in self._logits:
            return self._logits[node]
        path = node.path()
        shared = next((i for i, (a, b) in enumerate(zip(path, self._path, strict=False)) if a is not b), None)
        shared = min(len(path), len(self._path)) if shared is None else shared
        shared = min(shared, len(path) - 1)
        if shared < len(self._path):
            self._cache.crop(shared - len(self._path))
        for one in path[shared:]:
            model = self.models[one.version]
            out = model(torch.tensor([[one.token]]), cache=self._cache, use_cache=True)
            self._logits[one] = out.logits[0, -1].float()
        self._path = path
        return self._logits[node]


# ---- worlds


@dataclass(frozen=True)
class Pool:
    """Several models of one architecture; the first lies in the directory."""

    directory: Path
    models: list[transformers.PreTrainedModel]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    config = transformers.LlamaConfig(**CONFIG)
    generator = torch.Generator().manual_seed(5)
    base = transformers.LlamaForCausalLM(config).eval()
    models = []
    with torch.no_grad():
        for name, weight in base.named_parameters():
            spread = 0.3 if "norm" in name else 0.35
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread + (1.0 if "norm" in name else 0.0))
        for _ in range(NUM_MODELS):
            other = transformers.LlamaForCausalLM(config).eval()
            for name, weight in other.named_parameters():
                noise = torch.randn(weight.shape, generator=generator) * base.get_parameter(name).std() * 0.3
                weight.copy_(base.get_parameter(name) + noise)
            models.append(other)
    directory = tmp_path_factory.mktemp("mixed")
    models[0].save_pretrained(directory)
    return Pool(directory, models)


class Held:
    """Weights that come, after the first tensor, only when they are let go."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.resumed = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        items = iter([(name, weight.detach()) for name, weight in self.model.named_parameters()])
        yield next(items)
        assert self.resumed.wait(30)
        yield from items


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    count: int
    is_tool: bool
    salt: str
    leader_row: int = -1
    """The id of the sequence that scores the prompt."""


@dataclass
class World:
    """One random history."""

    rng: random.Random
    pool: Pool
    engine: InferenceEngine
    recorder: Recorder
    arrivals: list[Ask]
    models: dict[int, transformers.PreTrainedModel]
    """Version -> the trainer's model."""
    asked: dict[int, Ask] = field(default_factory=dict)
    done: list[TrainingSample] = field(default_factory=list)
    num_rows: int = 0
    held: Held | None = None
    """Weights on their way."""
    kinds: dict[int, str] = field(default_factory=dict)
    """Version -> in which of the ways it was to come."""
    num_samples: int = 0

    @property
    def counts(self) -> Counter[str]:
        """What happened, so that a test can say that enough did."""
        return self.recorder.counts


def make_world(seed: int, cache_type: str, pool: Pool) -> World:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    num_tokens = rng.choice([80, 80, 400])
    config = EngineConfig(
        model_path=str(pool.directory),
        device="cpu",
        cache_type=cache_type,  # type: ignore[arg-type]
        block_size=block_size,
        kv_cache_bytes=num_tokens * KV_BYTES_PER_TOKEN,
        max_batch_size=rng.choice([2, 4, 16]),
        max_tokens_per_batch=rng.choice([4, 16, 64]),
    )
    parts = assemble(config)
    assert parts.weights is not None and parts.kv.num_blocks == num_tokens // block_size
    recorder = Recorder(parts.runner, parts.weights, parts.kv.num_blocks, block_size)
    kv = WatchedKV(parts.kv, recorder)
    engine = InferenceEngine(config, parts=replace(parts, runner=recorder, kv=kv))  # type: ignore[arg-type]
    base = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    arrivals = [random_ask(rng, base, index) for index in range(rng.randrange(3, 8))]
    num_samples = sum(one.count for one in arrivals)
    return World(rng, pool, engine, recorder, arrivals, {0: pool.models[0]}, num_samples=num_samples)


def random_ask(rng: random.Random, base: list[int], seed: int) -> Ask:
    params = SamplingParams(
        temperature=rng.choice([0, 0.6, 1, 1, 1.4]),
        max_tokens=rng.randrange(1, 30),
        stop_token_ids=[11] if rng.random() < 0.2 else [],
        seed=seed,
        prompt_logprobs=0 if rng.random() < 0.4 else None,
        raw_logprobs=True,
    )
    prompt = base[: rng.randrange(30)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
    if rng.random() < 0.3:
        prompt = base[: rng.randrange(1, 6)]
    return Ask(prompt, params, rng.randrange(1, 4), rng.random() < 0.5, rng.choice(["", "", "a"]))


def ask(world: World, one: Ask, partial: TrainingSample | None = None) -> None:
    """Add a request, or resume a sample of one with its seed."""
    count = one.count if partial is None else 1
    params = one.params if partial is None else replace(one.params, seed=None)
    request_id = world.engine.add_request(
        one.prompt, params, count, salt=one.salt, program=Calculator() if one.is_tool else None, partial=partial
    )
    world.asked[request_id] = replace(one, leader_row=world.num_rows)
    world.num_rows += count


def take(world: World, samples: Sequence[TrainingSample]) -> None:
    """Keep finished samples; resume some aborted ones as new requests."""
    for sample in samples:
        one = world.asked[sample.request_id]
        is_short = len(sample.completion_tokens) < (one.params.max_tokens or 0)
        if sample.finish_reason == "abort" and is_short and world.rng.random() < 0.7:
            ask(world, one, sample)
            world.counts["resumed"] += 1
        else:
            world.done.append(sample)


def is_stuck(world: World, how: OnRunning) -> bool:
    """Whether an update with on_running="wait" would wait forever."""
    return how == "wait" and (world.engine.is_asleep or not world.engine.parts.weights.has_weights)


def update(world: World) -> None:
    """Begin to install other weights; those that come in flight are held back for some steps."""
    engine, rng = world.engine, world.rng
    how = rng.choice((*get_args(OnRunning), "keep"))
    if is_stuck(world, how):
        return
    if engine.weight_info().update != "idle":
        with pytest.raises(UpdateBusy):
            engine.update_weights({}, blocking=rng.random() < 0.5)
        return
    version = engine.get_weight_version() + 1
    model = rng.choice([other for other in world.pool.models if other is not world.models[version - 1]])
    is_blocking = rng.random() < 0.5
    world.models[version], world.recorder.plans[version] = model, how
    world.kinds[version] = f"{how}, {'blocking' if is_blocking else 'in flight'}"
    if is_blocking:
        named = model.named_parameters() if rng.random() < 0.5 else model.state_dict()
        assert engine.update_weights(named, blocking=True, on_running=how) == version
        assert engine.get_weight_version() == version
    else:
        world.held = Held(model)
        assert engine.update_weights(world.held, on_running=how) == version
        assert engine.get_weight_version() == version - 1


def let_go(world: World) -> None:
    """Release the pending weights: the next tick or `finish_update` installs them."""
    assert world.held is not None
    engine = world.engine
    world.held.resumed.set()
    world.held = None
    assert engine.parts.weights.wait(30) == "staged"
    how = world.recorder.plans[engine.get_weight_version() + 1]
    if world.rng.random() < 0.3 and not is_stuck(world, how):
        engine.finish_update()


def refuse(world: World) -> None:
    """An update that cannot be used changes nothing."""
    if world.held is not None or world.engine.weight_info().update != "idle":
        return
    broken = dict(world.pool.models[1].named_parameters())
    broken["model.norm.weight"] = torch.full((CONFIG["hidden_size"],), float("nan"))
    checksum = world.engine.weights_checksum() if world.engine.parts.weights.has_weights else None
    with pytest.raises(WeightError):
        world.engine.update_weights(broken, blocking=True)
    assert checksum is None or checksum == world.engine.weights_checksum()
    world.counts["refused"] += 1


def hold(world: World, what: str) -> None:
    """Pause or put to sleep; what is cleared may never be read again."""
    engine, rng = world.engine, world.rng
    if engine.is_asleep or not engine.parts.weights.has_weights:
        return
    clear = what == "sleep" or rng.random() < 0.5
    if what == "sleep":
        is_waiting = engine.weight_info().update != "idle"
        discard = rng.random() < 0.5 and not is_waiting
        engine.sleep(discard_weights=discard)
        world.counts["discarded"] += discard
    else:
        engine.pause(rng.choice(["keep", "keep", "wait", "abort"]), clear_cache=clear)
    world.recorder.see_version()
    if clear:
        world.recorder.oldest = engine.get_weight_version()
    world.counts[what] += 1


def revive(world: World) -> None:
    """Undo whatever holds the engine."""
    engine = world.engine
    engine.wake()
    engine.resume()
    if world.held is None and not engine.parts.weights.has_weights and engine.weight_info().update == "idle":
        update(world)


def interfere(world: World) -> None:
    """Do one random thing that a trainer or a client may do."""
    engine, rng = world.engine, world.rng
    action = rng.choice(["update"] * 4 + ["refuse", "pause", "resume", "sleep", "wake", "abort", "abort", "flush"])
    if action == "update":
        update(world)
    elif action == "refuse":
        refuse(world)
    elif action in ("pause", "sleep"):
        hold(world, action)
    elif action == "resume":
        engine.resume()
    elif action == "wake":
        engine.wake()
    elif action == "flush":
        engine.flush_cache()
    elif world.asked:
        partial = engine.abort(rng.choice(list(world.asked)))
        world.counts["aborted"] += len(partial)
        take(world, partial)


def is_over(world: World) -> bool:
    engine = world.engine
    is_held = engine.is_paused or engine.is_asleep or not engine.parts.weights.has_weights
    return not (world.arrivals or engine.has_pending() or is_held or engine.weight_info().update != "idle")


def run_world(world: World) -> World:
    engine, rng = world.engine, world.rng
    for _ in range(5_000):
        if is_over(world):
            break
        while world.arrivals and rng.random() < 0.4:
            ask(world, world.arrivals.pop(0))
        if world.held is not None and rng.random() < 0.25:
            let_go(world)
        if rng.random() < 0.15:
            interfere(world)
        if rng.random() < 0.2:
            revive(world)
        take(world, engine.step())
        engine.parts.kv.check()
    else:
        pytest.fail("the world did not end")
    assert engine.parts.kv.num_free_blocks() == engine.parts.kv.num_blocks
    assert len(world.done) == world.num_samples
    world.counts.update(world.kinds[version] for version in range(1, engine.get_weight_version() + 1))
    return world


# ---- judgement


def check_sample(world: World, witness: Witness, sample: TrainingSample) -> None:
    """Every token is of the step that drew it: its version, its log-probabilities, the tokens before it."""
    one = world.asked[sample.request_id]
    draws = iter(world.recorder.drawn.get((one.params.seed, sample.sample_index), []))
    temperature = one.params.temperature or 1.0
    state, forced = Calculator().start(), ()
    whole = [*sample.prompt_tokens, *sample.completion_tokens]
    raw = sample.raw_logprobs or ()
    for index, token in enumerate(sample.completion_tokens):
        if forced:
            assert (sample.mask[index], token, sample.logprobs[index], raw[index]) == (0, forced[0], 0.0, 0.0)
            assert sample.token_versions[index] == sample.token_versions[index - 1]
            forced = forced[1:]
            world.counts["forced"] += 1
            continue
        draw = next(draws)
        node = draw.node
        assert sample.mask[index] and token == draw.token
        assert [position.token for position in node.path()] == whole[: len(sample.prompt_tokens) + index]
        assert sample.token_versions[index] == node.version, "a token's version is that of the step that drew it"
        logits = witness.logits(node)
        expected = float(torch.log_softmax(logits / temperature, -1)[token])
        assert sample.logprobs[index] == pytest.approx(expected, abs=TOLERANCE), describe(node)
        assert raw[index] == pytest.approx(float(torch.log_softmax(logits, -1)[token]), abs=TOLERANCE), describe(node)
        world.counts["drawn"] += 1
        world.counts["mixed"] += node.oldest < node.version
        world.counts["mixed of three"] += len({position.version for position in node.path()}) > 2
        if one.is_tool:
            state, forced = Calculator().step(state, token)
    assert next(draws, None) is None, "every draw is in the sample"
    assert sample.weight_version == min(sample.token_versions, default=sample.weight_version)
    world.counts["preempted"] += sample.num_preemptions
    world.counts["spanning"] += len(set(sample.token_versions)) > 1
    if one.params.prompt_logprobs is not None and sample.finish_reason != "abort":
        check_scores(world, witness, sample, one.leader_row)


def check_scores(world: World, witness: Witness, sample: TrainingSample, leader_row: int) -> None:
    """The scores of a prompt are all of one version, K/V and all."""
    positions = range(1, len(sample.prompt_tokens))
    scored_at = {p: world.recorder.tracks[leader_row].scored_at[p] for p in positions}
    assert sample.prompt_logprobs is not None and len(sample.prompt_logprobs) == len(positions)
    assert len({version for node in scored_at.values() for version in (node.version, node.oldest)}) <= 1
    temperature = world.asked[sample.request_id].params.temperature or 1.0
    for position, node in scored_at.items():
        logp = torch.log_softmax(witness.logits(node) / temperature, -1)
        found = sample.prompt_logprobs[position - 1]
        assert found == pytest.approx(float(logp[sample.prompt_tokens[position]]), abs=TOLERANCE), describe(node)
        world.counts["scored"] += 1


def describe(node: Node) -> str:
    """Say which weights computed what a token was drawn after."""
    return f"versions {[position.version for position in node.path()]}"


@torch.inference_mode()
def pure_gap(world: World, sample: TrainingSample) -> list[float]:
    """How far the last token over mixed K/V, if there is one, is from what its own weights alone would have given."""
    draws = world.recorder.drawn.get((world.asked[sample.request_id].params.seed, sample.sample_index), [])
    index = next((i for i in reversed(range(len(draws))) if draws[i].node.oldest < draws[i].node.version), None)
    if index is None or sample.raw_logprobs is None:
        return []
    node = draws[index].node
    logits = world.models[node.version](torch.tensor([[position.token for position in node.path()]])).logits[0, -1]
    raw = [value for value, mask in zip(sample.raw_logprobs, sample.mask, strict=True) if mask]
    return [abs(float(torch.log_softmax(logits.float(), -1)[draws[index].token]) - raw[index])]


def judged(seed: int, cache_type: str, pool: Pool) -> tuple[Counter[str], list[float]]:
    """Run and judge one world; return what happened in it, and how far mixed K/V led."""
    try:
        world = run_world(make_world(seed, cache_type, pool))
        witness = Witness(world.models)
        for sample in world.done:
            check_sample(world, witness, sample)
        world.engine.shutdown()
        return world.counts, [gap for sample in world.done for gap in pure_gap(world, sample)]
    except BaseException as error:
        error.add_note(f"in world {seed} of the {cache_type} cache")
        raise


def test_every_token_agrees_with_the_weights_of_its_kv(pool: Pool) -> None:
    """Whatever updates, pauses, sleeps, aborts and preemptions did to a sample, each of its log-probabilities is the
    witness' to 1e-4, each version is that of the step that sampled it, and no row read stale K/V."""
    counts: Counter[str] = Counter()
    gaps: list[float] = []
    for seed in range(NUM_WORLDS):
        found, more = judged(seed, ("radix", "paged")[seed % 2], pool)
        counts += found
        gaps += more
    kinds = [f"{how}, {kind}" for how in get_args(OnRunning) for kind in ("blocking", "in flight")]
    acts = ["aborted", "resumed", "refused", "pause", "sleep", "discarded", "preempted", "spanning", "copies"]
    assert min(counts[what] for what in kinds + acts) >= some(2), counts
    assert min(counts[what] for what in ("hits", "forced", "mixed", "scored")) >= some(50), counts
    gaps.sort()
    assert len(gaps) >= some(20) and gaps[len(gaps) // 5] > 100 * TOLERANCE, "mixed K/V is far from any one version's"
