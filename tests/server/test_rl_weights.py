"""Weight updates over HTTP from directories: atomic, one at a time, and only from below --weights-dir."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.places import place_of, weights_below, weights_root
from tests.server.tiny import Running
from tests.server.trainer import (
    LONG,
    PROMPT,
    SHORT,
    Stream,
    fresh_tokens,
    held,
    make_weights,
    ok,
    refused,
    serving,
    until,
)

pytestmark = pytest.mark.slow


Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def shelf(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two directories of valid weights."""
    root = tmp_path_factory.mktemp("weights")
    for name, seed in (("one", 11), ("two", 12)):
        make_weights(tiny_directory, root / name, seed)
    return root


@pytest.fixture
def server(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    with serving(tiny_directory, shelf, weight_timeout=60) as one:
        yield one


@pytest.fixture(scope="module")
def steady(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    """A shared server whose weights no test may change."""
    with serving(tiny_directory, shelf, weight_timeout=60) as one:
        yield one


FORMS = {
    "sglang": ("/update_weights_from_disk", lambda place: {"model_path": place, "weight_version": "step-1"}),
    "prime-rl": ("/update_weights", lambda place: {"weight_dir": place, "weight_version": "step-1"}),
    "path": ("/update_weights", lambda place: {"update_info": {"path": place}, "weight_version": "step-1"}),
    "dir": ("/update_weights", lambda place: {"update_info": {"weight_dir": place}, "weight_version": "step-1"}),
}


@pytest.mark.parametrize(("form", "is_absolute"), [*((form, False) for form in FORMS), ("sglang", True)])
def test_update_from_directory(
    form: str, is_absolute: bool, server: Running, shelf: Path, tiny_directory: Path
) -> None:
    path, body = FORMS[form]
    reply = ok(server.post(path, body(str(shelf / "one") if is_absolute else "one")))
    assert (reply["weight_version"], reply["version"]) == ("step-1", 1)
    server.on_engine(lambda: None)  # wait until the event loop has processed the step that installed them
    shown = b'nano_inference_weight_version{engine="0",model_name="tiny"} 1.0'
    assert shown in server.opened.metrics.render()
    if form == "sglang":
        assert reply["success"] is True and reply["message"] and reply["num_paused_requests"] == 0
    sample = Stream(server, params=SHORT).result()
    assert sample.completion_tokens == fresh_tokens(tiny_directory, shelf / "one", PROMPT, SHORT)
    assert sample.token_versions == (1,) * 8 and dict(sample.version_labels) == {1: "step-1"}
    assert ok(server.client.get("/weight_info"))["label"] == "step-1"


def test_running_requests_change_weights_at_one_step_boundary(
    server: Running, shelf: Path, tiny_directory: Path
) -> None:
    prompts = [(i, 2 * i + 1, 7) for i in range(32)]
    before = [Stream(server, prompt).result().completion_tokens for prompt in prompts[:4]]
    with held(server):
        streams = [Stream(server, prompt) for prompt in prompts]
        assert all(stream.is_submitted.wait(60) for stream in streams)
    assert all(stream.started() for stream in streams)
    reply = ok(server.post("/update_weights_from_disk", {"model_path": "one", "weight_version": 5}))
    assert (reply["weight_version"], reply["version"]) == ("5", 1)
    samples = [stream.result() for stream in streams]
    for stream, sample in zip(streams, samples, strict=True):
        assert sample.finish_reason == "length" and len(stream.tokens) == 200
        versions = [version for delta in stream.deltas for version in delta.versions]
        assert tuple(versions) == sample.token_versions and versions == sorted(versions)
        assert set(versions) <= {0, 1}
    assert any(set(sample.token_versions) == {0, 1} for sample in samples), (
        "the update was not installed during the requests"
    )
    for old, sample in zip(before, samples[:4], strict=True):
        count = sample.token_versions.count(0)
        assert sample.completion_tokens[:count] == old[:count] and sample.completion_tokens != old
    after = Stream(server, prompts[0]).result()
    assert after.completion_tokens == fresh_tokens(tiny_directory, shelf / "one", prompts[0], LONG)


def test_sglang_update_may_abort_running_requests(server: Running) -> None:
    streams = [Stream(server).started() for _ in range(3)]
    ok(server.post("/update_weights_from_disk", {"model_path": "one", "abort_all_requests": True}))
    samples = [stream.result() for stream in streams]
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert {version for sample in samples for version in sample.token_versions} == {0}
    assert all(sample.completion_tokens for sample in samples)


def test_update_after_sleep_level_2(server: Running, shelf: Path, tiny_directory: Path) -> None:
    assert ok(server.client.post("/sleep?level=2"))["weights"] == "discarded"
    late = Stream(server, params=SHORT)
    reply = ok(server.client.post("/wake_up"))
    assert (reply["status"], reply["weights"]) == ("awake", "discarded") and "requests wait" in reply["hint"]
    assert not late.tokens
    for path in ("/weight_info", "/is_sleeping", "/is_paused", "/server_info"):
        assert ok(server.client.get(path))["weights"] == "discarded"
    update = ok(server.post("/update_weights_from_disk", {"model_path": "two"}))
    assert update["weights"] == "present" and "hint" not in ok(server.client.post("/wake_up"))
    assert late.result().completion_tokens == fresh_tokens(tiny_directory, shelf / "two", PROMPT, SHORT)


def write_changed(shelf: Path, target: Path, change: Change) -> None:
    """Write the weights of "one" after applying `change`."""
    target.mkdir()
    tensors = load_file(shelf / "one" / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")


def first_name(tensors: dict[str, torch.Tensor]) -> str:
    return sorted(tensors)[0]


CORRUPTIONS: dict[str, tuple[Change, str]] = {
    "name": (lambda t: t.update({"model.wrong.weight": t.pop(first_name(t))}), "model.wrong.weight"),
    "shape": (lambda t: t.update({first_name(t): torch.zeros(3)}), "has the shape (3,)"),
    "nan": (lambda t: t[first_name(t)].view(-1)[-1].fill_(float("nan")), "NaN"),
}


def assert_old_weights_serve(server: Running, before: str) -> None:
    info = ok(server.client.get("/weight_info"))
    assert (info["version"], info["update"]) == (0, "idle")
    assert ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"] == before
    assert Stream(server, params=SHORT).result().token_versions == (0,) * 8


@pytest.mark.parametrize(("kind", "form"), [*((kind, "prime-rl") for kind in CORRUPTIONS), ("truncated", "sglang")])
def test_invalid_weights_leave_the_old_ones_in_use(
    kind: str, form: str, steady: Running, shelf: Path, request: pytest.FixtureRequest
) -> None:
    before = ok(steady.post("/weight_checker", {"action": "checksum"}))["checksum"]
    target = shelf / f"bad-{form}-{kind.replace(' ', '-')}"
    request.addfinalizer(lambda: shutil.rmtree(target, ignore_errors=True))
    if kind in CORRUPTIONS:
        change, part = CORRUPTIONS[kind]
        write_changed(shelf, target, change)
    else:
        shutil.copytree(shelf / "one", target)
        data = (target / "model.safetensors").read_bytes()
        (target / "model.safetensors").write_bytes(data[:-1000])
        part = "truncated"
    stream = Stream(steady).started()
    path, body = FORMS[form]
    response = steady.post(path, body(target.name))
    error = refused(response, 400, part)
    assert "\n" not in error["message"] and str(shelf) not in error["message"]
    if kind == "truncated":
        assert f"{target.name}/model.safetensors: the tensors end at" in error["message"]
    if form == "sglang":
        assert response.json()["success"] is False and response.json()["message"] == error["message"]
    assert set(stream.result().token_versions) == {0}
    assert_old_weights_serve(steady, before)


@pytest.fixture(scope="module")
def outside(shelf: Path, tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Valid weights outside the shelf, and links to them on the shelf."""
    away = make_weights(tiny_directory, tmp_path_factory.mktemp("outside") / "away", 13)
    (shelf / "link").symlink_to(away)
    (shelf / "files").mkdir()
    (shelf / "files" / "model.safetensors").symlink_to(away / "model.safetensors")
    (shelf / "shards").mkdir()
    index = {"weight_map": dict.fromkeys(load_file(away / "model.safetensors"), "a.safetensors")}
    (shelf / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    (shelf / "shards" / "a.safetensors").symlink_to(away / "model.safetensors")
    (shelf / "indexed").mkdir()
    (shelf / "indexed" / "model.safetensors.index.json").symlink_to(shelf.parent / "index.json")
    (shelf / "loop").symlink_to(shelf / "loop")
    (shelf / "inner").symlink_to(shelf / "one")
    (shelf / "empty").mkdir()
    (shelf / "file").write_text("not a directory")
    (shelf / "pickled").mkdir()
    (shelf / "pickled" / "model.pt").write_bytes(b"\x80\x04.")
    return away


PLACES = [
    ("{away}", 403, "leads outside"),
    ("/", 403, "leads outside"),
    ("../away", 400, ".."),
    ("link", 403, "leads outside"),
    ("files", 403, "leads outside"),
    ("shards", 403, "leads outside"),
    ("indexed", 403, "leads outside"),
    ("loop", 400, "model_path"),
    ("missing", 400, "no directory of that name below --weights-dir, to which names are relative"),
    ("empty", 400, "no safetensors"),
    ("pickled", 400, "no safetensors"),
    ("one\0", 400, "zero byte"),
    ("x" * 5000, 400, "model_path"),
]


@pytest.mark.parametrize(("place", "status", "part"), PLACES)
def test_only_directories_below_weights_dir_are_accepted(
    place: str, status: int, part: str, shelf: Path, outside: Path
) -> None:
    path = place.replace("{away}", str(outside)).replace("{shelf}", str(shelf))
    with pytest.raises(ApiError, match=re.escape(part)) as found:
        place_of(weights_root(str(shelf)), path, "model_path")
    assert (found.value.status, found.value.param) == (status, "model_path")
    assert place_of(weights_root(str(shelf)), "inner", "model_path") == (shelf / "one").resolve()


def test_a_directory_elsewhere_is_refused(steady: Running, outside: Path) -> None:
    for path in (str(outside), "link"):
        error = refused(steady.post("/update_weights_from_disk", {"model_path": path}), 403, "leads outside")
        assert error["param"] == "model_path"
    refused(steady.post("/update_weights_from_disk", {"model_path": ""}), 400, "model_path")
    assert ok(steady.client.get("/weight_info"))["version"] == 0


def test_file_replaced_by_a_link_while_read_is_detected(shelf: Path, outside: Path, tmp_path: Path) -> None:
    root = tmp_path.resolve()
    shutil.copytree(shelf / "one", root / "one")
    pairs = weights_below(root, root / "one")
    next(pairs)
    (root / "one" / "model.safetensors").unlink()
    (root / "one" / "model.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(ValueError, match=r"link outside|changed while"):
        list(pairs)


def test_directory_without_weights_dir_is_refused(tiny_directory: Path, shelf: Path) -> None:
    with serving(tiny_directory) as one:
        refused(one.post("/update_weights_from_disk", {"model_path": str(shelf / "one")}), 403, "--weights-dir")
    with pytest.raises(ApiError):
        place_of(None, "one", "model_path")
    with pytest.raises(ValueError, match="weights_dir is not a directory"):
        weights_root(str(shelf / "missing"))
    assert weights_root(None) is None


def test_one_of_two_concurrent_updates_is_refused(server: Running) -> None:
    body = {"model_path": "one"}
    with ThreadPoolExecutor() as pool:
        with held(server):
            both = [pool.submit(server.client.post, "/update_weights_from_disk", json=body) for _ in range(2)]
            until(server, lambda: server.link.engine.num_commands >= 2)
        replies = [one.result(60) for one in both]
    assert sorted(reply.status_code for reply in replies) == [200, 409]
    (busy,) = [reply for reply in replies if reply.status_code == 409]
    assert refused(busy, 409, "busy")["code"] == "busy" and busy.json()["success"] is False
    assert ok(server.client.get("/weight_info"))["version"] == 1


def test_open_update_blocks_other_updates(server: Running) -> None:
    ok(server.post("/start_weight_update", {"is_checkpoint_format": True}))
    assert ok(server.client.get("/weight_info"))["update"] == "staging"
    refused(server.post("/start_weight_update", {}), 409, "busy")
    refused(server.post("/update_weights_from_disk", {"model_path": "one"}), 409, "busy")
    init = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    refused(server.post("/init_weights_update_group", init), 409, "busy")
    assert Stream(server, params=SHORT).result().token_versions == (0,) * 8
    refused(server.post("/finish_weight_update", {}), 400, "lacks")
    refused(server.post("/finish_weight_update", {}), 400, "no update is open")
    assert ok(server.post("/update_weights_from_disk", {"model_path": "one"}))["version"] == 1


def test_open_update_can_be_aborted_and_busy_error_names_the_path(server: Running, halves: tuple[str, str]) -> None:
    assert ok(server.post("/abort_weight_update", {}))["aborted"] is False
    ok(server.post("/start_weight_update", {}))
    ok(server.post("/update_weights", part_of(halves[0])))
    refused(server.post("/update_weights_from_disk", {"model_path": "one"}), 409, "busy", "/abort_weight_update")
    reply = ok(server.post("/abort_weight_update", {}))
    assert (reply["aborted"], reply["closed_groups"], reply["version"]) == (True, [], 0)
    assert ok(server.post("/abort_weight_update", {}))["aborted"] is False
    refused(server.post("/finish_weight_update", {}), 400, "no update is open")
    assert not staging(server)
    assert ok(server.post("/update_weights_from_disk", {"model_path": "one"}))["version"] == 1


def checksum(server: Running) -> str:
    found = ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("form", ["sglang", "dir"])
def test_update_with_checksum_is_verified(form: str, server: Running) -> None:
    path, body = FORMS[form]
    before = checksum(server)
    refused(server.post(path, {**body("one"), "checksum": "0" * 32}), 400, "checksum: the update has", "0" * 32)
    assert_old_weights_serve(server, before)
    ok(server.post(path, body("one")))
    expected = checksum(server)
    ok(server.post(path, body("two")))
    reply = ok(server.post(path, {**body("one"), "checksum": expected}))
    assert reply["version"] == 3 and checksum(server) == expected != before


def test_update_in_parts_is_verified_at_its_end(server: Running, halves: tuple[str, str]) -> None:
    before = checksum(server)

    def update(expected: str | None) -> Any:
        ok(server.post("/start_weight_update", {}))
        refused(server.post("/update_weights", {**part_of(halves[0]), "checksum": "00"}), 400, "finish_weight_update")
        for half in halves:
            ok(server.post("/update_weights", part_of(half)))
        return server.post("/finish_weight_update", {} if expected is None else {"checksum": expected})

    refused(update("0" * 32), 400, "checksum: the update has")
    assert_old_weights_serve(server, before)
    ok(update(None))
    assert ok(update(checksum(server)))["version"] == 2


def test_version_is_another_name_of_weight_version(server: Running) -> None:
    body = {"weight_dir": "one", "version": "step-7"}
    refused(server.post("/update_weights", {**body, "weight_version": "step-8"}), 400, "disagree")
    assert ok(server.post("/update_weights", body))["weight_version"] == "step-7"


@pytest.fixture(scope="module")
def halves(shelf: Path) -> tuple[str, str]:
    """The weights of "two", split into two directories."""
    tensors = load_file(shelf / "two" / "model.safetensors")
    names = sorted(tensors)
    for part, chosen in (("half-a", names[::2]), ("half-b", names[1::2])):
        (shelf / part).mkdir()
        save_file({name: tensors[name] for name in chosen}, shelf / part / "model.safetensors")
    return "half-a", "half-b"


def part_of(place: str) -> dict[str, Any]:
    return {"update_info": {"weight_dir": place}}


def test_update_in_parts_is_installed_atomically(
    server: Running, halves: tuple[str, str], shelf: Path, tiny_directory: Path
) -> None:
    streams = [Stream(server, (i, 3)).started() for i in range(4)]
    ok(server.post("/start_weight_update", {}))
    for half in halves:
        assert ok(server.post("/update_weights", part_of(half)))["version"] == 0
    reply = ok(server.post("/finish_weight_update", {"weight_version": "policy-2"}))
    assert (reply["weight_version"], reply["version"]) == ("policy-2", 1)
    for stream in streams:
        versions = stream.result().token_versions
        assert list(versions) == sorted(versions) and versions[0] == 0
    sample = Stream(server, params=SHORT).result()
    assert sample.completion_tokens == fresh_tokens(tiny_directory, shelf / "two", PROMPT, SHORT)
    assert dict(sample.version_labels) == {1: "policy-2"}
    refused(server.post("/finish_weight_update", {}), 400, "no update is open")


def test_invalid_part_aborts_the_whole_update(server: Running, halves: tuple[str, str], shelf: Path) -> None:
    before = ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"]
    write_changed(shelf, shelf / "bad-part", CORRUPTIONS["shape"][0])
    try:
        ok(server.post("/start_weight_update", {}))
        ok(server.post("/update_weights", part_of(halves[1])))
        refused(server.post("/update_weights", part_of("bad-part")), 400)
    finally:
        shutil.rmtree(shelf / "bad-part")
    for _ in range(2):
        refused(server.post("/update_weights", part_of(halves[0])), 400, "no update is open", "has the shape (3,)")
    refused(server.post("/finish_weight_update", {}), 400, "no update is open", "has the shape (3,)")
    assert_old_weights_serve(server, before)
    assert ok(server.post("/update_weights_from_disk", {"model_path": "two"}))["version"] == 1


def test_open_update_times_out(
    tiny_directory: Path, shelf: Path, halves: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = [0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + hours[0] * 3600)
    monkeypatch.setattr("nano_inference.weights.sync.time", clock)
    with serving(tiny_directory, shelf, weight_timeout=60) as one:
        ok(one.post("/start_weight_update", {}))
        ok(one.post("/update_weights", part_of(halves[0])))
        hours[0] = 1
        one.on_engine(lambda: None)  # an idle engine takes a turn only after a command
        until(one, lambda: not staging(one))
        one.on_engine(lambda: None)  # wait until the end of the update was reported
        refused(one.post("/update_weights", part_of(halves[1])), 400, "no update is open", "were not complete within")
        assert ok(one.client.get("/weight_info"))["version"] == 0
        assert Stream(one, params=SHORT).result().token_versions == (0,) * 8


def staging(server: Running) -> bool:
    return bool(server.opened.engine.weight_info().update != "idle")


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/start_weight_update", {"is_checkpoint_format": False}, 400, "is_checkpoint_format"),
        ("/update_weights", {}, 400, "no update is open"),
        ("/update_weights", {"update_info": {"packed": 1}}, 400, "packed"),
        ("/update_weights", {"update_info": {"ipc_handles": [1]}}, 501, "ipc_handles"),
        ("/update_weights", {"update_info": {"weight_dir": "one", "path": "one"}}, 400, "one directory"),
        ("/update_weights", {"weight_dir": "one", "update_info": {"names": ["a"]}}, 400, "one directory"),
        ("/update_weights_from_disk", {"model_path": "one", "load_format": "dummy"}, 400, "load_format"),
        ("/update_weights_from_disk", {"model_path": "one", "weight_version": 1.5}, 400, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "one", "abort_all_requests": 1}, 400, "abort_all_requests"),
    ],
)
def test_invalid_update_field_is_named(steady: Running, path: str, body: Any, status: int, part: str) -> None:
    refused(steady.post(path, body), status, part)
    info = ok(steady.client.get("/weight_info"))
    assert (info["version"], info["update"]) == (0, "idle")


def tokens_of(server: Running) -> tuple[int, ...]:
    return Stream(server, params=SHORT).result().completion_tokens


def test_held_weights_are_installed_at_the_commit(server: Running) -> None:
    old = tokens_of(server)
    reply = ok(server.post("/update_weights", {"weight_dir": "one", "weight_version": "step-1", "hold": True}))
    assert (reply["held_version"], reply["version"]) == (1, 0)
    assert ok(server.client.get("/weight_info"))["update"] == "staged" and tokens_of(server) == old
    refused(server.post("/update_weights_from_disk", {"model_path": "two"}), 409, "busy", "/commit_weight_update")
    reply = ok(server.post("/commit_weight_update", {}))
    assert (reply["version"], reply["weight_version"]) == (1, "step-1") and tokens_of(server) != old
    refused(server.post("/commit_weight_update", {}), 400, "no weights are held")


def test_sglangs_update_and_that_of_a_body_can_be_held(server: Running, shelf: Path) -> None:
    old, content = tokens_of(server), (shelf / "two" / "model.safetensors").read_bytes()
    kind = {"content-type": "application/octet-stream"}
    reply = ok(server.post("/update_weights_from_disk", {"model_path": "one", "hold": True}))
    assert (reply["success"], reply["held_version"], reply["version"]) == (True, 1, 0) and tokens_of(server) == old
    assert ok(server.post("/commit_weight_update", {}))["version"] == 1 and tokens_of(server) != old
    old = tokens_of(server)
    reply = ok(server.client.post("/update_weights_from_body?hold=true", content=content, headers=kind))
    assert (reply["held_version"], reply["version"]) == (2, 1) and tokens_of(server) == old
    assert ok(server.post("/commit_weight_update", {}))["version"] == 2 and tokens_of(server) != old


def test_a_commit_gives_the_weights_a_version_above_the_installed_one(server: Running) -> None:
    ok(server.post("/update_weights_from_disk", {"model_path": "one"}))
    ok(server.post("/update_weights", {"weight_dir": "two", "hold": True}))
    refused(server.post("/commit_weight_update", {"version": 1}), 400, "version must be >= 2, got 1")
    refused(server.post("/commit_weight_update", {"version": 0}), 400, "version")
    assert ok(server.post("/commit_weight_update", {"version": 7}))["version"] == 7
    assert set(Stream(server, params=SHORT).result().token_versions) == {7}
    largest = 2**63 - 2**32  # leaves numbers for later updates
    ok(server.post("/update_weights", {"weight_dir": "one", "hold": True}))
    refused(server.post("/commit_weight_update", {"version": largest + 1}), 400, "version", f"{largest}")
    assert ok(server.post("/commit_weight_update", {"version": largest}))["version"] == largest
    assert ok(server.post("/update_weights_from_disk", {"model_path": "two"}))["version"] == largest + 1


def test_rejected_weights_are_not_held(steady: Running, shelf: Path) -> None:
    refused(steady.post("/update_weights", {"hold": True}), 400, "hold: give the weights as a directory")
    refused(steady.post("/update_weights", {"weight_dir": "one", "partial": True}), 400, "partial: needs hold=true")
    broken = load_file(shelf / "one" / "model.safetensors")
    (shelf / "broken").mkdir()
    save_file(dict(list(broken.items())[1:]), shelf / "broken" / "model.safetensors")
    refused(steady.post("/update_weights", {"weight_dir": "broken", "hold": True}), 400, "lacks")
    refused(steady.post("/commit_weight_update", {}), 400, "no weights are held")
    ok(steady.post("/update_weights", {"weight_dir": "broken", "hold": True, "partial": True}))
    ok(steady.post("/abort_weight_update", {}))
    broken[next(iter(broken))].fill_(float("nan"))
    save_file(broken, shelf / "broken" / "model.safetensors")
    refused(steady.post("/update_weights", {"weight_dir": "broken", "hold": True}), 400, "NaN")
    ok(steady.post("/update_weights", {"weight_dir": "broken", "hold": True, "allow_nonfinite": True}))
    ok(steady.post("/abort_weight_update", {}))


def test_held_weights_treat_running_requests_at_the_commit(server: Running) -> None:
    stream = Stream(server, params=LONG)
    ok(server.post("/update_weights", {"weight_dir": "one", "hold": True, "on_running": "abort"}))
    ok(server.post("/commit_weight_update", {}))
    sample = stream.result()
    assert sample.finish_reason == "abort" and set(sample.token_versions) <= {0}
