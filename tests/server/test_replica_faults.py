"""Faults of replicas and of clients in the middle of trainers' commands, step by step with emulated replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nano_inference.config import EngineConfig
from nano_inference.server.app import guard_policy
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.front.run import setup_of
from nano_inference.server.guard import ClientGone
from nano_inference.server.security import KeyRing
from tests.server.emulated import ABORT, BODY, COMMIT, DISK, emulated

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ONE, TWO = {"model_path": "one"}, {"model_path": "two"}
HELD = {"model_path": "one", "hold": True}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize("body", [ONE, HELD])
async def test_an_abort_at_the_end_of_a_gather_ends_no_replica(shelf: Path, body: dict[str, object]) -> None:
    async with emulated(shelf) as group:
        gathered, aborted = group.gate(1, DISK), group.gate(1, ABORT)
        update = group.posting(DISK, body)
        await group.until(lambda: DISK in group.running[1].paths)
        abort = group.posting(ABORT)
        await group.until(lambda: ABORT in group.running[1].paths)
        gathered.set()
        await group.settle()
        aborted.set()
        assert (await abort)[1]["aborted"] is True
        status, reply = await update
        assert (status, reply["error"]["code"]) == (409, "aborted")
        assert group.states == ["ready", "ready"] and [len(one) for one in group.started] == [1, 1]
        assert (await group.post(COMMIT))[1]["error"]["code"] == "no_update"
        assert (await group.post(DISK, TWO))[1]["version"] == 1


async def test_an_update_that_no_replica_can_install_leaves_the_old_weights_in_force(shelf: Path) -> None:
    async with emulated(shelf) as group:
        assert (await group.post(DISK, ONE))[1]["version"] == 1
        group.refusing[COMMIT] = dict.fromkeys((0, 1), (409, "asleep"))
        status, reply = await group.post(DISK, TWO)
        assert (status, reply["error"]["code"], reply["success"]) == (409, "asleep", False)
        group.refusing.clear()
        assert group.states == ["ready", "ready"] and not any(one.is_held for one in group.running)
        assert group.trainers.version == 1
        await group.kill(1)
        assert [len(one) for one in group.started] == [1, 2]
        assert group.running[1].paths == [DISK, COMMIT] and group.running[1].version == 1
        assert (await group.post(DISK, TWO))[1]["version"] == 2


async def test_an_error_of_a_replica_keeps_its_headers(shelf: Path) -> None:
    async with emulated(shelf) as group:
        group.refusing["/pause"] = {1: (503, "engine_dead")}
        with pytest.raises(ApiError, match="emulated") as found:
            await group.trainers.answer(*group.request("/pause"))
        assert (found.value.status, found.value.code) == (503, "engine_dead")
        assert dict(found.value.headers) == {"x-should-retry": "false"}


async def test_a_replica_that_has_not_installed_an_update_yet_makes_none_forget_it(shelf: Path) -> None:
    async with emulated(shelf) as group:
        for one in group.running:
            one.weights = "discarded"
        installing = group.gate(1, COMMIT)
        update = group.posting(DISK, ONE)
        await group.until(lambda: COMMIT in group.running[1].paths)
        assert (await group.post("/resume"))[1]["weights"] == "present"
        installing.set()
        assert (await update)[1]["version"] == 1
        await group.kill(1)
        assert group.running[1].version == 1


async def test_a_replica_that_needs_an_update_is_paused_and_asleep_as_the_others(shelf: Path) -> None:
    async with emulated(shelf) as group:
        await group.post(DISK, ONE)
        await group.post("/pause", {"mode": "keep"})
        await group.post("/sleep", {"level": 1})
        (shelf / "one" / "model.safetensors").write_bytes(b"other")
        await group.kill(1, then="needs an update")
        assert group.servers.all[1].error == "one has changed since it was installed"
        await group.post(DISK, ONE)
        assert group.states == ["ready", "ready"]
        assert all(one.is_paused and one.is_asleep and one.version == 2 for one in group.running)


@pytest.mark.parametrize("error", [(503, "no_answer"), (400, "os_error")])
async def test_a_replica_whose_weights_cannot_be_read_at_the_moment_starts_again(
    shelf: Path, error: tuple[int, str]
) -> None:
    async with emulated(shelf) as group:
        await group.post(DISK, ONE)
        group.refusing[DISK] = {1: error}
        group.running[1].ended.set()
        await group.until(lambda: len(group.started[1]) > 3)
        assert "cannot be read at the moment" in group.servers.all[1].error
        group.refusing.clear()
        await group.until(lambda: group.states == ["ready", "ready"])
        assert group.running[1].version == 1
        group.refusing[DISK] = {1: (400, "bad_weights")}
        await group.kill(1, then="needs an update")


async def test_an_update_from_a_directory_does_not_wait_for_a_replica_that_starts(shelf: Path) -> None:
    async with emulated(shelf) as group:
        group.may_start.clear()
        await group.kill(1, then="starting")
        assert (await group.post(DISK, ONE))[1]["version"] == 1
        group.may_start.set()
        await group.until(lambda: group.states == ["ready", "ready"])
        assert group.running[1].version == 1


async def test_an_update_waits_for_a_replica_that_starts_no_longer_than_weight_timeout(shelf: Path) -> None:
    async with emulated(shelf, weight_timeout=0.01) as group:
        group.may_start.clear()
        await group.kill(1, then="starting")
        assert (await group.post(BODY))[1]["version"] == 1
        assert (await group.post(DISK, HELD))[1]["held_version"] == 2


async def test_an_option_of_held_updates_needs_hold(shelf: Path) -> None:
    async with emulated(shelf) as group:
        status, reply = await group.post("/update_weights", {"weight_dir": "one", "partial": True})
        assert (status, reply["error"]["param"]) == (400, "partial")
        assert not group.running[0].paths
        assert (await group.post("/update_weights", {"weight_dir": "one", "partial": True, "hold": True}))[0] == 200


async def test_an_update_ends_if_its_client_leaves_while_it_waits_for_replicas(shelf: Path) -> None:
    async with emulated(shelf) as group:
        group.may_start.clear()
        await group.kill(1, then="starting")
        update = group.posting(DISK, HELD)
        await group.settle()
        group.gone.set()
        with pytest.raises(ClientGone):
            await update
        assert not group.running[0].paths
        group.gone.clear()
        group.may_start.set()
        assert (await group.post(DISK, ONE))[0] == 200  # not 409: none is in progress


async def test_an_update_that_is_installed_during_a_replay_is_replayed_too(shelf: Path) -> None:
    async with emulated(shelf) as group:
        await group.post("/pause", {"mode": "keep"})
        pausing = group.gate(1, "/pause")
        await group.kill(1, then="starting")
        await group.until(lambda: group.running[1].paths == ["/pause"])
        installing = group.gate(0, COMMIT)
        update = group.posting(DISK, ONE)
        await group.until(lambda: COMMIT in group.running[0].paths)
        pausing.set()
        await group.settle()
        assert group.states == ["ready", "starting"]
        installing.set()
        assert (await update)[1]["version"] == 1
        await group.until(lambda: group.states == ["ready", "ready"])
        assert group.running[1].version == 1 and group.running[1].is_paused


async def test_the_replacement_of_a_replica_that_died_during_an_update_is_left_alone(shelf: Path) -> None:
    async with emulated(shelf) as group:
        gates = [group.gate(index, DISK) for index in (0, 1)]
        aborting = group.gate(0, ABORT)
        update = group.posting(DISK, ONE)
        await group.until(lambda: all(DISK in one.paths for one in group.running))
        group.may_start.clear()
        await group.kill(1, then="starting")
        await group.until(lambda: ABORT in group.running[0].paths)
        aborting.set()
        status, reply = await update
        assert (status, reply["error"]["code"]) == (503, "replica_died")
        group.may_start.set()
        await group.until(lambda: group.states == ["ready", "ready"])
        assert [len(one) for one in group.started] == [1, 2] and not any(one.is_set() for one in gates)


async def test_a_replica_that_dies_during_a_command_is_replaced_once(shelf: Path) -> None:
    async with emulated(shelf) as group:
        group.gate(1, "/resume")
        slow = group.gate(0, "/resume")
        command = group.posting("/resume")
        await group.until(lambda: all("/resume" in one.paths for one in group.running))
        group.may_start.clear()
        await group.kill(1, then="starting")
        slow.set()
        assert (await command)[0] == 200
        await group.settle()
        group.gates.clear()
        group.may_start.set()
        await group.until(lambda: group.states == ["ready", "ready"])
        assert [len(one) for one in group.started] == [1, 2]


async def test_a_replica_that_does_not_answer_is_replaced_after_weight_timeout(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.server.front.trainers._MARGIN_S", 0.01)

    async with emulated(shelf, weight_timeout=0.01) as group:
        group.gate(1, "/pause")
        command = group.posting("/pause", {"mode": "keep"})
        await group.until(lambda: len(group.started[1]) > 1)
        await command


@pytest.mark.parametrize("body", [{"mode": "wait"}, {"wait_for_inflight_requests": True}])
async def test_a_pause_that_waits_for_requests_has_no_limit_while_the_replica_is_healthy(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, object]
) -> None:
    monkeypatch.setattr("nano_inference.server.front.trainers._MARGIN_S", 0.01)

    async with emulated(shelf, weight_timeout=0.01) as group:
        pausing = group.gate(1, "/pause")
        command = group.posting("/pause", body)
        await group.until(lambda: "/pause" in group.running[1].paths)
        for _ in range(3):
            assert not (await asyncio.wait({command}, timeout=0.03))[0]
        pausing.set()
        assert (await command)[0] == 200 and [len(one) for one in group.started] == [1, 1]
        group.gate(1, "/pause")
        command = group.posting("/pause", body)
        await group.until(lambda: group.running[1].paths.count("/pause") == 2)
        await group.settle()  # the other one answers
        group.is_healthy = False
        group.servers.mark(group.servers.all[1], "unreachable")
        assert (await command)[0] == 200
        await group.until(lambda: len(group.started[1]) == 2)


async def test_a_rolling_restart_ends_at_an_update_that_a_new_replica_could_not_read(
    shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with emulated(shelf) as group:
        group.may_start.clear()
        group.servers.restart_all()
        await group.until(lambda: len(group.started[0]) == 2)
        update = group.posting(BODY)
        await group.until(lambda: not group.servers.may_restart())
        group.may_start.set()
        assert (await update)[1]["version"] == 1
        await group.until(lambda: "rolling restart: refused" in caplog.text)
        assert group.states == ["ready", "ready"] and [len(one) for one in group.started] == [2, 1]
        assert all(one.version == 1 for one in group.running)


async def test_no_replica_is_restarted_during_an_update(shelf: Path) -> None:
    async with emulated(shelf) as group:
        gathering = group.gate(1, BODY)
        update = group.posting(BODY)
        await group.until(lambda: BODY in group.running[1].paths)
        group.servers.restart_all()
        await group.settle()
        assert group.states == ["ready", "ready"]
        gathering.set()
        assert (await update)[1]["version"] == 1
        assert group.states == ["ready", "ready"] and [len(one) for one in group.started] == [1, 1]


async def test_a_replica_that_drains_is_not_stopped_during_an_update(shelf: Path) -> None:
    async with emulated(shelf) as group:
        installing = group.gate(1, COMMIT)
        update = group.posting(DISK, ONE)
        await group.until(lambda: COMMIT in group.running[1].paths)
        await group.settle()  # the first one has installed it: it answers no request now
        group.servers.stop(group.servers.all[0])
        await group.settle()
        assert group.states == ["draining", "ready"] and not group.running[0].ended.is_set()
        installing.set()
        assert (await update)[1]["version"] == 1 and group.states[0] != "ready"
        await group.until(lambda: len(group.started[0]) == 2)


async def test_a_repeated_pause_that_fails_or_is_left_keeps_the_earlier_one(shelf: Path) -> None:
    async with emulated(shelf) as group:
        assert (await group.post("/pause", {"mode": "keep"}))[0] == 200
        group.refusing["/pause"] = {1: (409, "overtaken")}
        assert (await group.post("/pause", {"mode": "keep"}))[0] == 409
        group.refusing.clear()
        await group.kill(1)
        assert group.running[1].is_paused
        pausing = group.gate(0, "/pause")
        again = group.posting("/pause", {"mode": "keep"})
        await group.until(lambda: group.running[0].paths.count("/pause") == 3)
        group.gone.set()
        with pytest.raises(ClientGone):
            await again
        pausing.set()
        await group.kill(1)
        assert group.running[1].is_paused


async def test_a_command_whose_client_leaves_reaches_all_replicas(shelf: Path) -> None:
    async with emulated(shelf) as group:
        pausing = group.gate(1, "/pause")
        command = group.posting("/pause", {"mode": "keep"})
        await group.until(lambda: "/pause" in group.running[1].paths)
        group.gone.set()
        with pytest.raises(ClientGone):
            await command
        pausing.set()
        await group.until(lambda: group.running[1].is_paused)
        await group.kill(0)
        assert group.running[0].is_paused


async def test_what_makes_a_new_replica_equal_is_bounded(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.server.front.trainers.MAX_JOURNAL", 3)

    async with emulated(shelf) as group:
        await group.post("/pause", {"mode": "keep"})
        for number in range(9):
            await group.post("/update_weight_version", {"new_version": number})
        await group.kill(1)
        assert group.running[1].paths == ["/pause", "/update_weight_version"]
        for number in range(4):
            await group.post("/update_weights", {"weight_dir": "one", "partial": True, "hold": True})
            assert (await group.post(COMMIT))[1]["version"] == number + 1
        await group.kill(1, then="needs an update")
        assert group.servers.all[1].error == "the weights in force were made by more than 256 commands"
        assert group.running[1].is_paused
        await group.post(DISK, ONE)
        assert group.states == ["ready", "ready"]


async def test_a_command_that_no_replica_gets_is_not_kept(shelf: Path) -> None:
    async with emulated(shelf) as group:
        group.may_start.clear()
        for index in (0, 1):
            await group.kill(index, then="starting")
        assert (await group.post("/pause", {"mode": "keep"}))[1]["error"]["code"] == "no_replica"
        group.may_start.set()
        await group.until(lambda: group.states == ["ready", "ready"])
        assert not any(one.is_paused for one in group.running)


async def test_a_replica_that_dies_or_refuses_a_new_version_of_an_adapter_loads_it_when_it_starts(shelf: Path) -> None:
    async with emulated(shelf) as group:
        loading = group.gate(1, LOAD)
        load = group.posting(LOAD, {"lora_name": "a", "lora_path": "one"})
        await group.until(lambda: LOAD in group.running[1].paths)
        assert (await group.post(DISK, ONE))[1]["error"]["code"] == "busy"
        group.running[1].ended.set()
        assert (await load)[0] == 200
        loading.set()
        await group.until(lambda: len(group.started[1]) == 2 and group.states == ["ready", "ready"])
        assert group.running[1].paths == [LOAD]
        group.refusing[LOAD] = {0: (400, "bad_adapter")}
        assert (await group.post(LOAD, {"lora_name": "a", "lora_path": "two", "load_inplace": True}))[0] == 200
        group.refusing.clear()
        await group.until(lambda: len(group.started[0]) == 2 and group.states == ["ready", "ready"])
        assert group.running[0].paths == [LOAD]
        group.refusing[UNLOAD] = {0: (503, "engine_dead"), 1: (404, "adapter_not_found")}
        assert (await group.post(UNLOAD, {"lora_name": "a"}))[0] == 503
        group.refusing[UNLOAD] = {1: (404, "adapter_not_found")}
        assert (await group.post(UNLOAD, {"lora_name": "a"}))[0] == 200
        await group.kill(1)
        assert group.running[1].paths == [] and len(group.started[0]) == 2


async def test_an_adapter_that_cannot_be_loaded_again_keeps_a_replica_from_requests(shelf: Path) -> None:
    async with emulated(shelf) as group:
        await group.post(LOAD, {"lora_name": "a", "lora_path": "one"})
        (shelf / "one" / "model.safetensors").write_bytes(b"other")
        await group.kill(1, then="needs an update")
        assert group.servers.all[1].error == "one has changed since it was installed"


async def test_replicas_behind_a_unix_socket_need_a_secret_admin_key(shelf: Path) -> None:
    config = ServerConfig(uds=str(shelf / "socket"), replicas=2, enable_rl=True)
    policy = guard_policy(config, KeyRing.of(()))
    found = setup_of(EngineConfig(model_path="m"), config, policy, ("m",), shelf)["server"]
    assert len(found["admin_key"]) == 1 and len(found["admin_key"][0]) == 64 and not found["api_key"]
    behind = guard_policy(ServerConfig.from_dict(found), KeyRing.of(()))
    assert behind.keys.is_empty and behind.admins.identify(found["admin_key"][0]) == 0

    async with emulated(shelf, uds=str(shelf / "socket")) as group:
        await group.post("/pause")
        (key,) = group.running[0].keys
        assert key.startswith("Bearer ") and len(key) == 71
