"""The calls of AReaL 1.0.4 to an inference server with SGLang's paths: areal/engine/sglang_remote.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.mounted import JSON, ids
from tests.server.test_rl_group import good_names
from tests.server.tiny import Running
from tests.server.trainer import make_weights, ok, serving, weights_of
from tests.weights.plain_trainer import Trainer, dtypes_and_shapes, trainer_process
from tests.weights.test_group import free_port

GROUP = "update_weight_group"


@pytest.fixture(scope="module")
def shelf(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("areal")
    make_weights(tiny_directory, root / "step", seed=5)
    return root


@pytest.fixture(scope="module")
def server(tiny_directory: Path, shelf: Path) -> Iterator[Running]:
    with serving(tiny_directory, shelf, weight_timeout=60) as one:
        yield one


@pytest.fixture
def trainer(shelf: Path, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_process(weights_of(shelf / "step"), tmp_path) as one:
        yield one


def generate(server: Running, **params: Any) -> JSON:
    sampling = {
        **{"top_p": 1.0, "top_k": 1 << 30, "max_new_tokens": 6, "temperature": 1.0, "stop_token_ids": [257]},
        **{"ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0, **params},
    }
    body = {"input_ids": ids("hello"), "image_data": None, "sampling_params": sampling}
    reply = server.post("/generate", {**body, "return_logprob": True, "stream": False})
    assert reply.status_code == 200, reply.text
    meta: JSON = reply.json()["meta_info"]
    return meta


def test_rollouts_have_tokens_and_log_probabilities(server: Running) -> None:
    meta = generate(server)
    assert 1 <= len(meta["output_token_logprobs"]) <= 6 and meta["finish_reason"]["type"] in ("stop", "length")
    assert all(logprob <= 0 and isinstance(token, int) for logprob, token, _ in meta["output_token_logprobs"])
    assert generate(server, stop=["x"])["finish_reason"]["type"] in ("stop", "length")


def test_a_teachers_score_covers_the_last_tokens(server: Running) -> None:
    prompt, length = ids("hello world"), 4
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True}
    more = {"logprob_start_len": len(prompt) - length - 1, "top_logprobs_num": 0, "stream": False}
    scored = server.post("/generate", {**body, **more}).json()["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in scored[-length:]] == prompt[-length:]
    assert all(logprob < 0 for logprob, _, _ in scored[-length:])


def test_pause_memory_and_health(server: Running) -> None:
    assert server.client.request("GET", "/health", json={}).status_code == 200
    ok(server.post("/pause_generation", {}))
    ok(server.post("/continue_generation", {}))
    ok(server.post("/release_memory_occupation", {}))
    ok(server.post("/resume_memory_occupation", {"tags": ["weights", "kv_cache"]}))
    assert generate(server)["output_token_logprobs"]


def test_weights_from_a_directory(server: Running, shelf: Path) -> None:
    before = ok(server.client.get("/weight_info"))["version"]
    reply = ok(
        server.post("/update_weights_from_disk", {"model_path": str(shelf / "step"), "abort_all_requests": True})
    )
    assert reply["success"] is True and reply["version"] == before + 1


def test_weights_from_a_group_whose_port_is_text(server: Running, shelf: Path, trainer: Trainer) -> None:
    port = free_port()
    group = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2}
    named = weights_of(shelf / "step")
    dtypes, shapes = dtypes_and_shapes(named, good_names(named))
    body = {"names": good_names(named), "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(
            server.post, "/init_weights_update_group", {**group, "backend": "gloo", "group_name": GROUP}
        )
        trainer.join(port, GROUP)
        trainer.wait()
        ok(joined.result(60))
        sent = pool.submit(server.post, "/update_weights_from_distributed", {**body, "abort_all_requests": True})
        trainer.send(good_names(named))
        trainer.wait()
        assert ok(sent.result(60))["success"] is True
    refused = server.post("/init_weights_update_group", {**group, "master_port": "12a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "master_port")
