"""`InferenceEngine`: the public face. It queues requests and runs steps; `control` decides whether steps may run.

Ids in, ids out: the engine knows nothing about text.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import Self, TypeVar

from nano_inference.admission import Limits, admit, params_for_each, score_starts, texts_of
from nano_inference.assemble import EngineParts, assemble, copied_parts
from nano_inference.books import Books
from nano_inference.calls import Calls, as_call
from nano_inference.checks import check_bool, unit_vector
from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.control import Control
from nano_inference.core import Core
from nano_inference.delta_stream import DeltaStream
from nano_inference.ngram_drafter import CPU_WEIGHT_TOKENS, CUDA_WEIGHT_TOKENS
from nano_inference.runner import ClosedRunner
from nano_inference.sampling import derive_seed
from nano_inference.sequence import Sequence
from nano_inference.speculation import NgramSpeculation, NoSpeculation
from nano_inference.types import (
    FROM_THE_PROMPT,
    BadRequest,
    Beginning,
    Delta,
    EngineRequest,
    MatcherFactory,
    OnRunning,
    PauseMode,
    Pooling,
    SamplingParams,
    StepResult,
    TokenProgram,
    TrainingSample,
    WeightInfo,
    WeightLabel,
)
from nano_inference.updates import UpdateRules, WeightUpdate
from nano_inference.weights.directory import weights_in
from nano_inference.weights.group import WeightGroup
from nano_inference.weights.member import GroupBackend
from nano_inference.weights.staging import NamedWeights

_LAST_PIECE_S = 2.0
"""How long `shutdown` waits for a thread that gathers weights: a process that ends while one copies is aborted."""
Progress = Callable[[StepResult], None]
Result = TypeVar("Result")


class InferenceEngine:
    """Runs requests on one model. A context manager.

    One thread drives it at a time. A call from another thread meanwhile, or from inside a step (a token program, a
    matcher), raises `EngineBusy` and changes nothing; `AsyncEngine` serves several callers. An exception, Ctrl-C
    included, leaves an engine that works: what `generate` and its like were asked is aborted, other requests continue.
    """

    def __init__(self, config: EngineConfig, *, parts: EngineParts | None = None) -> None:
        self.config = config
        self.parts = assemble(config) if parts is None else parts
        """What was built from the configuration; tests bring their own."""
        self._books = Books(self._new_core())
        self.calls = Calls(self._books)
        """Whose turn it is, and what ends with a call."""
        self.control = Control(self._books, self.calls, self.parts.runner, self.parts.kv, self.parts.weights)
        """Pauses, sleep, updates of the weights."""
        self._limits = Limits(
            vocab_size=self.parts.vocab_size,
            max_model_len=self.parts.max_model_len,
            num_blocks=self.parts.kv.num_blocks,
            block_size=self.parts.kv.block_size,
            hidden_size=self.parts.checkpoint.config.hidden_size if self.parts.checkpoint else 0,
            eos_token_ids=self.parts.eos_token_ids,
            caches_by_prompt=self.parts.caches_by_prompt,
            lineage=config.lineage or secrets.token_hex(8),
        )
        self._next_request = 0
        self._next_sequence = 0
        self._group: WeightGroup | None = None

    # ---- asking -----------------------------------------------------------------------------------------------------

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
        """Return the samples of all prompts, prompt-major: the n samples of a prompt stand together, in order.

        One `SamplingParams` serves all prompts, or one for each; `program` serves all samples. Raises `BadRequest`
        before anything runs when any of them is refused. An exception on the way (Ctrl-C) aborts what was asked here
        and passes on.
        """
        count = num_samples_per_prompt if num_samples is None else num_samples
        each = params_for_each(prompts, sampling_params)
        requests = [
            EngineRequest(prompt=prompt, params=params, num_samples=count, program=program)
            for prompt, params in zip(prompts, each, strict=True)
        ]
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
        """Go on with samples that were aborted, exactly as if they had not been; others come back as they are.

        So do those that ended as "abort" for a reason of their own (`stop_reason`: a program that failed). Parameters
        and program must be the ones they were begun with; for a salt or a matcher use `add_request(partial=…)`. Raises
        as `generate` does.
        """
        each = params_for_each([sample.prompt_tokens for sample in samples], sampling_params)
        open_ones = [i for i, s in enumerate(samples) if s.finish_reason == "abort" and s.stop_reason is None]
        requests = [
            EngineRequest(prompt=samples[i].prompt_tokens, params=each[i], program=program, partial=samples[i])
            for i in open_ones
        ]
        admitted = self._admit_all(requests, [f"samples[{i}]: " for i in open_ones])
        completed = dict(zip(open_ones, self._finish_all(admitted, progress), strict=True))
        return [completed.get(i, sample) for i, sample in enumerate(samples)]

    def stream(
        self, prompt: Seq[int], sampling_params: SamplingParams | None = None, num_samples_per_prompt: int = 1
    ) -> DeltaStream:
        """Yield what each step adds to the samples of one prompt; closing the iterator aborts them.

        The request is checked and queued at the call, not at the first `next`.
        """
        return self.deltas(self.add_request(prompt, sampling_params, num_samples_per_prompt, claim=True))

    def deltas(self, request_id: int) -> DeltaStream:
        """Yield what each step adds to a request that was added with `claim`; closing the iterator aborts it.

        A `next` that raises `EngineBusy` changes nothing; any other exception ends the request. Raises `BadRequest` for
        a request that was not claimed, or was collected.
        """
        if not self._books.ledger.is_claimed(request_id):
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
        """Queue a request and return its id; its samples come back from `step`. Raises `BadRequest`.

        `partial` is an unfinished sample of this prompt ("abort" or "length"): the new one goes on where it ended, with
        its seed and sample index, exactly as if it had never been interrupted, and comes back whole; `max_tokens` and
        the rest count from the prompt. With `beginning` the prompt ends with an answer's first tokens. With `claim` the
        samples wait for `collect`, whatever runs the steps; with `for_call` they also end with the call that runs now
        (see `exclusively`), however that ends.
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
        self._enqueue(sequences, claimed=claim or for_call, is_owned=for_call)
        return sequences[0].request_id

    @as_call
    def wait_for_any(self, request_ids: Iterable[int], progress: Progress | None = None) -> list[int]:
        """Run steps until one of these requests has ended; return all that have. Raises `EnginePaused`."""
        ids = list(request_ids)
        ended = self._books.ledger.ended_among(ids)
        while ids and not ended:
            num_ended = self._books.ledger.num_ended
            self.control.require_running()
            result = self.tick()
            if progress is not None:
                progress(result)
            if self._books.ledger.num_ended > num_ended:  # most steps end nothing, and the ids may be many
                ended = self._books.ledger.ended_among(ids)
        return ended

    @as_call
    def collect(self, request_id: int) -> list[TrainingSample]:
        """Return a claimed request's samples, in order, and forget it; what has not ended is aborted."""
        return self.calls.collect(request_id)

    @as_call
    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return what came for these claimed requests since the last time, those of one request in order."""
        return self._books.change(lambda: self._books.ledger.take_deltas(request_ids))

    @as_call
    def score(
        self, token_ids: Seq[int] | Seq[Seq[int]], start: int | Seq[int] = 0, *, temperature: float = 1.0
    ) -> list[float] | list[list[float]]:
        """Return the log-probability of each token from position max(start, 1) on, teacher-forced.

        One list of ids gives one list, a list of them a list for each, with one `start` for all or one for each. Cached
        prefixes before `start` are used. `temperature` divides the logits first (0 counts as 1). Raises `BadRequest`,
        `ValueError` when the logits are no numbers, and `EnginePaused`.
        """
        texts, single = texts_of(token_ids)
        starts = score_starts(start, len(texts))
        params = SamplingParams(temperature=temperature, max_tokens=0, prompt_logprobs=0, logprobs_mode="tempered")
        requests = [
            EngineRequest(prompt=ids, params=params, score_start=begin)
            for ids, begin in zip(texts, starts, strict=True)
        ]
        scores = [list(sample.prompt_logprobs or ()) for sample in self._read_all(requests)]
        return scores[0] if single else scores

    @as_call
    def embed(
        self, token_ids: Seq[int] | Seq[Seq[int]], pooling: Pooling = "mean", *, normalize: bool = False
    ) -> list[float] | list[list[float]]:
        """Return the embedding of each text: its last hidden states after the final norm, pooled, as float32 values.

        "mean" is over all positions, "last" takes the last one's, which can use cached prefixes. One list of ids gives
        one embedding, a list of them one for each. `normalize` makes its length 1. Raises `BadRequest`, `ValueError`
        when hidden states are no numbers, and `EnginePaused`.
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
        """End one request, or several, now; return their unfinished samples, with what they have, as "abort".

        Works for waiting, prefilling and running requests. An unknown or finished id gives nothing.
        """
        deltas = self.end_requests((request_ids,) if isinstance(request_ids, int) else request_ids)
        return tuple(delta.sample for delta in deltas if delta.sample is not None)

    @as_call
    def end_requests(self, request_ids: Iterable[int] | None = None) -> tuple[Delta, ...]:
        """End requests as `abort` does, all of them unless named; return their last deltas: no token, the sample."""
        return self._books.change(lambda: self._books.end(request_ids))

    def abort_all(self) -> tuple[TrainingSample, ...]:
        """End every request now, as `abort` does."""
        return tuple(delta.sample for delta in self.end_requests() if delta.sample is not None)

    # ---- driving ----------------------------------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Whether `step` has anything to do or to give; a paused engine has nothing to do."""
        books = self._books
        if books.is_torn and not books.is_changing:
            self.exclusively(lambda: books.change(_nothing))
        return books.ledger.has_finished or (books.core.has_work() and not self.control.is_halted)

    @as_call
    def step(self) -> list[TrainingSample]:
        """Run one step; return the samples of `add_request`s that ended."""
        if self._books.core.has_work() or not self._books.ledger.has_finished:
            self.tick()
        return self._books.ledger.take_finished()

    @as_call
    def tick(self) -> StepResult:
        """Run one step and return all it did: what `step`, `stream` and `generate` are made of.

        New weights that are ready are installed first; a paused engine does no more than that. A step that fails or is
        interrupted (Ctrl-C) raises, and leaves every request where it was before: the next step computes it again.
        """
        self.control.require_alive()
        self.calls.end_dropped()
        result = self.control.tick()
        self.calls.end_dropped()
        return result

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, run as one call: until it returns, calls from other threads raise `EngineBusy`.

        `work` may call the engine. Requests that it added with `for_call` are aborted and forgotten at its end.
        """
        return self.calls.run(work)

    def flush_cache(self) -> int:
        """Forget all cached prefixes; idle blocks are free at once, held ones when released. Returns how many."""
        return self.control.flush_cache()

    @as_call
    def copy(self, *, kv_cache_bytes: int | None = None) -> InferenceEngine:
        """Return a second engine with a copy of the weights in force: a reference model, or the next policy's tester.

        It has queues, versions, a random lineage and a KV cache of its own (an eighth of this one's, but room for one
        longest sequence, unless `kv_cache_bytes` says otherwise). Raises `BadRequest` for an engine without a model of
        its own.
        """
        self.control.require_alive()
        self.control.require_weights()
        parts = copied_parts(self.parts, self.config, kv_cache_bytes)
        return InferenceEngine(replace(self.config, lineage=None), parts=parts)

    def twin(self, *, kv_cache_bytes: int | None = None) -> InferenceEngine:
        """Return `copy(...)`. Deprecated: the old name of `copy`."""
        warnings.warn("InferenceEngine.twin is now InferenceEngine.copy", DeprecationWarning, stacklevel=2)
        return self.copy(kv_cache_bytes=kv_cache_bytes)

    @as_call
    def shutdown(self) -> None:
        """Abort everything and let go of model and cache; later calls raise `EngineDead`. May be called twice."""
        self.end_requests()
        self.control.refuse_work()  # before anything that can be interrupted or fail
        if self.parts.weights is not None:
            self.parts.weights.cancel(wait=_LAST_PIECE_S)
        if self._group is not None:
            self._group.close()
        self.control.close()
        self.parts = replace(self.parts, runner=ClosedRunner(), executor=None, weights=None)
        self._books.reset(self._new_core())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- control ----------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, blocking: bool = True) -> None:
        """Stop running steps. Requests can still be added; they wait. Pausing a paused engine again is allowed.

        "keep" freezes everything where it is; "wait" first runs to its end what has begun; "abort" ends all requests
        now (their samples come from `step`, or to whoever waits for them). `clear_cache` gives all K/V back: what goes
        on later computes its own again. With `blocking=False`, "wait" returns at once: whoever drives the engine goes
        on with `tick`, which starts nothing new and pauses when what had begun has ended (`is_pausing` until then).
        Raises `ValueError` for another mode, `EnginePaused` when it sleeps.
        """
        self.control.pause(mode, clear_cache=clear_cache, blocking=blocking)

    def cancel_pause(self) -> bool:
        """Call off a `pause("wait", blocking=False)` that still waits; whether there was one."""
        return self.control.cancel_pause()

    def resume(self) -> None:
        """Go on after `pause`, or call it off. Resuming an engine that runs is allowed."""
        self.control.resume()

    @property
    def limits(self) -> Limits:
        """What a request must fit into: whoever checks requests before they are queued asks here."""
        return self._limits

    @property
    def lineage(self) -> str:
        """Whose weight versions this engine counts: `EngineConfig.lineage`, or a random name of its own."""
        return self._limits.lineage or ""

    @property
    def is_alive(self) -> bool:
        """Whether it takes work: it was not shut down. The same in every thread, also while a step runs."""
        return self.control.is_alive

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self.control.is_paused

    @property
    def is_pausing(self) -> bool:
        """Whether the engine runs to their end what has begun, and will be paused then."""
        return self.control.is_pausing

    @property
    def is_on_cuda(self) -> bool:
        """Whether it computes on a GPU."""
        return self.parts.is_on_cuda

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` holds the engine."""
        return self.control.is_asleep

    @property
    def is_halted(self) -> bool:
        """Whether no step may run before somebody resumes or wakes it, or brings weights."""
        return self.control.is_halted

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to compute with; `sleep(discard_weights=True)` leaves none."""
        return self.control.has_weights

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Give the memory of the KV cache back; requests stay and compute their K/V again after `wake`.

        On CUDA the weights move to main memory; on a CPU they stay. With `discard_weights` they are dropped, and
        nothing runs before `update_weights` has brought all of them again. Sleeping twice is allowed.
        """
        self.control.sleep(discard_weights=discard_weights)

    def wake(self) -> None:
        """Take the memory that `sleep` gave back. Waking an engine that is awake is allowed."""
        self.control.wake()

    # ---- weights ----------------------------------------------------------------------------------------------------

    @as_call
    def update_weights(
        self,
        weights: NamedWeights | str | Path,
        *,
        blocking: bool = False,
        on_running: OnRunning | None = None,
        version: WeightLabel | None = None,
        partial: bool = False,
        allow_nonfinite: bool = False,
        checksum: str | None = None,
        timeout: float | None = None,
        on_gathered: Callable[[], None] | None = None,
    ) -> int:
        """Replace the weights between two steps; return the version that these will be.

        `weights` are (Hugging Face name, tensor) pairs or a state dict, `weights_in(directory)` (or just the path of
        the directory), or `WeightGroup.receive()`. All are gathered and checked beside the old ones, which serve on
        when anything is wrong. `blocking=True` gathers here, raises `WeightError` when they cannot be used, and
        installs them before it returns. Otherwise a thread gathers while steps go on, `tick` installs, and the tensors
        must not change until then; `finish_update` waits for it and raises what went wrong.

        `on_running` says what happens to requests that have begun: "keep" their K/V and go on (the default when not
        blocking), "recompute" their K/V (the default when blocking), "abort" them, or "wait" for their end first.
        `version` is the trainer's own name for these weights, a string or an integer. With `partial`, tensors that are
        not named keep their values; `allow_nonfinite` lets NaN in; `checksum` is what `weights_checksum` must give.
        An update that is not gathered after `timeout` seconds is given up (not for `blocking`, which waits for its
        source). `on_gathered` is called from the thread at its end, however it ended: the next `tick` installs then.
        Raises `UpdateBusy` while another update is under way, `BadRequest` naming a wrong argument.
        """
        self.control.require_alive()
        try:
            check_bool("blocking", blocking)
            rules = UpdateRules(partial=partial, allow_nonfinite=allow_nonfinite, checksum=checksum)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        update = WeightUpdate(
            weights=weights_in(weights) if isinstance(weights, str | Path) else weights,
            rules=rules,
            label=version,
            on_running=("recompute" if blocking else "keep") if on_running is None else on_running,
            timeout=timeout,
            on_gathered=on_gathered,
        )
        return self.control.install_update(update) if blocking else self.control.start_update(update)

    def finish_update(self, timeout: float | None = None) -> int:
        """Wait until the update under way is gathered, install it, and return the version in force.

        Runs what has begun to its end first when the update was asked to "wait". Raises the `WeightError` of an update
        that failed, also when a `tick` has seen it before, and `TimeoutError` after `timeout` seconds.
        """
        return self.control.finish_update(timeout)

    def cancel_update(self) -> bool:
        """Forget an update that is not installed yet; whether there was one."""
        return self.control.cancel_update()

    def label_weights(self, label: WeightLabel, *, are_next: bool = False) -> None:
        """Give the weights in force a trainer's name, or, with `are_next`, those of the update under way.

        Raises `BadRequest` for what is no name, and when no update is under way.
        """
        self.control.label_weights(label, are_next=are_next)

    def expect_checksum(self, checksum: str) -> None:
        """Say what `weights_checksum` must give for the update under way, before its source has ended.

        Raises `BadRequest` when no update is under way.
        """
        self.control.expect_checksum(checksum)

    def get_weight_version(self) -> int:
        """Return how many times weights were installed since the start."""
        return self.weight_info().version

    def weight_info(self) -> WeightInfo:
        """Return the version in force, its label, and where an update stands."""
        return self.control.weight_info()

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names under which weights may come, and the shapes that they have; from whatever thread."""
        return self.control.weight_shapes()

    def weights_dtype(self) -> str:
        """Return the precision that the weights in force are kept in, such as float32."""
        return self.control.weights_dtype()

    def weights_checksum(self) -> str:
        """Return `weights_checksum` of the weights in force: a trainer's own tells whether they arrived whole."""
        return self.control.weights_checksum()

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
        """Join a trainer's process group (rank 0 is the trainer); `update_weights(group.receive())` then takes from it.

        Gloo on a CPU and NCCL on CUDA, unless `backend` names one. Waits for the others, `timeout` seconds at most,
        which also bounds every broadcast. The engine closes the group when it joins another, and at its end.
        """
        self.control.require_alive()
        if self._group is not None:
            self._group.close()
        backend = backend or ("nccl" if self.parts.is_on_cuda else "gloo")
        self._group = WeightGroup(address, port, rank=rank, world_size=world_size, backend=backend, timeout=timeout)
        return self._group

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _admit_all(self, requests: Seq[EngineRequest], names: Seq[str] | None = None) -> list[list[Sequence]]:
        """Return the sequences of every request, or raise `BadRequest`; each of `names` begins that request's text."""
        self.control.require_alive()
        admitted: list[list[Sequence]] = []
        next_sequence = self._next_sequence
        for index, request in enumerate(requests):
            try:
                admitted.append(self._admit(request, self._next_request + index, next_sequence))
            except BadRequest as error:
                if names is None:
                    raise
                raise BadRequest(f"{names[index]}{error}") from None
            next_sequence += len(admitted[-1])
        return admitted

    def _admit(self, request: EngineRequest, request_id: int, first_id: int) -> list[Sequence]:
        """Check one request, with a seed and a matcher of its stop strings; return its sequences."""
        if not isinstance(request, EngineRequest):
            raise BadRequest(f"request must be an EngineRequest, got {type(request).__name__}")
        params = request.params
        if not isinstance(params, SamplingParams):
            raise BadRequest(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if request.make_matcher is not None and params.stop:
            raise BadRequest("stop: give stop strings or a matcher, not both")
        if params.stop and self.parts.stop_matcher:
            request = replace(request, make_matcher=self.parts.stop_matcher(tuple(params.stop)))
        return admit(
            request,
            self._limits,
            request_id=request_id,
            first_id=first_id,
            seed=self._seed_of(request, request_id),
            logprobs_mode=self.config.logprobs_mode,
        )

    def _seed_of(self, request: EngineRequest, request_id: int) -> int:
        """The request's own seed, or its partial sample's, or one derived from the engine's, or fresh entropy."""
        if request.params.seed is not None:
            return request.params.seed
        if isinstance(request.partial, TrainingSample) and request.partial.seed is not None:
            return request.partial.seed
        if self.config.seed is not None:
            return derive_seed(self.config.seed, request_id)
        return secrets.randbits(64)

    def _enqueue(self, sequences: list[Sequence], *, claimed: bool, is_owned: bool) -> None:
        """Put a request's sequences at the end of the queue; an owned one ends with the call that runs."""
        request_id = sequences[0].request_id

        def enqueue() -> None:
            self._next_request = request_id + 1
            self._next_sequence += len(sequences)
            if is_owned:
                self.calls.own(request_id)
            self._books.ledger.open(request_id, sequences, claimed=claimed)
            self._books.core.enqueue(sequences)

        self._books.change(enqueue)

    def _finish_all(self, admitted: Seq[list[Sequence]], progress: Progress | None) -> list[TrainingSample]:
        """Queue requests, run until all have ended, return their samples in order."""
        ids = [sequences[0].request_id for sequences in admitted]
        try:
            for sequences in admitted:
                self._enqueue(sequences, claimed=True, is_owned=True)
            for one in ids:  # one after another: the work of a step does not grow with those that wait
                self.wait_for_any((one,), progress)
        finally:
            samples = [sample for one in ids for sample in self.collect(one)]
        return samples

    def _read_all(self, requests: Seq[EngineRequest]) -> list[TrainingSample]:
        """Run requests that score or embed to their end. Raises `ValueError` naming the first that was aborted."""
        samples = self._finish_all(self._admit_all(requests), None)
        for index, sample in enumerate(samples):
            if sample.finish_reason == "abort":
                raise ValueError(f"token_ids[{index}]: {sample.stop_reason or 'the request was aborted'}")
        return samples

    def _next_delta(self, request_id: int) -> Delta | None:
        """Return a claimed request's next delta, after as many steps as that takes; None when it has ended."""
        while True:
            delta = self._books.change(lambda: self._books.ledger.take_delta(request_id))
            if delta is not None or not self._books.ledger.is_live(request_id):
                return delta
            self.control.require_running()
            self.tick()

    def _new_core(self) -> Core:
        """Return empty queues over the parts."""
        limits = SchedulerConfig(
            max_batch_size=self.config.max_batch_size,
            max_tokens_per_batch=self.config.max_tokens_per_batch,
            block_size=self.parts.kv.block_size,
            lookahead=self.parts.lookahead,
            max_draft_tokens=self.config.max_draft_tokens if self.config.speculation == "ngram" else 0,
            weight_tokens=CUDA_WEIGHT_TOKENS if self.parts.is_on_cuda else CPU_WEIGHT_TOKENS,
        )
        speculation = NgramSpeculation(limits.max_draft_tokens) if limits.max_draft_tokens else NoSpeculation()
        return Core(self.parts.runner, self.parts.kv, limits, speculation, vocab_size=self.parts.vocab_size)


def _nothing() -> None:
    """Change nothing: entering a section repairs what was interrupted before."""
