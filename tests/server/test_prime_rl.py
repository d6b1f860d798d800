"""The calls of prime-rl (559b447) to an inference server: prime_rl/utils/client.py. Broadcasts come through gloo."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.test_rl_group import good_names
from tests.server.tiny import Running
from tests.server.trainer import PROMPT, SHORT, Stream, fresh_tokens, make_weights, ok, refused, serving, weights_of
from tests.weights.plain_trainer import Trainer, trainer_process
from tests.weights.test_group import free_port


@pytest.fixture(scope="module")
def broadcasts(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The orchestrator's folder: a directory per step, with weights only if they are sent through files."""
    root = tmp_path_factory.mktemp("broadcasts")
    make_weights(tiny_directory, root / "step_1", seed=31)
    make_weights(tiny_directory, root / "trained", seed=32)
    for step in (1, 2):
        (root / f"step_{step}").mkdir(exist_ok=True)
        (root / f"step_{step}" / "STABLE").touch()
    return root


@pytest.fixture(scope="module")
def named(broadcasts: Path) -> dict[str, torch.Tensor]:
    good = weights_of(broadcasts / "trained")
    return {**good, "short": torch.zeros(3)}


@pytest.fixture
def server(tiny_directory: Path, broadcasts: Path) -> Iterator[Running]:
    with serving(tiny_directory, broadcasts, weight_timeout=60) as one:
        yield one


@pytest.fixture
def trainer(named: dict[str, torch.Tensor], tmp_path: Path) -> Iterator[Trainer]:
    with trainer_process(named, tmp_path) as one:
        yield one


def update(server: Running, weight_dir: Path | None) -> Any:
    """Make the calls of `update_weights`; return the reply of /update_weights."""
    posted = server.client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    assert (posted.status_code, posted.json()["status"]) == (200, "paused")
    if weight_dir is not None:
        (weight_dir / "NCCL_READY").touch()
    try:
        return server.post("/update_weights", {"weight_dir": weight_dir and weight_dir.as_posix()})
    finally:
        resumed = server.client.post("/resume")
        assert (resumed.status_code, resumed.json()["status"]) == (200, "resumed")


def join(server: Running, trainer: Trainer, num_servers: int = 1) -> Any:
    """Make the call of `init_nccl_broadcast`, with gloo."""
    port = free_port()
    body = {"host": "127.0.0.1", "port": port, "rank_offset": 0, "inference_world_size": num_servers, "timeout": 60}
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(
            server.post, "/init_broadcaster", {**body, "quantize_in_weight_transfer": False, "backend": "gloo"}
        )
        trainer.join(port, "prime-rl", num_servers + 1)
        trainer.wait()
        return joined.result(60)


def test_server_is_ready_and_has_the_model(server: Running) -> None:
    assert server.client.get("/health").status_code == 200
    assert any(one["id"] == "tiny" for one in server.client.get("/v1/models").json()["data"])
    assert server.client.get("/liveness").status_code == 200


def test_weights_from_a_directory(server: Running, broadcasts: Path, tiny_directory: Path) -> None:
    stream = Stream(server).started()
    assert ok(update(server, broadcasts / "step_1"))["version"] == 1
    assert stream.result().finish_reason == "length"
    fresh = fresh_tokens(tiny_directory, broadcasts / "step_1", PROMPT, SHORT)
    assert Stream(server, params=SHORT).result().completion_tokens == fresh
    refused(update(server, broadcasts / "step_2"), 400, "weight_dir", "no safetensors files and no pytorch_model")


@pytest.mark.parametrize("has_directory", [True, False])
def test_weights_from_the_broadcaster(
    server: Running,
    trainer: Trainer,
    named: dict[str, torch.Tensor],
    broadcasts: Path,
    tiny_directory: Path,
    has_directory: bool,
) -> None:
    assert ok(join(server, trainer))["status"] == "ok"
    place = broadcasts / "step_2" if has_directory else None
    stream = Stream(server).started()
    with ThreadPoolExecutor() as pool:
        for version in (1, 2):
            updating = pool.submit(update, server, place)
            trainer.send_dicts(good_names(named))
            trainer.wait()
            assert ok(updating.result(60))["version"] == version
    assert stream.result().finish_reason == "length"
    fresh = fresh_tokens(tiny_directory, broadcasts / "trained", PROMPT, SHORT)
    assert Stream(server, params=SHORT).result().completion_tokens == fresh


def test_a_broadcast_that_does_not_fit_leaves_the_old_weights(
    server: Running, trainer: Trainer, named: dict[str, torch.Tensor]
) -> None:
    ok(join(server, trainer))
    before = ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"]
    with ThreadPoolExecutor() as pool:
        for names, part in ((list(named), "short: the model has no such tensor"), (good_names(named)[1:], "lacks 1")):
            updating = pool.submit(update, server, None)
            trainer.send_dicts(names)
            trainer.wait()
            refused(updating.result(60), 400, part)
            assert ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"] == before
        updating = pool.submit(update, server, None)
        trainer.send_dicts(good_names(named))
        trainer.wait()
        assert ok(updating.result(60))["version"] == 1


def test_servers_have_the_ranks_after_the_trainer(
    server: Running, tiny_directory: Path, named: dict[str, torch.Tensor], trainer: Trainer
) -> None:
    port = free_port()
    with serving(tiny_directory, weight_timeout=60) as second, ThreadPoolExecutor() as pool:
        servers = (server, second)
        body = {"host": "127.0.0.1", "port": port, "inference_world_size": 2, "backend": "gloo"}
        joined = [
            pool.submit(one.post, "/init_broadcaster", {**body, "rank_offset": offset})
            for offset, one in enumerate(servers)
        ]
        trainer.join(port, "prime-rl", 3)
        trainer.wait()
        assert [ok(one.result(60))["status"] for one in joined] == ["ok", "ok"]
        updating = [pool.submit(update, one, None) for one in servers]
        trainer.send_dicts(good_names(named))
        trainer.wait()
        assert [ok(one.result(60))["version"] for one in updating] == [1, 1]
        digests = {ok(one.post("/weight_checker", {"action": "checksum"}))["checksum"] for one in servers}
        assert len(digests) == 1


INIT = {"host": "127.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 1, "timeout": 60}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"quantize_in_weight_transfer": True}, "quantize_in_weight_transfer: weights in the layout of vLLM's kernels"),
    ({"session_id": "a1b2"}, "session_id: transfers by NIXL are not supported"),
    ({"rank_offset": 1}, "rank_offset must be below inference_world_size, got 1 of 1"),
    ({"inference_world_size": 0}, "inference_world_size"),
    ({"host": ""}, "host"),
    ({"port": 0}, "port"),
    ({"timeout": -1}, "timeout"),
    ({"backend": "mpi"}, "backend"),
]


def test_invalid_broadcaster_is_refused_by_name(server: Running) -> None:
    for fields, part in INVALID:
        refused(server.post("/init_broadcaster", {**INIT, **fields}), 400, part)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_without_cuda_is_refused_at_once(server: Running) -> None:
    group = {"master_address": "127.0.0.1", "master_port": 29501, "rank_offset": 1, "world_size": 2}
    for path, body in (
        ("/init_broadcaster", {**INIT, "session_id": "default"}),
        ("/init_weight_transfer_engine", {"init_info": {**group, "backend": "nccl"}}),
    ):
        refused(server.post(path, body), 400, "backend: nccl needs a CUDA device", "a directory or gloo")
