"""`Engine`: the interface of karpathy/nanochat's nanochat/engine.py, on the core engine for a `GPT`.

On the core engine, finished rows are not computed, a tool's tokens are computed as one chunk, and the prefix of a
conversation is reused. The columns of tokens equal those of upstream's loop.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from threading import RLock, current_thread, main_thread
from types import FrameType

import torch

from nano_inference.build import parts_of
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.calculator import Value, calculate, evaluate
from nano_inference.nanochat.columns import Columns, ColumnSampler, sample_next_token
from nano_inference.nanochat.gpt import GPT
from nano_inference.nanochat.loop import Call, ChatTokenizer, Column, RowState, find_specials, plain_columns
from nano_inference.types import Delta, SamplingParams

__all__ = ["Engine", "KVCache", "RowState", "eval_with_timeout", "sample_next_token", "timeout", "use_calculator"]

_ROWS = 64  # rows of the trained length for which a GPU's cache is sized
_UNIFORM = 1e30
"""Temperature at which all candidates are equally likely in float32; replaces larger ones, for which logits are NaN."""
_HOTTEST = 100.0
"""Largest temperature of `SamplingParams`; only `exact=False` samples with it, `Columns` has the call's."""
Batch = tuple[list[list[int]], list[list[int]]]
"""The tokens of each row, and masks of the same lengths: 1 where a token was sampled."""


def use_calculator(expr: str) -> Value | None:
    """Return the value of an expression, None if it is refused: upstream's rules, without `eval` and signals."""
    return calculate(expr)


def eval_with_timeout(formula: str, max_time: float = 3) -> Value | None:
    """Return the value of a formula, else None. `max_time` (seconds) is ignored: size limits bound the time.

    In addition to what `use_calculator` lets pass: `%`, powers, bits and comparisons.
    """
    return evaluate(formula)


@contextmanager
def timeout(duration: float, formula: str) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer than `duration` seconds; 0 is no limit.

    The main thread is interrupted, by SIGALRM as upstream. Elsewhere, and on Windows, the time is checked afterwards.
    """
    start, error = time.monotonic(), TimeoutError(f"{formula!r}: timed out after {duration} seconds")

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise error

    if current_thread() is not main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        if 0 < duration < time.monotonic() - start:
            raise error
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, duration)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


class Engine:
    """Generates columns of tokens for one prompt and several samples, with nanochat's calculator.

    `model` is a `GPT`, or any object with `config`, `get_device()` and `forward(ids, kv_cache=…)`. With `exact`, a seed
    gives upstream's tokens (one `torch.multinomial` per column); otherwise tokens depend only on (seed, row, position).
    `config` configures the core engine (its model_path is not read). `cache_dtype` is the precision of the cache of
    other models; default: upstream's COMPUTE_DTYPE, else that of the embedding. Thread-safe. Raises `ValueError` for a
    `lookahead` above 1.
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
        if config is not None and config.lookahead not in (None, 1):
            raise ValueError(f"lookahead must be 1 here, got {config.lookahead}: each column is drawn after the last")
        self.model = model
        self.tokenizer = tokenizer
        self.exact = exact
        self._config = config
        self._cache_dtype = cache_dtype
        self._sampler = ColumnSampler()
        self._lock = RLock()  # held while a thread uses the core engine, which then steps the rows of all calls
        self._core: InferenceEngine | None = None
        self._version = 0  # `GPT.version` of the weights in the core engine

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
        """Yield (token_column, token_masks): one token per sample, and its mask, 1 if sampled, 0 if forced.

        A generator: arguments are checked at the first `next`. A row that samples a terminal token (assistant_end, bos)
        yields it once with mask 1. Ignore what it yields afterwards, until all rows end (on the core engine the same
        token with mask 0). `max_tokens` counts forced tokens too; without it a row ends at the trained length. Raises
        `AssertionError` if `tokens` is not a list of integers, for a negative temperature, and for a prompt longer than
        the trained length without `max_tokens`.
        """
        call = self._call(tokens, num_samples, max_tokens, temperature, top_k, seed, top_p)
        if not isinstance(self.model, GPT):
            yield from plain_columns(self.model, call, self._cache_dtype)
        elif call.limit and num_samples:
            yield from self._core_columns(self.model, call)

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

        Raises as `generate`.
        """
        return self._batches([self._call(tokens, num_samples, max_tokens, temperature, top_k, seed, top_p)])[0]

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
        """Return the result of `generate_batch` for each prompt; a `GPT` computes all prompts together.

        `seeds` is one seed for all prompts, or one for each. Raises as `generate`, and `ValueError` for another number
        of seeds.
        """
        each = list(seeds) if isinstance(seeds, Sequence) else [seeds] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"seeds must be one for each of {len(prompts)} prompts, got {len(each)}")
        options = (num_samples, max_tokens, temperature, top_k)
        return self._batches(
            [self._call(tokens, *options, seed, top_p) for tokens, seed in zip(prompts, each, strict=True)]
        )

    @property
    def core(self) -> InferenceEngine:
        """The core engine of a `GPT`; created at first use, after a failed step, and updated after new weights."""
        assert isinstance(self.model, GPT), "only a GPT of this package runs on the core engine"
        if self._core is None or not self._core.is_alive:
            config, device = self._config, self.model.get_device()
            if config is None:
                num_bytes = None
                if device.type == "cuda":  # the cache takes at most half of the free memory
                    wanted = _ROWS * self.model.config.sequence_len * self.model.kv_bytes_per_token()
                    num_bytes = max(1, min(wanted, torch.cuda.mem_get_info(device)[0] // 2))
                config = EngineConfig(model_path="nanochat", max_model_len=2**31 - 1, kv_cache_bytes=num_bytes)
            parts = parts_of(self.model.executor(config, self._sampler), config)
            self._core, self._version = InferenceEngine(config, parts=parts), self.model.version
        if self._version != self.model.version:
            self._core.pause(clear_cache=True)  # running requests recompute their K/V
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
        """Return the checked arguments with the maximal number of columns. Raises `AssertionError`."""
        _require(isinstance(tokens, list) and isinstance(tokens[0], int), "expecting list of ints")
        _require(temperature >= 0.0, "temperature must be non-negative")
        if max_tokens is None:
            length = int(self.model.config.sequence_len)  # type: ignore[attr-defined]
            too_long = f"a prompt of {len(tokens)} tokens is longer than the model's {length}; set max_tokens"
            _require(len(tokens) <= length, too_long)
            # The last token is not computed, so its position may be one past the trained length.
            max_tokens = length - len(tokens) + 1
        tool, terminals = find_specials(self.tokenizer)
        return Call(
            tokens=[index(token) for token in tokens],
            num_samples=index(num_samples),
            limit=index(max_tokens),
            temperature=min(float(temperature), _UNIFORM),
            top_k=None if top_k is None else index(top_k),
            seed=index(seed),
            top_p=None if top_p is None else float(top_p),
            tool=tool,
            terminals=terminals,
        )

    def _batches(self, calls: Sequence[Call]) -> list[Batch]:
        """Run calls, together on the core engine if the model is a `GPT`. Raises `RuntimeError` for an aborted one."""
        batches = []  # rows that start with the prompt, and their masks
        for call in calls:
            rows = range(call.num_samples)
            batches.append(([call.tokens.copy() for _ in rows], [[0] * len(call.tokens) for _ in rows]))
        if not isinstance(self.model, GPT):
            for call, (results, masks) in zip(calls, batches, strict=True):
                open_rows = set(range(call.num_samples))
                for tokens, flags in plain_columns(self.model, call, self._cache_dtype):
                    open_rows -= {row for row in open_rows if tokens[row] in call.terminals}
                    for row in open_rows:
                        results[row].append(tokens[row])
                        masks[row].append(flags[row])
                    if not open_rows:
                        break
            return batches
        with self._lock:
            core, asked = self.core, dict[int, int]()
            try:
                for place, call in enumerate(calls):
                    if call.limit and call.num_samples:
                        asked[place], _ = self._ask(self.model, call)
                left = set(asked.values())
                while left:
                    left.difference_update(core.wait_for_any(left))
            finally:
                samples = {place: core.collect(request_id) for place, request_id in asked.items()}
                for request_id in asked.values():
                    self._sampler.close(request_id)
        for place, found in samples.items():
            for result, mask, sample in zip(*batches[place], found, strict=False):
                if sample.finish_reason == "abort":
                    raise RuntimeError(f"generation was aborted: {sample.stop_reason}")
                end = len(sample.mask) - (sample.finish_reason == "stop")  # without the terminal
                result += sample.completion_tokens[:end]
                mask += sample.mask[:end]
        return batches

    def _ask(self, model: GPT, call: Call) -> tuple[int, Columns]:
        """Queue a call on the core engine; return its request id and its random numbers."""
        params = SamplingParams(
            temperature=min(call.temperature, _HOTTEST),
            max_tokens=call.limit,
            stop_token_ids=call.terminals,
            ignore_eos=True,
            top_k=max(call.top_k or 0, 0),
            top_p=1.0 if call.top_p is None else call.top_p,
            seed=call.seed,
        )
        device = model.get_device()
        columns = Columns(call.num_samples, call.seed, call.temperature, call.top_k, call.top_p, device)
        request_id = self.core.add_request(call.tokens, params, call.num_samples, program=call.tool, claim=True)
        if self.exact:
            self._sampler.open(request_id, columns)
        return request_id, columns

    def _core_columns(self, model: GPT, call: Call) -> Iterator[Column]:
        """Run one call on the core engine and yield its columns."""
        with self._lock:
            request_id, columns = self._ask(model, call)
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


def _require(condition: bool, text: str) -> None:
    """Raise `AssertionError`, as upstream, also under `python -O`."""
    if not condition:
        raise AssertionError(text)


def _columns_of(deltas: Iterator[Delta], num_rows: int, columns: Columns) -> Iterator[Column]:
    """Collect deltas of rows into columns; a row that has ended repeats its last token with mask 0.

    Raises `RuntimeError` if a row was aborted.
    """
    waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(num_rows)]
    ended = [False] * num_rows
    last = [0] * num_rows
    while True:
        missing = {row for row, queue in enumerate(waiting) if not (queue or ended[row])}
        while missing:
            delta = next(deltas)
            if delta.finish_reason == "abort" and delta.sample is not None:
                raise RuntimeError(f"generation was aborted: {delta.sample.stop_reason}")
            row = delta.sample_index
            ended[row] = delta.sample is not None
            waiting[row].extend(zip(delta.token_ids, delta.mask, strict=True))
            if ended[row]:
                columns.end(row)
            if waiting[row] or ended[row]:
                missing.discard(row)
        if not any(waiting):
            return
        taken = [queue.popleft() if queue else (last[row], 0) for row, queue in enumerate(waiting)]
        last = [token for token, _ in taken]
        yield last.copy(), [mask for _, mask in taken]
