"""`InferenceEngine`: the public interface, from token ids to token ids. `StepControl` decides when steps may run."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import NoReturn, Self, TypeVar

from nano_inference.admission import Limits, requests_for, score_starts, scoring_request, texts_of
from nano_inference.assemble import EngineParts, assemble, copied_parts
from nano_inference.calls import DeltaStream, as_call
from nano_inference.checks import check_bool, unit_vector
from nano_inference.config import EngineConfig, config_of
from nano_inference.control import Control
from nano_inference.core import Core
from nano_inference.executors.protocol import Executor
from nano_inference.kv import KVManager
from nano_inference.requests import RequestQueue
from nano_inference.sequence import Sequence
from nano_inference.state import EngineState
from nano_inference.types import (
    FROM_THE_PROMPT,
    BadRequest,
    Beginning,
    Delta,
    EngineDead,
    EngineRequest,
    MatcherFactory,
    Pooling,
    SamplingParams,
    StepResult,
    TokenProgram,
    TrainingSample,
)
from nano_inference.weights.directory import weights_in
from nano_inference.weights.group import WeightGroup
from nano_inference.weights.member import GroupBackend
from nano_inference.weights.sync import WeightSyncManager

_LAST_PIECE_S = 2.0
"""Most seconds `shutdown` waits for a thread that gathers weights: Python aborts if one copies at exit."""
Progress = Callable[[StepResult], None]
Result = TypeVar("Result")


class InferenceEngine(Control):
    """Runs requests on one model. A context manager.

    One thread drives it at a time: other calls meanwhile raise `EngineBusy`, also from inside a step; `AsyncEngine`
    serves several callers. After an exception, Ctrl-C included, the engine still works: the requests of the
    interrupted call are aborted, others continue.
    """

    def __init__(self, config: EngineConfig | str | Path, *, parts: EngineParts | None = None) -> None:
        """`config` may be a `model_path`; `parts` replaces what it would build, in tests and copies."""
        self.config = config = config_of(config)
        self.parts = assemble(config) if parts is None else parts
        state = EngineState(self._new_core())
        super().__init__(state, self.parts.runner, self.parts.kv, self.parts.weights, weights_in)
        limits = self.parts.limits(config.lineage or secrets.token_hex(8))
        self._queue = RequestQueue(config, limits, self.parts.stop_matcher, self._state, self.calls)
        self._group: WeightGroup | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    # ---- requests ---------------------------------------------------------------------------------------------------

    @as_call
    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        num_samples: int | None = None,
        program: TokenProgram | None = None,
        progress: Progress | None = None,
    ) -> list[TrainingSample]:
        """Return n samples of each prompt, those of the first prompt first. `sampling_params`: for all, or a list.

        Raises `BadRequest` before anything runs if a request is invalid.
        """
        count = num_samples_per_prompt if num_samples is None else num_samples
        requests = requests_for(prompts, sampling_params, count, program)
        return self._finish_all(self._admit_all(requests), progress)

    @as_call
    def complete(
        self,
        samples: Seq[TrainingSample],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        program: TokenProgram | None = None,
        progress: Progress | None = None,
    ) -> list[TrainingSample]:
        """Resume samples that ended as "abort" without a `stop_reason`; return others unchanged.

        Output is identical to an uninterrupted run with the same parameters and program; for a salt or a matcher use
        `add_request(partial=…)`. Raises as `generate` does.
        """
        requests = requests_for([sample.prompt_tokens for sample in samples], sampling_params, program=program)
        open_ones = [i for i, s in enumerate(samples) if s.finish_reason == "abort" and s.stop_reason is None]
        requests = [replace(requests[i], partial=samples[i]) for i in open_ones]
        admitted = self._admit_all(requests, [f"samples[{i}]: " for i in open_ones])
        completed = dict(zip(open_ones, self._finish_all(admitted, progress), strict=True))
        return [completed.get(i, sample) for i, sample in enumerate(samples)]

    @as_call
    def stream(
        self, prompt: Seq[int], sampling_params: SamplingParams | None = None, num_samples_per_prompt: int = 1
    ) -> DeltaStream:
        """Queue one prompt and return an iterator of its deltas; closing the iterator aborts the samples."""
        params = sampling_params or SamplingParams()
        request = EngineRequest(prompt=prompt, params=params, num_samples=num_samples_per_prompt, is_streamed=True)
        return self.deltas(self.add(request, claim=True, for_call=True))

    def deltas(self, request_id: int) -> DeltaStream:
        """Return an iterator of the deltas of a claimed request, see `DeltaStream`; closing it aborts the request.

        Raises `BadRequest` if the request was not added with `claim`, or was collected.
        """
        if not self._state.requests.is_claimed(request_id):
            raise BadRequest(f"request_id: {request_id} was not added with claim, or was collected")
        return self.calls.stream(request_id, bound(self._next_delta, request_id))

    def add_request(
        self,
        prompt: Seq[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        salt: str = "",
        make_matcher: MatcherFactory | None = None,
        program: TokenProgram | None = None,
        partial: TrainingSample | None = None,
        beginning: Beginning = FROM_THE_PROMPT,
        claim: bool = False,
        for_call: bool = False,
    ) -> int:
        """Queue a request (see `EngineRequest`) and return its id; `step` returns its samples. Raises `BadRequest`.

        With `claim`, `collect` returns the samples instead; with `for_call` too, and the request ends with the running
        call (see `exclusively`). A resumed `partial` comes back whole, and `max_tokens` counts from the prompt.
        """
        request = EngineRequest(
            prompt=prompt,
            params=sampling_params or SamplingParams(),
            num_samples=num_samples,
            salt=salt,
            make_matcher=make_matcher,
            program=program,
            partial=partial,
            beginning=beginning,
        )
        return self.add(request, claim=claim, for_call=for_call)

    @as_call
    def add(self, request: EngineRequest, *, claim: bool = False, for_call: bool = False) -> int:
        """Queue a request and return its id, as `add_request` does. Raises `BadRequest`."""
        (sequences,) = self._admit_all([request])
        return self._queue.enqueue(sequences, claimed=claim, is_owned=for_call)

    @as_call
    def wait_for_any(self, request_ids: Iterable[int], progress: Progress | None = None) -> list[int]:
        """Run steps until one of these requests has ended; return all that have. Raises `EnginePaused`."""
        ids = list(request_ids)
        ended = self._state.requests.ended_among(ids)
        while ids and not ended:
            num_ended = self._state.requests.num_ended
            self._require_running()
            result = self.tick()
            if progress is not None:
                progress(result)
            if self._state.requests.num_ended > num_ended:  # most steps end no request, and there may be many ids
                ended = self._state.requests.ended_among(ids)
        return ended

    @as_call
    def collect(self, request_id: int) -> list[TrainingSample]:
        """Abort and forget a request that is claimed or a call's; return its samples in order."""
        return self.calls.collect(request_id)

    @as_call
    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return the new deltas of these claimed requests; those of one request are in order."""
        return self._state.change(lambda: self._state.requests.take_deltas(request_ids))

    @as_call
    def score(
        self, token_ids: Seq[int] | Seq[Seq[int]], start: int | Seq[int] = 0, *, temperature: float = 1.0
    ) -> list[float] | list[list[float]]:
        """Return the log-probability of each token from position max(start, 1) on, given the tokens before it.

        Takes one text or a list, and one `start` or one for each. Logits are divided by `temperature` (0 counts as 1).
        Raises `BadRequest`, `ValueError` if a log-probability is not finite, and `EnginePaused`.
        """
        texts, single = texts_of(token_ids)
        starts = score_starts(start, len(texts))
        requests = [scoring_request(ids, begin, temperature) for ids, begin in zip(texts, starts, strict=True)]
        scores = [list(sample.prompt_logprobs or ()) for sample in self._read_all(requests)]
        return scores[0] if single else scores

    @as_call
    def embed(
        self, token_ids: Seq[int] | Seq[Seq[int]], pooling: Pooling = "mean", *, normalize: bool = False
    ) -> list[float] | list[list[float]]:
        """Return the embedding of each text: pooled last hidden states after the final norm, float32 values.

        "mean" averages all positions; "last" takes the last one, and can use cached prefixes. Raises as `score` does.
        """
        texts, single = texts_of(token_ids)
        check_bool("normalize", normalize)
        if pooling is None:
            raise BadRequest("pooling must be one of mean, last, got None")
        params = SamplingParams(max_tokens=0, pooling=pooling)
        samples = self._read_all([EngineRequest(prompt=ids, params=params) for ids in texts])
        found = [sample.embedding or () for sample in samples]
        embeddings = [list(unit_vector(one) if normalize else one) for one in found]
        return embeddings[0] if single else embeddings

    def abort(self, request_ids: int | Iterable[int]) -> tuple[TrainingSample, ...]:
        """End one or several requests now; return their unfinished samples. Ignores ended and unknown ids."""
        return _samples_in(self.end_requests((request_ids,) if isinstance(request_ids, int) else request_ids))

    @as_call
    def end_requests(self, request_ids: Iterable[int] | None = None) -> tuple[Delta, ...]:
        """End requests now, all of them for None; return their last deltas."""
        return self._state.change(lambda: self._state.end(request_ids))

    def abort_all(self) -> tuple[TrainingSample, ...]:
        """End every request now, as `abort` does."""
        return _samples_in(self.end_requests())

    # ---- steps ------------------------------------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Return whether `step` has work to do or samples to return; a paused engine has no work."""
        state = self._state
        if state.needs_repair and not state.is_changing:
            self.exclusively(lambda: state.change(lambda: None))  # entering a transaction repairs the state
        return state.requests.has_finished or (state.core.has_work() and not self.is_halted)

    @as_call
    def step(self) -> list[TrainingSample]:
        """Run one step; return the finished samples of requests that are neither claimed nor a call's."""
        if self._state.core.has_work() or not self._state.requests.has_finished:
            self.tick()
        return self._state.requests.take_finished()

    @as_call
    def tick(self) -> StepResult:
        """Install staged weights, run one step unless the engine is paused, and return everything it did.

        If a step fails or is interrupted (Ctrl-C), it is undone and the next one repeats it.
        """
        self._require_alive()
        self.calls.end_dropped()
        result = self._tick()
        self.calls.end_dropped()
        return result

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, run as one call: see `Calls.run`. Requests that it adds with `for_call` end with it."""
        return self.calls.run(work)

    @as_call
    def copy(self, *, kv_cache_bytes: int | None = None) -> InferenceEngine:
        """Return a second engine with a copy of the weights and a random lineage, such as a reference model.

        Its KV cache has an eighth of this one's blocks, at least enough for the longest sequence, unless
        `kv_cache_bytes` is given. Raises `BadRequest` if there is no model to copy.
        """
        self._require_alive()
        self._require_weights()
        parts = copied_parts(self.parts, self.config, kv_cache_bytes)
        return InferenceEngine(replace(self.config, lineage=None), parts=parts)

    def twin(self, *, kv_cache_bytes: int | None = None) -> InferenceEngine:  # quoted
        """Return `copy(...)`. Deprecated."""
        warnings.warn("InferenceEngine.twin is now InferenceEngine.copy", DeprecationWarning, stacklevel=2)  # quoted
        return self.copy(kv_cache_bytes=kv_cache_bytes)

    @as_call
    def shutdown(self) -> None:
        """Abort all requests and free model and cache; later calls raise `EngineDead`. Can be called twice."""
        self.end_requests()
        self._end = self._end or EngineDead("the engine was shut down")  # before anything that can fail
        if self.parts.weights is not None:
            self.parts.weights.cancel(wait=_LAST_PIECE_S)
        if self._group is not None:
            self._group.close()
        if self.parts.executor is not None:
            self.parts.executor.close()
        self.parts = self.parts.closed()
        self._runner, self._weights = self.parts.runner, None
        self._state.reset(self._new_core())

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine owns memory and threads, and cannot be pickled or copied: pickle its config")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def limits(self) -> Limits:
        """The limits that a request must respect."""
        return self._queue.limits

    @property
    def lineage(self) -> str:
        """`EngineConfig.lineage`, or this engine's random one; see `TrainingSample.lineage`."""
        return self.limits.lineage or ""

    @property
    def is_on_cuda(self) -> bool:
        """Whether the model runs on a CUDA device."""
        return self.parts.is_on_cuda

    @property
    def model(self) -> Executor | None:
        """The owner of the weights; None without a model."""
        return self.parts.executor

    @property
    def cache(self) -> KVManager:
        """The owner of the cache blocks."""
        return self.parts.kv

    @property
    def weight_sync(self) -> WeightSyncManager | None:
        """The owner of weight updates; None if the weights cannot be replaced."""
        return self.parts.weights

    # ---- weights ----------------------------------------------------------------------------------------------------

    def get_weight_version(self) -> int:
        """Return the number of weight installations since the start."""
        return self.weight_info().version

    @as_call
    def init_weights_update_group(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: GroupBackend | None = None,
        timeout: float = 300.0,
    ) -> WeightGroup:
        """Join a trainer's process group, whose rank 0 sends weights; pass `group.receive()` to `update_weights`.

        The default backend is Gloo on a CPU and NCCL on CUDA. `timeout` in seconds bounds the wait for the other ranks
        and each broadcast. The engine closes the group when it joins another and at shutdown.
        """
        self._require_alive()
        if self._group is not None:
            self._group.close()
        backend = backend or ("nccl" if self.parts.is_on_cuda else "gloo")
        self._group = WeightGroup(address, port, rank=rank, world_size=world_size, backend=backend, timeout=timeout)
        return self._group

    # ---- running requests to their end ------------------------------------------------------------------------------

    def _new_core(self) -> Core:
        """Return a core with empty queues."""
        parts = self.parts
        limits = parts.scheduler_config(self.config)
        return Core(parts.runner, parts.kv, limits, parts.make_drafter, vocab_size=parts.vocab_size)

    def _admit_all(self, requests: Seq[EngineRequest], prefixes: Seq[str] = ()) -> list[list[Sequence]]:
        self._require_alive()
        return self._queue.admit_all(requests, prefixes)

    def _finish_all(self, admitted: Seq[list[Sequence]], progress: Progress | None) -> list[TrainingSample]:
        """Queue requests, run steps until all have ended, return their samples in order."""
        ids = [sequences[0].request_id for sequences in admitted]
        try:
            for sequences in admitted:
                self._queue.enqueue(sequences, claimed=False, is_owned=True)
            for one in ids:  # one by one: the cost of a step must not grow with the number of ids
                self.wait_for_any((one,), progress)
        finally:
            samples = [sample for one in ids for sample in self.collect(one)]
        return samples

    def _read_all(self, requests: Seq[EngineRequest]) -> list[TrainingSample]:
        """Run requests that score or embed. Raises `ValueError` naming the first that was aborted."""
        samples = self._finish_all(self._admit_all(requests), None)
        for index, sample in enumerate(samples):
            if sample.finish_reason == "abort":
                raise ValueError(f"token_ids[{index}]: {sample.stop_reason or 'the request was aborted'}")
        return samples

    def _next_delta(self, request_id: int) -> Delta | None:
        """Run steps until a claimed request has a delta, and return it; None if the request has ended."""
        while True:
            delta = self._state.change(lambda: self._state.requests.take_delta(request_id))
            if delta is not None or not self._state.requests.is_live(request_id):
                return delta
            self._require_running()
            self.tick()


def _samples_in(deltas: Iterable[Delta]) -> tuple[TrainingSample, ...]:
    return tuple(delta.sample for delta in deltas if delta.sample is not None)
