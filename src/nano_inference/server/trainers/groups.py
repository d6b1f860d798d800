"""Process groups with trainers, by name. They are joined in threads, because a rendezvous may take minutes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from nano_inference.models.names import WeightShapes
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.updates import Source
from nano_inference.types import WeightError

if TYPE_CHECKING:  # these modules import torch, which takes seconds
    from nano_inference.weights.member import Place
    from nano_inference.weights.plain import PlainGroup

JOINING = "weight-joining"  # name of the threads that wait for a trainer
MAX_GROUPS = 8
Packed = int | Literal[False] | None  # size in bytes of packed broadcasts; False for one broadcast per tensor
_SHOWN_FAULTS = 5
_GRACE_S = 5.0  # time for a group to report its own timeout
_log = logging.getLogger("nano_inference.server")
T = TypeVar("T")


async def in_thread(work: Callable[[], T], drop: Callable[[T], None], name: str = JOINING) -> T:
    """Return the result of `work`, or raise its exception; if the caller was cancelled, `drop` receives the result.

    The thread is a daemon: such calls cannot be cancelled, and the process does not join them at exit.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await asyncio.shield(asyncio.wrap_future(done))
    except asyncio.CancelledError:
        done.add_done_callback(lambda one: drop(one.result()) if one.exception() is None else None)
        raise


@dataclass(frozen=True, slots=True)
class _Joined:
    group: PlainGroup
    bucket_bytes: int | None  # size of packed broadcasts
    is_vllm: bool

    def close(self) -> None:
        """Leave the group. NCCL may take its time, so it is left in a thread."""
        if self.is_vllm:
            threading.Thread(target=self.group.close, name="weight-leaving", daemon=True).start()
        else:
            self.group.close()


class Groups:
    """Owns the process groups. Accessed on the event loop."""

    def __init__(
        self,
        timeout: float,
        weight_shapes: Callable[[], WeightShapes],
        *,
        nccl_device: str = "cuda",
        nccl_library: str | None = None,
    ) -> None:
        """`weight_shapes` returns {name: shape} of the model's weights; `timeout` is in seconds.

        `nccl_device` and `nccl_library` are those of groups of vLLM's trainers; without a file of the library the one
        that torch uses.
        """
        self._timeout = timeout
        self._weight_shapes = weight_shapes
        self._nccl_device, self._nccl_library = nccl_device, nccl_library
        self._groups: dict[str, _Joined] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}  # rendezvous in progress; cancelling the task abandons it
        self._waiting: list[str] = []  # groups of updates that wait for their tensors

    async def join(
        self,
        name: str,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: Literal["gloo", "nccl"],
        bucket_bytes: int | None = None,
        is_vllm: bool = False,
    ) -> None:
        """Join the group of a trainer, which has rank 0. An existing or joining group of that name is left first.

        `bucket_bytes`: the trainer packs tensors into broadcasts of this size, unless an update says otherwise.
        `is_vllm`: with NCCL, the trainer uses vLLM's communicator instead of torch's.

        Raises `ApiError`: 400 for invalid arguments and if no trainer connects, 409 if the join is cancelled by a newer
        one or by `leave`, or if there are `MAX_GROUPS` groups.
        """
        if len((self._groups.keys() | self._joining.keys()) - {name}) >= MAX_GROUPS:
            raise ApiError(409, f"there are {MAX_GROUPS} groups already; destroy one first", code="busy")
        if not 1 <= rank < world_size:
            text = f"rank_offset must be in [1, world_size), got {rank} of {world_size}: rank 0 is the trainer's"
            raise ApiError(400, text, param="rank_offset")
        self.leave(name)
        given_up = threading.Event()
        is_vllm = is_vllm and backend == "nccl"

        def connect() -> _Joined:
            from nano_inference.weights.member import Place

            place = Place(address, port, rank, world_size, self._timeout, given_up)
            return _Joined(self._connect(place, name, backend, is_vllm=is_vllm), bucket_bytes, is_vllm)

        async def store() -> None:
            # If this is cancelled meanwhile, the group is closed.
            self._groups[name] = await in_thread(connect, lambda joined: joined.close())

        task = self._joining[name] = asyncio.ensure_future(store())
        try:
            # ncclCommInitRank has no timeout; the other groups end by themselves. Its thread is abandoned.
            await asyncio.wait({task}, timeout=self._timeout + _GRACE_S if is_vllm else None)
        finally:
            is_late = not task.done()
            task.cancel()
            given_up.set()
            if self._joining.get(name) is task:
                del self._joining[name]
        if is_late:
            text = f"the other ranks did not join the group within {self._timeout:g} seconds"
            raise ApiError(400, text, code="no_group")
        if task.cancelled():
            text = f"group_name: joining {name!r} was cancelled by a newer join or by leaving the group"
            raise ApiError(409, text, code="superseded")
        try:
            task.result()
        except (ValueError, WeightError) as error:
            raise ApiError(400, str(error), code="no_group") from None

    def _connect(self, place: Place, name: str, backend: Literal["gloo", "nccl"], *, is_vllm: bool) -> PlainGroup:
        import torch

        from nano_inference.weights import nccl, plain

        if is_vllm:
            return nccl.stateless_group(place, torch.device(self._nccl_device), self._nccl_library)
        return plain.plain_group(place, name, backend)

    def leave(self, name: str) -> bool:
        """Close the group of that name and cancel a join of it; return False if there is neither."""
        joined, task = self._groups.pop(name, None), self._joining.pop(name, None)
        if joined is not None:
            joined.close()
        if task is not None:
            task.cancel()
        return joined is not None or task is not None

    def leave_all(self) -> int:
        """Leave all groups, also those being joined; return their number."""
        return sum(self.leave(name) for name in self._groups.keys() | self._joining.keys())

    @contextmanager
    def receive(
        self,
        name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes_field: str,
        packed: Packed = None,
    ) -> Iterator[Source]:
        """Yield a source that receives the tensors that the trainer broadcasts. Raises `ApiError` naming the field.

        Tensors that do not fit the model are received too, so that the ranks stay in step; the update is rejected
        afterwards, and a warning is logged at once. `dtypes_field` is the client's name of `dtypes`; without `packed`
        the tensors come as the group was joined.
        """
        from nano_inference.weights.member import misfits, plain_specs

        joined = self._joined(name)
        try:
            specs = plain_specs(names, dtypes, shapes, dtypes_field)
        except ValueError as error:
            raise ApiError(400, str(error), param=dtypes_field) from None
        shapes_of = self._weight_shapes()
        if faults := misfits(specs, shapes_of):
            shown = "; ".join(faults[:_SHOWN_FAULTS])
            _log.warning("an update will be rejected once received: %d tensors do not fit: %s", len(faults), shown)
        bucket_bytes = joined.bucket_bytes if packed is None else packed or None
        with self._awaited(name):
            yield joined.group.receive(specs, shapes_of, bucket_bytes=bucket_bytes)

    @contextmanager
    def receive_state_dicts(self, name: str) -> Iterator[Source]:
        """Yield a source that receives what prime-rl's trainer broadcasts. Raises `ApiError` if there is no group."""
        from nano_inference.weights.state_dicts import state_dicts

        with self._awaited(name):
            yield state_dicts(self._joined(name).group, self._weight_shapes())

    @contextmanager
    def _awaited(self, name: str) -> Iterator[None]:
        """Count a group as receiving while its update waits, also before the update's thread reads from it."""
        self._waiting.append(name)
        try:
            yield
        finally:
            self._waiting.remove(name)

    def has(self, name: str) -> bool:
        return name in self._groups

    def receiving(self) -> list[str]:
        """Return the names of the groups with tensors still to be received."""
        reading = (name for name, joined in self._groups.items() if joined.group.is_receiving)
        return sorted({*reading, *(name for name in self._waiting if name in self._groups)})

    def _joined(self, name: str) -> _Joined:
        if name not in self._groups:
            raise ApiError(400, f"there is no group {name!r}; join one first", param="group_name", code="no_group")
        return self._groups[name]
