"""Commands of trainers that meet: each is told of its own end; what is named wrongly is refused and breaks nothing."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nano_inference.server.rl import context
from nano_inference.server.rl.threads import JOINING
from nano_inference.types import BadRequest, EngineDead, EnginePaused, UpdateBusy, WeightError
from nano_inference.weights import plain
from tests.server.tiny import Running
from tests.server.trainer import SHORT, Hold, Stream, make_weights, ok, refused, serving, until, weights_of
from tests.weights.plain_trainer import Trainer, trainer_process
from tests.weights.test_group import free_port

INFO = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2}


@pytest.fixture(scope="module")
def shelf(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of weights: a whole one, one that is none, and links without an end."""
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
    """The server, which a test leaves running, without groups, and without an open update."""
    yield shared
    shared.post("/wake_up", {})
    shared.post("/resume", {})
    shared.post("/shutdown_weight_transfer_engine", {})


@pytest.fixture
def own(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    """A server whose weights a test may change."""
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


# ---- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"), [("/update_weights_from_disk", {"model_path": "one"}), ("/start_weight_update", {})]
)
def test_a_failed_update_is_not_told_the_result_of_the_next(own: Running, path: str, body: Any) -> None:
    """The next one comes after the failure and before the step boundary at which it would be noticed."""
    link, engine = own.link, own.opened.engine
    with ThreadPoolExecutor() as pool:
        first = Hold(own)
        assert first.has_come.wait(60)
        failing = pool.submit(own.post, "/update_weights_from_disk", {"model_path": "bad"})
        until(own, lambda: link.engine.thread.num_commands >= 1)
        second = Hold(own)
        next_one = pool.submit(own.post, path, body)
        until(own, lambda: link.engine.thread.num_commands >= 3)
        first.let_go()
        assert second.has_come.wait(60)
        until(own, lambda: engine.weight_info().update == "failed")
        second.let_go()
        refused(failing.result(60), 400, "model.safetensors")
        assert refused(next_one.result(60), 409, "the last update has failed")["code"] == "busy"
    assert ok(own.post("/update_weights_from_disk", {"model_path": "one"}))["version"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/init_weight_transfer_engine", {"init_info": {**INFO, "master_port": 1}}), ("/start_weight_update", {})],
)
def test_an_open_update_in_the_way_says_how_it_is_got_rid_of(server: Running, path: str, body: Any) -> None:
    ok(server.post("/start_weight_update", {}))
    refused(server.post(path, body), 409, "/shutdown_weight_transfer_engine", "/abort_weight_update")
    ok(server.post("/shutdown_weight_transfer_engine", {}))
    ok(server.post("/start_weight_update", {}))


def test_the_first_reason_is_told_when_the_rest_of_a_source_fails_too(server: Running) -> None:
    has_ended = threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield "model.nothing.weight", torch.zeros(1)
        except GeneratorExit:
            has_ended.set()
            raise WeightError("the broadcast failed") from None

    with pytest.raises(WeightError, match="no such tensor"):
        server.on_engine(lambda: server.opened.engine.update_weights(source(), blocking=True))
    assert has_ended.is_set()


# ---- sleep ----------------------------------------------------------------------------------------------------------


def test_memory_that_nobody_named_stays(server: Running) -> None:
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert ok(server.post(path, {"tags": ["cuda_graph"]}))["success"] is True
        assert not is_asleep(server) and not is_sleeping(server)
    assert Stream(server, params=SHORT).result().finish_reason == "length"


def test_a_tag_that_is_no_memory_does_not_wake(server: Running) -> None:
    ok(server.post("/release_memory_occupation", {}))
    ok(server.post("/resume_memory_occupation", {"tags": ["cuda_graph"]}))
    assert is_asleep(server) and is_sleeping(server)
    ok(server.post("/resume_memory_occupation", {}))
    assert not is_asleep(server) and not is_sleeping(server)


def test_waking_that_fails_can_be_tried_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def wake() -> None:
        raise BadRequest("not now")

    ok(server.post("/sleep", {}))
    with monkeypatch.context() as patch:
        patch.setattr(server.opened.engine.control, "wake", wake)
        refused(server.post("/wake_up", {}), 400, "not now")
    assert is_asleep(server) and is_sleeping(server)
    assert ok(server.post("/wake_up", {}))["status"] == "awake"
    assert not is_asleep(server) and not is_sleeping(server)


def test_what_slept_otherwise_is_woken_too(server: Running) -> None:
    server.on_engine(server.opened.engine.sleep)
    ok(server.post("/wake_up", {}))
    assert not is_asleep(server)


@pytest.mark.parametrize("path", ["/resume", "/continue_generation"])
def test_resuming_ends_a_sleep_that_only_paused(server: Running, path: str) -> None:
    ok(server.client.post("/sleep?level=0"))
    assert is_sleeping(server)
    ok(server.post(path, {}))
    assert not is_sleeping(server)
    assert Stream(server, params=SHORT).result().finish_reason == "length"


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["x" * 300, "y/" * 2000, "loop"])
def test_a_path_that_cannot_be_followed_is_refused(server: Running, asked: str) -> None:
    reply = server.post("/update_weights_from_disk", {"model_path": asked})
    assert reply.json()["success"] is False
    refused(reply, 400, "model_path: ")
    refused(server.post("/update_weights", {"weight_dir": asked}), 400, "weight_dir: ")
    ok(server.post("/start_weight_update", {}))
    refused(server.post("/update_weights", {"update_info": {"path": asked}}), 400, "update_info.path: ")
    assert ok(server.client.get("/weight_info"))["update"] == "staging", "a wrong path gave the update up"


def test_weights_that_were_dropped_cannot_be_checked(own: Running) -> None:
    ok(own.client.post("/sleep?level=2"))
    refused(own.post("/weight_checker", {"action": "checksum"}), 400, "discarded")


@pytest.mark.parametrize(
    ("error", "status", "part"),
    [
        (WeightError("a wrong weight"), 400, "a wrong weight"),
        (BadRequest("a wrong word"), 400, "a wrong word"),
        (UpdateBusy("another one"), 409, "another one"),
        (EnginePaused("it sleeps"), 409, "it sleeps"),
        (EngineDead("gone"), 503, "the engine has failed"),
        (OSError(28, "No space left on device"), 400, "No space left on device"),
        (RuntimeError("a fault of ours"), 500, "internal server error"),
    ],
)
@pytest.mark.parametrize(("path", "name"), [("/weight_checker", "weights_checksum"), ("/flush_cache", "flush_cache")])
def test_what_a_command_fails_of_is_told(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, name: str, error: Exception, status: int, part: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(server.opened.engine.control, name, fail)
    reply = server.post(path, {"action": "checksum"} if path == "/weight_checker" else {})
    refused(reply, status, part)
    if status != 500:
        assert (reply.json().get("success") is False) == (path == "/flush_cache")


def test_no_name_is_nobody(server: Running) -> None:
    stream = Stream(server).begun()
    assert ok(server.post("/abort_requests", {"request_ids": []}))["num_aborted"] == 0
    assert stream.result().finish_reason == "length"
    stream = Stream(server).begun()
    assert ok(server.post("/abort_requests", {"request_ids": None}))["num_aborted"] == 1
    assert stream.result().finish_reason == "abort"


# ---- queries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{}, None, {"abort_all_requests": False}])
@pytest.mark.parametrize("text", ["1", "yes", "off", "step-7"])
def test_a_field_that_is_needed_may_stand_in_the_query(server: Running, text: str, body: Any) -> None:
    path = f"/update_weight_version?new_version={text}"
    reply = ok(server.client.post(path) if body is None else server.post(path, body))
    assert reply["new_version"] == reply["weight_version"] == text


@pytest.mark.parametrize(("text", "is_free"), [("1", True), ("ON", True), ("0", False), ("no", False)])
def test_words_for_yes_and_no_count_where_one_of_them_is_asked(server: Running, text: str, is_free: bool) -> None:
    stream = Stream(server).begun()
    ok(server.client.post(f"/pause?mode=keep&clear_cache={text}"))
    kv = server.opened.engine.parts.kv
    assert server.on_engine(lambda: kv.num_free_blocks() == kv.num_blocks) is is_free
    ok(server.post("/resume", {}))
    assert stream.result().finish_reason == "length"


def test_the_query_and_the_body_are_one(server: Running) -> None:
    assert ok(server.client.post("/weight_checker?action=checksum"))["checksum"]
    query = "action=compare&checksum=on"
    assert ok(server.post(f"/weight_checker?{query}", {"action": "checksum"}))["equal"] is False
    assert ok(server.post("/sleep?level=1", {"mode": "keep"}))["level"] == 1
    assert ok(server.client.post("/wake_up?tags=weights&tags=kv_cache"))["status"] == "awake"
    for number in (1, 2):
        ids = "&".join(["request_ids=nobody"] * number)
        assert ok(server.client.post(f"/abort_requests?{ids}"))["num_aborted"] == 0
    refused(server.client.post("/sleep?level=one"), 400, "level")
    refused(server.client.post("/pause?clear_cache=2"), 400, "clear_cache")
    refused(server.client.post("/pause?mode=keep&mode=keep"), 400, "mode: is there twice")
    refused(server.post("/pause?mode=keep", [1]), 400, "must be a JSON object")


# ---- directories ----------------------------------------------------------------------------------------------------


class Silence(NamedTuple):
    """A file system that was asked, and answers when it is told to: that it failed."""

    asked: threading.Event
    answer: threading.Event


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silence]:
    """Let the file system be silent while the test runs."""
    one = Silence(threading.Event(), threading.Event())

    def place_of(*_: object) -> None:
        one.asked.set()
        one.answer.wait(60)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(context, "place_of", place_of)
    yield one
    one.answer.set()


def test_a_silent_file_system_holds_nobody_up(
    server: Running, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_PLACE_S", 60.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "/update_weights_from_disk", {"model_path": "one"})
        assert silence.asked.wait(60)
        assert server.client.get("/health").status_code == 200
        assert Stream(server, params=SHORT).result().finish_reason == "length"
        assert not waiting.done()
        monkeypatch.setattr(context, "_PLACE_S", 0.01)
        refused(server.post("/update_weights_from_disk", {"model_path": "one"}), 503, "model_path", "did not answer")
        silence.answer.set()
        refused(waiting.result(60), 400, "Stale file handle")


# ---- groups ---------------------------------------------------------------------------------------------------------


def is_joining(server: Running) -> bool:
    return any(thread.name == JOINING for thread in threading.enumerate())


def test_a_newer_group_takes_the_place_of_one_that_nobody_comes_to(own: Running, trainer: Trainer) -> None:
    port = free_port()
    info = {**INFO, "master_port": port}
    with ThreadPoolExecutor() as pool:
        older = pool.submit(own.post, "/init_weights_update_group", info)
        until(own, lambda: is_joining(own))
        newer = pool.submit(own.post, "/init_weight_transfer_engine", {"init_info": info})
        assert refused(older.result(60), 409, "given up")["code"] == "superseded"
        trainer.join(port, "weight_update_group")
        trainer.wait()
        ok(newer.result(60))
    until(own, lambda: not is_joining(own))
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]}
    with ThreadPoolExecutor() as pool:
        update = pool.submit(own.post, "/update_weights_from_distributed", body)
        trainer.send(["model.norm.weight"])
        trainer.wait()
        assert ok(update.result(60))["version"] == 1


@pytest.mark.parametrize("path", ["/shutdown_weight_transfer_engine", "/destroy_weights_update_group"])
def test_what_waits_for_a_trainer_can_be_left(server: Running, path: str) -> None:
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(server.post, "/init_weights_update_group", {**INFO, "master_port": free_port()})
        until(server, lambda: is_joining(server))
        reply = ok(server.post(path, {}))
        assert reply.get("num_groups", 1) == 1
        refused(joining.result(60), 409, "given up")
    until(server, lambda: not is_joining(server))
    assert ok(server.post("/shutdown_weight_transfer_engine", {}))["num_groups"] == 0


def test_a_group_that_comes_late_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    may_come, is_closed = threading.Event(), threading.Event()

    class Late:
        def __init__(self, *_: object, **__: object) -> None:
            may_come.wait(60)

        def close(self) -> None:
            is_closed.set()

    monkeypatch.setattr(plain, "PlainGroup", Late)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(server.post, "/init_weights_update_group", {**INFO, "master_port": 1})
        until(server, lambda: is_joining(server))
        ok(server.post("/shutdown_weight_transfer_engine", {}))
        refused(joining.result(60), 409, "given up")
    may_come.set()
    assert is_closed.wait(60)
    refused(server.post("/destroy_weights_update_group", {}), 400, "no group")
