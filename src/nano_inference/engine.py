"""`InferenceEngine`: what callers talk to. It owns requests and who waits for them; `core` owns the step.

Ids in, ids out: the engine knows nothing about text.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from nano_inference.assemble import EngineParts, assemble, twin_parts
from nano_inference.books import Books
from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.core import Core
from nano_inference.delta_stream import DeltaStream
from nano_inference.door import Limits, MatcherFactory, admit, check_update, params_for_each, score_starts, texts_of
from nano_inference.exclusive import Exclusive
from nano_inference.ledger import Ledger
from nano_inference.runner import ClosedRunner
from nano_inference.sampling import derive_seed
from nano_inference.sequence import start_sequences
from nano_inference.speculate import CPU_WEIGHT_TOKENS, CUDA_WEIGHT_TOKENS
from nano_inference.types import (
    FROM_THE_PROMPT,
    PAUSE_MODES,
    BadRequest,
    Beginning,
    Delta,
    EngineBusy,
    EngineDead,
    EnginePaused,
    OnRunning,
    PauseMode,
    Pooling,
    Request,
    SamplingParams,
    StepResult,
    TokenProgram,
    TrainingSample,
    WeightError,
    WeightInfo,
    WeightLabel,
    check_bool,
    unit_vector,
)
from nano_inference.weights.directory import weights_in
from nano_inference.weights.group import WeightGroup
from nano_inference.weights.member import GroupBackend
from nano_inference.weights.staging import NamedWeights, UpdateRules
from nano_inference.weights.sync import WeightSyncManager

_LAST_PIECE_S = 2.0
"""How long `shutdown` waits for a thread that gathers weights: a process that ends while one copies is aborted."""
Progress = Callable[[StepResult], None]

Result = TypeVar("Result")
Given = ParamSpec("Given")

_log = logging.getLogger(__name__)


def _exclusive(
    method: Callable[Concatenate[InferenceEngine, Given], Result],
) -> Callable[Concatenate[InferenceEngine, Given], Result]:
    """Make a method of the engine refuse a second thread while another call runs."""

    @wraps(method)
    def call(self: InferenceEngine, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self.exclusively(lambda: method(self, *args, **kwargs))

    return call


class _Pausing(NamedTuple):
    """A pause that waits for what has begun to end."""

    clear_cache: bool


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
        self._calls = Exclusive(_in_use)
        self._books = self._new_books()
        self._door = Limits(
            vocab_size=self.parts.vocab_size,
            max_model_len=self.parts.max_model_len,
            num_blocks=self.parts.kv.num_blocks,
            block_size=self.parts.kv.block_size,
            hidden_size=self.parts.checkpoint.config.hidden_size if self.parts.checkpoint else 0,
            eos_token_ids=self.parts.eos_token_ids,
            caches_by_prompt=self.parts.caches_by_prompt,
            lineage=config.lineage or secrets.token_hex(8),
        )
        self._owned: set[int] = set()
        """Requests of the call that runs, such as `generate`: they end with it."""
        self._streams: dict[weakref.ref[DeltaStream], int] = {}
        """What `deltas` gave out -> its request, until it is garbage collected."""
        self._dead_streams: set[weakref.ref[DeltaStream]] = set()
        self._dropped: set[int] = set()
        """Requests of streams that were closed while they could not be aborted, such as inside a step."""
        self._next_request = 0
        self._next_sequence = 0
        self._error: BaseException | None = None
        self._is_paused = False
        self._pausing: _Pausing | None = None
        self._is_asleep = False
        self._is_memory_torn = False
        """Whether `sleep` or `wake` was left half done."""
        self._installing: int | None = None
        """The version that is being installed; None between two installations."""
        self._on_running: OnRunning = "keep"
        """What the update under way does to requests that have begun."""
        self._failed_update: WeightError | None = None
        """What went wrong with an update that nobody waited for yet."""
        self._group: WeightGroup | None = None

    @property
    def _core(self) -> Core:
        return self._books.core

    @property
    def _ledger(self) -> Ledger:
        return self._books.ledger

    # ---- asking -----------------------------------------------------------------------------------------------------

    @_exclusive
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
            self._admit(prompt, params, count, offset=i, program=program)
            for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]
        return self._finish_all(requests, progress)

    @_exclusive
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
        requests: list[Request] = []
        for i in open_ones:
            sample, offset = samples[i], len(requests)
            try:
                one = self._admit(sample.prompt_tokens, each[i], 1, offset=offset, program=program, partial=sample)
            except BadRequest as error:
                raise BadRequest(f"samples[{i}]: {error}") from None
            requests.append(one)
        completed = dict(zip(open_ones, self._finish_all(requests, progress), strict=True))
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
        if not self._ledger.is_claimed(request_id):
            raise BadRequest(f"request_id: {request_id} was not added with claim, or was collected")
        take = partial(self.exclusively, partial(self._next_delta, request_id))
        stream = DeltaStream(take, partial(self._drop, request_id))
        self._streams[weakref.ref(stream, self._dead_streams.add)] = request_id
        return stream

    @_exclusive
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
        request = self._admit(
            prompt,
            sampling_params or SamplingParams(),
            num_samples,
            salt=salt,
            make_matcher=make_matcher,
            program=program,
            partial=partial,
            beginning=beginning,
        )
        self._enqueue(request, claimed=claim or for_call, is_owned=for_call)
        return request.id

    @_exclusive
    def wait_for_any(self, request_ids: Iterable[int], progress: Progress | None = None) -> list[int]:
        """Run steps until one of these requests has ended; return all that have. Raises `EnginePaused`."""
        ids = list(request_ids)
        ended = self._ledger.ended_among(ids)
        while ids and not ended:
            num_ended = self._ledger.num_ended
            self._require_running()
            result = self.tick()
            if progress is not None:
                progress(result)
            if self._ledger.num_ended > num_ended:  # most steps end nothing, and the ids may be many
                ended = self._ledger.ended_among(ids)
        return ended

    @_exclusive
    def collect(self, request_id: int) -> list[TrainingSample]:
        """Return a claimed request's samples, in order, and forget it; what has not ended is aborted."""

        def close() -> list[TrainingSample]:
            self._end((request_id,))
            self._owned.discard(request_id)
            return self._ledger.close(request_id)

        return self._books.change(close)

    @_exclusive
    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return what came for these claimed requests since the last time, those of one request in order."""
        return self._books.change(lambda: self._ledger.take_deltas(request_ids))

    @_exclusive
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
            self._admit(ids, params, 1, offset=i, score_start=begin)
            for i, (ids, begin) in enumerate(zip(texts, starts, strict=True))
        ]
        samples = self._read_all(requests)
        scores = [list(sample.prompt_logprobs or ()) for sample in samples]
        return scores[0] if single else scores

    @_exclusive
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
        samples = self._read_all([self._admit(ids, params, 1, offset=i) for i, ids in enumerate(texts)])
        found = [sample.embedding or () for sample in samples]
        embeddings = [list(unit_vector(one) if normalize else one) for one in found]
        return embeddings[0] if single else embeddings

    def abort(self, request_ids: int | Iterable[int]) -> tuple[TrainingSample, ...]:
        """End one request, or several, now; return their unfinished samples, with what they have, as "abort".

        Works for waiting, prefilling and running requests. An unknown or finished id gives nothing.
        """
        deltas = self.end_requests((request_ids,) if isinstance(request_ids, int) else request_ids)
        return tuple(delta.sample for delta in deltas if delta.sample is not None)

    @_exclusive
    def end_requests(self, request_ids: Iterable[int] | None = None) -> tuple[Delta, ...]:
        """End requests as `abort` does, all of them unless named; return their last deltas: no token, the sample."""
        return self._books.change(lambda: self._end(request_ids))

    def abort_all(self) -> tuple[TrainingSample, ...]:
        """End every request now, as `abort` does."""
        return tuple(delta.sample for delta in self.end_requests() if delta.sample is not None)

    # ---- driving ----------------------------------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Whether `step` has anything to do or to give; a paused engine has nothing to do."""
        if self._books.is_torn and not self._books.is_changing:
            self.exclusively(lambda: self._books.change(_nothing))
        return self._ledger.has_finished or (self._core.has_work() and not self._is_halted())

    @_exclusive
    def step(self) -> list[TrainingSample]:
        """Run one step; return the samples of `add_request`s that ended."""
        if self._core.has_work() or not self._ledger.has_finished:
            self.tick()
        return self._ledger.take_finished()

    @_exclusive
    def tick(self) -> StepResult:
        """Run one step and return all it did: what `step`, `stream` and `generate` are made of.

        New weights that are ready are installed first; a paused engine does no more than that. A step that fails or is
        interrupted (Ctrl-C) raises, and leaves every request where it was before: the next step computes it again.
        """
        self._require_alive()
        self._end_dropped()
        ended = self._install_staged()
        self._pause_when_drained()
        if self._is_halted():
            return self._core.idle_result(ended)
        result = self._core_step(ended, admit_new=not self._is_draining())
        self._pause_when_drained()
        self._end_dropped()
        return result

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, run as one call: until it returns, calls from other threads raise `EngineBusy`.

        `work` may call the engine. Requests that it added with `for_call` are aborted and forgotten at its end.
        """
        if self._calls.is_running_here():
            return work()
        return self._calls.run(lambda: self._as_outermost(work))

    def _as_outermost(self, work: Callable[[], Result]) -> Result:
        """Run a call that no other contains. What an earlier one owned is ended first: its end was interrupted."""
        self._end_owned()
        try:
            return work()
        finally:
            self._end_owned()

    def _end_owned(self) -> None:
        """Abort and forget the requests of a call that is over, and of closed streams."""
        for request_id in tuple(self._owned):
            self.collect(request_id)
        self._end_dropped()

    def _end_dropped(self) -> None:
        """Abort and forget the requests of streams that were closed or garbage collected."""
        if not (self._dead_streams or self._dropped):
            return
        for stream in tuple(self._dead_streams):
            request_id = self._streams.get(stream)
            if request_id is not None:
                self._dropped.add(request_id)
            self._streams.pop(stream, None)
            self._dead_streams.discard(stream)
        for request_id in tuple(self._dropped):
            self.collect(request_id)
            self._dropped.discard(request_id)

    def _drop(self, request_id: int) -> None:
        """End a stream's request: now, or at the next step boundary while a step or another thread's call runs.

        A stream may be closed anywhere, by the garbage collector in any thread.
        """
        self._dropped.add(request_id)
        if self._books.is_changing:
            return
        try:
            self.exclusively(self._end_dropped)
        except EngineBusy:
            _log.debug("request %d is aborted at the end of the step that runs", request_id)

    def _core_step(self, ended: Seq[Delta], *, admit_new: bool) -> StepResult:
        """Let the core run a step, and deliver what it gave; `ended` goes before it in the result."""
        sync = self.parts.weights
        try:
            if sync is not None:
                sync.begin_step()
            result = self._books.change(lambda: self._run_step(admit_new))
        finally:
            if sync is not None:
                sync.end_step()
        return result.after(ended)

    def _run_step(self, admit_new: bool) -> StepResult:
        result = self._core.step(admit_new=admit_new)
        self._books.deliver(result.deltas)
        return result

    @_exclusive
    def flush_cache(self) -> int:
        """Forget all cached prefixes; idle blocks are free at once, held ones when released. Returns how many."""
        return self._books.change(self.parts.kv.flush)

    # ---- control ----------------------------------------------------------------------------------------------------

    @_exclusive
    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, blocking: bool = True) -> None:
        """Stop running steps. Requests can still be added; they wait. Pausing a paused engine again is allowed.

        "keep" freezes everything where it is; "wait" first runs to its end what has begun; "abort" ends all requests
        now (their samples come from `step`, or to whoever waits for them). `clear_cache` gives all K/V back: what goes
        on later computes its own again. With `blocking=False`, "wait" returns at once: whoever drives the engine goes
        on with `tick`, which starts nothing new and pauses when what had begun has ended (`is_pausing` until then).
        Raises `ValueError` for another mode, `EnginePaused` when it sleeps.
        """
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        check_bool("clear_cache", clear_cache)
        check_bool("blocking", blocking)
        self._require_alive()
        if mode == "wait" and not blocking:
            self._begin_pausing(clear_cache)
            return
        if mode == "wait":
            self._drain()
        elif mode == "abort":
            self._abort_for_step()
        self._pausing = None
        self._is_paused = True
        if clear_cache:
            self._forget_kv()

    @_exclusive
    def cancel_pause(self) -> bool:
        """Call off a `pause("wait", blocking=False)` that still waits; whether there was one."""
        was_pausing, self._pausing = self._pausing is not None, None
        return was_pausing

    @_exclusive
    def resume(self) -> None:
        """Go on after `pause`, or call it off. Resuming an engine that runs is allowed."""
        self._require_alive()
        self._pausing = None
        self._is_paused = False

    @property
    def limits(self) -> Limits:
        """What a request must fit into: whoever checks requests before they are queued asks here."""
        return self._door

    @property
    def lineage(self) -> str:
        """Whose weight versions this engine counts: `EngineConfig.lineage`, or a random name of its own."""
        return self._door.lineage or ""

    @property
    def is_alive(self) -> bool:
        """Whether it takes work: it was not shut down. The same in every thread, also while a step runs."""
        return self._error is None

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self._is_paused and self._pausing is None

    @property
    def is_pausing(self) -> bool:
        """Whether the engine runs to their end what has begun, and will be paused then."""
        return self._pausing is not None

    @property
    def is_on_cuda(self) -> bool:
        """Whether it computes on a GPU."""
        return self.parts.is_on_cuda

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` holds the engine."""
        return self._is_asleep

    @property
    def is_halted(self) -> bool:
        """Whether no step may run before somebody resumes or wakes it, or brings weights."""
        return self._is_halted()

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to compute with; `sleep(discard_weights=True)` leaves none."""
        return self._has_weights()

    @_exclusive
    def sleep(self, *, discard_weights: bool = False) -> None:
        """Give the memory of the KV cache back; requests stay and compute their K/V again after `wake`.

        On CUDA the weights move to main memory; on a CPU they stay. With `discard_weights` they are dropped, and
        nothing runs before `update_weights` has brought all of them again. Sleeping twice is allowed.
        """
        check_bool("discard_weights", discard_weights)
        self._require_alive()
        if self._pausing is not None:
            raise EnginePaused("the engine is pausing, and a sleeping one would never end what has begun")
        self._forget_kv()
        self._books.change(lambda: self._free_memory(discard_weights))

    @_exclusive
    def wake(self) -> None:
        """Take the memory that `sleep` gave back. Waking an engine that is awake is allowed."""
        self._require_alive()
        if self._is_asleep:
            self._books.change(self._take_memory)

    def _free_memory(self, discard_weights: bool) -> None:
        """Give the memory of the cache, and perhaps of the weights, back. Interrupted, it is taken again."""
        self._is_memory_torn = True
        self.parts.runner.free_cache()
        if self.parts.weights is not None:
            self.parts.weights.sleep(discard=discard_weights)
        self._is_asleep = True
        self._is_memory_torn = False

    def _take_memory(self) -> None:
        """Take the memory back that `_free_memory` gave. Can be repeated after an interruption."""
        self._is_memory_torn = True
        self.parts.runner.restore_cache()
        if self.parts.weights is not None:
            self.parts.weights.wake()
        self._is_asleep = False
        self._is_memory_torn = False

    # ---- weights ----------------------------------------------------------------------------------------------------

    @_exclusive
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
        sync = self._sync()
        try:
            check_update(blocking, on_running, version, timeout)
            rules = UpdateRules(partial=partial, allow_nonfinite=allow_nonfinite, checksum=checksum)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        named = weights_in(weights) if isinstance(weights, str | Path) else weights
        if blocking:
            sync.stage(named, rules=rules, label=version)
        else:
            sync.start_sync(named, rules=rules, label=version, timeout=timeout, on_gathered=on_gathered)
        self._on_running = on_running or ("recompute" if blocking else "keep")
        self._failed_update = None
        if not blocking:
            return sync.version + 1
        try:
            return self.finish_update()
        except BaseException:
            sync.cancel()  # what was interrupted here must not be installed later
            raise

    @_exclusive
    def finish_update(self, timeout: float | None = None) -> int:
        """Wait until the update under way is gathered, install it, and return the version in force.

        Runs what has begun to its end first when the update was asked to "wait". Raises the `WeightError` of an update
        that failed, also when a `tick` has seen it before, and `TimeoutError` after `timeout` seconds.
        """
        sync = self._sync()
        if sync.wait(timeout) == "staging":
            raise TimeoutError(f"the update is still being gathered after {timeout} seconds")
        if sync.state == "staged" and self._must_wait(sync):
            self._drain()
        self._install_staged()
        if self._failed_update is not None:
            try:
                raise self._failed_update
            finally:
                self._failed_update = None  # and no local variable: its traceback would refer to itself
        return self._core.version

    @_exclusive
    def cancel_update(self) -> bool:
        """Forget an update that is not installed yet; whether there was one."""
        return self._sync().cancel()

    @_exclusive
    def label_weights(self, label: WeightLabel, *, are_next: bool = False) -> None:
        """Give the weights in force a trainer's name, or, with `are_next`, those of the update under way.

        Raises `BadRequest` for what is no name, and when no update is under way.
        """
        sync = self._sync()
        try:
            check_update(False, None, label, None)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if not are_next:
            sync.label = self._core.labels[self._core.version] = label
        elif not sync.label_next(label):
            raise BadRequest("no update is under way that could be named")

    @_exclusive
    def expect_checksum(self, checksum: str) -> None:
        """Say what `weights_checksum` must give for the update under way, before its source has ended.

        Raises `BadRequest` when no update is under way.
        """
        if not self._sync().expect_next(checksum):
            raise BadRequest("no update is under way that could be checked")

    def get_weight_version(self) -> int:
        """Return how many times weights were installed since the start."""
        return self._core.version

    def weight_info(self) -> WeightInfo:
        """Return the version in force, its label, and where an update stands."""
        version = self._core.version
        state = self.parts.weights.state if self.parts.weights is not None else "idle"
        return WeightInfo(version, self._core.labels.get(version), state)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names under which weights may come, and the shapes that they have; from whatever thread."""
        sync = self.parts.weights
        return {} if sync is None else sync.shapes

    def weights_dtype(self) -> str:
        """Return the precision that the weights in force are kept in, such as float32."""
        return self._sync().dtype

    @_exclusive
    def weights_checksum(self) -> str:
        """Return `weights_checksum` of the weights in force: a trainer's own tells whether they arrived whole."""
        return self._sync().checksum()

    @_exclusive
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
        self._require_alive()
        if self._group is not None:
            self._group.close()
        backend = backend or ("nccl" if self.parts.is_on_cuda else "gloo")
        self._group = WeightGroup(address, port, rank=rank, world_size=world_size, backend=backend, timeout=timeout)
        return self._group

    @_exclusive
    def twin(self, *, kv_cache_bytes: int | None = None) -> InferenceEngine:
        """Return a second engine with a copy of the weights in force: a reference model, or the next policy's tester.

        It has queues, versions, a random lineage and a KV cache of its own (an eighth of this one's, but room for one
        longest sequence, unless `kv_cache_bytes` says otherwise). Raises `BadRequest` for an engine without a model of
        its own.
        """
        self._require_alive()
        self._require_weights()
        parts = twin_parts(self.parts, self.config, kv_cache_bytes)
        return InferenceEngine(replace(self.config, lineage=None), parts=parts)

    @_exclusive
    def shutdown(self) -> None:
        """Abort everything and let go of model and cache; later calls raise `EngineDead`. May be called twice."""
        self.end_requests()
        self._error = self._error or EngineDead("the engine was shut down")
        if self.parts.weights is not None:
            self.parts.weights.cancel(wait=_LAST_PIECE_S)
        if self._group is not None:
            self._group.close()
        self.parts = replace(self.parts, runner=ClosedRunner(), executor=None, weights=None)
        self._books = self._new_books()

    def _new_books(self) -> Books:
        """Return empty queues and mailboxes over the parts."""
        repair = weakref.WeakMethod(self._repair)  # a dropped engine's memory is free without a collection

        def repair_rest() -> None:
            method = repair()
            assert method is not None, "the engine's own calls keep it"
            method()

        return Books(self._new_core(), repair_rest)

    def _repair(self) -> None:
        """Repair what an interrupted section may have left besides queues and mailboxes. Can be repeated."""
        self.parts.runner.recover()
        sync = self.parts.weights
        if sync is not None:
            sync.recover()
        if self._is_memory_torn:
            self._take_memory()
        if sync is not None and self._installing is not None:
            if sync.version == self._installing:
                self._books.deliver(self._core.install(sync.version, sync.label, self._on_running))
            self._installing = None

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
        return Core(
            self.parts.runner,
            self.parts.kv,
            limits,
            vocab_size=self.parts.vocab_size,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- the step boundary ------------------------------------------------------------------------------------------

    def _is_halted(self) -> bool:
        """Whether no steps may run now."""
        return self.is_paused or self._is_asleep or not self._has_weights()

    def _require_running(self) -> None:
        """Refuse to wait for what will not come."""
        if self._is_asleep:
            raise EnginePaused("the engine sleeps; call wake() first")
        if self.is_paused:
            raise EnginePaused("the engine is paused; call resume() first")
        if not self._has_weights():
            self._install_staged()
        self._require_weights()

    def _require_weights(self) -> None:
        if not self._has_weights():
            raise EnginePaused("the weights were discarded; call update_weights() and finish_update() first")

    def _has_weights(self) -> bool:
        return self.parts.weights is None or self.parts.weights.has_weights

    def _is_draining(self) -> bool:
        """Whether a pause or an update waits for what has begun to end."""
        sync = self.parts.weights
        return self._pausing is not None or (sync is not None and sync.state == "staged" and self._must_wait(sync))

    def _drain(self) -> None:
        """Run what has begun to its end, and start nothing new; paused or not."""
        while self._core.begun_requests():
            self._require_awake_for_drain()
            self._require_alive()
            self._core_step((), admit_new=False)

    def _begin_pausing(self, clear_cache: bool) -> None:
        """Let `tick` pause when what has begun has ended; at once when there is nothing."""
        self._require_awake_for_drain()
        self._pausing = _Pausing(clear_cache=clear_cache)
        self._pause_when_drained()

    def _pause_when_drained(self) -> None:
        """Pause when that was asked for and everything that had begun has ended."""
        if self._pausing is None or self._core.begun_requests():
            return
        pausing, self._pausing = self._pausing, None
        self._is_paused = True
        if pausing.clear_cache:
            self._forget_kv()

    def _require_awake_for_drain(self) -> None:
        """Refuse to wait for requests that cannot end."""
        if self._core.begun_requests() and (self._is_asleep or not self._has_weights()):
            raise EnginePaused("the engine sleeps, so nothing that has begun can end; call wake() first")

    def _forget_kv(self) -> None:
        """Take back all blocks, and forget what they hold."""

        def forget() -> None:
            self._core.preempt_all()
            self.parts.kv.flush()

        self._books.change(forget)

    def _abort_for_step(self) -> None:
        """End all requests; their samples go to whoever waits for them, or to `step`."""
        self._books.change(lambda: self._end(None, keep_samples=True))

    def _end(self, request_ids: Iterable[int] | None, *, keep_samples: bool = False) -> tuple[Delta, ...]:
        """End requests, all of them for None; return their last deltas. Called inside a section."""
        ids = self._ledger.live_requests() if request_ids is None else tuple(request_ids)
        deltas = tuple(self._core.abort(seq) for one in ids for seq in self._ledger.sequences_of(one))
        self._books.deliver(deltas, keep_samples=keep_samples)
        return deltas

    def _install_staged(self) -> list[Delta]:
        """Install an update that is ready; return the last deltas of the requests that it ended."""
        sync = self.parts.weights
        if sync is None or sync.state in ("idle", "staging") or self._must_wait(sync):
            return []
        return self._books.change(lambda: self._install(sync))

    def _install(self, sync: WeightSyncManager) -> list[Delta]:
        """Install what is staged, in the weights and in the core. Called inside a section."""
        self._installing = sync.version + 1
        try:
            sync.maybe_finish_sync()
        except WeightError as error:
            _log.error("an update was refused, version %d serves on: %s", self._core.version, error)
            self._failed_update, self._installing = error, None
            return []
        ended = self._core.install(sync.version, sync.label, self._on_running)
        self._books.deliver(ended)
        self._installing = None
        return ended

    def _must_wait(self, sync: WeightSyncManager) -> bool:
        """Whether an update waits for requests to end; without weights none can, and none has K/V that matters."""
        is_waiting = self._on_running == "wait" and sync.has_weights and sync.state != "failed"
        return is_waiting and bool(self._core.begun_requests())

    def _sync(self) -> WeightSyncManager:
        """The owner of the weights, when there are any."""
        self._require_alive()
        if self.parts.weights is None:
            raise BadRequest("this engine was made without weights that could be updated")
        return self.parts.weights

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
        partial: TrainingSample | None = None,
        beginning: Beginning = FROM_THE_PROMPT,
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
            seed=self._seed_of(params, partial, request_id),
            num_samples=num_samples,
            salt=salt,
            score_start=score_start,
            make_matcher=make_matcher,
            program=program,
            partial=partial,
            beginning=beginning,
        )

    def _seed_of(self, params: SamplingParams, partial: TrainingSample | None, request_id: int) -> int:
        """The request's own seed, or its partial sample's, or one derived from the engine's, or fresh entropy."""
        if params.seed is not None:
            return params.seed
        if isinstance(partial, TrainingSample) and partial.seed is not None:
            return partial.seed
        if self.config.seed is not None:
            return derive_seed(self.config.seed, request_id)
        return secrets.randbits(64)

    def _enqueue(self, request: Request, *, claimed: bool, is_owned: bool) -> None:
        """Put a request's sequences at the end of the queue; an owned one ends with the call that runs."""
        try:
            sequences = start_sequences(
                request, self._next_sequence, self.parts.eos_token_ids, self.config.logprobs_mode
            )
        except ValueError as error:
            raise error if isinstance(error, BadRequest) else BadRequest(str(error)) from error

        def enqueue() -> None:
            self._next_request = request.id + 1
            self._next_sequence += len(sequences)
            if is_owned:
                self._owned.add(request.id)
            self._ledger.open(request.id, sequences, claimed=claimed)
            self._core.enqueue(sequences)

        self._books.change(enqueue)

    def _finish_all(self, requests: Seq[Request], progress: Progress | None) -> list[TrainingSample]:
        """Queue requests, run until all have ended, return their samples in order."""
        try:
            for request in requests:
                self._enqueue(request, claimed=True, is_owned=True)
            for request in requests:  # one after another: the work of a step does not grow with those that wait
                self.wait_for_any((request.id,), progress)
        finally:
            samples = [sample for request in requests for sample in self.collect(request.id)]
        return samples

    def _read_all(self, requests: Seq[Request]) -> list[TrainingSample]:
        """Run requests that score or embed to their end. Raises `ValueError` naming the first that was aborted."""
        samples = self._finish_all(requests, None)
        for index, sample in enumerate(samples):
            if sample.finish_reason == "abort":
                raise ValueError(f"token_ids[{index}]: {sample.stop_reason or 'the request was aborted'}")
        return samples

    def _next_delta(self, request_id: int) -> Delta | None:
        """Return a claimed request's next delta, after as many steps as that takes; None when it has ended."""
        while True:
            delta = self._books.change(lambda: self._ledger.take_delta(request_id))
            if delta is not None or not self._ledger.is_live(request_id):
                return delta
            self._require_running()
            self.tick()

    def _require_alive(self) -> None:
        if self._error is not None:
            raise EngineDead(f"the engine takes no more work: {self._error}") from self._error


def _in_use() -> EngineBusy:
    return EngineBusy(
        "another thread is using the engine: one thread drives it at a time; AsyncEngine serves several callers"
    )


def _nothing() -> None:
    """Change nothing: entering a section repairs what was interrupted before."""
