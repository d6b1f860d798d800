"""The calls of trainers to inference servers, as their sources make them; broadcasts come through gloo.

AReaL 1.0.4: areal/engine/sglang_remote.py. slime 624b824: slime/rollout/sglang_rollout.py,
slime/backends/sglang_utils/sglang_engine.py and server_control.py. prime-rl 559b447: prime_rl/utils/client.py.
PipelineRL 58d3934: pipelinerl/async_llm.py, finetune_loop.py, vllm1.py.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.mounted import JSON, ids
from tests.server.tiny import Running
from tests.server.trainer import (
    PROMPT,
    SHORT,
    Stream,
    broadcast,
    fresh_tokens,
    good_names,
    joined,
    make_weights,
    ok,
    posting,
    refused,
    sampled,
    serving,
    version_of,
    weights_of,
)
from tests.weights.plain_trainer import Named, Trainer, dtypes_and_shapes, trainer_process
from tests.weights.test_group import free_port

pytestmark = pytest.mark.slow

GROUP: JSON = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2}


@pytest.fixture(scope="module")
def root(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory per step; that of prime-rl's second step has no weights, which come through a group."""
    root = tmp_path_factory.mktemp("trainers")
    make_weights(tiny_directory, root / "step_1", seed=31)
    make_weights(tiny_directory, root / "trained", seed=32)
    for step in (1, 2):
        (root / f"step_{step}").mkdir(exist_ok=True)
        (root / f"step_{step}" / "STABLE").touch()
    return root


@pytest.fixture(scope="module")
def named(root: Path) -> Named:
    return {**weights_of(root / "trained"), "short": torch.zeros(3)}


@pytest.fixture(scope="module")
def server(tiny_directory: Path, root: Path) -> Iterator[Running]:
    with serving(tiny_directory, root, weight_timeout=60) as one:
        yield one


@pytest.fixture(autouse=True)
def without_groups(server: Running) -> Iterator[None]:
    yield
    server.post("/shutdown_weight_transfer_engine", {})


@pytest.fixture
def trainer(named: Named, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_process(named, tmp_path) as one:
        yield one


def checksum(server: Running) -> str:
    return str(ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"])


def good(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def meta_of(server: Running, params: JSON, **fields: Any) -> JSON:
    """Return the `meta_info` of a rollout with the reply's ids."""
    body = {"input_ids": ids("hello"), "sampling_params": params, "return_logprob": True, "stream": False, **fields}
    reply = good(server.post("/generate", body))
    return {**reply["meta_info"], "output_ids": reply["output_ids"]}


def test_areals_rollouts_and_scores(server: Running) -> None:
    params = {"top_p": 1.0, "top_k": 1 << 30, "max_new_tokens": 6, "temperature": 1.0, "stop_token_ids": [257]}
    params |= {"ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0, "stop": ["x"]}
    meta = meta_of(server, params, image_data=None)
    assert 1 <= len(meta["output_token_logprobs"]) <= 6 and meta["finish_reason"]["type"] in ("stop", "length")
    assert all(logprob <= 0 and isinstance(token, int) for logprob, token, _ in meta["output_token_logprobs"])
    prompt, length = ids("hello world"), 4
    more = {"logprob_start_len": len(prompt) - length - 1, "top_logprobs_num": 0}
    scored = meta_of(server, {"max_new_tokens": 1, "temperature": 0.0}, input_ids=prompt, **more)
    assert [token for _, token, _ in scored["input_token_logprobs"][-length:]] == prompt[-length:]
    assert server.client.request("GET", "/health", json={}).status_code == 200


def test_areals_updates(server: Running, root: Path, trainer: Trainer, named: Named) -> None:
    before = version_of(server)
    body = {"model_path": str(root / "step_1"), "abort_all_requests": True}
    reply = ok(server.post("/update_weights_from_disk", body))
    assert reply["success"] is True and reply["version"] == before + 1
    port, path = free_port(), "/init_weights_update_group"
    group = {**GROUP, "master_port": str(port), "backend": "gloo", "group_name": "update_weight_group"}
    ok(joined(server, trainer, path, group, port, "update_weight_group"))
    dtypes, shapes = dtypes_and_shapes(named, good_names(named))
    body = {"names": good_names(named), "dtypes": dtypes, "shapes": shapes, "group_name": "update_weight_group"}
    body["abort_all_requests"] = True
    reply = ok(broadcast(server, trainer, "/update_weights_from_distributed", body, good_names(named)))
    assert reply["success"] is True
    refused(server.post(path, {**group, "master_port": "12a"}), 400, "master_port")


SLIME: JSON = {
    **{"temperature": 1.0, "top_p": 0.7, "top_k": -1, "max_new_tokens": 12, "stop": None, "stop_token_ids": None},
    **{"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 5},
}
"""What slime sends for a rollout with top-p."""
KEPT: JSON = {"custom_params": {"return_top_p_token_ids": True}}


def int32(text: str) -> tuple[int, ...]:
    """Decode an array as slime does."""
    data = base64.b64decode(text)
    return struct.unpack(f"<{len(data) // 4}i", data)


def test_slimes_kept_tokens_of_top_p_are_the_sampling_masks(server: Running) -> None:
    meta = meta_of(server, {**SLIME, **KEPT})
    kept, offsets = int32(meta["top_p_token_ids"]), int32(meta["top_p_token_offsets"])
    assert len(offsets) == meta["completion_tokens"] + 1 == 13 and offsets[0] == 0 and offsets[-1] == len(kept)
    rows = [kept[start:end] for start, end in pairwise(offsets)]
    assert all(token in row for token, row in zip(meta["output_ids"], rows, strict=True))
    assert "sampling_mask" not in meta
    masks = meta_of(server, SLIME, return_sampling_mask=True)["sampling_mask"]
    assert [list(row) for row in rows] == masks and any(len(row) > 1 for row in rows)
    assert "top_p_token_ids" not in meta_of(server, {**SLIME, **KEPT, "top_p": 1.0})
    assert "top_p_token_ids" not in meta_of(server, SLIME)
    body = {"sampling_params": {**SLIME, **KEPT}, "input_ids": ids("hello"), "stream": True}
    metas = [event["meta_info"] for event in server.events("/generate", body)[:-1]]
    assert ["top_p_token_ids" in meta for meta in metas] == [False] * (len(metas) - 1) + [True]
    assert len(int32(metas[-1]["top_p_token_offsets"])) == metas[-1]["completion_tokens"] + 1


def test_an_engine_that_slime_paused_is_healthy_at_once(server: Running) -> None:
    def is_paused() -> bool:
        reply = good(server.client.get("/health_generate"))
        assert reply == {"status": "paused"} or reply["meta_info"]["completion_tokens"] == 1
        return "status" in reply

    assert not is_paused()
    for path, body, paused in (
        ("/pause_generation", {}, True),
        ("/continue_generation", {}, False),
        ("/release_memory_occupation", {}, True),
        ("/resume_memory_occupation", {"tags": ["weights"]}, True),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, False),
    ):
        ok(server.post(path, body))
        assert is_paused() is paused


def test_slimes_update_and_checksum(server: Running, root: Path) -> None:
    new = str(root / "step_1")
    ok(server.post("/update_weights_from_disk", {"model_path": new, "weight_version": "1"}))
    assert ok(server.client.get("/get_weight_version"))["weight_version"] == "1"
    tokens, before = sampled(server), ok(server.post("/weights_checker", {"action": "checksum"}))
    ok(server.post("/post_process_weights", {"restore_weights_before_load": True, "post_process_quantization": True}))
    ok(server.post("/update_weights_from_disk", {"model_path": new, "weight_version": "2", "load_format": "auto"}))
    for action in ("snapshot", "reset_tensors"):
        assert server.post("/weights_checker", {"action": action}).json()["error"]["param"] == "action"
    assert before["per_engine_checksum"] == ok(server.client.post("/weights_checker"))["checksum"]
    assert sampled(server) == tokens
    assert [one["num_total_reqs"] for one in ok(server.client.get("/v1/loads?include=core"))["loads"]] == [0]


def prime_update(server: Running, weight_dir: Path | None) -> Any:
    """Make the calls of prime-rl's `update_weights`; return the reply of /update_weights."""
    posted = server.client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    assert (posted.status_code, posted.json()["status"]) == (200, "paused")
    if weight_dir is not None:
        (weight_dir / "NCCL_READY").touch()
    try:
        return server.post("/update_weights", {"weight_dir": weight_dir and weight_dir.as_posix()})
    finally:
        assert good(server.client.post("/resume"))["status"] == "resumed"


def sent_dicts(server: Running, trainer: Trainer, names: list[str], weight_dir: Path | None = None) -> Any:
    with ThreadPoolExecutor() as pool:
        updating = pool.submit(prime_update, server, weight_dir)
        trainer.send_dicts(names)
        trainer.wait()
        return updating.result(60)


INIT: JSON = {"host": "127.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 1, "timeout": 60}


def join_prime(server: Running, trainer: Trainer) -> None:
    body = {**INIT, "port": free_port(), "quantize_in_weight_transfer": False, "backend": "gloo"}
    assert ok(joined(server, trainer, "/init_broadcaster", body, body["port"], "prime-rl"))["status"] == "ok"


def test_prime_rls_weights_from_a_directory(server: Running, root: Path, tiny_directory: Path) -> None:
    assert any(one["id"] == "tiny" for one in server.client.get("/v1/models").json()["data"])
    before, stream = version_of(server), Stream(server).started()
    assert ok(prime_update(server, root / "step_1"))["version"] == before + 1
    assert stream.result().finish_reason == "length"
    assert sampled(server) == fresh_tokens(tiny_directory, root / "step_1", PROMPT, SHORT)
    refused(prime_update(server, root / "step_2"), 400, "weight_dir", "no safetensors files and no pytorch_model")


def test_prime_rls_weights_from_the_broadcaster(
    server: Running, trainer: Trainer, named: Named, root: Path, tiny_directory: Path
) -> None:
    join_prime(server, trainer)
    before, version = checksum(server), version_of(server)
    for names, part in ((list(named), "short: the model has no such tensor"), (good_names(named)[1:], "lacks 1")):
        refused(sent_dicts(server, trainer, names), 400, part)
        assert checksum(server) == before
    stream = Stream(server).started()
    for number, place in enumerate((root / "step_2", None), start=1):
        assert ok(sent_dicts(server, trainer, good_names(named), place))["version"] == version + number
    assert stream.result().finish_reason == "length"
    assert sampled(server) == fresh_tokens(tiny_directory, root / "trained", PROMPT, SHORT)


def test_prime_rls_servers_have_the_ranks_after_the_trainer(
    server: Running, tiny_directory: Path, named: Named, trainer: Trainer
) -> None:
    port = free_port()
    body = {"host": "127.0.0.1", "port": port, "inference_world_size": 2, "backend": "gloo"}
    with serving(tiny_directory, weight_timeout=60) as second, ThreadPoolExecutor() as pool:
        with posting(second, "/init_broadcaster", {**body, "rank_offset": 1}) as other:
            ok(joined(server, trainer, "/init_broadcaster", {**body, "rank_offset": 0}, port, "prime-rl", 2))
            ok(other.result(60))
        updating = pool.submit(prime_update, second, None)
        ok(sent_dicts(server, trainer, good_names(named)))
        ok(updating.result(60))
        assert checksum(server) == checksum(second)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"quantize_in_weight_transfer": True}, "quantize_in_weight_transfer: weights in the layout of vLLM's kernels"),
        ({"session_id": "a1b2"}, "session_id: transfers by NIXL are not supported"),
        ({"rank_offset": 1}, "rank_offset must be below inference_world_size, got 1 of 1"),
        ({"host": ""}, "host"),
        ({"timeout": -1}, "timeout"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_invalid_broadcaster_is_refused_by_name(server: Running, fields: JSON, part: str) -> None:
    refused(server.post("/init_broadcaster", {**INIT, **fields}), 400, part)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_without_cuda_is_refused_at_once(server: Running) -> None:
    for path, body in (
        ("/init_broadcaster", {**INIT, "session_id": "default"}),
        ("/init_weight_transfer_engine", {"init_info": {**GROUP, "master_port": 29501, "backend": "nccl"}}),
    ):
        refused(server.post(path, body), 400, "backend: nccl needs a CUDA device", "a directory or gloo")


def pipeline_request(named: Named, names: list[str], version: int) -> JSON:
    """Return PipelineRL's WeightUpdateRequest."""
    dtypes, shapes = dtypes_and_shapes(named, names, prefix="torch.")
    described = zip(names, shapes, dtypes, strict=True)
    infos = [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in described]
    return {"kind": "weight_update_request", "version": version, "parameters_info": infos, "timestamp": 1781.5}


def test_pipeline_rls_actor_samples_with_log_probabilities(server: Running) -> None:
    body = {
        **{"max_tokens": 6, "temperature": 1.0, "return_tokens_as_token_ids": True},
        **{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
        **{"logprobs": 1, "include_stop_str_in_output": True, "skip_special_tokens": False},
    }
    reply = good(server.post("/v1/chat/completions", body))
    (choice,), usage = reply["choices"], reply["usage"]
    entries = [(int(one["token"].split(":")[-1]), one["logprob"]) for one in choice["logprobs"]["content"]]
    assert len(entries) == usage["completion_tokens"] and all(logprob <= 0 for _, logprob in entries)


def test_pipeline_rl_updates_while_requests_run(
    server: Running, trainer: Trainer, named: Named, root: Path, tiny_directory: Path
) -> None:
    def send(names: list[str], version: int) -> Any:
        body = pipeline_request(named, names, version)
        return broadcast(server, trainer, "/receive_weight_update", body, names)

    whole, path = pipeline_request(named, ["model.norm.weight"], 1), "/receive_weight_update"
    refused(server.post(path, whole), 400, "there is no group 'weight_update_group'; join one first")
    info = {**GROUP, "master_port": free_port(), "backend": "gloo"}  # as the operator does, in place of their options
    place = "/init_weight_transfer_engine", {"init_info": info}, info["master_port"]
    ok(joined(server, trainer, *place, "weight_update_group"))
    before, stream = version_of(server), Stream(server).started()
    for number, version in enumerate((64, 128), start=1):
        reply = ok(send(good_names(named), version))
        assert (reply["status"], reply["weight_version"], reply["version"]) == ("ok", str(version), before + number)
    versions = stream.result().token_versions
    assert versions[0] == before and list(versions) == sorted(versions)
    assert sampled(server) == fresh_tokens(tiny_directory, root / "trained", PROMPT, SHORT)
    digest, names = checksum(server), ["model.embed_tokens.weight", "short"]
    refused(send(names, 1), 400, "short: the model has no such tensor")
    assert checksum(server) == digest
    assert ok(send(names[:1], 2))["weight_version"] == "2", "weights that are not named stay"
    for fields, part in (
        ({"parameters_info": []}, "parameters_info"),
        ({"parameters_info": [{"name": "a", "shape": [1]}]}, "dtype"),
        ({"parameters_info": [{"name": "a", "shape": [1], "dtype": "torch.int8"}]}, "parameters_info[0]"),
        ({"kind": "training_done"}, "kind"),
        ({"version": None}, "version"),
        ({"timestamp": "now"}, "timestamp"),
        ({"group_name": "other"}, "there is no group 'other'"),
        ({"more": 1}, "more: there is no such field"),
    ):
        refused(server.post(path, {**whole, **fields}), 400, part)
