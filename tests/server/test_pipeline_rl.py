"""The calls of PipelineRL (58d3934) to its inference servers: pipelinerl/async_llm.py, finetune_loop.py, vllm1.py."""

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
from tests.weights.plain_trainer import Trainer, dtypes_and_shapes, trainer_process
from tests.weights.test_group import free_port


@pytest.fixture(scope="module")
def trained(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tiny_directory, tmp_path_factory.mktemp("pipeline") / "trained", seed=41)


@pytest.fixture(scope="module")
def named(trained: Path) -> dict[str, torch.Tensor]:
    return {**weights_of(trained), "short": torch.zeros(3)}


@pytest.fixture
def server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, weight_timeout=60) as one:
        yield one


@pytest.fixture
def trainer(named: dict[str, torch.Tensor], tmp_path: Path) -> Iterator[Trainer]:
    with trainer_process(named, tmp_path) as one:
        yield one


def join(server: Running, trainer: Trainer) -> None:
    """Join as the operator does in place of the options of PipelineRL's own server; with gloo."""
    place = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(server.post, "/init_weight_transfer_engine", {"init_info": {**place, "backend": "gloo"}})
        trainer.join(place["master_port"], "weight_update_group")
        trainer.wait()
        ok(joined.result(60))


def request(named: dict[str, torch.Tensor], names: list[str], version: int) -> dict[str, Any]:
    """Return a WeightUpdateRequest."""
    dtypes, shapes = dtypes_and_shapes(named, names, prefix="torch.")
    described = zip(names, shapes, dtypes, strict=True)
    infos = [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in described]
    return {"kind": "weight_update_request", "version": version, "parameters_info": infos, "timestamp": 1781.5}


def send(server: Running, trainer: Trainer, body: dict[str, Any], names: list[str]) -> Any:
    """Announce tensors and broadcast them."""
    with ThreadPoolExecutor() as pool:
        updating = pool.submit(server.post, "/receive_weight_update", body)
        trainer.send(names)
        trainer.wait()
        return updating.result(60)


def test_actor_samples_with_log_probabilities(server: Running) -> None:
    assert server.client.get("/health").status_code == 200
    body = {
        **{"max_tokens": 6, "temperature": 1.0, "return_tokens_as_token_ids": True},
        **{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
        **{"logprobs": 1, "include_stop_str_in_output": True, "skip_special_tokens": False},
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    (choice,), usage = reply.json()["choices"], reply.json()["usage"]
    entries = [(int(one["token"].split(":")[-1]), one["logprob"]) for one in choice["logprobs"]["content"]]
    assert len(entries) == usage["completion_tokens"] and all(logprob <= 0 for _, logprob in entries)
    assert choice["finish_reason"] in ("stop", "length") and usage["prompt_tokens"] > 0


def test_trainer_updates_while_requests_run(
    server: Running, trainer: Trainer, named: dict[str, torch.Tensor], trained: Path, tiny_directory: Path
) -> None:
    join(server, trainer)
    stream = Stream(server).started()
    for number, version in enumerate((64, 128), start=1):
        reply = ok(send(server, trainer, request(named, good_names(named), version), good_names(named)))
        assert (reply["status"], reply["weight_version"], reply["version"]) == ("ok", str(version), number)
    versions = stream.result().token_versions
    assert versions[0] == 0 and list(versions) == sorted(versions)
    fresh = fresh_tokens(tiny_directory, trained, PROMPT, SHORT)
    assert Stream(server, params=SHORT).result().completion_tokens == fresh


def test_weights_that_are_not_named_stay(server: Running, trainer: Trainer, named: dict[str, torch.Tensor]) -> None:
    join(server, trainer)
    before = ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"]
    names = ["model.embed_tokens.weight", "short"]
    refused(send(server, trainer, request(named, names, 1), names), 400, "short: the model has no such tensor")
    assert ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"] == before
    assert ok(send(server, trainer, request(named, names[:1], 2), names[:1]))["weight_version"] == "2"
    assert ok(server.post("/weight_checker", {"action": "checksum"}))["checksum"] != before


def test_invalid_update_is_refused_by_name(server: Running, trainer: Trainer, named: dict[str, torch.Tensor]) -> None:
    join(server, trainer)
    whole = request(named, ["model.norm.weight"], 1)
    for fields, part in INVALID:
        refused(server.post("/receive_weight_update", {**whole, **fields}), 400, part)


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"parameters_info": []}, "parameters_info"),
    ({"parameters_info": [{"name": "a", "shape": [1]}]}, "dtype"),
    ({"parameters_info": [{"name": "a", "shape": [1], "dtype": "torch.int8"}]}, "parameters_info[0]"),
    ({"kind": "training_done"}, "kind"),
    ({"version": None}, "version"),
    ({"timestamp": "now"}, "timestamp"),
    ({"group_name": "other"}, "there is no group 'other'"),
    ({"more": 1}, "more: there is no such field"),
]


def test_update_without_a_group_is_refused(server: Running, named: dict[str, torch.Tensor]) -> None:
    body = request(named, ["model.norm.weight"], 1)
    refused(server.post("/receive_weight_update", body), 400, "there is no group 'weight_update_group'; join one first")
