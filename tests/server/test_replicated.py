"""Trainers' routes of replicas: an update reaches all or none, and those that replace a replica."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from nano_inference.server.front.commands import OF_ONE_ENGINE
from tests.server.replicated import BYTES, Group, replicated
from tests.server.tiny import Running
from tests.server.trainer import (
    PROMPT,
    SHORT,
    fresh_tokens,
    held,
    make_adapter,
    make_weights,
    ok,
    refused,
    serving,
    until,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shelf(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shelf")
    for seed, name in ((11, "one"), (12, "two")):
        make_weights(tiny_directory, root / name, seed)
    some = dict(list(load_file(root / "two" / "model.safetensors").items())[:2])
    (root / "some").mkdir()
    save_file(some, root / "some" / "model.safetensors")
    return root


@pytest.fixture
def group(tiny_directory: Path, shelf: Path) -> Iterator[Group]:
    with replicated(tiny_directory, shelf) as one:
        yield one


@pytest.fixture
def single(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    """One server, whose replies those of the proxy must equal."""
    with serving(tiny_directory, shelf, lineage="of-all-replicas") as one:
        yield one


def send(client: Any, form: str, name: str, shelf: Path, label: str = "step") -> Any:
    if form == "sglang":
        return client.post("/update_weights_from_disk", json={"model_path": name, "weight_version": label})
    if form == "vllm":
        return client.post("/update_weights", json={"update_info": {"path": name}, "weight_version": label})
    content = (shelf / name / "model.safetensors").read_bytes()
    return client.post(f"/update_weights_from_body?weight_version={label}", content=content, headers=BYTES)


@pytest.mark.parametrize("form", ["sglang", "vllm", "body"])
def test_an_update_reaches_all_replicas(
    group: Group, single: Running, shelf: Path, tiny_directory: Path, form: str
) -> None:
    reply = ok(send(group.front.client, form, "one", shelf))
    right = ok(send(single.client, form, "one", shelf))
    assert reply == right
    expected = list(fresh_tokens(tiny_directory, shelf / "one", PROMPT, SHORT))
    for index in (0, 1):
        tokens, versions = group.tokens(index)
        assert tokens == expected and [(one["version"], one["number"]) for one in versions] == [("step", 1)]
    assert ok(send(group.front.client, form, "two", shelf))["version"] == 2
    assert group.facts(0) == group.facts(1)


def test_an_update_that_one_replica_refuses_reaches_none(group: Group, shelf: Path) -> None:
    before = group.facts(0)
    ok(group.replica(1).post("/update_weights", {"weight_dir": "two", "hold": True}))
    reply = send(group.front.client, "sglang", "one", shelf)
    refused(reply, 409, "busy: an update is staged")
    assert reply.json()["success"] is False
    assert group.facts(0) == group.facts(1) == before
    refused(send(group.front.client, "vllm", "some", shelf), 400, "lacks")
    refused(send(group.front.client, "vllm", "nowhere", shelf), 400, "update_info.path", "no directory of that name")
    refused(send(group.front.client, "body", "some", shelf), 400, "lacks")
    large = save({"other": torch.zeros(16 << 20)})
    reply = group.front.client.post("/update_weights_from_body", content=large, headers=BYTES)
    refused(reply, 400, "other: the model has no such tensor")
    assert group.facts(0) == group.facts(1) == before
    assert ok(send(group.front.client, "sglang", "one", shelf))["version"] == 1
    assert group.facts(0) == group.facts(1) != before


def in_thread(work: Callable[[], Any]) -> Any:
    return ThreadPoolExecutor(1).submit(work)


def test_a_replica_that_dies_before_it_has_gathered_ends_the_update_for_all(group: Group, shelf: Path) -> None:
    before = group.facts(0)
    with held(group.replica(1)):
        update = in_thread(lambda: send(group.front.client, "sglang", "one", shelf))
        until(group.replica(0), lambda: group.replica(0).opened.engine.weight_info().update == "staged")
        refused(send(group.front.client, "vllm", "two", shelf), 409, "busy: an update is gathering")
        group.replicas[1][-1].kill()
        error = refused(update.result(60), 503, "replica 1 died", "no replica installs the update")
        assert error["code"] == "replica_died"
    group.until(lambda: len(group.replicas[1]) == 2 and len(group.front.servers.ready) == 2)
    assert group.facts(0) == group.facts(1) == before
    assert ok(send(group.front.client, "sglang", "one", shelf))["version"] == 1
    assert group.facts(0) == group.facts(1) != before


def test_an_update_waits_for_replicas_that_start_and_can_be_aborted_meanwhile(group: Group, shelf: Path) -> None:
    before = group.facts(0)
    group.may_start.clear()
    group.replicas[1][-1].kill()
    group.until(lambda: len(group.replicas[1]) == 2)
    update = in_thread(lambda: send(group.front.client, "body", "one", shelf))
    group.until(lambda: not group.front.servers.may_restart())
    assert ok(group.post("/abort_weight_update", {}))["aborted"] is True
    refused(update.result(60), 409, "the update was aborted")
    update = in_thread(lambda: send(group.front.client, "body", "one", shelf))
    group.until(lambda: not group.front.servers.may_restart())
    assert group.facts(0) == before and not update.done()
    group.may_start.set()
    assert ok(update.result(60))["version"] == 1
    assert group.facts(0) == group.facts(1) != before


def test_a_replica_that_dies_before_it_has_installed_is_replaced_by_one_that_has(group: Group, shelf: Path) -> None:
    reply = ok(group.post("/update_weights", {"weight_dir": "one", "hold": True, "weight_version": "step"}))
    assert (reply["held_version"], reply["version"]) == (1, 0)
    with held(group.replica(1)):
        commit = in_thread(lambda: group.post("/commit_weight_update", {}))
        until(group.replica(0), lambda: group.replica(0).opened.engine.weight_info().version == 1)
        refused(group.post("/abort_weight_update", {}), 409, "being installed")
        group.replicas[1][-1].kill()
        assert ok(commit.result(60))["version"] == 1
    group.until(lambda: len(group.replicas[1]) == 2 and len(group.front.servers.ready) == 2)
    assert group.facts(0) == group.facts(1) and group.facts(1)[:2] == (1, "step")
    assert group.tokens(0) == group.tokens(1)


def test_a_replica_that_cannot_install_is_replaced_by_one_that_has(group: Group, shelf: Path) -> None:
    ok(group.post("/update_weights", {"weight_dir": "one", "hold": True}))
    assert ok(group.replica(1).post("/abort_weight_update", {}))["aborted"] is True
    assert ok(group.post("/commit_weight_update", {}))["version"] == 1
    group.until(lambda: len(group.replicas[1]) == 2 and len(group.front.servers.ready) == 2)
    assert group.facts(0) == group.facts(1) and group.facts(1)[0] == 1


def test_a_replica_that_starts_during_an_update_gets_it(group: Group, shelf: Path) -> None:
    first, second = group.front.servers.all

    def drain() -> None:
        second.num_open += 1  # a request, which the restart waits for
        group.front.servers.stop(second)

    def end_request() -> None:
        second.num_open -= 1
        group.front.servers.notify()

    group.front.on_loop(drain)
    with held(group.replica(0)):
        update = in_thread(lambda: send(group.front.client, "sglang", "one", shelf))
        group.until(lambda: first.num_open)
        old = second.url
        group.front.on_loop(end_request)
        group.until(lambda: second.url != old)
        for _ in range(20):  # turns of the proxy, in which the replica must not become ready
            states = [one["state"] for one in group.front.client.get("/health").json()["replicas"]]
        assert states == ["ready", "starting"]
    assert ok(update.result(60))["version"] == 1
    group.until(lambda: len(group.front.servers.ready) == 2)
    assert group.facts(0) == group.facts(1) and group.facts(1)[0] == 1


def test_a_killed_replica_is_replaced_with_weights_version_label_and_pause(group: Group, shelf: Path) -> None:
    for name, path in (("one", "model_path"), ("two", "model_path")):
        ok(group.post("/update_weights_from_disk", {path: name}))
    ok(group.post("/update_weights", {"weight_dir": "some", "hold": True, "partial": True}))
    ok(group.post("/commit_weight_update", {"version": 7}))
    ok(group.post("/update_weight_version", {"new_version": "named"}))
    ok(group.post("/pause", {"mode": "keep"}))
    group.kill(1)
    assert group.facts(0) == group.facts(1) and group.facts(1)[:2] == (7, "named") and group.facts(1)[3] is True
    ok(group.post("/resume", {}))
    group.kill(0)
    assert group.facts(0) == group.facts(1) and group.facts(0)[3] is False
    assert group.tokens(0) == group.tokens(1)


def test_a_replica_waits_for_an_update_if_the_weights_came_in_a_body(group: Group, shelf: Path) -> None:
    ok(send(group.front.client, "body", "one", shelf))
    group.kill(1, then="needs an update")
    health = group.front.client.get("/health").json()
    assert health["status"] == "degraded" and [one["state"] for one in health["replicas"]] == [
        "ready",
        "needs an update",
    ]
    body = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
    for index in range(4):
        assert group.post("/v1/completions", {**body, "prompt": f"{index}"}).status_code == 200
    assert set(group.front.servers.placed) == {0}
    ok(group.post("/update_weights", {"weight_dir": "some", "hold": True, "partial": True}))
    assert ok(group.post("/commit_weight_update", {}))["version"] == 2
    assert ok(group.post("/weights_checker", {}))["version"] == 2
    assert group.replica(1).client.get("/weight_info").json()["version"] == 0
    assert group.front.on_loop(lambda: group.front.servers.all[1].state) == "needs an update"
    group.kill(0, then="needs an update")
    error = refused(group.post("/v1/completions", body), 503, "send a complete update", "came in the body of a request")
    assert error["code"] == "needs_update" and group.front.client.get("/ready").status_code == 503
    assert ok(send(group.front.client, "sglang", "two", shelf))["version"] == 3
    assert group.facts(0) == group.facts(1) and group.post("/v1/completions", body).status_code == 200
    group.kill(1)
    assert group.facts(0) == group.facts(1)


def test_discarded_weights_are_given_to_no_replica(group: Group, shelf: Path) -> None:
    ok(send(group.front.client, "sglang", "one", shelf))
    assert ok(group.post("/sleep", {"level": 2}))["weights"] == "discarded"
    group.kill(1, then="needs an update")
    ok(group.post("/wake_up", {"tags": ["weights"]}))
    ok(send(group.front.client, "sglang", "two", shelf))
    assert all(group.replica(index).client.get("/is_sleeping").json()["is_sleeping"] for index in (0, 1))
    ok(group.post("/wake_up", {}))
    assert group.tokens(0) == group.tokens(1)


def test_a_rolling_restart_keeps_the_weights_and_is_refused_where_it_could_not(
    group: Group, shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ok(send(group.front.client, "sglang", "one", shelf))
    before, finished, statuses = group.facts(0), threading.Event(), []

    def load() -> None:
        while not finished.is_set():
            reply = group.post("/v1/completions", {"prompt": f"{len(statuses)}", "max_tokens": 2})
            statuses.append(reply.status_code)

    loading = in_thread(load)
    group.front.on_loop(group.front.servers.restart_all)
    group.until(lambda: [len(one) for one in group.replicas] == [2, 2] and len(group.front.servers.ready) == 2)
    finished.set()
    loading.result(60)
    assert set(statuses) == {200} and group.facts(0) == group.facts(1) == before
    ok(send(group.front.client, "body", "two", shelf))
    group.front.on_loop(group.front.servers.restart_all)
    refusal = "rolling restart: refused, because the weights in force came in the body of a request"
    group.until(lambda: refusal in caplog.text)
    assert group.facts(0) == group.facts(1)


def test_commands_reach_all_replicas(group: Group, single: Running) -> None:
    for path, body in (
        ("/pause", {"mode": "keep"}),
        ("/resume", {}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/sleep", {"level": 0}),
        ("/wake_up", {}),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {}),
        ("/abort_requests", {}),
        ("/abort_request", {"abort_all": True}),
        ("/reset_prefix_cache", {}),
        ("/flush_cache", {}),
        ("/update_weight_version", {"new_version": "named"}),
        ("/weight_checker", {"action": "checksum"}),
        ("/weights_checker", {}),
        ("/post_process_weights", {}),
        ("/abort_weight_update", {}),
    ):
        assert ok(group.post(path, body)) == ok(single.post(path, body)), path
        assert group.facts(0) == group.facts(1), path
        assert group.facts(0)[3] is (path in ("/pause", "/pause_generation", "/sleep")), path
    assert ok(group.front.client.get("/flush_cache"))["success"] is True
    for path, body in (("/pause", {"mode": "never"}), ("/abort_request", {}), ("/flush_cache", {"unknown": 1})):
        reply, right = group.post(path, body), single.post(path, body)
        assert (reply.status_code, reply.json()) == (right.status_code, right.json()) and reply.status_code == 400
    assert group.front.client.get("/pause").status_code == 405


def test_aborted_samples_of_all_replicas_are_counted(group: Group) -> None:
    body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
    for index in (0, 1):
        group.replica(index).blocker.put_on()
    asking = [in_thread(lambda index=index: group.replica(index).post("/v1/completions", body)) for index in (0, 1)]
    for index in (0, 1):
        until(group.replica(index), lambda index=index: group.replica(index).link.num_open)
    reply = ok(group.post("/abort_request", {"abort_all": True}))
    for index in (0, 1):
        group.replica(index).blocker.take_off()
    assert (reply["num_aborted"], reply["message"]) == (2, "2 samples aborted")
    assert [one.result(60).json()["choices"][0]["finish_reason"] for one in asking] == ["abort", "abort"]


def test_different_weights_are_reported(group: Group) -> None:
    ok(group.replica(1).post("/update_weights_from_disk", {"model_path": "one"}))
    assert refused(group.post("/weights_checker", {}), 500, "different weights")["code"] == "weights_differ"


def test_an_update_that_a_client_holds(group: Group, shelf: Path) -> None:
    before = group.facts(0)
    refused(group.post("/commit_weight_update", {}), 400, "no weights are held")
    ok(group.post("/update_weights", {"weight_dir": "one", "hold": True}))
    refused(send(group.front.client, "sglang", "two", shelf), 409, "busy", "/commit_weight_update")
    refused(group.post("/commit_weight_update", {"version": 0}), 400, "version")
    assert ok(group.post("/abort_weight_update", {}))["aborted"] is True
    refused(group.post("/commit_weight_update", {}), 400, "no weights are held")
    assert group.facts(0) == group.facts(1) == before
    ok(group.post("/update_weights", {"weight_dir": "one", "hold": True}))
    group.kill(1)
    refused(group.post("/commit_weight_update", {}), 409, "a replica was replaced")
    assert group.facts(0) == group.facts(1) == before
    ok(group.post("/update_weights", {"weight_dir": "one", "hold": True}))
    for wrong in (0, 2**63):
        refused(group.post("/commit_weight_update", {"version": wrong}), 400, "version")
    for wrong in (2**62 + 1, 2**63 - 2**32):
        refused(group.post("/commit_weight_update", {"version": wrong}), 400, f"version: must be <= {2**62}, got")
    assert ok(group.post("/commit_weight_update", {"version": 5}))["version"] == 5
    ok(group.post("/update_weights", {"weight_dir": "two", "hold": True}))
    refused(group.post("/commit_weight_update", {"version": 5}), 400, "version: must be >= 6, got 5")
    assert ok(group.post("/commit_weight_update", {}))["version"] == 6


def test_an_update_follows_the_largest_version(group: Group) -> None:
    ok(group.post("/update_weights", {"weight_dir": "one", "hold": True}))
    assert ok(group.post("/commit_weight_update", {"version": 2**62}))["version"] == 2**62
    assert ok(group.post("/update_weights_from_disk", {"model_path": "two"}))["version"] == 2**62 + 1
    group.kill(1)
    assert group.facts(0) == group.facts(1) and group.facts(1)[0] == 2**62 + 1


def test_a_client_that_leaves_in_the_middle_of_a_body_changes_nothing(group: Group, shelf: Path) -> None:
    before, content = group.facts(0), (shelf / "one" / "model.safetensors").read_bytes()

    def half() -> Iterator[bytes]:
        yield content[: len(content) // 2]
        for index in (0, 1):
            until(group.replica(index), lambda i=index: group.replica(i).opened.engine.weight_info().update != "idle")
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        group.front.client.post("/update_weights_from_body", content=half(), headers=BYTES)
    group.until(group.front.servers.may_restart)
    assert group.facts(0) == group.facts(1) == before
    assert ok(send(group.front.client, "body", "one", shelf))["version"] == 1


def test_updates_that_need_one_engine_are_refused_by_name(group: Group) -> None:
    for path in sorted(OF_ONE_ENGINE):
        refused(group.post(path, {}), 501, path, "needs one engine", "/update_weights_from_disk")
    assert refused(group.post("/update_weights", {}), 501, "weight_dir", "needs one engine")["param"] == "weight_dir"
    refused(
        group.post("/update_weights_from_disk", {"model_path": "one", "typo": 1}), 400, "typo: there is no such field"
    )


def test_commands_need_an_admin_key_and_questions_any(tiny_directory: Path, shelf: Path) -> None:
    with replicated(tiny_directory, shelf, api_key=("a-key-of-clients",), admin_key=("a-key-of-admins",)) as group:
        client = group.front.client
        assert client.post("/pause", json={}).status_code == 401
        client.headers["authorization"] = "Bearer a-key-of-clients"
        assert client.post("/pause", json={}).status_code == 403
        assert client.get("/weight_info").json()["version"] == 0
        client.headers["authorization"] = "Bearer a-key-of-admins"
        assert ok(send(client, "sglang", "one", shelf))["version"] == 1
        group.kill(0)
        assert ok(client.get("/weight_info"))["version"] == 1


# ---- adapters


@pytest.fixture(scope="module")
def adapters(shelf: Path) -> None:
    for seed, name in ((1, "first"), (2, "second")):
        make_adapter(shelf / name, seed)


def adapted(running: Running, name: str) -> list[int] | None:
    """Return what a replica generates with an adapter; None if it has none of this name."""
    body = {"token_ids": list(PROMPT), "model": name, "sampling_params": {"max_tokens": 8, "temperature": 0}}
    reply = running.post("/inference/v1/generate", body)
    return None if reply.status_code == 404 else list(reply.json()["choices"][0]["token_ids"])


def both(group: Group, name: str) -> list[list[int] | None]:
    return [adapted(group.replica(index), name) for index in (0, 1)]


def load(group: Group, path: str, **fields: Any) -> Any:
    return group.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path, **fields})


@pytest.mark.usefixtures("adapters")
def test_an_adapter_is_loaded_by_all_replicas_and_by_one_that_starts(group: Group) -> None:
    reply = load(group, "first")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'a' added successfully.")
    first = both(group, "a")
    assert first[0] == first[1] != [group.tokens(0)[0]]
    assert load(group, "second", load_inplace=True).status_code == 200
    second = both(group, "a")
    assert second[0] == second[1] != first[0]
    group.kill(1)
    assert both(group, "a") == second
    reply = group.post("/unload_lora_adapter", {"lora_name": "a"})
    assert ok(reply)["loaded_adapters"] == {} and both(group, "a") == [None, None]
    group.kill(0)
    assert both(group, "a") == [None, None]
    refused(group.post("/load_lora_adapter_from_tensors", {}), 501, "needs one engine")


@pytest.mark.usefixtures("adapters")
def test_an_adapter_that_one_replica_refuses_is_loaded_by_none(group: Group) -> None:
    assert group.replica(1).post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "second"}).status_code == 200
    refused(load(group, "first"), 400, "already been loaded")
    assert both(group, "a") == [None, None]
    refused(load(group, "nowhere"), 400, "lora_path")
    assert load(group, "first").status_code == 200
    assert ok(group.post("/update_weights", {"weight_dir": "one"}))["version"] == 1
    assert None not in both(group, "a")
