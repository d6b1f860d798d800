"""Concurrent trainer commands, their errors, sleep, query parameters, silent file systems and groups."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nano_inference.server.trainers import places
from nano_inference.server.trainers.context import client_error
from nano_inference.server.trainers.groups import JOINING
from nano_inference.server.trainers.updates import Feed
from nano_inference.types import BadRequest, EngineDead, EnginePaused, UpdateBusy, WeightError
from nano_inference.weights import plain
from tests.server.tiny import Running
from tests.server.trainer import SHORT, Hold, Stream, make_weights, ok, refused, serving, until, weights_of
from tests.weights.plain_trainer import Trainer, trainer_process
from tests.weights.test_group import free_port

pytestmark = pytest.mark.slow

INFO = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2}


@pytest.fixture(scope="module")
def shelf(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of weights: one valid, one with an invalid file, and a loop of links."""
    root = tmp_path_factory.mktemp("weights")
    make_weights(tiny_directory, root / "one", 11)
    (root / "bad").mkdir()
    (root / "bad" / "model.safetensors").write_bytes(b"no weights")
    (root / "loop").symlink_to(root / "loop")
    return root


@pytest.fixture(scope="module")
def shared(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    with serving(tiny_directory, shelf, weight_timeout=60, max_batch_size=2) as one:
        yield one


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The shared server, awake and without groups or open update after each test."""
    yield shared
    shared.post("/wake_up", {})
    shared.post("/resume", {})
    shared.post("/shutdown_weight_transfer_engine", {})


@pytest.fixture
def own(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    """A server whose weights the test may change."""
    with serving(tiny_directory, shelf, weight_timeout=60) as one:
        yield one


@pytest.fixture
def trainer(shelf: Path, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_process(weights_of(shelf / "one"), tmp_path) as one:
        yield one


def is_sleeping(server: Running) -> bool:
    return bool(ok(server.client.get("/is_sleeping"))["is_sleeping"])


def is_asleep(server: Running) -> bool:
    return bool(server.on_engine(lambda: server.opened.engine.is_asleep))


@pytest.mark.parametrize(
    ("path", "body"), [("/update_weights_from_disk", {"model_path": "one"}), ("/start_weight_update", {})]
)
def test_failed_update_reports_its_own_error_not_the_next_updates_result(own: Running, path: str, body: Any) -> None:
    """The next update starts after the failure and before the step boundary that reports it."""
    link, engine = own.link, own.opened.engine
    with ThreadPoolExecutor() as pool:
        first = Hold(own)
        assert first.is_active.wait(60)
        failing = pool.submit(own.post, "/update_weights_from_disk", {"model_path": "bad"})
        until(own, lambda: link.engine.num_commands >= 1)
        second = Hold(own)
        next_one = pool.submit(own.post, path, body)
        until(own, lambda: link.engine.num_commands >= 3)
        first.release()
        assert second.is_active.wait(60)
        until(own, lambda: engine.weight_info().update == "failed")
        second.release()
        refused(failing.result(60), 400, "model.safetensors")
        assert refused(next_one.result(60), 409, "the last update has failed")["code"] == "busy"
    assert ok(own.post("/update_weights_from_disk", {"model_path": "one"}))["version"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/init_weight_transfer_engine", {"init_info": {**INFO, "master_port": 1}}), ("/start_weight_update", {})],
)
def test_busy_error_names_the_paths_that_end_an_open_update(server: Running, path: str, body: Any) -> None:
    ok(server.post("/start_weight_update", {}))
    refused(server.post(path, body), 409, "/shutdown_weight_transfer_engine", "/abort_weight_update")
    ok(server.post("/shutdown_weight_transfer_engine", {}))
    ok(server.post("/start_weight_update", {}))


def test_release_without_memory_tag_has_no_effect(server: Running) -> None:
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert ok(server.post(path, {"tags": ["cuda_graph"]}))["success"] is True
        assert not is_asleep(server) and not is_sleeping(server)
    assert Stream(server, params=SHORT).result().finish_reason == "length"


def test_failed_wake_can_be_retried(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def wake() -> None:
        raise BadRequest("", "not now")

    ok(server.post("/sleep", {}))
    with monkeypatch.context() as patch:
        patch.setattr(server.opened.engine, "wake", wake)
        refused(server.post("/wake_up", {}), 400, "not now")
    assert is_asleep(server) and is_sleeping(server)
    assert ok(server.post("/wake_up", {}))["status"] == "awake"
    assert not is_asleep(server) and not is_sleeping(server)


@pytest.mark.parametrize("path", ["/resume", "/continue_generation"])
def test_resume_ends_sleep_level_0(server: Running, path: str) -> None:
    ok(server.client.post("/sleep?level=0"))
    assert is_sleeping(server)
    ok(server.post(path, {}))
    assert not is_sleeping(server)
    assert Stream(server, params=SHORT).result().finish_reason == "length"


@pytest.mark.parametrize("asked", ["x" * 300, "y/" * 2000, "loop"])
def test_unresolvable_path_is_refused_and_keeps_the_open_update(server: Running, asked: str) -> None:
    reply = server.post("/update_weights_from_disk", {"model_path": asked})
    assert reply.json()["success"] is False
    refused(reply, 400, "model_path: ")
    refused(server.post("/update_weights", {"weight_dir": asked}), 400, "weight_dir: ")
    ok(server.post("/start_weight_update", {}))
    refused(server.post("/update_weights", {"update_info": {"path": asked}}), 400, "update_info.path: ")
    assert ok(server.client.get("/weight_info"))["update"] == "staging", "a wrong path aborted the update"


def test_checksum_of_discarded_weights_is_refused(own: Running) -> None:
    ok(own.client.post("/sleep?level=2"))
    refused(own.post("/weight_checker", {"action": "checksum"}), 400, "discarded")


@pytest.mark.parametrize(
    ("error", "status", "part"),
    [
        (WeightError("a wrong weight"), 400, "a wrong weight"),
        (BadRequest("", "a wrong value"), 400, "a wrong value"),
        (UpdateBusy("another one"), 409, "another one"),
        (EnginePaused("it sleeps"), 409, "it sleeps"),
        (EngineDead("gone"), 503, "the engine has failed"),
        (OSError(28, "No space left on device"), 400, "No space left on device"),
    ],
)
def test_client_error(error: Exception, status: int, part: str) -> None:
    found = client_error(error)
    assert found.status == status and part in found.message


def test_abort_with_empty_list_aborts_nothing_and_null_aborts_all(server: Running) -> None:
    stream = Stream(server).started()
    assert ok(server.post("/abort_requests", {"request_ids": []}))["num_aborted"] == 0
    assert stream.result().finish_reason == "length"
    stream = Stream(server).started()
    assert ok(server.post("/abort_requests", {"request_ids": None}))["num_aborted"] == 1
    assert stream.result().finish_reason == "abort"


@pytest.mark.parametrize(
    ("text", "body"), [("1", {}), ("off", None), ("yes", {"abort_all_requests": False}), ("step-7", None)]
)
def test_required_field_may_be_a_query_parameter(server: Running, text: str, body: Any) -> None:
    path = f"/update_weight_version?new_version={text}"
    reply = ok(server.client.post(path) if body is None else server.post(path, body))
    assert reply["new_version"] == reply["weight_version"] == text


def test_query_and_body_are_merged(server: Running) -> None:
    assert ok(server.client.post("/weight_checker?action=checksum"))["checksum"]
    query = "action=compare&checksum=on"
    assert ok(server.post(f"/weight_checker?{query}", {"action": "checksum"}))["equal"] is False
    assert ok(server.post("/sleep?level=1", {"mode": "keep"}))["level"] == 1
    assert ok(server.client.post("/wake_up?tags=weights&tags=kv_cache"))["status"] == "awake"
    for number in (1, 2):
        ids = "&".join(["request_ids=unknown"] * number)
        assert ok(server.client.post(f"/abort_requests?{ids}"))["num_aborted"] == 0
    refused(server.client.post("/sleep?level=one"), 400, "level")
    refused(server.client.post("/pause?clear_cache=2"), 400, "clear_cache")
    refused(server.client.post("/pause?mode=keep&mode=keep"), 400, "mode: given twice")
    refused(server.post("/pause?mode=keep", [1]), 400, "must be a JSON object")


class HangingFileSystem(NamedTuple):
    """A file system that does not respond until `answer` is set, and then fails."""

    asked: threading.Event
    answer: threading.Event


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingFileSystem]:
    """Make the resolution of paths hang."""
    one = HangingFileSystem(threading.Event(), threading.Event())

    def place_of(*_: object) -> None:
        one.asked.set()
        one.answer.wait(60)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(places, "place_of", place_of)
    yield one
    one.answer.set()


def test_hanging_file_system_blocks_no_other_request(
    server: Running, hanging: HangingFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_FILE_SYSTEM_TIMEOUT_S", 60.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "/update_weights_from_disk", {"model_path": "one"})
        assert hanging.asked.wait(60)
        assert server.client.get("/health").status_code == 200
        assert Stream(server, params=SHORT).result().finish_reason == "length"
        assert not waiting.done()
        monkeypatch.setattr(places, "_FILE_SYSTEM_TIMEOUT_S", 0.01)
        refused(server.post("/update_weights_from_disk", {"model_path": "one"}), 503, "model_path", "did not answer")
        hanging.answer.set()
        refused(waiting.result(60), 400, "Stale file handle")


@pytest.fixture
def is_joining() -> Callable[[], bool]:
    """Return True while a thread waits for a trainer; one that an earlier test left in a broadcast does not count."""
    before = set(threading.enumerate())
    return lambda: any(thread.name == JOINING for thread in set(threading.enumerate()) - before)


def until_joining(server: Running, is_joining: Callable[[], bool], joining: Future[Any]) -> None:
    """Wait until a request that joins a group waits for its trainer; it must not have been answered before."""
    until(server, lambda: is_joining() or joining.done())
    assert not joining.done(), joining.result().text


def test_newer_join_replaces_one_that_still_waits(
    own: Running, trainer: Trainer, is_joining: Callable[[], bool]
) -> None:
    port = free_port()
    info = {**INFO, "master_port": port}
    with ThreadPoolExecutor() as pool:
        older = pool.submit(own.post, "/init_weights_update_group", info)
        until_joining(own, is_joining, older)
        newer = pool.submit(own.post, "/init_weight_transfer_engine", {"init_info": info})
        assert refused(older.result(60), 409, "cancelled")["code"] == "superseded"
        trainer.join(port, "weight_update_group")
        trainer.wait()
        ok(newer.result(60))
    until(own, lambda: not is_joining())
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]}
    with ThreadPoolExecutor() as pool:
        update = pool.submit(own.post, "/update_weights_from_distributed", body)
        trainer.send(["model.norm.weight"])
        trainer.wait()
        assert ok(update.result(60))["version"] == 1


@pytest.mark.parametrize("path", ["/shutdown_weight_transfer_engine", "/destroy_weights_update_group"])
def test_waiting_join_can_be_cancelled(server: Running, path: str, is_joining: Callable[[], bool]) -> None:
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(server.post, "/init_weights_update_group", {**INFO, "master_port": free_port()})
        until_joining(server, is_joining, joining)
        reply = ok(server.post(path, {}))
        assert reply.get("num_groups", 1) == 1
        refused(joining.result(60), 409, "cancelled")
    until(server, lambda: not is_joining())
    assert ok(server.post("/shutdown_weight_transfer_engine", {}))["num_groups"] == 0


def test_group_that_connects_after_cancellation_is_closed(
    server: Running, monkeypatch: pytest.MonkeyPatch, is_joining: Callable[[], bool]
) -> None:
    may_connect, is_closed = threading.Event(), threading.Event()

    class Late:
        def __init__(self, *_: object, **__: object) -> None:
            may_connect.wait(60)

        def close(self) -> None:
            is_closed.set()

    monkeypatch.setattr(plain, "plain_group", Late)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(server.post, "/init_weights_update_group", {**INFO, "master_port": 1})
        until_joining(server, is_joining, joining)
        ok(server.post("/shutdown_weight_transfer_engine", {}))
        refused(joining.result(60), 409, "cancelled")
    may_connect.set()
    assert is_closed.wait(60)
    refused(server.post("/destroy_weights_update_group", {}), 400, "no group")


def broken(closed: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        yield "b", 2
        raise ValueError("it cannot be read")
    finally:
        closed.append("broken")


async def test_future_is_true_for_consumed_source_and_false_for_others() -> None:
    closed: list[str] = []
    feed = Feed()
    consumed, failed, left = feed.put(iter([("a", 1)])), feed.put(broken(closed)), feed.put(iter([("c", 3)]))
    pairs: list[tuple[str, Any]] = []
    with pytest.raises(ValueError, match="cannot be read"):
        await asyncio.to_thread(lambda: pairs.extend(feed.pairs()))
    assert pairs == [("a", 1), ("b", 2)] and closed == ["broken"]
    assert [await one for one in (consumed, failed, left)] == [True, False, False]


async def test_end_stops_pairs_and_abort_raises() -> None:
    whole, aborted = Feed(), Feed()
    futures = [whole.put(iter([("a", 1)])), aborted.put(iter([("a", 1)]))]
    whole.end()
    aborted.abort("the trainer left")
    late = aborted.put(iter([("b", 2)]))
    assert await asyncio.to_thread(lambda: list(whole.pairs())) == [("a", 1)]
    with pytest.raises(WeightError, match="the trainer left"):
        await asyncio.to_thread(lambda: list(aborted.pairs()))
    assert [await one for one in (*futures, late)] == [True, True, False]


def test_pairs_after_the_event_loop_is_closed() -> None:
    async def put() -> Feed:
        feed = Feed()
        feed.put(iter([("a", 1)]))
        feed.end()
        return feed

    assert list(asyncio.run(put()).pairs()) == [("a", 1)]
