"""`Engine`: nanochat's generation interface, on the core engine when the model is ours.

The names and behaviour are karpathy/nanochat's nanochat/engine.py. Our own `GPT` runs on paged K/V with prefix reuse:
rows that are done cost nothing, a tool's tokens are computed as one chunk, and a conversation's next turn starts where
the last one ended. The columns that come out are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from threading import RLock

import torch

from nano_inference.assemble import parts_of
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.calculator import Value, calculate, evaluate
from nano_inference.nanochat.columns import Columns, ColumnSampler, sample_next_token
from nano_inference.nanochat.gpt import GPT
from nano_inference.nanochat.loop import Call, ChatTokenizer, Column, RowState, Specials, find_specials, plain_columns
from nano_inference.types import Delta, SamplingParams, TrainingSample

__all__ = [
    "Engine",
    "KVCache",
    "RowState",
    "eval_with_timeout",
    "sample_next_token",
    "timeout",
    "use_calculator",
]

_ROWS = 64
"""Rows of the trained length that a GPU's cache has room for."""
Batch = tuple[list[list[int]], list[list[int]]]
"""The tokens of each row, and masks of the same lengths: 1 where a token was sampled."""


def use_calculator(expr: str) -> Value | None:
    """Return what an expression comes to, None when it is refused: upstream's rules, without `eval` and signals."""
    return calculate(expr)


def eval_with_timeout(formula: str, max_time: float = 3) -> Value | None:
    """Return what a formula comes to, None when it has no value; bounded by its size, so that no clock is needed."""
    return evaluate(formula)


@contextmanager
def timeout(duration: float, formula: str) -> Iterator[None]:
    """Raise `TimeoutError` when the block took longer, once it has ended: nothing is interrupted, in any thread."""
    start = time.monotonic()
    yield
    if time.monotonic() - start > duration:
        raise TimeoutError(f"{formula!r}: timed out after {duration} seconds")


class Engine:
    """Generates columns of tokens for one prompt and several samples, with nanochat's tools.

    `model` is our `GPT`, or any object with `config`, `get_device()` and `forward(ids, kv_cache=…)`. With `exact`, a
    seed gives upstream's tokens (one `torch.multinomial` a column); without, tokens depend on (seed, row, position)
    alone, whatever the other rows are. `config` sizes the core engine and picks what computes (its model_path is not
    read). `cache_dtype` is the precision of another model's cache, by default the one that it computes in: upstream's
    COMPUTE_DTYPE, else that of its embedding. Several threads may use one.
    """

    def __init__(
        self,
        model: object,
        tokenizer: ChatTokenizer,
        *,
        exact: bool = True,
        config: EngineConfig | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.exact = exact
        self._config = config
        self._cache_dtype = cache_dtype
        self._sampler = ColumnSampler()
        self._lock = RLock()
        """Held while the core engine is used, which one thread drives at a time; it runs everybody's rows."""
        self._core: InferenceEngine | None = None
        self._version = 0
        """The weights that the core engine's cache was computed with."""

    def generate(
        self,
        tokens: list[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
        top_p: float | None = None,
    ) -> Iterator[Column]:
        """Yield (token_column, token_masks): a token for each sample, and 1 where it was sampled, 0 where forced.

        A generator: nothing is checked or computed before the first `next`. A row that samples a terminal token
        (assistant_end, bos) yields it once with mask 1; what it yields after that, until all rows are done, means
        nothing (on the core engine the same token with mask 0). `max_tokens` counts forced tokens too; without it a
        row ends where the trained length is full. Raises `AssertionError` for tokens that are no list of integers, a
        negative temperature, or a prompt longer than the trained length without `max_tokens`.
        """
        call = self._call(tokens, num_samples, max_tokens, temperature, top_k, seed, top_p)
        specials = find_specials(self.tokenizer)
        if not isinstance(self.model, GPT):
            yield from plain_columns(self.model, specials, call, self._cache_dtype)
        elif call.limit and num_samples:
            yield from self._core_columns(self.model, specials, call)

    def generate_batch(
        self,
        tokens: list[int],
        num_samples: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
        top_p: float | None = None,
    ) -> Batch:
        """Return each sample's prompt and tokens without the terminal, and masks of the same length, 0 for the prompt.

        Raises as `generate` does.
        """
        return self.generate_batches(
            [tokens],
            num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seeds=[seed],
            top_p=top_p,
        )[0]

    def generate_batches(
        self,
        prompts: Sequence[list[int]],
        num_samples: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seeds: int | Sequence[int] = 42,
        top_p: float | None = None,
    ) -> list[Batch]:
        """Return what `generate_batch` gives for each of several prompts, of any lengths.

        Our own model runs all at once. One seed serves all prompts, or one for each. Raises as `generate` does, and
        `ValueError` when the seeds are not as many as the prompts.
        """
        each = [seeds] * len(prompts) if isinstance(seeds, int) else list(seeds)
        if len(each) != len(prompts):
            raise ValueError(f"seeds must be one for each of {len(prompts)} prompts, got {len(each)}")
        return self._batches(
            [
                self._call(tokens, num_samples, max_tokens, temperature, top_k, seed, top_p)
                for tokens, seed in zip(prompts, each, strict=True)
            ]
        )

    @property
    def core(self) -> InferenceEngine:
        """The core engine that our own model runs on; made at its first use, and anew after a step that failed."""
        assert isinstance(self.model, GPT), "a model that is not ours runs in nanochat's own loop"
        if self._core is None or not self._core.is_alive:
            config = self._config or _config_for(self.model)
            parts = parts_of(self.model.executor(config, self._sampler), config)
            self._core, self._version = InferenceEngine(config, parts=parts), self.model.version
        if self._version != self.model.version:
            self._core.pause(clear_cache=True)  # what runs computes its K/V again
            assert self._core.parts.executor is not None
            self.model.refresh(self._core.parts.executor)
            self._core.resume()
            self._version = self.model.version
        return self._core

    def _call(
        self,
        tokens: list[int],
        num_samples: int,
        max_tokens: int | None,
        temperature: float,
        top_k: int | None,
        seed: int,
        top_p: float | None,
    ) -> Call:
        """Check the arguments of a generation, and find how many columns it may have."""
        _demand(isinstance(tokens, list) and isinstance(tokens[0], int), "expecting list of ints")
        _demand(temperature >= 0.0, "temperature must be non-negative")
        if max_tokens is None:
            length = int(self.model.config.sequence_len)  # type: ignore[attr-defined]
            _demand(
                len(tokens) <= length,
                f"a prompt of {len(tokens)} tokens is longer than the model's {length}; name max_tokens",
            )
            # The last token is never computed, so it may stand one past the trained length.
            max_tokens = length - len(tokens) + 1
        return Call(
            tokens=[index(token) for token in tokens],
            num_samples=index(num_samples),
            limit=index(max_tokens),
            temperature=float(temperature),
            top_k=None if top_k is None else index(top_k),
            seed=index(seed),
            top_p=None if top_p is None else float(top_p),
        )

    def _batches(self, calls: Sequence[Call]) -> list[Batch]:
        """Return the finished rows of calls."""
        specials = find_specials(self.tokenizer)
        if not isinstance(self.model, GPT):
            each = [(call, plain_columns(self.model, specials, call, self._cache_dtype)) for call in calls]
            return [_batch_of(columns, specials, call) for call, columns in each]
        with self._lock:
            samples = self._samples(self.model, specials, calls)
        return [_rows_of(samples.get(place, []), call) for place, call in enumerate(calls)]

    def _samples(self, model: GPT, specials: Specials, calls: Sequence[Call]) -> dict[int, list[TrainingSample]]:
        """Run calls to their end on the core engine; return each one's samples by its place."""
        core, asked = self.core, dict[int, int]()
        try:
            for place, call in enumerate(calls):
                if call.limit and call.num_samples:
                    asked[place], _ = self._ask(model, specials, call)
            left = set(asked.values())
            while left:
                left.difference_update(core.wait_for_any(left))
        finally:
            samples = {place: core.collect(request_id) for place, request_id in asked.items()}
            for request_id in asked.values():
                self._sampler.close(request_id)
        return samples

    def _ask(self, model: GPT, specials: Specials, call: Call) -> tuple[int, Columns]:
        """Queue a call on the core engine; return its request and the numbers that it draws by."""
        params = SamplingParams(
            temperature=call.temperature,
            max_tokens=call.limit,
            stop_token_ids=specials.terminals,
            ignore_eos=True,
            top_k=call.top_k or 0,
            top_p=1.0 if call.top_p is None else call.top_p,
            seed=call.seed,
        )
        device = model.get_device()
        columns = Columns(call.num_samples, call.seed, call.temperature, call.top_k, call.top_p, device)
        request_id = self.core.add_request(call.tokens, params, call.num_samples, program=specials.tool, claim=True)
        if self.exact:
            self._sampler.open(request_id, columns)
        return request_id, columns

    def _core_columns(self, model: GPT, specials: Specials, call: Call) -> Iterator[Column]:
        """Yield the columns of a call on the core engine."""
        with self._lock:
            request_id, columns = self._ask(model, specials, call)
            deltas = self.core.deltas(request_id)
        found = _columns_of(deltas, call.num_samples, columns)
        try:
            while True:
                with self._lock:
                    column = next(found, None)
                if column is None:
                    return
                yield column
        finally:
            with self._lock:
                deltas.close()
                self._sampler.close(request_id)


def _demand(holds: bool, text: str) -> None:
    """Raise `AssertionError`, which upstream's callers expect, also where Python leaves out asserts."""
    if not holds:
        raise AssertionError(text)


def _config_for(model: GPT) -> EngineConfig:
    """Return the configuration of a core engine. On a GPU it takes half of what is free: a trainer has the rest."""
    num_bytes = None
    device = model.get_device()
    if device.type == "cuda":
        wanted = _ROWS * model.config.sequence_len * model.kv_bytes_per_token()
        num_bytes = max(1, min(wanted, torch.cuda.mem_get_info(device)[0] // 2))
    return EngineConfig(model_path="nanochat", max_model_len=2**31 - 1, kv_cache_bytes=num_bytes)


def _batch_of(columns: Iterator[Column], specials: Specials, call: Call) -> Batch:
    """Gather columns into rows, each up to its terminal."""
    results, masks = _empty_batch(call)
    open_rows = set(range(call.num_samples))
    for token_column, token_masks in columns:
        open_rows -= {row for row in open_rows if token_column[row] in specials.terminals}
        for row in open_rows:
            results[row].append(token_column[row])
            masks[row].append(token_masks[row])
        if not open_rows:
            break
    return results, masks


def _rows_of(samples: Sequence[TrainingSample], call: Call) -> Batch:
    """Return the core engine's samples as rows without their terminals."""
    results, masks = _empty_batch(call)
    for result, mask, sample in zip(results, masks, samples, strict=False):
        if sample.finish_reason == "abort":
            raise RuntimeError(f"generation was aborted: {sample.stop_reason}")
        end = len(sample.mask) - (sample.finish_reason == "stop")
        result += sample.completion_tokens[:end]
        mask += sample.mask[:end]
    return results, masks


def _empty_batch(call: Call) -> Batch:
    """Return a row for each sample that holds the prompt alone."""
    rows = range(call.num_samples)
    return [call.tokens.copy() for _ in rows], [[0] * len(call.tokens) for _ in rows]


def _columns_of(deltas: Iterator[Delta], num_rows: int, columns: Columns) -> Iterator[Column]:
    """Put what rows get at their own pace into columns; a row that is done repeats its last token with mask 0."""
    waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(num_rows)]
    ended = [False] * num_rows
    last = [0] * num_rows
    while True:
        while not all(queue or is_over for queue, is_over in zip(waiting, ended, strict=True)):
            row, is_over = _take(next(deltas), waiting)
            ended[row] = is_over
            if is_over:
                columns.end(row)
        if not any(waiting):
            return
        taken = [queue.popleft() if queue else (last[row], 0) for row, queue in enumerate(waiting)]
        last = [token for token, _ in taken]
        yield last.copy(), [mask for _, mask in taken]


def _take(delta: Delta, waiting: list[deque[tuple[int, int]]]) -> tuple[int, bool]:
    """Append a delta's tokens to its row; return the row and whether it has ended. Raises what ended it wrongly."""
    waiting[delta.sample_index].extend(zip(delta.token_ids, delta.mask, strict=True))
    if delta.finish_reason == "abort" and delta.sample is not None:
        raise RuntimeError(f"generation was aborted: {delta.sample.stop_reason}")
    return delta.sample_index, delta.sample is not None
