"""`Members`: the workers of a pool. Places jobs, replaces dead workers, and resubmits what these did not finish."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nano_inference.core.admission import Limits
from nano_inference.rl.pool.routing import PrefixRouter
from nano_inference.rl.pool.worker import Command, Fleet, Job, Worker, WorkerDied
from nano_inference.support.files import path_of
from nano_inference.types import BadRequest, Delta, EngineDead, PauseMode, TrainingSample, WeightLabel
from nano_inference.weights.staging import pairs
from nano_inference.weights.updates import AdapterLoad, NamedWeights, WeightUpdate

_MOST_ATTEMPTS = 4  # a request that so many workers in a row did not survive is not tried again
_PER_TOKEN = (
    *("token_ids", "logprobs", "mask", "versions", "adapter_versions"),
    *("top_logprobs", "raw_logprobs", "sampling_masks"),
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker in its place in the pool; a worker that replaces it is another `Member`."""

    index: int
    worker: Worker
    versions: dict[int, int]  # the worker's numbers of versions, which start anew in each -> the pool's
    labels: Mapping[int, WeightLabel]  # the trainer's names for the pool's versions; they replace a server's
    lineage: str  # the pool's

    def pool_version(self, number: int) -> int:
        """Return the pool's number. Raises `EngineDead` if another client has updated the worker's weights."""
        if number not in self.versions:
            raise EngineDead(f"{self.worker.name}: has weights of version {number}, which this pool did not install")
        return self.versions[number]

    def sample(self, sample: TrainingSample, job_id: int) -> TrainingSample:
        """Return a worker's sample with the pool's request id, versions and lineage."""
        number = self.pool_version
        labels = {number(version): label for version, label in sample.version_labels.items()}
        return replace(
            sample,
            request_id=job_id,
            token_versions=tuple(map(number, sample.token_versions)),
            weight_version=number(sample.weight_version),
            version_labels={**labels, **self.labels},
            lineage=self.lineage,
        )

    def delta(self, delta: Delta, job_id: int) -> Delta:
        """Return a worker's delta, as `sample` does with samples."""
        sample = None if delta.sample is None else self.sample(delta.sample, job_id)
        versions = tuple(map(self.pool_version, delta.versions))
        return replace(delta, request_id=job_id, versions=versions, sample=sample)


class Members:
    """Owns the workers. Accessed on the pool's event loop."""

    def __init__(self, fleet: Fleet, lineage: str) -> None:
        self.lock = asyncio.Lock()
        """Held while weights are installed or a new worker gets them: it has the weights of all others."""
        self.version = 0  # number of the pool's installations
        self.labels: dict[int, WeightLabel] = {}  # the trainer's names for the pool's versions
        self.num_replaced = 0
        self._fleet = fleet
        self._lineage = lineage
        self._router = PrefixRouter(fleet.size)
        self._members: dict[int, Member] = {}
        self._in_force: list[tuple[int, WeightUpdate]] = []
        """(pool version, update): the latest complete one, and of the partial ones after it what none replaces."""
        self.adapters: dict[str, AdapterLoad] = {}
        """Name -> the latest load of the pool, in the order of loads; some workers may have evicted it."""
        self._is_paused = False
        self._tasks: set[asyncio.Task[Any]] = set()  # replacements that run
        self._retries: set[asyncio.Task[None]] = set()  # further attempts at places that could not be filled

    async def open(self) -> None:
        """Open all workers, or none. Raises the first one's error."""
        places = range(self._fleet.size)
        opened = await asyncio.gather(*(self._fleet.open(index) for index in places), return_exceptions=True)
        workers = [(index, one) for index, one in enumerate(opened) if not isinstance(one, BaseException)]
        self._members = {index: self._member(index, worker) for index, worker in workers}
        for one in opened:
            if isinstance(one, BaseException):
                await self.close()
                raise one
        if self.limits is not None:
            self._router = PrefixRouter(self._fleet.size, block_size=self.limits.block_size)

    async def close(self) -> None:
        running = [*self._tasks, *self._retries]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        members, self._members = list(self._members.values()), {}
        await asyncio.gather(*(one.worker.close() for one in members), return_exceptions=True)
        await self._fleet.close()

    @property
    def limits(self) -> Limits | None:
        """Return the limits of a request; None if no worker has reported its own."""
        return next((one.worker.limits for one in self.alive if one.worker.limits is not None), None)

    @property
    def alive(self) -> list[Member]:
        """Members in order of their index; a dead one counts until a call notices it."""
        return [self._members[index] for index in sorted(self._members)]

    # ---- jobs -------------------------------------------------------------------------------------------------------

    async def generate(self, job: Job, session: str | None) -> list[TrainingSample]:
        """Return a job's samples, with the pool's numbers. Raises `BadRequest`, and `EngineDead` without workers."""
        died: list[WorkerDied] = []
        while True:
            async with self._placed(job, session, died) as member:
                samples = await member.worker.generate(job)
                return [member.sample(one, job.id) for one in samples]

    async def stream(self, job: Job, session: str | None) -> AsyncGenerator[Delta]:
        """Yield a job's deltas, with the pool's numbers; after a worker's death the next one continues the stream.

        Raises as `generate` does, and `EngineDead` if the weights changed since a dead worker sampled its tokens.
        """
        died: list[WorkerDied] = []
        delivered = Delivered()
        while True:
            delivered.restart()
            async with self._placed(job, session, died) as member:
                async with aclosing(member.worker.stream(job)) as deltas:
                    async for delta in deltas:
                        new = delivered.unseen(member.delta(delta, job.id))
                        if new is not None:
                            yield new
                return

    def require_some(self) -> None:
        """Raise `EngineDead` without workers."""
        if not self._members:
            raise EngineDead("the pool has no worker left")

    @asynccontextmanager
    async def _placed(self, job: Job, session: str | None, died: list[WorkerDied]) -> AsyncIterator[Member]:
        """Choose the member for an attempt at a job, and count the job's cost until the block ends.

        If the worker dies, add the error to `died`, replace the worker and end the block, so that the caller tries
        again. Raises `EngineDead` without workers, and after `_MOST_ATTEMPTS` attempts.
        """
        if len(died) == _MOST_ATTEMPTS:
            raise EngineDead(f"request {job.id}: {len(died)} workers died while they ran it, the last: {died[-1]}")
        while not self._members and self._tasks:  # one is replaced
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.require_some()
        request = job.request
        length = len(request.prompt)
        cost = length + request.num_samples * (request.params.max_tokens or 0)
        index = self._router.place(request.prompt, cost, session)
        member = self._members[index]
        error: WorkerDied | None = None
        try:
            yield member
        except WorkerDied as death:
            error = death
        finally:
            if self._members.get(index) is member:  # a new worker in its place has other jobs
                self._router.finish(index, cost)
        if error is not None:
            died.append(error)
            await self.replace(member, error)

    # ---- all workers ------------------------------------------------------------------------------------------------

    async def each(self, command: Command, *args: Any) -> dict[str, Any]:
        """Return each worker's result of a command by its name; a dead worker is replaced and asked again.

        All have ended when an error of one is raised.
        """
        while self._tasks:  # a replacement that another call has started
            await asyncio.wait(self._tasks)
        self.require_some()
        found = await asyncio.gather(
            *(self._at(one.index, command, args) for one in self.alive), return_exceptions=True
        )
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return dict(one for one in found if one is not None and not isinstance(one, BaseException))

    async def _at(self, index: int, command: Command, args: tuple[Any, ...]) -> tuple[str, Any] | None:
        while (member := self._members.get(index)) is not None:
            try:
                return member.worker.name, await member.worker.call(command, *args)
            except WorkerDied as error:
                await self.replace(member, error)
        return None

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause all workers, and those that replace them. Raises `BadRequest`, with none paused, if one cannot."""
        self._is_paused = True
        try:
            await self.each("pause", mode, clear_cache)
        except BadRequest:
            self._is_paused = False
            for member in self.alive:
                with suppress(BadRequest, WorkerDied):
                    await member.worker.call("resume")
            raise

    async def resume(self) -> None:
        self._is_paused = False
        await self.each("resume")

    # ---- weights and replacements -----------------------------------------------------------------------------------

    def shared(self, weights: NamedWeights | str | Path) -> Any:
        """Return new weights as `WeightUpdate.weights`. Can be called on any thread. Raises `WeightError`."""
        if isinstance(weights, str | Path):
            return path_of(weights, "weights").absolute()
        return self._fleet.share(pairs(weights))

    def record(self, update: WeightUpdate, numbers: Iterable[tuple[Member, int]]) -> int:
        """Count an update that all workers hold, before any installs it; return the pool's new version.

        `numbers` are those that the members' workers give the new weights. From now on the update is in force: a worker
        that dies before it has installed it gets it with its replacement.
        """
        self.version += 1
        if update.label is not None:
            self.labels[self.version] = update.label
        for member, number in numbers:
            member.versions[number] = self.version
        kept: list[tuple[int, WeightUpdate]] = []
        # A partial update leaves earlier ones in force, but not the tensors that it replaces, which bounds their size.
        for version, one in self._in_force if update.partial else ():
            left: Any = one.weights
            if one.partial:
                with suppress(Exception):  # a directory that only the workers can read
                    left = self._fleet.uncovered(one.weights, update.weights)
            if left is not None:
                checksum = one.checksum if left is one.weights else None
                kept.append((version, replace(one, weights=left, checksum=checksum)))
        self._in_force = [*kept, (self.version, update)]
        return self.version

    async def replace(self, member: Member, error: WorkerDied) -> None:
        """Open a new worker in the place of a dead one; if that fails, try again later. Can be called twice."""
        index = member.index
        if self._members.get(index) is not member:
            return
        self._router.remove(index)
        del self._members[index]
        task = asyncio.ensure_future(self._replace(member, error))  # continues if the caller is cancelled
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _replace(self, member: Member, error: WorkerDied) -> None:
        with suppress(Exception):
            await member.worker.close()
        _log.warning("%s; a new worker takes its place", error)
        try:
            await self._fill(member.index)
        except Exception as failure:
            _log.error("%s; its replacement failed: %s; %d workers are left", error, failure, len(self._members))
            retry = asyncio.ensure_future(self._retry(member.index))
            self._retries.add(retry)
            retry.add_done_callback(self._retries.discard)

    async def _retry(self, index: int) -> None:
        """Try to fill a place until that succeeds."""
        while index not in self._members:
            await asyncio.sleep(self._fleet.retry_s)
            with suppress(Exception):  # the reason was logged when the place became empty
                await self._fill(index)
        _log.warning("%s: takes part again; %d workers", self._members[index].worker.name, len(self._members))

    async def _fill(self, index: int) -> None:
        """Open a worker and add it to the members. Raises what opening it raises."""
        worker = await self._fleet.open(index)
        try:
            async with self.lock:
                member = self._member(index, worker)
                # Install the weights in force.
                if self._in_force:
                    await worker.call("discard")  # a server that was unreachable may hold an update of before
                for version, update in self._in_force:
                    member.versions[await worker.call("stage", update)] = version
                    await worker.call("commit")
                for load in tuple(self.adapters.values()):
                    await worker.call("stage_adapter", load)
                    await worker.call("install_adapter")
                # Pause or resume it as the pool is: a server that was unreachable may be paused since then.
                is_paused: bool | None = None
                while is_paused != self._is_paused:  # the pool may be paused or resumed during the call
                    is_paused = self._is_paused
                    if is_paused:
                        await worker.call("pause", "keep", False)
                    else:
                        with suppress(BadRequest):  # a server without pauses cannot be paused
                            await worker.call("resume")
                self._members[index] = member
        except BaseException:
            await worker.close()
            raise
        self._router.add(index)
        self.num_replaced += 1

    def _member(self, index: int, worker: Worker) -> Member:
        versions = {worker.first_version: 0}
        return Member(index=index, worker=worker, versions=versions, labels=self.labels, lineage=self._lineage)


class Delivered:
    """Owns the tokens of one stream that its reader has, by sample index."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._ended: set[int] = set()
        self._position: Counter[int] = Counter()  # tokens of each sample since `restart`

    def restart(self) -> None:
        """The job starts again on another worker."""
        self._position.clear()

    def unseen(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the reader does not have, or None.

        Raises `EngineDead` if the repetition differs from what the reader has: the weights have changed.
        """
        index = delta.sample_index
        if index in self._ended:
            return None
        known, start = self._tokens[index], self._position[index]
        repeated = tuple(known[start : start + len(delta.token_ids)])
        end = self._position[index] = start + len(delta.token_ids)
        is_shorter = delta.sample is not None and end < len(known)
        if delta.token_ids[: len(repeated)] != repeated or is_shorter:
            raise EngineDead(
                f"request {delta.request_id}: its worker died and the weights have changed since, so that the stream "
                "cannot be continued; start it again"
            )
        if repeated:  # cut these tokens off; the sample stays whole
            count = len(repeated)
            delta = replace(delta, **{name: value[count:] for name in _PER_TOKEN if (value := getattr(delta, name))})
        known += delta.token_ids
        if delta.sample is not None:
            self._ended.add(index)
        return delta if delta.token_ids or delta.sample is not None else None
