"""A runner whose K/V is the token itself: a wrong block table gives a wrong token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from nano_inference.build import EngineParts
from nano_inference.config import EngineConfig, Speculation
from nano_inference.core.cache import make_kv
from nano_inference.core.step import UNREAD, BlockCopy, DrawExtras, Row, RowResult, RowState
from nano_inference.engine import InferenceEngine
from nano_inference.types import BadRequest, OnAdapter, SamplingParams, WeightLabel
from nano_inference.weights.adapters import StagedAdapter
from nano_inference.weights.updates import AdapterLoad

VOCAB_SIZE = 50
EOS = 7


Drawing = Callable[[tuple[int, ...], int, int, int], int]
"""What `next_token` is."""
OnStep = Callable[[int], object]
"""Called with the number of each step before it is computed; may wait or raise."""
Slot = tuple[int, int]
"""The token whose K/V a slot holds, and the model that computed it (`model_of`)."""
_ADAPTER = 1000


def model_of(version: int, adapter: int) -> int:
    """Return one number for a version of the weights and the number of an adapter."""
    return version + _ADAPTER * adapter


def next_token(seen: tuple[int, ...], seed: int, sample_index: int, version: int = 0) -> int:
    """Return the fake model's token: a function of all earlier tokens, of the seed and of the weights."""
    return random_of(version, seen, seed, sample_index, len(seen)).randrange(VOCAB_SIZE)


def random_of(version: int, *things: object) -> random.Random:
    return random.Random(repr((*things, version) if version else things))


def parrot(seen: tuple[int, ...], seed: int, sample_index: int, version: int = 0) -> int:
    """Return the token of a model that repeats itself, with a period for each version: mostly an earlier token."""
    rng = random_of(version, seen, seed, sample_index, len(seen))
    period = 4 - version % 2
    return seen[-period] if len(seen) > period and rng.random() < 0.8 else rng.randrange(40, VOCAB_SIZE)


def score(seen: tuple[int, ...], token: int, version: int = 0) -> float:
    """The fake model's log-probability of a known token."""
    return -random_of(version, seen, token).random()


def raising(error: BaseException, at: int) -> OnStep:
    """Return an `OnStep` that raises an error in one step."""

    def on_step(number: int) -> None:
        if number == at:
            raise error

    return on_step


class FakeRunner:
    """Owns slots that hold tokens and versions; reads a row's history back through its block table.

    Draft tokens are written like other tokens and stay after rejection, so that a wrong read is detected. K/V of a
    version before `oldest` must not be read, nor by a row that starts any of weights before the installed ones, nor
    that of another adapter; a row that continues may read an older one of its name, once it was replaced by `replaced`.

    With `num_states`, a recurrent state is a hash of the tokens and versions that it has seen. A row fails that does
    not start from the state of exactly the tokens before it, or uses a slot that another row of its step writes.
    """

    failure: Exception | None = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        lookahead: int = 1,
        drawing: Drawing = next_token,
        num_states: int = 0,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_states = num_states
        self.states: list[int | None] = []
        self.slots: list[Slot | None] = []
        self.restore_cache()
        self.lookahead = lookahead
        self.drawing = drawing
        self.version = self.oldest = 0
        self.adapters: dict[int, str] = {}
        """Number -> name of the adapters that rows may use."""
        self.older: dict[int, frozenset[int]] = {}
        """Number of an adapter -> the numbers before it whose K/V its rows may continue."""
        self.num_computed = self.num_mixed_reads = 0
        self.num_right = self.num_wrong = 0
        """Accepted and rejected draft tokens."""
        self.num_steps = 0
        self.on_step: OnStep = lambda number: None
        self.on_collect: OnStep = lambda number: None
        self._last: dict[int, tuple[int, int]] = {}
        """The last two tokens of each row."""
        self.num_launched_ahead = 0
        self._ends: dict[int, range] = {}
        """Where a row may continue after its last step: behind its own tokens and its accepted drafts."""

    def install(self, version: int) -> None:
        self.version = version

    def commit_adapter(self, number: int, staged: tuple[str, OnAdapter]) -> None:
        """`staged` is the adapter's name, and what happens to started requests."""
        name, on_running = staged
        before = {n: older for n, older in self.older.items() if self.adapters.get(n) == name}
        kept = frozenset(before).union(*before.values()) if on_running == "continue" else frozenset()
        self.adapters[number], self.older[number] = name, kept

    def drop_adapter(self, number: int) -> None:
        del self.adapters[number], self.older[number]

    def forget_rows(self) -> None:
        """Drop what is known of rows, all of whose sequences have ended."""
        self._last.clear()
        self._ends.clear()

    def free_cache(self) -> None:
        self.slots = []
        self.states = []

    def recover(self) -> None:
        pass

    def restore_cache(self) -> None:
        self.slots = [None] * (self.num_blocks * self.block_size)
        self.states = [None] * self.num_states

    def run(self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> dict[int, RowResult]:
        self.num_steps += 1
        before = self._states_before(rows)
        self.on_step(self.num_steps)
        size = self.block_size
        copied = [(c.target * size + i, self.slots[c.source * size + i]) for c in copies for i in range(c.num_tokens)]
        for block in fresh:  # stale contents must not be read
            self.slots[block * size : (block + 1) * size] = [None] * size
        for slot, content in copied:
            self.slots[slot] = content
        for row in rows:
            self._check_versions(row)
            assert row.id not in before or before[row.id] == self._state_of(row, row.start), "a wrong state"
            self._write(row, row.start, row.tokens)
            self.num_computed += len(row.tokens)
        results = {row.id: self._result(row) for row in rows}
        for row in rows:
            if row.state is not None:
                end = row.start + len(row.tokens) + max(0, len(results[row.id].tokens) - row.num_drafts - 1)
                for position, slot in (*row.state.saves, (end, row.state.slot)):
                    self.states[slot] = self._state_of(row, position)
        return results

    def _states_before(self, rows: tuple[Row, ...]) -> dict[int, int | None]:
        """Return the states from which rows start, and spoil the slots that they write: the step may fail."""
        given = {row.id: row.state for row in rows if row.state is not None}
        assert len(given) == (len(rows) if self.num_states else 0)
        before = {row.id: self.states[row.state.source] for row in rows if row.state is not None and row.start}
        written = [(id, slot) for id, state in given.items() for slot in _written(state)]
        assert len({slot for _, slot in written}) == len(written), "two rows write a slot"
        owner = {slot: id for id, slot in written}
        assert all(owner.get(given[id].source, id) == id for id in before), "a row writes a slot that another reads"
        for slot in owner:
            self.states[slot] = None
        return before

    def _state_of(self, row: Row, end: int) -> int:
        """Return the state after a row's first tokens."""
        return hash(tuple(self._read(row, end)))

    def launch(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...], *, is_next: bool
    ) -> Callable[[], dict[int, RowResult]] | None:
        """Compute a window now, and return its results later; rows that have ended go on, as on an unaware device."""
        if not all(len(row.tokens) == 1 and row.num_sampled and not row.num_drafts for row in rows):
            return None
        if is_next:
            assert all(row.tokens == (UNREAD,) for row in rows)
            rows = tuple(row._replace(prev_token=self._last[row.id][0], tokens=self._last[row.id][1:]) for row in rows)
        self.num_launched_ahead += is_next
        results = self.run(rows, copies, fresh)
        for row in rows:  # a window that is dropped is computed again from its start
            self._ends[row.id] = range(row.start, self._ends[row.id].stop)
            self._last[row.id] = (*row.tokens, *results[row.id].tokens)[-2:]

        def collect() -> dict[int, RowResult]:
            self.on_collect(self.num_steps)
            return results

        return collect

    def _check_versions(self, row: Row) -> None:
        assert not row.adapter or row.adapter in self.adapters, "an adapter that was dropped"
        models = {slot[1] for slot in self._read(row, row.start)}
        is_continued = row.start in self._ends.get(row.id, ())
        for adapter, version in (divmod(model, _ADAPTER) for model in models):
            assert version >= (self.oldest if is_continued else self.version), "a stale read"
            assert adapter == row.adapter or (is_continued and adapter in self.older[row.adapter]), "another adapter's"
        self.num_mixed_reads += bool(models - {self._model(row)})
        end = row.start + len(row.tokens)
        self._ends[row.id] = range(end - row.num_drafts, end + max(1, row.num_sampled))

    def _model(self, row: Row) -> int:
        return model_of(self.version, row.adapter)

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: Row, start: int, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            self.slots[self._slot(row, start + i)] = (token, self._model(row))

    def _read(self, row: Row, end: int) -> list[Slot]:
        slots = [self.slots[self._slot(row, position)] for position in range(end)]
        assert None not in slots, "a row read a slot that was never written"
        return slots  # type: ignore[return-value]

    def _draw(self, row: Row, end: int) -> int:
        seen = tuple(token for token, _ in self._read(row, end))
        return self.drawing(seen, row.seed, row.sample_index, self._model(row))

    def _result(self, row: Row) -> RowResult:
        end = row.start + len(row.tokens)
        tokens = [self._draw(row, place) for place in range(end - row.num_drafts, end)]
        if row.num_drafts:
            agree = [token == guess for token, guess in zip(tokens, row.tokens[-row.num_drafts :], strict=True)]
            num_right = (*agree, False).index(False)
            self.num_right += num_right
            self.num_wrong += row.num_drafts - num_right
        for place in range(row.num_sampled):
            if place:
                self._write(row, end + place - 1, tokens[-1:])
            tokens.append(self._draw(row, end + place))
        scores: tuple[float, ...] = ()
        if row.score_from is not None:
            seen = tuple(token for token, _ in self._read(row, end))
            known = seen if row.next_token < 0 else (*seen, row.next_token)
            places = range(max(row.score_from, row.start + 1), min(len(known), row.score_end))
            scores = tuple(score(known[:place], known[place], self._model(row)) for place in places)
        return RowResult(
            id=row.id,
            tokens=tuple(tokens),
            logprobs=(-0.5,) * len(tokens),
            extras=tuple(DrawExtras(raw_logprob=-0.25, sampling_mask=(token,)) for token in tokens),
            scores=scores,
            score_tops=((),) * len(scores),
        )


def _written(state: RowState) -> set[int]:
    return {state.slot, *(slot for _, slot in state.saves)}


class Calculator:
    """A token program: between 3 and 4 the sample writes a call, whose answer is forced. Pure."""

    def start(self) -> object:
        return None

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        if token % 5 == 3:
            return (), ()
        if token % 5 == 4 and isinstance(state, tuple):
            return None, (48, *state[:3], 49)
        return ((*state, token) if isinstance(state, tuple) else None), ()


class StopAfter:
    """A matcher that stops a sample once its last two tokens add up to a multiple of 23."""

    def __init__(self) -> None:
        self.last: int | None = None

    def advance(self, token: int) -> str | None:
        hit = self.last is not None and (self.last + token) % 23 == 0
        self.last = token
        return "sum" if hit else None

    def mask(self) -> bytes | None:
        return None


class Failing:
    """A matcher and a program that fail after a few tokens."""

    def __init__(self) -> None:
        self.left = 3

    def advance(self, token: int) -> str | None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("the matcher broke")
        return None

    def mask(self) -> bytes | None:
        return None

    def start(self) -> object:
        return 0

    def step(self, state: object, token: int) -> tuple[object, tuple[int, ...]]:
        assert isinstance(state, int)
        return state + 1, (10**6,) if state == 2 else ()


def fake_parts(
    cache_type: str,
    num_blocks: int,
    block_size: int,
    lookahead: int = 1,
    drawing: Drawing = next_token,
    num_states: int = 0,
    *,
    overlaps: bool = False,
) -> EngineParts:
    """The parts of an engine without a model; with `overlaps`, its runner launches windows ahead."""
    runner = FakeRunner(num_blocks, block_size, lookahead, drawing, num_states)
    return EngineParts(
        runner=runner,
        launch=runner.launch if overlaps else None,
        kv=make_kv(cache_type, num_blocks, block_size, num_states),  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
        max_model_len=100_000,
        eos_token_ids=frozenset([EOS]),
        lookahead=lookahead,
    )


def fake_config(
    max_batch_size: int = 8,
    max_tokens_per_batch: int = 64,
    speculation: Speculation = "off",
    lineage: str | None = None,
    max_adapters: int = 32,
) -> EngineConfig:
    """A configuration that names no model."""
    return EngineConfig(
        model_path="fake",
        max_batch_size=max_batch_size,
        max_tokens_per_batch=max_tokens_per_batch,
        seed=3,
        speculation=speculation,
        lineage=lineage,
        max_adapters=max_adapters,
    )


def fake_engine(
    cache_type: str = "radix", num_blocks: int = 100, lookahead: int = 1, drawing: Drawing = next_token, **options: Any
) -> InferenceEngine:
    """An engine without a model, with blocks of 4 tokens; `options` are those of `fake_config`."""
    return InferenceEngine(fake_config(**options), parts=fake_parts(cache_type, num_blocks, 4, lookahead, drawing))


class Adapting(InferenceEngine):
    """An engine on the fake runner that stages every adapter whose source is not "bad"."""

    def stage_adapter(self, load: AdapterLoad) -> StagedAdapter:
        if load.source == "bad":
            raise BadRequest("adapter", "is bad")
        return StagedAdapter(load=load, rank=1, num_bytes=1, packed=(load.name, load.on_running))


def adapting_engine(**options: Any) -> Adapting:
    return Adapting(fake_config(**options), parts=fake_parts("radix", 100, 4))


def load(
    engine: InferenceEngine,
    name: str,
    *,
    version: WeightLabel | None = None,
    on_running: OnAdapter = "keep",
    num_bytes: int = 1,
) -> WeightLabel:
    """Load an adapter into an engine on the fake runner."""
    one = AdapterLoad(name=name, source="fake", version=version, on_running=on_running)
    return engine.install_adapter(StagedAdapter(load=one, rank=1, num_bytes=num_bytes, packed=(name, on_running)))


def is_idle(engine: InferenceEngine) -> bool:
    """Whether an engine has no request and holds no block."""
    engine.cache.check()
    return not engine.has_pending() and engine.cache.num_free_blocks() == engine.cache.num_blocks


def replay(
    prompt: Sequence[int],
    params: SamplingParams,
    sample_index: int,
    versions: Sequence[int] | None = None,
    *,
    program: bool = False,
    matcher: bool = False,
    drawing: Drawing = next_token,
) -> tuple[list[int], list[int], str | None]:
    """Write a sample out naively, token by token: (tokens, mask, why it ends, if it does).

    Each token is drawn under the version that it claims, as far as there are `versions`; all under the first without.
    """
    assert params.max_tokens is not None and params.seed is not None
    tokens, mask = list(prompt), []
    state: object = None
    tool, stop_after = Calculator(), StopAfter() if matcher else None
    end: str | None = "length" if params.max_tokens == 0 else None

    def add(token: int, sampled: int) -> str | None:
        tokens.append(token)
        mask.append(sampled)
        if stop_after is not None and stop_after.advance(token):
            return "stop"
        return "length" if len(mask) == params.max_tokens else None

    while end is None and (versions is None or len(mask) < len(versions)):
        version = 0 if versions is None else versions[len(mask)]
        token = drawing(tuple(tokens), params.seed, sample_index, version)
        end = add(token, 1)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            end = "stop"
        elif program and not end:
            state, forced = tool.step(state, token)
            for forced_token in forced:
                end = end or add(forced_token, 0)
    return tokens[len(prompt) :], mask, end


def reference(
    prompt: Sequence[int], params: SamplingParams, sample_index: int, **options: Any
) -> tuple[list[int], list[int], str]:
    """Return a whole sample of the first weights; `options` are those of `replay`."""
    tokens, mask, end = replay(prompt, params, sample_index, **options)
    assert end is not None
    return tokens, mask, end
