"""Every field of the RL routes: the test that covers it; and tests of fields that no other file covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nano_inference.server.schema import Body
from nano_inference.server.trainers import schema
from nano_inference.server.trainers.groups import Groups
from nano_inference.server.trainers.routes import REFUSED_COMMANDS
from nano_inference.server.trainers.schema import UPDATE_FORMS
from tests.server import (
    test_pipeline_rl,
    test_prime_rl,
    test_rl_control,
    test_rl_group,
    test_rl_weights,
    test_slime,
    test_weight_body,
    test_weights_from_tensor,
)
from tests.server.tiny import Running
from tests.server.trainer import SHORT, Stream, make_weights, ok, refused, serving

ARRIVAL = "test_group_is_joined_with_given_fields"
BUCKET = "test_each_sglang_bucket_is_an_update"
PARTS = "test_vllm_update_in_parts"
DIRECTORY = "test_update_from_directory"
PACKED = "test_packed_broadcasts"
CHECKER = "test_weights_checker_returns_the_checksum"
PAUSES = "test_pause_keep_does_not_change_the_output"
ENDS = "test_abort_all"
NAMED = "test_abort_by_id_ends_only_that_request"
SLEEPS = "test_sleep_and_wake_up"
ODD = "test_invalid_group_field_is_named"
UNKNOWN = "test_invalid_update_field_is_named"
LABELS = "test_update_weight_version_sets_the_label"
CHECKS = "test_weight_checker_returns_and_compares_the_checksum"
HELD = "test_update_with_checksum_is_verified"
TAKEN = "test_field_without_effect_is_accepted"
TAKEN_TOO = "test_ignored_group_fields_change_nothing"
UPDATES = "test_ignored_update_fields_change_nothing"
SHARED = "test_weights_of_a_trainer_beside_the_server_are_installed"
WITHOUT_EFFECT = "test_fields_without_effect_are_accepted"
BROADCASTER = "test_weights_from_the_broadcaster"
NO_BROADCASTER = "test_invalid_broadcaster_is_refused_by_name"
PIPELINE = "test_trainer_updates_while_requests_run"
SHOWN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "EmptyBody": {},
        "PauseBody": {
            "mode": PAUSES,
            "clear_cache": PAUSES,
            "wait_for_inflight_requests": "test_pause_wait_finishes_running_requests_and_starts_no_other",
        },
        "AbortBody": {"request_ids": NAMED},
        "ResetBody": {
            "reset_running_requests": "test_reset_running_requests_recomputes_their_kv",
            "reset_external": TAKEN,
            "reset_connector": TAKEN,
        },
        "SleepBody": {"level": SLEEPS, "mode": SLEEPS},
        "WakeBody": {"tags": SLEEPS},
        "Rendezvous": {
            "master_address": ARRIVAL,
            "master_port": ARRIVAL,
            "rank_offset": ARRIVAL,
            "world_size": ARRIVAL,
            "group_name": ARRIVAL,
            "backend": ARRIVAL,
        },
        "InitInfo": {
            "master_address": ARRIVAL,
            "master_port": ARRIVAL,
            "rank_offset": ARRIVAL,
            "world_size": ARRIVAL,
            "group_name": ARRIVAL,
            "backend": ARRIVAL,
            "packed": PACKED,
            "packed_buffer_size_bytes": PACKED,
            "packed_num_buffers": TAKEN_TOO,
        },
        "InitTransferBody": {"init_info": PARTS},
        "StartUpdateBody": {"is_checkpoint_format": UNKNOWN},
        "UpdateInfo": {
            "names": PARTS,
            "dtype_names": PARTS,
            "shapes": PARTS,
            "packed": PACKED,
            "packed_buffer_size_bytes": PACKED,
            "packed_num_buffers": TAKEN_TOO,
            "group_name": "test_update_part_is_received_from_named_group",
            "weight_dir": DIRECTORY,
            "path": DIRECTORY,
        },
        "UpdateWeightsBody": {
            "update_info": DIRECTORY,
            "weight_dir": DIRECTORY,
            "weight_version": DIRECTORY,
            "version": "test_version_is_another_name_of_weight_version",
            "checksum": HELD,
            "hold": "test_held_weights_are_installed_at_the_commit",
            "on_running": "test_held_weights_treat_running_requests_at_the_commit",
            "partial": "test_rejected_weights_are_not_held",
            "allow_nonfinite": "test_rejected_weights_are_not_held",
        },
        "FinishUpdateBody": {
            "weight_version": "test_update_in_parts_is_installed_atomically",
            "checksum": "test_update_in_parts_is_verified_at_its_end",
        },
        "CommitBody": {"version": "test_a_commit_gives_the_weights_a_version_above_the_installed_one"},
        "LabelBody": {"new_version": LABELS, "abort_all_requests": ENDS},
        "CheckBody": {"action": CHECKS, "checksum": CHECKS},
        "PauseGenerationBody": {"mode": "test_sglang_pause_modes"},
        "AbortRequestBody": {"rid": NAMED, "abort_all": ENDS, "abort_message": TAKEN},
        "ContinueBody": {"torch_empty_cache": TAKEN},
        "FlushBody": {"timeout": TAKEN},
        "FromDiskBody": {
            "model_path": DIRECTORY,
            "hold": "test_sglangs_update_and_that_of_a_body_can_be_held",
            "load_format": UNKNOWN,
            "weight_version": DIRECTORY,
            "checksum": HELD,
            "abort_all_requests": "test_sglang_update_may_abort_running_requests",
            "flush_cache": UPDATES,
            "keep_pause": UPDATES,
            "token_step": UPDATES,
            "is_async": UPDATES,
            "torch_empty_cache": UPDATES,
            "recapture_cuda_graph": UPDATES,
            "manifest": UPDATES,
        },
        "FromGroupBody": {
            "names": BUCKET,
            "dtypes": BUCKET,
            "shapes": BUCKET,
            "group_name": BUCKET,
            "load_format": ODD,
            "weight_version": BUCKET,
            "checksum": HELD,
            "flush_cache": "test_ignored_bucket_fields_change_nothing",
            "torch_empty_cache": "test_ignored_bucket_fields_change_nothing",
            "abort_all_requests": "test_bucket_update_can_abort_running_requests",
        },
        "DestroyGroupBody": {"group_name": BUCKET},
        "FromBodyQuery": {
            "weight_version": "test_weights_are_installed_with_their_label",
            "checksum": "test_weights_are_installed_with_their_label",
            "partial": "test_a_part_of_the_weights_needs_partial",
            "hold": "test_sglangs_update_and_that_of_a_body_can_be_held",
            "abort_all_requests": "test_running_requests_may_be_aborted",
        },
        "FromTensorBody": {
            "serialized_named_tensors": SHARED,
            "load_format": SHARED,
            "weight_version": SHARED,
            "checksum": "test_each_bucket_is_an_update",
            "abort_all_requests": "test_running_requests_may_be_aborted",
            "flush_cache": WITHOUT_EFFECT,
            "torch_empty_cache": WITHOUT_EFFECT,
            "disable_draft_model": WITHOUT_EFFECT,
        },
        "InitBroadcasterBody": {
            "host": BROADCASTER,
            "port": BROADCASTER,
            "rank_offset": "test_servers_have_the_ranks_after_the_trainer",
            "inference_world_size": "test_servers_have_the_ranks_after_the_trainer",
            "timeout": BROADCASTER,
            "quantize_in_weight_transfer": NO_BROADCASTER,
            "session_id": NO_BROADCASTER,
            "backend": "test_nccl_without_cuda_is_refused_at_once",
        },
        "ParameterInfo": {"name": PIPELINE, "shape": PIPELINE, "dtype": PIPELINE},
        "ReceiveUpdateBody": {
            "version": PIPELINE,
            "parameters_info": PIPELINE,
            "kind": "test_invalid_update_is_refused_by_name",
            "timestamp": PIPELINE,
            "group_name": "test_invalid_update_is_refused_by_name",
        },
        "PostProcessBody": {"restore_weights_before_load": CHECKER, "post_process_quantization": CHECKER},
        "WeightsCheckerBody": {
            "action": CHECKER,
        },
        "MemoryBody": {"tags": "test_named_memory_is_restored_alone"},
    }
)
"""Body -> field -> name of its test."""
PLAIN: Mapping[str, Any] = MappingProxyType(
    {"master_address": "127.0.0.1", "master_port": 4321, "rank_offset": 1, "world_size": 2, "group_name": "g"}
)
TENSOR = ("model.norm.weight", 32)
BUCKET_BODY: Mapping[str, Any] = MappingProxyType({"names": [TENSOR[0]], "shapes": [[32]], "dtypes": ["float32"]})


@pytest.fixture(scope="module")
def shelf(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shelf")
    make_weights(tiny_directory, root / "one", 11)
    return root


@pytest.fixture(scope="module")
def server(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    with serving(tiny_directory, shelf, weight_timeout=60) as one:
        yield one


@pytest.fixture
def groups(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Record calls of weight groups; every group exists and gives one tensor. Ends an open update."""
    seen: list[tuple[Any, ...]] = []

    async def join(self: Groups, *where: Any, rank: int, world_size: int, backend: str, **_: Any) -> None:
        seen.append((*where, rank, world_size, backend))

    @contextmanager
    def receive(
        self: Groups, name: str, names: Any, dtypes: Any, shapes: Any, field: str, packed: Any = None
    ) -> Iterator[Any]:
        seen.append((name, names, dtypes, shapes))
        yield [(TENSOR[0], torch.ones(TENSOR[1]))]

    monkeypatch.setattr(Groups, "join", join)
    monkeypatch.setattr(Groups, "receive", receive)
    yield seen
    server.post("/shutdown_weight_transfer_engine", {})


# ---- coverage -------------------------------------------------------------------------------------------------------


def test_every_field_has_a_test() -> None:
    kinds = [one for one in vars(schema).values() if isinstance(one, type) and one.__module__ == schema.__name__]
    parts = (schema.NewWeights, schema.Packing)  # fields of several bodies
    declared = {one.__name__: set(one.model_fields) for one in kinds if issubclass(one, Body) and one not in parts}
    assert {name: set(fields) for name, fields in SHOWN.items()} == declared
    modules = (
        *(test_rl_control, test_rl_group, test_rl_weights, test_slime, test_weight_body),
        *(test_weights_from_tensor, test_prime_rl, test_pipeline_rl),
    )
    tests = {*globals(), *(name for module in modules for name in vars(module))}
    assert {test for fields in SHOWN.values() for test in fields.values()} <= tests


def test_every_refused_command_has_a_test() -> None:
    refusals: Any = test_rl_control.test_unsupported_command_is_refused_with_501
    (mark,) = refusals.pytestmark
    assert set(mark.args[1]) == REFUSED_COMMANDS


# ---- further tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/init_weights_update_group"])
@pytest.mark.parametrize(
    "field",
    [
        *({"master_address": "localhost"}, {"master_port": 9876}, {"rank_offset": 2, "world_size": 3}),
        *({"world_size": 5}, {"group_name": "other"}, {"backend": "nccl"}),
    ],
    ids=lambda field: next(iter(field)),
)
def test_group_is_joined_with_given_fields(
    server: Running, groups: list[tuple[Any, ...]], path: str, field: dict[str, Any]
) -> None:
    asked = {**PLAIN, "backend": "gloo", **field}
    for body in ({**PLAIN, "backend": "gloo"}, asked):
        ok(server.post(path, {"init_info": body} if "transfer" in path else body))
    names = ("group_name", "master_address", "master_port", "rank_offset", "world_size", "backend")
    assert groups[1] == tuple(asked[name] for name in names) != groups[0]


def test_group_has_default_name_and_backend(server: Running, groups: list[tuple[Any, ...]]) -> None:
    ok(server.post("/init_weights_update_group", {name: PLAIN[name] for name in PLAIN if name != "group_name"}))
    assert (groups[0][0], groups[0][-1]) == ("weight_update_group", "gloo")


@pytest.mark.parametrize("name", ["mine", None])
def test_update_part_is_received_from_named_group(
    server: Running, groups: list[tuple[Any, ...]], name: str | None
) -> None:
    ok(server.post("/start_weight_update", {}))
    info = {"names": [TENSOR[0]], "shapes": [[32]], "dtype_names": ["float32"], "group_name": name}
    ok(server.post("/update_weights", {"update_info": info}))
    assert groups == [(name or "weight_update_group", [TENSOR[0]], ["float32"], [[32]])]
    refused(server.post("/finish_weight_update", {}), 400, "lacks")


def test_bucket_update_can_abort_running_requests(server: Running, groups: list[tuple[Any, ...]]) -> None:
    for aborts, reason in ((True, "abort"), (False, "length"), (None, "length")):
        stream = Stream(server).started()
        ok(server.post("/update_weights_from_distributed", {**BUCKET_BODY, "abort_all_requests": aborts}))
        assert stream.result().finish_reason == reason


def test_ignored_bucket_fields_change_nothing(server: Running, groups: list[tuple[Any, ...]]) -> None:
    prompt = tuple(range(1, 101))
    for taken in ({"flush_cache": True}, {"flush_cache": False}, {"torch_empty_cache": True}):
        Stream(server, prompt, SHORT).result()
        ok(server.post("/update_weights_from_distributed", {**BUCKET_BODY, **taken}))
        assert Stream(server, prompt, SHORT).result().num_cached_tokens == 0


@pytest.mark.parametrize(
    "field",
    [
        *({}, {"flush_cache": True}, {"flush_cache": False}, {"keep_pause": True}, {"keep_pause": False}),
        *({"token_step": 7}, {"is_async": True}, {"torch_empty_cache": True}, {"recapture_cuda_graph": False}),
        {"manifest": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_paused", [False, True])
def test_ignored_update_fields_change_nothing(server: Running, field: dict[str, Any], is_paused: bool) -> None:
    prompt = tuple(range(1, 101))
    Stream(server, prompt, SHORT).result()
    if is_paused:
        ok(server.post("/pause_generation", {"mode": "in_place"}))
    reply = ok(server.post("/update_weights_from_disk", {"model_path": "one", "weight_version": "v", **field}))
    paused = server.client.get("/is_paused").json()["is_paused"]
    ok(server.post("/continue_generation", {}))
    assert (reply["weight_version"], paused) == ("v", is_paused)
    assert Stream(server, prompt, SHORT).result().num_cached_tokens == 0


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_known_load_formats_are_accepted(server: Running, load_format: str) -> None:
    ok(server.post("/update_weights_from_disk", {"model_path": "one", "load_format": load_format}))


def test_disk_update_reads_pytorch_model_bin(server: Running, shelf: Path, tiny_directory: Path) -> None:
    """What MiniMind's trainer writes before it sends the path."""
    (shelf / "pickled").mkdir()
    torch.save(load_file(shelf / "one" / "model.safetensors"), shelf / "pickled" / "pytorch_model.bin")
    ok(server.post("/update_weights_from_disk", {"model_path": "one"}))
    checksum = server.on_engine(server.opened.engine.weights_checksum)
    make_weights(tiny_directory, shelf / "other", 12)
    ok(server.post("/update_weights_from_disk", {"model_path": "other"}))
    assert server.on_engine(server.opened.engine.weights_checksum) != checksum
    ok(server.post("/update_weights_from_disk", {"model_path": "pickled"}))
    assert server.on_engine(server.opened.engine.weights_checksum) == checksum


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_named_memory_is_restored_alone(server: Running, tag: str) -> None:
    engine = server.opened.engine
    other = {"weights": "kv_cache", "kv_cache": "weights"}[tag]
    for released, resumed, is_asleep in (([tag], [tag], False), ([tag, other], [tag], True), ([tag], [other], True)):
        ok(server.post("/release_memory_occupation", {"tags": released}))
        assert server.on_engine(lambda: engine.is_asleep)
        ok(server.post("/resume_memory_occupation", {"tags": resumed}))
        assert server.on_engine(lambda: engine.is_asleep) is is_asleep
        ok(server.post("/resume_memory_occupation", {}))
    assert not server.on_engine(lambda: engine.is_asleep)


def test_cuda_graph_tag_alone_does_not_sleep(server: Running) -> None:
    ok(server.post("/release_memory_occupation", {"tags": ["cuda_graph"]}))
    assert Stream(server, params=SHORT).result().finish_reason == "length"
    ok(server.post("/resume_memory_occupation", {"tags": ["cuda_graph"]}))
    assert not server.on_engine(lambda: server.opened.engine.is_asleep)


def test_flush_clears_prefix_cache(server: Running) -> None:
    prompt = tuple(range(1, 101))
    Stream(server, prompt, SHORT).result()
    assert ok(server.post("/flush_cache", {}))["flushed_items"] > 0
    assert Stream(server, prompt, SHORT).result().num_cached_tokens == 0


def test_ignored_group_fields_change_nothing(server: Running, groups: list[tuple[Any, ...]]) -> None:
    taken = {"packed": False, "packed_buffer_size_bytes": 1 << 20, "packed_num_buffers": 2}
    for more in ({}, taken):
        ok(server.post("/init_weight_transfer_engine", {"init_info": {**PLAIN, "backend": "gloo", **more}}))
    assert groups[0] == groups[1]
    groups.clear()
    for more in ({}, taken):
        ok(server.post("/start_weight_update", {}))
        info = {"names": [TENSOR[0]], "shapes": [[32]], "dtype_names": ["float32"], **more}
        ok(server.post("/update_weights", {"update_info": info}))
        refused(server.post("/finish_weight_update", {}), 400, "lacks")
    assert groups[0] == groups[1]


@pytest.mark.parametrize("form", UPDATE_FORMS)
def test_every_other_way_to_send_weights_is_refused_by_name(server: Running, form: str) -> None:
    for body in ({form: [1]}, {"update_info": {form: [1]}}):
        assert refused(server.post("/update_weights", body), 501, form)["param"] == form
    refused(server.post("/update_weights", {form: None, "update_info": {form: []}}), 400, "no update is open")
