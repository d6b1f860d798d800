"""`RolloutServer`: what runs in the Ray actor of a replica. Its methods are those that verl calls on its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.rl.pool.ray_workers import SharedTensor, from_shared
from nano_inference.server.app import App
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.load import open_model
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.run import Listener, bind, close_listener, make_app
from nano_inference.server.security import is_loopback_name
from nano_inference.server.trainers.updates import Feed, UpdateInParts
from nano_inference.server.verl.options import RolloutOptions, params_of, refuse_media
from nano_inference.types import TrainingSample
from nano_inference.weights.updates import WeightUpdate

ADAPTER = "verl-policy"  # name in the engine of the trainer's adapter
TAGS = frozenset({"weights", "kv_cache"})  # the parts whose memory verl asks to resume


class ServerState(NamedTuple):
    """State of a server's engine."""

    version: int  # number of updates that were installed
    is_asleep: bool
    is_paused: bool


class RolloutServer:
    """Owns an engine and its HTTP routes. All methods run on the actor's event loop."""

    def __init__(self, read_options: Callable[[], RolloutOptions], make_output: Callable[..., Any]) -> None:
        """`read_options` is called in `launch_server`; `make_output` is verl's `TokenOutput`."""
        self._read_options = read_options
        self._make_output = make_output
        self._options: RolloutOptions | None = None
        self._face: HttpFace | None = None
        self._opened: LoadedModel | None = None
        self._host = ""
        self._steps: int | None = None  # the trainer's step of the installed weights
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._rejects = False
        """Whether requests that arrive while generation is stopped are returned as aborted, instead of waiting."""
        self._running: dict[int, str] = {}  # requests in the engine
        self._num_requests = 0
        self._update: UpdateInParts | None = None
        self._adapter: str | None = None  # the trainer's adapter, once it is loaded
        self._config: Mapping[str, Any] | None = None  # PEFT's, of an adapter whose tensors are being sent
        self._tensors: list[tuple[str, Any]] = []

    # ---- start ------------------------------------------------------------------------------------------------------

    async def launch_server(self, host: str) -> tuple[str, int]:
        """Open the model, and listen on a free port of `host`; return the address."""
        options = self._options = self._read_options()
        self._face, self._host = HttpFace(options.engine, host, options.served_name), host
        self._opened = await self._face.open()
        return self.get_server_address()

    def get_server_address(self) -> tuple[str, int]:
        assert self._face is not None, "not launched"
        return self._host, self._face.port

    async def shutdown(self) -> None:
        if self._face is not None:
            await self._face.close()

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """Return one sample as a `TokenOutput`.

        A stop of generation ends it as "aborted" with the tokens it has; then, and while generation is stopped, a
        request waits for `resume_generation`, or returns "aborted" without tokens. `priority` is accepted without
        effect. Raises `ValueError` naming an invalid argument.
        """
        refuse_media(image_data, video_data, audio_data, mm_processor_kwargs)
        prompt = [int(token) for token in prompt_ids]
        assert self._opened is not None, "not launched"
        longest, options = self._opened.model.limits.max_model_len, self._require_options()
        params, wants_logprobs = params_of(sampling_params, options, len(prompt), longest, str(request_id))
        while not self._may_start.is_set():
            if self._rejects:
                return self._make_output(
                    token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._steps}
                )
            await self._may_start.wait()
        self._num_requests += 1
        number = self._num_requests
        self._running[number] = str(request_id)
        try:
            # The request is queued before the first await, so that no stop of generation can come between.
            (sample,) = await self._link.engine.generate([prompt], params, adapter=self._adapter)
        finally:
            del self._running[number]
        return self._output(sample, wants_logprobs)

    def _output(self, sample: TrainingSample, wants_logprobs: bool) -> Any:
        """Return a sample as verl's record. Raises `RuntimeError` for one that its own request ended."""
        if sample.finish_reason == "abort" and sample.stop_reason is not None:
            raise RuntimeError(f"the request failed: {sample.stop_reason}")
        # A label is the trainer's step; the weights of the checkpoint have none.
        found = sample.adapter_versions or [span.label for span in sample.version_spans]
        labels = [label if isinstance(label, int) else None for label in found]
        steps = [step for step in labels if step is not None]
        extra = {
            "global_steps": labels[-1] if labels else self._steps,
            "min_global_steps": min(steps, default=None) if labels else self._steps,
            "max_global_steps": max(steps, default=None) if labels else self._steps,
            "num_cached_tokens": sample.num_cached_tokens,
            "finish_reason": sample.finish_reason,
        }
        return self._make_output(
            token_ids=list(sample.completion_tokens),
            log_probs=list(sample.logprobs) if wants_logprobs else None,
            stop_reason="aborted" if sample.finish_reason == "abort" else "completed",
            num_preempted=sample.num_preemptions,
            extra_fields=extra | scores_of(sample),
        )

    # ---- stop and resume --------------------------------------------------------------------------------------------

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Stop generation and end all requests as "aborted"; return their number and ids.

        Later ones wait for `resume_generation`; with `reject_request` they return "aborted".
        """
        self._may_start.clear()
        self._rejects = reject_request
        ids = list(self._running.values())
        await self._control(lambda control: control.pause("abort", clear_cache=True))
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        """Resume generation, and start the requests that wait."""
        await self._control(lambda control: control.resume())
        self._rejects = False
        self._may_start.set()

    async def clear_kv_cache(self) -> None:
        await self._control(lambda control: control.flush_cache())

    # ---- memory -----------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Free the memory of cache and weights; a standalone server, whose devices are its own, keeps it.

        A hybrid server's weights are dropped, because the trainer sends all of them before it wakes, unless it sends
        an adapter.
        """
        if self._sleeps:
            options = self._require_options()
            discards = options.mode == "hybrid" and not options.has_adapter
            await self._control(lambda control: control.sleep(discard_weights=discards))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if self._sleeps:
            await self.resume_memory(sorted(TAGS) if tags is None else tags)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the cache, and weights that were not dropped, if `kv_cache` is among the tags.

        `weights` alone allocates nothing: an update brings the memory of its weights. Raises `ValueError`.
        """
        if unknown := sorted(set(tags) - TAGS):
            raise ValueError(f"tags: must be {' or '.join(sorted(TAGS))}, got {unknown[0]!r}")
        if "kv_cache" in tags and self._require_options().frees_memory:
            await self._control(lambda control: control.wake())

    async def release_kv_cache(self) -> None:
        """Free the memory of the cache, and of the weights on a device, which are kept."""
        if self._require_options().frees_memory:
            await self._control(lambda control: control.sleep())

    async def resume_kv_cache(self) -> None:
        await self.resume_memory(["kv_cache"])

    @property
    def _sleeps(self) -> bool:
        options = self._require_options()
        return options.frees_memory and options.mode != "standalone"

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def begin_update(self, global_steps: int | None, adapter: Mapping[str, Any] | None = None) -> None:
        """Start an update, whose tensors follow by `put_weights`; one that its sender left unfinished is dropped.

        With the configuration of an `adapter`, the tensors are the adapter's.
        """
        await self.cancel_update("another update was started")
        if adapter is not None:
            self._tensors, self._config = [], adapter
            return
        feed = Feed()
        update = WeightUpdate(weights=feed.pairs(), label=global_steps, on_running="recompute")
        self._update = UpdateInParts(feed, await self._link.engine.start_update(update))

    async def put_weights(self, shared: Iterable[SharedTensor]) -> None:
        """Add tensors to the update; return when they are packed. Raises what the update raised."""
        if self._config is not None:
            self._tensors += from_shared(shared)
            return
        await self._require_update().add(from_shared(shared))

    async def finish_update(self, global_steps: int | None) -> int:
        """Install the update between two steps; return its version. Raises `WeightError`; then the old weights stay.

        An adapter that is refused raises `BadRequest`.
        """
        if self._config is not None:
            tensors, config = self._tensors, self._config
            self._tensors, self._config = [], None
            await self._link.engine.load_adapter(ADAPTER, tensors, config=config, version=global_steps)
            self._adapter = ADAPTER
            version = await self._control(lambda control: control.weight_info().version)
        else:
            version = (await self._require_update().finish()).version
        self._steps = self._steps if global_steps is None else global_steps
        return int(version)

    async def cancel_update(self, reason: str) -> None:
        """End an update without installing it. Has no effect without one."""
        self._tensors, self._config = [], None
        if self._update is not None and not self._update.outcome.done():
            await self._update.abort(reason)

    async def set_global_steps(self, global_steps: int) -> None:
        """Record the trainer's step of the installed weights."""
        self._steps = global_steps

    async def get_state(self) -> ServerState:
        state: ServerState = await self._control(
            lambda control: ServerState(control.weight_info().version, control.is_asleep, control.is_paused)
        )
        return state

    # ---- profiler ---------------------------------------------------------------------------------------------------

    async def start_profile(self) -> None:
        """Accepted without effect: the engine has no profiler."""

    async def stop_profile(self) -> None:
        """Accepted without effect."""

    # ---- parts ------------------------------------------------------------------------------------------------------

    @property
    def _link(self) -> Any:
        assert self._face is not None, "not launched"
        return self._face.link

    async def _control(self, work: Callable[[InferenceEngine], Any]) -> Any:
        """Return `work(control)`, run between two steps."""
        return await self._link.engine.call(work)

    def _require_options(self) -> RolloutOptions:
        assert self._options is not None, "not launched"
        return self._options

    def _require_update(self) -> UpdateInParts:
        assert self._update is not None, "begin_update comes first"
        return self._update


def scores_of(sample: TrainingSample) -> dict[str, Any]:
    """Return the prompt's log-probabilities as verl's distillation reads them; nothing if none were asked for.

    Row i has the scores of token i + 1: the most probable ids, or the prompt's own; the last row is a filler.
    """
    if sample.prompt_logprobs is None:
        return {}
    own = zip(sample.prompt_tokens[1:], sample.prompt_logprobs, strict=True)
    rows = sample.prompt_top_logprobs or [((token, logprob),) for token, logprob in own]
    ids = [[int(one[0]) for one in row] for row in rows]
    logprobs = [[float(one[1]) for one in row] for row in rows]
    width = max(map(len, ids), default=1)
    return {"prompt_ids": [*ids, [0] * width], "prompt_logprobs": [*logprobs, [0.0] * width]}


_POLL_S = 0.005
_LONG_S = 86400.0


class HttpFace:
    """Owns an engine and a listening socket. The routes are those without `enable_rl`, and need no key."""

    def __init__(self, engine: EngineConfig, host: str, name: str) -> None:
        """`name` is the model's for clients; any other is accepted too."""
        self._engine = engine
        self._config = ServerConfig(
            host=host,
            port=0,
            insecure=not is_loopback_name(host),
            served_model_name=(name,),
            any_model=True,
            generation_config="none",
            logprobs_mode=engine.logprobs_mode,
            max_queued_requests=65536,
            max_admitted_tokens=1 << 30,
            request_timeout=_LONG_S,
            log_requests=False,
        )
        self.link = EngineLink(step_timeout=self._config.step_timeout)
        self.port = 0
        self._app: App | None = None
        self._listener: Listener | None = None
        self._serving: asyncio.Task[Any] | None = None

    async def open(self) -> LoadedModel:
        """Open the model and accept requests; return it. Raises what `open_model` raises."""
        config, path = self._config, Path(self._engine.model_path)
        self._app = make_app(config, self.link)
        opened = await self.link.start(lambda: open_model(self._engine, config, name=path.name, path=path))
        self._app.serve(opened, self._engine.max_batch_size)
        listening = bind(config)
        self.port = listening.getsockname()[1]
        self._listener = Listener(uvicorn_config(self._app.asgi, config, self._app.guard.policy))
        self._serving = asyncio.get_running_loop().create_task(self._listener.serve(sockets=[listening]))
        while not (self._listener.started or self._serving.done()):
            await asyncio.sleep(_POLL_S)
        return opened

    async def close(self) -> None:
        if self._listener is not None and self._serving is not None:
            await close_listener(self._listener, self._serving)
        await self.link.stop()
        if self._app is not None:
            self._app.close()
