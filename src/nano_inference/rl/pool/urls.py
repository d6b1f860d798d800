"""`UrlFleet`: workers are servers at given addresses, our own or others that speak vLLM's dialect."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from nano_inference.core.admission import Limits
from nano_inference.rl.pool.dialect import SampleBuilder, check_supported, plain_request, request_json, samples_of
from nano_inference.rl.pool.local import uncovered
from nano_inference.rl.pool.wire import Refused, Server, read_url
from nano_inference.rl.pool.worker import Command, Job, WorkerDied, WorkerFacts
from nano_inference.support.checks import check_number, float32
from nano_inference.types import BadRequest, Delta, PauseMode, TrainingSample, WeightError
from nano_inference.weights.updates import AdapterLoad, WeightUpdate

_GENERATE = "/inference/v1/generate"


class UrlWorker:
    """Owns the connections to one server; see `Worker`. It sends the pool's key, and never stops the server."""

    def __init__(self, server: Server) -> None:
        self.name = server.url
        self.limits: Limits | None = None
        self.first_version = 0
        self._server = server
        self._model = ""
        self._nonce = secrets.token_hex(4)
        self._open: dict[int, str] = {}  # open jobs and the names of their requests
        self._version = 0
        self._lineage: str | None = None
        self._is_extended = False  # whether the server has this project's extensions of the dialect

    async def open(self) -> None:
        """Read the model's name and the version of its weights. Raises `WorkerDied`, `BadRequest`."""
        models = await self._server.ask("/v1/models")
        self._model = models["data"][0]["id"]
        with suppress(Refused, KeyError):  # another program's server, or one without the trainers' routes
            info = await self._server.ask("/weight_info")
            self.first_version, self._lineage = int(info["version"]), info.get("lineage")
            self._is_extended = True
        self._version = self.first_version

    async def generate(self, job: Job) -> list[TrainingSample]:
        request = job.request
        if request.params.pooling is not None:
            return [await self._embedding(job)]
        body = self._body(job)
        try:
            reply = await self._server.ask(_GENERATE, body, None)
        finally:
            self._open.pop(job.id, None)
        for choice in reply["choices"]:
            self._check_lineage(choice)
        return samples_of(reply, request, self._version)

    async def stream(self, job: Job) -> AsyncGenerator[Delta]:
        request = job.request
        body = self._body(job) | {"stream": True}
        builders = [SampleBuilder(request, index, self._version) for index in range(request.num_samples)]
        try:
            async with aclosing(self._server.events(_GENERATE, body)) as events:
                async for event in events:
                    for choice in event["choices"]:
                        self._check_lineage(choice)
                        builder = builders[choice["index"]]
                        delta = builder.add(choice)
                        if choice.get("finish_reason") is not None:
                            delta = replace(delta, sample=builder.sample(choice, {}))
                        yield delta
        finally:
            self._open.pop(job.id, None)

    async def call(self, command: Command, *args: Any) -> Any:
        return await getattr(self, command)(*args)

    # ---- commands: see `local.LocalWorker` --------------------------------------------------------------------------

    async def stage(self, update: WeightUpdate) -> int:
        """Only our own server holds updates; others reject the field by name."""
        body: dict[str, Any] = {"weight_dir": str(update.weights), "hold": True, "on_running": update.on_running}
        body |= {"partial": update.partial, "allow_nonfinite": update.allow_nonfinite}
        given = {"weight_version": update.label, "checksum": update.checksum}
        body |= {name: value for name, value in given.items() if value is not None}
        try:
            reply = await self._command("/update_weights", body)
            return int(reply["held_version"])
        except Refused as error:
            raise WeightError(str(error)) from None
        except KeyError:
            raise WeightError(f"{self.name}: cannot hold an update, so that it would not be atomic") from None

    async def commit(self) -> int:
        self._version = int((await self._command("/commit_weight_update", {}))["version"])
        return self._version

    async def discard(self) -> bool:
        return bool((await self._command("/abort_weight_update", {}))["aborted"])

    async def stage_adapter(self, load: AdapterLoad | None) -> None:
        """Refuse: a server installs an adapter at once, so that a load would not be atomic."""
        raise BadRequest("adapter", "workers at URLs load adapters by their own routes only (/v1/load_lora_adapter)")

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._command("/pause", {"mode": mode, "clear_cache": clear_cache})

    async def resume(self) -> None:
        await self._command("/resume", {})

    async def abort(self, job_ids: Collection[int] | None) -> None:
        wanted = self._open if job_ids is None else {one: self._open[one] for one in job_ids if one in self._open}
        if wanted:
            await self._command("/abort_requests", {"request_ids": list(wanted.values())})

    async def flush(self) -> int:
        return int((await self._command("/reset_prefix_cache", {})).get("num_blocks", 0))

    async def checksum(self) -> str:
        return str((await self._command("/weight_checker", {"action": "checksum"}))["checksum"])

    async def facts(self) -> WorkerFacts:
        await self._server.ask("/health")
        return WorkerFacts(version=self._version)

    async def close(self) -> None:
        await self._server.close()

    def _check_lineage(self, reply: Mapping[str, Any]) -> None:
        """Raise `WorkerDied` if the server has been restarted: its weights are not the pool's any more."""
        lineage = reply.get("lineage")
        if None not in (lineage, self._lineage) and lineage != self._lineage:
            raise WorkerDied(f"{self.name}: was restarted, without the weights that the pool installed")

    def _body(self, job: Job) -> dict[str, Any]:
        """Return a job's request and keep its name until the caller removes it. Raises `BadRequest`."""
        check_supported(job.request)
        name = self._open[job.id] = f"pool-{self._nonce}-{job.id}"
        return request_json(job.request if self._is_extended else plain_request(job.request), self._model, name)

    async def _command(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call a route of our server with `--enable-rl`. Raises `Refused`, naming the route if there is none."""
        try:
            return await self._server.ask(path, body)
        except Refused as error:
            if error.status not in (404, 405):
                raise
            raise Refused(
                f"{self.name}: has no POST {path}; updates, pauses and aborts need nano-inference's server with "
                "--enable-rl",
                error.status,
            ) from None

    async def _embedding(self, job: Job) -> TrainingSample:
        body: dict[str, Any] = {"model": self._model, "input": list(job.request.prompt), "encoding_format": "float"}
        body |= {"pooling": job.request.params.pooling, "normalize": False}
        reply = await self._server.ask("/v1/embeddings", body, None)
        self._check_lineage(reply)
        sample = SampleBuilder(job.request, 0, self._version).sample({}, {})
        return replace(sample, embedding=float32(reply["data"][0]["embedding"]))


class UrlFleet:
    """Servers at fixed addresses. One that stops answering is left out, and its requests go to the others.

    Every `retry_s` seconds it is asked again; one that answers gets the weights in force and its part of the work.
    Requests, scores and streams need `/v1/models`, `/health` and `/inference/v1/generate`; embeddings `/v1/embeddings`.
    Pauses, aborts and updates need our server with `--enable-rl`; an update is a directory below every server's
    `--weights-dir`. All servers must have opened the same weights, also after a restart.
    """

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None, retry_s: float = 5.0) -> None:
        """Raises `BadRequest` naming an address that is invalid or given twice, `ValueError` for `retry_s`."""
        if isinstance(urls, str) or not urls:
            raise BadRequest("urls", "must be a list of at least one address, such as http://host:8000")
        found = [read_url(one) for one in urls]
        for one in found:
            if found.count(one) > 1:
                raise BadRequest("urls", f"{one} is given twice")
        check_number("retry_s", retry_s, 0, 86400, open_low=True)
        self.size = len(found)
        self.retry_s = retry_s
        self._urls = found
        self._api_key = api_key

    def share(self, named: Iterable[tuple[object, object]]) -> Any:
        """Refuse: tensors are not sent over HTTP."""
        raise WeightError(
            "weights: workers at URLs read an update from a directory that all of them can read (save_weights), "
            "not from tensors or a process group"
        )

    def uncovered(self, older: Any, newer: Any) -> Any | None:
        return uncovered(older, newer, list, list)

    async def open(self, index: int) -> UrlWorker:
        worker = UrlWorker(Server(self._urls[index], self._api_key))
        try:
            await worker.open()
        except BaseException as error:
            await worker.close()
            if isinstance(error, KeyError | IndexError | TypeError):
                raise WorkerDied(f"{worker.name}: is no server of a model: /v1/models names none") from None
            raise
        return worker

    async def close(self) -> None:
        """Owns nothing else."""
