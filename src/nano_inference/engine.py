"""`InferenceEngine`: what callers talk to. It owns requests and who waits for them; `core` owns the step.

Ids in, ids out: the engine knows nothing about text.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Self, cast

from nano_inference.assemble import EngineParts, assemble
from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.core import Core
from nano_inference.door import Limits, MatcherFactory, admit
from nano_inference.runner import ClosedRunner
from nano_inference.sampling import derive_seed
from nano_inference.sequence import Sequence, start_sequences
from nano_inference.types import (
    BadRequest,
    Delta,
    EngineDead,
    Request,
    SamplingParams,
    StepResult,
    TokenProgram,
    TrainingSample,
)

Progress = Callable[[StepResult], None]


class InferenceEngine:
    """Runs requests on one model. Not thread-safe: one thread drives it. A context manager."""

    def __init__(self, config: EngineConfig, *, parts: EngineParts | None = None) -> None:
        self.config = config
        self.parts = assemble(config) if parts is None else parts
        """What was built from the configuration; tests bring their own."""
        self._core = self._new_core()
        self._door = Limits(
            vocab_size=self.parts.vocab_size,
            max_model_len=self.parts.max_model_len,
            num_blocks=self.parts.kv.num_blocks,
            block_size=self.parts.kv.block_size,
        )
        self._live: dict[int, list[Sequence]] = {}
        """Request id -> its sequences that have not ended."""
        self._mailboxes: dict[int, deque[Delta]] = {}
        """Deltas of the requests that `generate` and `stream` wait for."""
        self._finished: list[TrainingSample] = []
        """Samples of other requests, for `step`."""
        self._next_request = 0
        self._next_sequence = 0
        self._error: BaseException | None = None

    # ---- asking -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        num_samples: int | None = None,
        progress: Progress | None = None,
    ) -> list[TrainingSample]:
        """Return the samples of all prompts, prompt-major: the n samples of a prompt stand together, in order.

        One `SamplingParams` serves all prompts, or one for each. Raises `BadRequest` before anything runs when any of
        them is refused. An exception on the way (Ctrl-C) aborts what was asked here and passes on.
        """
        count = num_samples_per_prompt if num_samples is None else num_samples
        each = _one_for_each(prompts, sampling_params)
        requests = [
            self._admit(prompt, params, count, offset=i)
            for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]
        return self._finish_all(requests, progress)

    def stream(
        self, prompt: Seq[int], sampling_params: SamplingParams | None = None, num_samples_per_prompt: int = 1
    ) -> Iterator[Delta]:
        """Yield what each step adds to the samples of one prompt; closing the iterator aborts them.

        The request is checked and queued at the call, not at the first `next`.
        """
        request = self._admit(prompt, sampling_params or SamplingParams(), num_samples_per_prompt)
        self._enqueue(request, claimed=True)
        deltas = self._deltas(request)
        next(deltas)  # enters its `try`: from now on closing it aborts, read or not
        return cast(Iterator[Delta], deltas)

    def add_request(
        self,
        prompt: Seq[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        salt: str = "",
        make_matcher: MatcherFactory | None = None,
        program: TokenProgram | None = None,
    ) -> int:
        """Queue a request and return its id; its samples come back from `step`. Raises `BadRequest`."""
        request = self._admit(
            prompt,
            sampling_params or SamplingParams(),
            num_samples,
            salt=salt,
            make_matcher=make_matcher,
            program=program,
        )
        self._enqueue(request, claimed=False)
        return request.id

    def score(
        self, token_ids: Seq[int] | Seq[Seq[int]], start: int = 0, *, temperature: float = 1.0
    ) -> list[float] | list[list[float]]:
        """Return the log-probability of each token from position max(start, 1) on, teacher-forced.

        One list of ids gives one list, a list of them a list for each. Cached prefixes before `start` are used.
        `temperature` divides the logits first (0 counts as 1).
        """
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise BadRequest(f"start must be an integer >= 0, got {start!r}")
        if not isinstance(token_ids, list | tuple) or not token_ids:
            raise BadRequest("token_ids must be a list of token ids, or a list of such lists, and not empty")
        single = isinstance(token_ids[0], int)
        texts: Seq[Seq[int]] = [token_ids] if single else token_ids
        params = SamplingParams(temperature=temperature, max_tokens=0, prompt_logprobs=0, logprobs_mode="tempered")
        requests = [self._admit(ids, params, 1, offset=i, score_start=start) for i, ids in enumerate(texts)]
        scores = [list(sample.prompt_logprobs or ()) for sample in self._finish_all(requests, None)]
        return scores[0] if single else scores

    def abort(self, request_id: int) -> tuple[TrainingSample, ...]:
        """End a request now and return its unfinished samples, with what they have, as "abort".

        Works for waiting, prefilling and running requests. An unknown or finished id gives nothing.
        """
        if self._core.is_torn:
            return ()
        deltas = [self._core.abort(seq) for seq in self._live.pop(request_id, ())]
        if request_id in self._mailboxes:
            self._mailboxes[request_id].extend(deltas)
        return tuple(delta.sample for delta in deltas if delta.sample is not None)

    # ---- driving ----------------------------------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Whether `step` has anything to do or to give."""
        return self._core.has_work() or bool(self._finished)

    def step(self) -> list[TrainingSample]:
        """Run one step; return the samples of `add_request`s that ended."""
        if self._core.has_work() or not self._finished:
            self.tick()
        finished, self._finished = self._finished, []
        return finished

    def tick(self) -> StepResult:
        """Run one step and return all it did: what `step`, `stream` and `generate` are made of.

        A failure inside kills the engine: this call raises its cause, later ones `EngineDead`. An interruption
        (Ctrl-C) while the model computes harms nothing: those rows are computed again.
        """
        self._require_alive()
        try:
            result = self._core.step()
        except BaseException as error:
            if isinstance(error, Exception) or self._core.is_torn:
                self._error = error
            raise
        self._deliver(result.deltas)
        return result

    def flush_cache(self) -> int:
        """Forget all cached prefixes; idle blocks are free at once, held ones when released. Returns how many."""
        return self.parts.kv.flush()

    def get_weight_version(self) -> int:
        """Return how many times weights were installed since the start."""
        return self._core.version

    def shutdown(self) -> None:
        """Abort everything and let go of model and cache; later calls raise `EngineDead`. May be called twice."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._error = self._error or EngineDead("the engine was shut down")
        self.parts = replace(self.parts, runner=ClosedRunner())
        self._core = self._new_core()

    def _new_core(self) -> Core:
        """Return empty queues over the parts."""
        limits = SchedulerConfig(
            max_batch_size=self.config.max_batch_size,
            max_tokens_per_batch=self.config.max_tokens_per_batch,
            block_size=self.parts.kv.block_size,
            lookahead=self.parts.lookahead,
        )
        return Core(
            self.parts.runner,
            self.parts.kv,
            limits,
            vocab_size=self.parts.vocab_size,
            logprobs_mode=self.config.logprobs_mode,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _admit(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        num_samples: int,
        *,
        offset: int = 0,
        salt: str = "",
        score_start: int = 0,
        make_matcher: MatcherFactory | None = None,
        program: TokenProgram | None = None,
    ) -> Request:
        """Check a request at the door; `offset` counts those checked before it and not yet queued."""
        self._require_alive()
        if not isinstance(params, SamplingParams):
            raise BadRequest(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if make_matcher is not None and params.stop:
            raise BadRequest("stop: give stop strings or a matcher, not both")
        request_id = self._next_request + offset
        if make_matcher is None and params.stop and self.parts.stop_matcher:
            make_matcher = self.parts.stop_matcher(tuple(params.stop))
        return admit(
            request_id,
            prompt,
            params,
            self._door,
            seed=self._seed_of(params, request_id),
            num_samples=num_samples,
            salt=salt,
            score_start=score_start,
            make_matcher=make_matcher,
            program=program,
        )

    def _seed_of(self, params: SamplingParams, request_id: int) -> int:
        """The request's own seed, or one derived from the engine's, or the operating system's entropy."""
        if params.seed is not None:
            return params.seed
        if self.config.seed is not None:
            return derive_seed(self.config.seed, request_id)
        return secrets.randbits(64)

    def _enqueue(self, request: Request, *, claimed: bool) -> None:
        """Put a request's sequences at the end of the queue."""
        sequences = start_sequences(request, self._next_sequence, self.parts.eos_token_ids)
        self._next_request = request.id + 1
        self._next_sequence += len(sequences)
        self._core.enqueue(sequences)
        self._live[request.id] = sequences
        if claimed:
            self._mailboxes[request.id] = deque()

    def _finish_all(self, requests: Seq[Request], progress: Progress | None) -> list[TrainingSample]:
        """Queue requests, run until all have ended, return their samples in order."""
        try:
            for request in requests:
                self._enqueue(request, claimed=True)
            while any(request.id in self._live for request in requests):
                result = self.tick()
                if progress is not None:
                    progress(result)
        finally:
            samples = [sample for request in requests for sample in self._collect(request)]
        return samples

    def _collect(self, request: Request) -> list[TrainingSample]:
        """Close a claimed request's mailbox, aborting what has not ended; return its samples in order."""
        self.abort(request.id)
        samples = [delta.sample for delta in self._mailboxes.pop(request.id, ()) if delta.sample is not None]
        return sorted(samples, key=lambda sample: sample.sample_index)

    def _deltas(self, request: Request) -> Iterator[Delta | None]:
        """Yield None once, then a claimed request's deltas as they come."""
        mailbox = self._mailboxes[request.id]
        try:
            yield None
            while request.id in self._live or mailbox:
                if not mailbox:
                    self.tick()
                while mailbox:
                    yield mailbox.popleft()
        finally:
            self._collect(request)

    def _require_alive(self) -> None:
        if self._error is not None:
            raise EngineDead(f"the engine takes no more work: {self._error}") from self._error

    def _deliver(self, deltas: Seq[Delta]) -> None:
        """Put deltas into the mailboxes that wait for them, and other requests' samples aside for `step`."""
        for delta in deltas:
            if delta.sample is not None:
                self._forget(delta)
            if delta.request_id in self._mailboxes:
                self._mailboxes[delta.request_id].append(delta)
            elif delta.sample is not None:
                self._finished.append(delta.sample)

    def _forget(self, delta: Delta) -> None:
        """Take an ended sample off the list of the living."""
        left = [seq for seq in self._live[delta.request_id] if seq.sample_index != delta.sample_index]
        if left:
            self._live[delta.request_id] = left
        else:
            del self._live[delta.request_id]


def _one_for_each(
    prompts: Seq[Seq[int]], sampling_params: SamplingParams | Seq[SamplingParams] | None
) -> Seq[SamplingParams]:
    """Return one `SamplingParams` for each prompt."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, list | tuple):
        raise BadRequest(f"prompts must be a list of lists of token ids, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int):
        raise BadRequest("prompts must be a list of lists of token ids, got one list of ids; put it into a list")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * len(prompts)
    if len(sampling_params) != len(prompts):
        raise BadRequest(f"sampling_params: {len(sampling_params)} given for {len(prompts)} prompts")
    return sampling_params
