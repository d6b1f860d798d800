"""`InferenceEngine`: from token ids to token ids. One class over `core`, which has the queues, and an executor."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from nano_inference.build import EngineParts, assemble, chat_params, copied_parts
from nano_inference.config import EngineConfig, config_of
from nano_inference.core.adapters import Adapters
from nano_inference.core.admission import Admission, Limits, requests_for, scoring_requests, texts_of
from nano_inference.core.cache import KVManager
from nano_inference.core.core import Core
from nano_inference.core.driving import Driving
from nano_inference.core.flights import Flight, Launcher
from nano_inference.core.mailboxes import DeltaStream, Mailboxes
from nano_inference.executors.protocol import Executor
from nano_inference.models.names import WeightShapes
from nano_inference.support.checks import check_bool, unit_vector
from nano_inference.text.dialogue import ANSWER, Rendering, text_of
from nano_inference.text.dialogue import require as require_dialogue
from nano_inference.text.kinds import Message, Tokenizer
from nano_inference.types import (
    FROM_THE_PROMPT,
    PAUSE_MODES,
    AdapterInfo,
    BadRequest,
    Beginning,
    Delta,
    EngineBusy,
    EngineDead,
    EnginePaused,
    EngineRequest,
    MatcherFactory,
    OnAdapter,
    OnRunning,
    PauseMode,
    Pooling,
    SamplingParams,
    SequenceView,
    StepResult,
    TokenProgram,
    TrainingSample,
    UpdateState,
    WeightError,
    WeightInfo,
    WeightLabel,
)
from nano_inference.weights.adapters import StagedAdapter, drop_unused, install_adapter, room_for, stage_adapter
from nano_inference.weights.group import WeightGroup
from nano_inference.weights.member import GroupBackend
from nano_inference.weights.sync import WeightSyncManager
from nano_inference.weights.updates import AdapterLoad, NamedWeights, WeightUpdate, check_weight_label

_LAST_PIECE_S = 2.0
"""Most seconds `shutdown` waits for a thread that gathers weights: Python aborts if one copies at exit."""
Progress = Callable[[StepResult], None]
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class InferenceEngine:
    """Runs requests on one model. A context manager.

    One thread drives it at a time: other calls meanwhile raise `EngineBusy`, also from inside a step; `AsyncEngine`
    serves several callers. After Ctrl-C the engine still works: the requests of the interrupted call are aborted,
    others continue. An exception while a step is planned or committed is a bug, and ends the engine.
    """

    def __init__(self, config: EngineConfig | str | Path, *, parts: EngineParts | None = None) -> None:
        """`config` may be a `model_path`; `parts` replaces what it would build, in tests and copies."""
        self.config = config = config_of(config)
        self.parts = parts = assemble(config) if parts is None else parts
        self._admission = Admission(config, parts.limits(config.lineage or secrets.token_hex(8)), parts.stop_matcher)
        self._empty_queues()
        self._driving = Driving()
        self._group: WeightGroup | None = None
        self._end: BaseException | None = None  # why the engine accepts no more work
        self._is_paused = False
        self._pause_clears: bool | None = None  # whether the pause that waits forgets all K/V; None if none waits
        self._is_asleep = False
        self._flight: Flight | None = None  # the window that runs between two ticks
        self._launcher = Launcher(parts.launch)
        self._failed_update: WeightError | None = None  # error of an update that `finish_update` has not raised yet

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        num_samples: int | None = None,
        program: TokenProgram | None = None,
        adapter: str | None = None,
        progress: Progress | None = None,
        with_text: bool = False,
    ) -> list[TrainingSample]:
        """Return n samples of each prompt, those of the first prompt first. `sampling_params`: for all, or a list.

        `with_text` sets `TrainingSample.text`. Raises `BadRequest` before anything runs if a request is invalid.
        """
        check_bool("with_text", with_text)
        tokenizer = self.tokenizer if with_text else None
        count = num_samples_per_prompt if num_samples is None else num_samples
        requests = requests_for(prompts, sampling_params, count, program, adapter)
        with self._driving:
            samples = self._run_all(requests, progress)
        if tokenizer is None:
            return samples
        stops = [tuple(request.params.stop) for request in requests for _ in range(count)]
        texts = [text_of(tokenizer, None, *pair, raw=True) for pair in zip(samples, stops, strict=True)]
        return [replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)]

    def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        rendering: Rendering = ANSWER,
        adapter: str | None = None,
        progress: Progress | None = None,
    ) -> TrainingSample:
        """Return the answer to messages such as `{"role": "user", "content": "Hello"}`; the sample has `text`.

        Without `sampling_params` the model's defaults for chats apply. `rendering` has tools and template variables.
        Raises as `generate` does, and `BadRequest` for a model without a chat template.
        """
        dialogue = require_dialogue(self.parts.load_dialogue())
        params = sampling_params or chat_params(self.parts, self.config)
        prompt = dialogue.encode(messages, rendering)
        (sample,) = self.generate([prompt], params, program=dialogue.tool, adapter=adapter, progress=progress)
        return replace(sample, text=text_of(self.tokenizer, dialogue.tool, sample, tuple(params.stop), raw=False))

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
        `add_request(partial=…)`. Each continues with the current version of its adapter. Raises as `generate` does.
        """
        requests = requests_for([sample.prompt_tokens for sample in samples], sampling_params, program=program)
        open_ones = [i for i, s in enumerate(samples) if s.finish_reason == "abort" and s.stop_reason is None]
        requests = [replace(requests[i], partial=samples[i], adapter=samples[i].adapter) for i in open_ones]
        with self._driving:
            found = self._run_all(requests, progress, [f"samples[{i}]" for i in open_ones])
        completed = dict(zip(open_ones, found, strict=True))
        return [completed.get(i, sample) for i, sample in enumerate(samples)]

    def stream(
        self,
        prompt: Seq[int],
        sampling_params: SamplingParams | None = None,
        num_samples_per_prompt: int = 1,
        *,
        adapter: str | None = None,
    ) -> DeltaStream:
        """Queue one prompt and return an iterator of its deltas; closing the iterator aborts the samples."""
        params = sampling_params or SamplingParams()
        request = EngineRequest(prompt=prompt, params=params, num_samples=num_samples_per_prompt, adapter=adapter)
        request = replace(request, is_streamed=True)
        with self._driving:
            self._require_alive()
            (request_id,) = self._mail.add([request], claimed=True, is_owned=False)
            return self.deltas(request_id)

    def deltas(self, request_id: int) -> DeltaStream:
        """Return an iterator of the deltas of a claimed request, see `DeltaStream`; closing it aborts the request.

        Raises `BadRequest` if the request was not added with `claim`, or was collected.
        """
        if not self._mail.is_claimed(request_id):
            raise BadRequest("request_id", f"{request_id} was not added with claim, or was collected")
        return self._mail.stream(request_id, bound(self._next_delta, request_id), self._end_streams)

    def add_request(
        self,
        prompt: Seq[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        salt: str = "",
        make_matcher: MatcherFactory | None = None,
        program: TokenProgram | None = None,
        adapter: str | None = None,
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
            adapter=adapter,
            partial=partial,
            beginning=beginning,
        )
        return self.add(request, claim=claim, for_call=for_call)

    def add(self, request: EngineRequest, *, claim: bool = False, for_call: bool = False) -> int:
        """Queue a request and return its id, as `add_request` does. Raises `BadRequest`."""
        with self._driving:
            self._require_alive()
            (request_id,) = self._mail.add([request], claimed=claim, is_owned=for_call)
            if not self._driving.is_nested:
                self._mail.end_owned()
            return request_id

    def wait_for_any(self, request_ids: Iterable[int], progress: Progress | None = None) -> list[int]:
        """Run steps until one of these requests has ended; return all that have. Raises `EnginePaused`."""
        with self._driving:
            return self._wait_for_any(list(request_ids), progress)

    def collect(self, request_id: int) -> list[TrainingSample]:
        """Abort and forget a request that is claimed or a call's; return its samples in order."""
        with self._driving:
            return self._mail.collect(request_id)

    def take_deltas(self, request_ids: Container[int]) -> list[Delta]:
        """Return the new deltas of these claimed requests; those of one request are in order."""
        with self._driving:
            return self._mail.take_deltas(request_ids)

    def score(
        self,
        token_ids: Seq[int] | Seq[Seq[int]],
        start: int | Seq[int] = 0,
        *,
        temperature: float = 1.0,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        adapter: str | None = None,
    ) -> list[float] | list[list[float]]:
        """Return the log-probability of each token from position max(start, 1) on, given the tokens before it.

        Takes one text or a list, and one `start` or one for each. With a `start` above 0, the tokens from there on are
        an answer. `params` are those that it was sampled with: penalties, bias, `min_tokens` and truncation are
        repeated from the ids, in their `logprobs_mode`, and the values are the bits of `TrainingSample.logprobs` where
        an executor's rows do not depend on the batch. A grammar or a token program is not repeated. Without `params`,
        logits are divided by `temperature` alone (0 counts as 1).
        Raises `BadRequest`, `ValueError` if a log-probability is not finite, and `EnginePaused`.
        """
        texts, single = texts_of(token_ids)
        requests = scoring_requests(texts, start, temperature, params, adapter)
        scores = [list(sample.prompt_logprobs or ()) for sample in self._read_all(requests)]
        return scores[0] if single else scores

    def embed(
        self,
        token_ids: Seq[int] | Seq[Seq[int]],
        pooling: Pooling = "mean",
        *,
        normalize: bool = False,
        adapter: str | None = None,
    ) -> list[float] | list[list[float]]:
        """Return the embedding of each text: pooled last hidden states after the final norm, float32 values.

        "mean" averages all positions; "last" takes the last one, and can use cached prefixes. Raises as `score` does.
        """
        texts, single = texts_of(token_ids)
        check_bool("normalize", normalize)
        if pooling is None:
            raise BadRequest("pooling", "must be one of mean, last, got None")
        params = SamplingParams(max_tokens=0, pooling=pooling)
        samples = self._read_all([EngineRequest(prompt=ids, params=params, adapter=adapter) for ids in texts])
        found = [sample.embedding or () for sample in samples]
        embeddings = [list(unit_vector(one) if normalize else one) for one in found]
        return embeddings[0] if single else embeddings

    def abort(self, request_ids: int | Iterable[int]) -> tuple[TrainingSample, ...]:
        """End one or several requests now; return their unfinished samples. Ignores ended and unknown ids."""
        return _samples_in(self.end_requests((request_ids,) if isinstance(request_ids, int) else request_ids))

    def abort_all(self) -> tuple[TrainingSample, ...]:
        """End every request now, as `abort` does."""
        return _samples_in(self.end_requests())

    def end_requests(self, request_ids: Iterable[int] | None = None) -> tuple[Delta, ...]:
        """End requests now, all of them for None; return their last deltas."""
        with self._driving:
            return self._mail.abort(request_ids)

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, which may call the engine, while calls from other threads raise `EngineBusy`.

        Requests that it adds with `for_call` are aborted and forgotten when it ends.
        """
        with self._driving:
            try:
                with self._driving.callers_window:
                    return work()
            finally:
                if not self._driving.is_nested and self._end is None:
                    self._mail.end_owned()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Return whether `step` has work to do or samples to return; a paused engine has no work."""
        return self._mail.has_finished or (self._core.has_work() and not self.is_halted)

    def step(self) -> list[TrainingSample]:
        """Run one step; return the finished samples of requests that are neither claimed nor a call's."""
        with self._driving:
            if self._core.has_work() or not self._mail.has_finished:
                self._tick(reads_all=False)
            with self._driving.window:  # Ctrl-C waits no longer: after the next line it would lose samples
                pass
            return self._mail.take_finished()

    def tick(self) -> StepResult:
        """Install staged weights, run one step unless the engine is paused, and return everything it did.

        If the model's run fails or is interrupted (Ctrl-C), the next step computes the same rows again.
        """
        with self._driving:
            return self._tick()

    def _tick(self, *, reads_all: bool = True) -> StepResult:
        """Run `tick`; without `reads_all`, return no deltas of requests that are not claimed."""
        self._require_alive()
        self._mail.end_streams()
        if self._flight is not None and not self._core.current(self._flight.step).rows:
            self._land()
        # A window in flight is committed first, under its own weights.
        ended = self._install_staged() if self._flight is None or self.is_halted else []
        self._complete_pause()
        if self.is_halted:
            return self._core.result(ended)
        admit_new = not (self.is_pausing or self._is_update_waiting())
        result = self._step(admit_new=admit_new, is_read=None if reads_all else self._mail.is_claimed)
        if self._flight is None:
            drop_unused(self._core, self.parts.runner)
        self._complete_pause()
        self._mail.end_streams()
        return result.after(ended)

    def _step(self, *, admit_new: bool, is_read: Callable[[int], bool] | None) -> StepResult:
        """Plan a step, run it, commit it, deliver its deltas. Only the run can be interrupted, and is then repeated.

        If the runner can launch windows, the next one is launched before this one's results are read and committed.
        An exception that leaves queues and cache half changed ends the engine: it is a bug, never Ctrl-C.
        """
        weights, runner = self.parts.weights, self.parts.runner
        if weights is not None:
            weights.begin_step()  # an update that is gathered takes turns with steps
        flight, self._flight = self._flight, None
        collect = following = None
        is_changing = True
        try:
            is_urgent = weights is not None and weights.takes_turns
            if flight is None:
                step = self._core.plan_and_apply(admit_new=admit_new, is_urgent=is_urgent)
            else:
                step = self._core.current(flight.step)
            is_changing = False
            try:
                with self._driving.window:
                    collect = self._launcher.start(step) if flight is None else flight.collect
                    if collect is None:
                        results = runner.run(step.rows, step.copies, step.fresh) if step.rows else {}
                if collect is not None:
                    is_changing = True
                    may_overlap = (
                        admit_new
                        and not is_urgent
                        and (weights is None or weights.is_held or weights.state in ("idle", "staging"))
                    )
                    ahead = self._launcher.plan_next(self._core, step, may_overlap=may_overlap)
                    is_changing = False
                    with self._driving.window:
                        following = self._launcher.start_next(ahead)
                        results = collect()
            except MemoryError as error:
                if collect is not None:  # what the device does after it is not known
                    runner.recover()
                    following = None
                is_changing = True
                result = self._core.free_memory(step, error)
            except BaseException:
                is_changing = True
                runner.recover()
                self._core.preempt(step)
                is_changing = False
                raise
            else:
                is_changing = True
                result = self._core.commit(step, results, is_read)
            self._flight = following
            self._mail.deliver(result.deltas)
            return result
        except BaseException as error:
            self._end = self._end or (error if is_changing else None)
            raise
        finally:
            if weights is not None:
                weights.end_step()

    def _land(self) -> None:
        """Wait for the window in flight, and drop its tokens: a later step samples them again."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            with self._driving.window:
                flight.collect()
        except BaseException:
            self.parts.runner.recover()
            raise

    @property
    def overlaps(self) -> Mapping[str, int]:
        """Windows that ran while the host committed the one before ("ahead"); for others, what ended the overlap."""
        return dict(self._launcher.counts)

    def _drain(self) -> None:
        """Run started requests to their end and start no others, also while paused."""
        self._mail.end_streams()
        while self._core.started_requests():
            self._require_awake_for_drain()
            self._step(admit_new=False, is_read=self._mail.is_claimed)

    # ---- running requests to their end ------------------------------------------------------------------------------

    def _run_all(
        self, requests: Seq[EngineRequest], progress: Progress | None, prefixes: Seq[str] = ()
    ) -> list[TrainingSample]:
        """Queue requests, run steps until all have ended, return their samples in order."""
        self._require_alive()
        ids = self._mail.add(requests, claimed=False, is_owned=True, prefixes=prefixes)
        samples: list[TrainingSample] = []
        try:
            for one in ids:  # one by one: the cost of a step must not grow with the number of ids
                self._wait_for_any([one], progress)
        finally:
            if self._end is None:  # the queues of a dead engine may be half changed
                for one in ids:
                    samples += self._mail.collect(one)
                if not self._driving.is_nested:
                    self._mail.end_owned()  # what a progress callback added with `for_call`
        return samples

    def _wait_for_any(self, ids: list[int], progress: Progress | None) -> list[int]:
        ended = self._mail.ended_among(ids)
        while ids and not ended:
            num_ended = self._mail.num_ended
            self._require_running()
            result = self._tick(reads_all=progress is not None)
            if progress is not None:
                with self._driving.callers_window:
                    progress(result)
            if self._mail.num_ended > num_ended:  # most steps end no request, and there may be many ids
                ended = self._mail.ended_among(ids)
        return ended

    def _read_all(self, requests: Seq[EngineRequest]) -> list[TrainingSample]:
        """Run requests that score or embed. Raises `ValueError` naming the first that was aborted."""
        with self._driving:
            samples = self._run_all(requests, None)
        for index, sample in enumerate(samples):
            if sample.finish_reason == "abort":
                raise ValueError(f"token_ids[{index}]: {sample.stop_reason or 'the request was aborted'}")
        return samples

    def _next_delta(self, request_id: int) -> Delta | None:
        """Run steps until a claimed request has a delta, and return it; None if the request has ended."""
        with self._driving:
            while not (delta := self._mail.take_delta(request_id)) and self._mail.is_live(request_id):
                self._require_running()
                self._tick(reads_all=False)
            return delta

    def _end_streams(self) -> None:
        """End the requests of closed streams: now, or at the next step boundary while another call runs."""
        try:
            with self._driving:
                if self._end is None:
                    self._mail.end_streams()
        except EngineBusy:
            _log.debug("the requests of a closed stream are aborted at the end of the running step")

    # ---- pause and sleep --------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, blocking: bool = True) -> None:
        """Stop running steps; new requests are queued. Can be repeated.

        "keep" suspends all requests; "wait" first runs started ones to their end, in `tick` with `blocking=False`
        (`is_pausing` until then); "abort" ends all. `clear_cache` forgets all K/V, which is recomputed later. Raises
        `BadRequest` for an unknown mode, `EnginePaused` if started requests cannot end because the engine is asleep.
        """
        if mode not in PAUSE_MODES:
            raise BadRequest("mode", f"must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        check_bool("clear_cache", clear_cache)
        check_bool("blocking", blocking)
        with self._driving:
            self._require_alive()
            if mode == "wait" and blocking:
                self._drain()
            elif mode == "wait":
                self._require_awake_for_drain()
            elif mode == "abort":
                self._mail.abort(None, keep_samples=True)
            self._pause_clears = clear_cache
            self._complete_pause(must_drain=mode == "wait")

    def _complete_pause(self, *, must_drain: bool = True) -> None:
        """Complete a pause; with `must_drain`, only if every started request has ended."""
        if self._pause_clears is None or (must_drain and self._core.started_requests()):
            return
        if self._pause_clears:
            self._core.forget_kv()
        self._pause_clears, self._is_paused = None, True

    def cancel_pause(self) -> bool:
        """Cancel a `pause("wait", blocking=False)` that still waits; return whether there was one."""
        with self._driving:
            was_pausing, self._pause_clears = self.is_pausing, None
            return was_pausing

    def resume(self) -> None:
        """Allow steps after `pause`, or cancel a pause that still waits. Has no effect on a running engine."""
        with self._driving:
            self._require_alive()
            self._pause_clears, self._is_paused = None, False

    def flush_cache(self) -> int:
        """Forget all cached prefixes; return the number of blocks freed. Held blocks are freed when released."""
        with self._driving:
            return self.parts.kv.flush()

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Free the memory of the KV cache; requests stay, and recompute their K/V after `wake`.

        Weights move from CUDA to main memory. With `discard_weights` they are freed, also later in sleep, and no step
        runs before `update_weights` has replaced all of them.
        """
        check_bool("discard_weights", discard_weights)
        with self._driving:
            self._require_alive()
            if self.is_pausing:
                raise EnginePaused("the engine is pausing, and started requests could not end in sleep; resume() first")
            self._land()
            self._core.forget_kv()
            self.parts.runner.free_cache()
            if self.parts.weights is not None:
                self.parts.weights.sleep(discard=discard_weights)
            self._is_asleep = True

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed. Has no effect if awake."""
        with self._driving:
            self._require_alive()
            if self._is_asleep:
                self.parts.runner.restore_cache()
                if self.parts.weights is not None:
                    self.parts.weights.wake()
                self._is_asleep = False

    # ---- weights ----------------------------------------------------------------------------------------------------

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
        hold: bool = False,
    ) -> int:
        """Replace the weights between two steps; return the version that they get.

        `weights` are (Hugging Face name, tensor) pairs, a state dict, a directory or `WeightGroup.receive()`. All are
        gathered and checked before installation; on an error the old weights stay. With `blocking`, installs before it
        returns and raises `WeightError`. Otherwise a thread gathers and `tick` installs; do not modify the tensors
        until then; `finish_update` waits and raises the error; an argument of another form is refused at once.
        With `hold`, gathered weights wait for `commit_update`, and steps continue with the old ones. `on_running` is
        "recompute" by default with `blocking`, else "keep"; `version` is the trainer's label; `WeightUpdate`
        documents the others. Raises `UpdateBusy` during another update, `BadRequest`, `EngineDead` if a
        rank is lost.
        """
        self._require_alive()
        check_bool("blocking", blocking)
        update = WeightUpdate(
            weights=weights,
            on_running=("recompute" if blocking else "keep") if on_running is None else on_running,
            label=version,
            partial=partial,
            allow_nonfinite=allow_nonfinite,
            checksum=checksum,
            timeout=timeout,
            on_gathered=on_gathered,
            hold=hold,
        )
        return self._install_update(update) if blocking else self.start_update(update)

    def start_update(self, update: WeightUpdate) -> int:
        """Gather new weights in a thread; return their future version. Raises `UpdateBusy`."""
        with self._driving:
            weights = self._updatable_weights
            weights.start_sync(update)
            self._failed_update = None
            return weights.version + 1

    def _install_update(self, update: WeightUpdate) -> int:
        """Gather new weights in this thread and install them unless they are held; return their version."""
        with self._driving:
            weights = self._updatable_weights
            weights.require_idle()
            try:
                with self._driving.window:
                    weights.stage(update)
                self._failed_update = None
                return weights.version + 1 if update.hold else self._finish_update(None)
            except BaseException:
                weights.cancel()  # an interrupted update must not be installed later
                raise

    def finish_update(self, timeout: float | None = None) -> int:
        """Wait until the update in progress is gathered, install it unless it is held; return the installed version.

        With on_running="wait", started requests end first. Raises `WeightError`; `TimeoutError` after `timeout` s.
        """
        with self._driving:
            return self._finish_update(timeout)

    def _finish_update(self, timeout: float | None) -> int:
        weights = self._updatable_weights
        with self._driving.window:
            state = weights.wait(timeout)
        if state == "staging":
            raise TimeoutError(f"the update is still being gathered after {timeout} seconds")
        if self._is_update_waiting():
            self._drain()
        self._install_staged()
        if self._failed_update is not None:
            try:
                raise self._failed_update
            finally:
                self._failed_update = None  # no local variable: its traceback would reference itself
        return self._core.version

    def _is_update_waiting(self) -> bool:
        """Return whether a gathered update waits for started requests; without weights it cannot wait."""
        weights = self.parts.weights
        if weights is None or weights.state != "staged" or weights.is_held or not weights.has_weights:
            return False
        return weights.on_running == "wait" and bool(self._core.started_requests())

    def _install_staged(self) -> list[Delta]:
        """Install a gathered update; return the last deltas of the requests that it aborted."""
        weights = self.parts.weights
        if weights is None or weights.state in ("idle", "staging") or weights.is_held or self._is_update_waiting():
            return []
        on_running = weights.on_running
        self._land()
        try:
            weights.maybe_finish_sync()
        except WeightError as error:
            _log.error("a weight update was rejected, version %d stays installed: %s", self._core.version, error)
            self._failed_update = error
            return []
        except BaseException as error:  # the weights may be half changed
            self._end = self._end or error
            raise
        ended = self._core.install(weights.version, weights.label, on_running)
        self._mail.deliver(ended)
        return ended

    def commit_update(self, *, blocking: bool = True, version: int | None = None) -> int:
        """Install a held update: as `finish_update` does, or in `tick` without `blocking`. Raises `BadRequest` too.

        `version`, above the installed one, is the new weights' number, as in other engines; by default the next.
        """
        check_bool("blocking", blocking)
        with self._driving:
            weights = self._updatable_weights
            if not weights.release(version) and self._failed_update is None:
                raise BadRequest("", "no weight update is in progress that could be committed")
            return self._finish_update(None) if blocking else version or weights.version + 1

    def cancel_update(self) -> bool:
        """Cancel an update that is not installed yet; return whether there was one."""
        with self._driving:
            return self._updatable_weights.cancel()

    def label_weights(self, label: WeightLabel, *, are_next: bool = False) -> None:
        """Set the trainer's label of the installed weights, or with `are_next` of the update in progress.

        Raises `BadRequest` for an invalid label, or if no update is in progress.
        """
        check_weight_label(label)
        with self._driving:
            weights = self._updatable_weights
            if not are_next:
                weights.label = self._core.labels[self._core.version] = label
            elif not weights.label_next(label):
                raise BadRequest("", "no weight update is in progress that could be labelled")

    def expect_checksum(self, checksum: str) -> None:
        """Set the expected `weights_checksum` of the update in progress. Raises `BadRequest` if there is none."""
        with self._driving:
            if not self._updatable_weights.expect_next(checksum):
                raise BadRequest("", "no weight update is in progress that could be checked")

    def get_weight_version(self) -> int:
        """Return the number of the installed weights: of updates since the start, unless `commit_update` gave one."""
        return self._core.version

    def weight_info(self) -> WeightInfo:
        """Return the installed version, its label, and the state of the latest update."""
        weights = self.parts.weights  # read once: another thread may close the engine
        state: UpdateState = "idle" if weights is None else weights.state
        return WeightInfo(self._core.version, self._core.labels.get(self._core.version), state)

    def weight_shapes(self) -> WeightShapes:
        """Return the model's weight names and their shapes, by every accepted name. Can be called from any thread."""
        weights = self.parts.weights  # read once: another thread may close the engine
        return WeightShapes({}) if weights is None else weights.shapes

    def weights_dtype(self) -> str:
        """Return the precision in which the weights are stored, such as float32."""
        return self._updatable_weights.dtype

    def weights_checksum(self) -> str:
        """Return `weights_checksum` of the installed weights, to compare with the trainer's."""
        with self._driving:
            return self._updatable_weights.checksum()

    # ---- adapters ---------------------------------------------------------------------------------------------------

    def load_adapter(
        self,
        name: str,
        source: NamedWeights | str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        version: WeightLabel | None = None,
        on_running: OnAdapter = "keep",
    ) -> WeightLabel:
        """Load a LoRA adapter for requests that name it, or another version of it; return its version.

        `source` is a directory of PEFT, or (name, tensor) pairs with PEFT's `config`. `version` is the trainer's label,
        by default the number of loads so far. Requests that have started keep their version to the end, or move to the
        new one and keep their K/V ("continue"). Adapters that no request uses make room, see `EngineConfig`. Raises
        `BadRequest`, `WeightError`, and `UpdateBusy` if it does not fit; the one in use stays then.
        """
        load = AdapterLoad(name=name, source=source, config=config, version=version, on_running=on_running)
        return self.install_adapter(self.stage_adapter(load))

    def stage_adapter(self, load: AdapterLoad) -> StagedAdapter:
        """Read and pack an adapter for `install_adapter`; raises as `load_adapter`. Can be called from any thread."""
        self._require_alive()
        if (executor := self.parts.executor) is None:
            raise BadRequest("adapter", "this engine has no model that could use it")
        return stage_adapter(load, executor, self.config.max_adapter_rank)

    def check_room(self, staged: StagedAdapter) -> None:
        """Raise as `install_adapter` would, if the adapter does not fit now."""
        with self._driving:
            room_for(staged, self._core)

    def install_adapter(self, staged: StagedAdapter) -> WeightLabel:
        """Install a staged adapter between two steps; return its version. Raises as `load_adapter`."""
        with self._driving:
            self._require_alive()
            self._land()
            return install_adapter(staged, self._core, self.parts.runner)

    def unload_adapter(self, name: str) -> bool:
        """Forget an adapter; return whether it was loaded. Requests that use it keep it, then its memory is freed."""
        with self._driving:
            self._require_alive()
            self._land()
            was_loaded = self._core.adapters.unload(name)
            drop_unused(self._core, self.parts.runner)
            return was_loaded

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters that requests can name, in the order of their loads."""
        with self._driving:
            return self._core.adapters.infos()

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
        with self._driving:
            self._require_alive()
            if self._group is not None:
                self._group.close()
            backend = backend or ("nccl" if self.parts.is_on_cuda else "gloo")
            with self._driving.window:
                group = WeightGroup(address, port, rank=rank, world_size=world_size, backend=backend, timeout=timeout)
            self._group = group
            return group

    # ---- state and lifetime -----------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """Why the engine accepts no work; None while it does. Can be read from any thread."""
        return self._end or self.parts.runner.failure

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts work, that is, was not shut down. Can be read from any thread."""
        return self.failure is None

    @property
    def is_paused(self) -> bool:
        return self._is_paused and not self.is_pausing

    @property
    def is_pausing(self) -> bool:
        """Whether the engine will be paused when the started requests have ended."""
        return self._pause_clears is not None

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    @property
    def has_weights(self) -> bool:
        weights = self.parts.weights  # read once: another thread may close the engine
        return weights is None or weights.has_weights

    @property
    def is_halted(self) -> bool:
        """Whether no step can run before `resume`, `wake` or a weight update."""
        return self.is_paused or self._is_asleep or not self.has_weights

    @property
    def is_on_cuda(self) -> bool:
        """Whether the model runs on a CUDA device."""
        return self.parts.is_on_cuda

    @property
    def limits(self) -> Limits:
        """The limits that a request must respect."""
        return self._admission.limits

    @property
    def lineage(self) -> str:
        """`EngineConfig.lineage`, or this engine's random one; see `TrainingSample.lineage`."""
        return self.limits.lineage or ""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `BadRequest` if the engine was made without one."""
        if self.parts.load_tokenizer is None:
            raise BadRequest("tokenizer", "this engine was made without one")
        return self.parts.load_tokenizer()

    @property
    def model(self) -> Executor | None:
        """The owner of the weights; None without a model."""
        return self.parts.executor

    @property
    def waiting(self) -> tuple[SequenceView, ...]:
        """Copies of the samples that wait for a step, in the order of the queue."""
        return self._core.views(running=False)

    @property
    def running(self) -> tuple[SequenceView, ...]:
        """Copies of the samples that steps compute, oldest first."""
        return self._core.views(running=True)

    @property
    def cache(self) -> KVManager:
        """The owner of the cache blocks."""
        return self.parts.kv

    @property
    def weight_sync(self) -> WeightSyncManager | None:
        """The owner of weight updates; None if the weights cannot be replaced."""
        return self.parts.weights

    @property
    def _updatable_weights(self) -> WeightSyncManager:
        """The owner of the weights. Raises `BadRequest` if the engine has none that can be updated."""
        self._require_alive()
        if self.parts.weights is None:
            raise BadRequest("", "this engine has no weights that can be updated")
        return self.parts.weights

    def _require_alive(self) -> None:
        if (failure := self.failure) is not None:
            raise EngineDead(f"the engine takes no more work: {failure}") from failure

    def _require_running(self) -> None:
        """Raise `EnginePaused` if waiting for a request would never end."""
        if self._is_asleep:
            raise EnginePaused("the engine is asleep; call wake() first")
        if self.is_paused:
            raise EnginePaused("the engine is paused; call resume() first")
        if not self.has_weights:
            self._install_staged()
        self._require_weights()

    def _require_weights(self) -> None:
        if not self.has_weights:
            raise EnginePaused("the weights were discarded; call update_weights() and finish_update() first")

    def _require_awake_for_drain(self) -> None:
        if self._core.started_requests() and (self._is_asleep or not self.has_weights):
            raise EnginePaused("the engine is asleep, so started requests cannot end; call wake() first")

    def copy(self, *, kv_cache_bytes: int | None = None) -> InferenceEngine:
        """Return a second engine with a copy of the weights and a random lineage, such as a reference model.

        Its KV cache has an eighth of this one's blocks, at least enough for the longest sequence, unless
        `kv_cache_bytes` is given. Raises `BadRequest` if there is no model to copy.
        """
        with self._driving:
            self._require_alive()
            self._require_weights()
            parts = copied_parts(self.parts, self.config, kv_cache_bytes)
            return InferenceEngine(replace(self.config, lineage=None), parts=parts)

    def twin(self, *, kv_cache_bytes: int | None = None) -> InferenceEngine:  # quoted
        """Return `copy(...)`. Deprecated."""
        warnings.warn("InferenceEngine.twin is now InferenceEngine.copy", DeprecationWarning, stacklevel=2)  # quoted
        return self.copy(kv_cache_bytes=kv_cache_bytes)

    def shutdown(self) -> None:
        """Abort all requests and free model and cache; later calls raise `EngineDead`. Can be called twice."""
        with self._driving:
            if self._end is None:  # the queues of a dead engine may be half changed
                self._mail.abort(None)
            self._end = self._end or EngineDead("the engine was shut down")  # before anything that can fail
            if self.parts.weights is not None:
                self.parts.weights.cancel(wait=_LAST_PIECE_S)
            if self._group is not None:
                self._group.close()
            if self.parts.executor is not None:
                self.parts.executor.close()
            self._flight = None
            self.parts = self.parts.closed()
            self._launcher = Launcher(None)
            self._empty_queues()

    def _empty_queues(self) -> None:
        parts = self.parts
        limits = parts.scheduler_config(self.config)
        adapters = Adapters(self.config.max_adapters, self.config.adapter_memory)
        self._core = Core(parts.kv, limits, parts.make_drafter, adapters, vocab_size=parts.vocab_size)
        self._mail = Mailboxes(self._core, self._admission)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine owns memory and threads, and cannot be pickled or copied: pickle its config")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _samples_in(deltas: Iterable[Delta]) -> tuple[TrainingSample, ...]:
    return tuple(delta.sample for delta in deltas if delta.sample is not None)
