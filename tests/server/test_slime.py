"""The calls of slime (commit 624b824) to its engines, with SGLang's paths: slime/rollout/sglang_rollout.py,
slime/backends/sglang_utils/sglang_engine.py and server_control.py.
"""

from __future__ import annotations

import base64
import logging
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from tests.server.mounted import JSON, ids
from tests.server.tiny import Running, running
from tests.server.trainer import make_weights, ok, serving

SAMPLING: JSON = {
    "temperature": 1.0,
    "top_p": 0.7,
    "top_k": -1,
    "max_new_tokens": 12,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "sampling_seed": 5,
}
"""What slime sends for a rollout with top-p."""


@pytest.fixture(scope="module")
def weights_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slime_weights")


@pytest.fixture(scope="module")
def server(tiny_directory: Path, weights_root: Path) -> Iterator[Running]:
    make_weights(tiny_directory, weights_root / "new", seed=7)
    with serving(tiny_directory, weights_root) as one:
        yield one


def rollout(server: Running, **params: Any) -> JSON:
    """Send slime's request; return its `meta_info` with the reply's ids."""
    body = {"sampling_params": {**SAMPLING, **params}, "return_logprob": True, "input_ids": ids("hello")}
    reply = good(server.post("/generate", body))
    return {**reply["meta_info"], "output_ids": reply["output_ids"]}


def good(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def int32(text: str) -> tuple[int, ...]:
    """Decode an array as slime does."""
    data = base64.b64decode(text)
    return struct.unpack(f"<{len(data) // 4}i", data)


def test_kept_tokens_of_top_p_are_the_sampling_masks(server: Running) -> None:
    asked = {"custom_params": {"return_top_p_token_ids": True}}
    meta = rollout(server, **asked)
    kept, offsets = int32(meta["top_p_token_ids"]), int32(meta["top_p_token_offsets"])
    assert len(offsets) == meta["completion_tokens"] + 1 == 13 and offsets[0] == 0 and offsets[-1] == len(kept)
    rows = [kept[start:end] for start, end in pairwise(offsets)]
    assert all(token in row for token, row in zip(meta["output_ids"], rows, strict=True))
    assert "sampling_mask" not in meta
    body = {"sampling_params": SAMPLING, "return_sampling_mask": True, "input_ids": ids("hello")}
    masks = good(server.post("/generate", body))["meta_info"]["sampling_mask"]
    assert [list(row) for row in rows] == masks and any(len(row) > 1 for row in rows)


def test_kept_tokens_are_left_out_where_nothing_is_cut(server: Running) -> None:
    asked = {"custom_params": {"return_top_p_token_ids": True}}
    assert "top_p_token_ids" not in rollout(server, **asked, top_p=1.0)
    assert "top_p_token_ids" not in rollout(server)


def test_kept_tokens_of_a_stream_are_in_its_last_event(server: Running) -> None:
    params = {**SAMPLING, "custom_params": {"return_top_p_token_ids": True}}
    body = {"sampling_params": params, "input_ids": ids("hello"), "stream": True}
    metas = [event["meta_info"] for event in server.events("/generate", body)[:-1]]
    assert ["top_p_token_ids" in meta for meta in metas] == [False] * (len(metas) - 1) + [True]
    assert len(int32(metas[-1]["top_p_token_offsets"])) == metas[-1]["completion_tokens"] + 1


def test_a_paused_engine_is_healthy_at_once(server: Running) -> None:
    assert good(server.client.get("/health_generate"))["meta_info"]["completion_tokens"] == 1
    ok(server.post("/pause_generation", {}))
    assert good(server.client.get("/health_generate")) == {"status": "paused"}
    ok(server.post("/continue_generation", {}))
    assert good(server.client.get("/health_generate"))["meta_info"]["completion_tokens"] == 1
    assert server.client.get("/flush_cache").status_code == 200
    ok(server.post("/release_memory_occupation", {}))
    assert good(server.client.get("/health_generate")) == {"status": "paused"}
    ok(server.post("/resume_memory_occupation", {"tags": ["weights"]}))
    ok(server.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}))
    assert good(server.client.get("/health_generate"))["meta_info"]["completion_tokens"] == 1


def test_load_and_liveness(server: Running) -> None:
    assert server.client.get("/liveness").status_code == 200
    assert [one["num_total_reqs"] for one in ok(server.client.get("/v1/loads?include=core"))["loads"]] == [0]
    (load,) = server.client.get("/get_load").json()
    assert load == {"rid": None, "dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": load["num_tokens"]}


def test_weights_checker_returns_the_checksum(server: Running, weights_root: Path) -> None:
    new = str(weights_root / "new")
    ok(server.post("/update_weights_from_disk", {"model_path": new, "weight_version": "1"}))
    assert ok(server.client.get("/get_weight_version"))["weight_version"] == "1"
    tokens, before = rollout(server)["output_ids"], ok(server.post("/weights_checker", {"action": "checksum"}))
    ok(server.post("/post_process_weights", {"restore_weights_before_load": True, "post_process_quantization": True}))
    ok(server.post("/update_weights_from_disk", {"model_path": new, "weight_version": "2", "load_format": "auto"}))
    for action in ("snapshot", "reset_tensors"):
        assert server.post("/weights_checker", {"action": action}).json()["error"]["param"] == "action"
    assert before["per_engine_checksum"] == ok(server.client.post("/weights_checker"))["checksum"]
    assert rollout(server)["output_ids"] == tokens


def test_hints_are_logged_once_and_refused_if_strict(tiny_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def ask(server: Running) -> Any:
        return server.post("/generate", {"text": "a", "priority": 3, "sampling_params": {"stream_interval": 2}})

    with caplog.at_level(logging.WARNING, logger="nano_inference.server"), running(tiny_directory) as plain:
        assert [ask(plain).status_code for _ in range(2)] == [200, 200]
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["fields without effect are ignored: 'priority', 'sampling_params.stream_interval'"]
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, strict=True)) as strict:
        reply = ask(strict)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")
