"""Fields of the trainers' commands: groups, parts, buckets, directories, memory, and those without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nano_inference.server.trainers.groups import Groups
from nano_inference.server.trainers.schema import UPDATE_FORMS
from tests.server.tiny import Running
from tests.server.trainer import SHORT, Stream, make_weights, ok, refused, serving

pytestmark = pytest.mark.slow

PLAIN: Mapping[str, Any] = MappingProxyType(
    {"master_address": "127.0.0.1", "master_port": 4321, "rank_offset": 1, "world_size": 2, "group_name": "g"}
)
TENSOR = ("model.norm.weight", 32)


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


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/init_weights_update_group"])
def test_group_is_joined_with_given_fields(server: Running, groups: list[tuple[Any, ...]], path: str) -> None:
    names = ("group_name", "master_address", "master_port", "rank_offset", "world_size", "backend")
    asked = dict(zip(names, ("other", "localhost", 9876, 2, 5, "nccl"), strict=True))
    ok(server.post(path, {"init_info": asked} if "transfer" in path else asked))
    assert groups == [tuple(asked.values())]


def test_group_has_default_name_and_backend(server: Running, groups: list[tuple[Any, ...]]) -> None:
    ok(server.post("/init_weights_update_group", {name: PLAIN[name] for name in PLAIN if name != "group_name"}))
    assert (groups[0][0], groups[0][-1]) == ("weight_update_group", "gloo")


IGNORED: Mapping[str, Any] = MappingProxyType(
    {"token_step": 7, "is_async": True, "torch_empty_cache": True, "recapture_cuda_graph": False, "manifest": None}
)


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_ignored_update_fields_change_nothing(server: Running, load_format: str, is_paused: bool) -> None:
    field = {**IGNORED, "flush_cache": is_paused, "keep_pause": not is_paused, "load_format": load_format}
    prompt = tuple(range(1, 101))
    Stream(server, prompt, SHORT).result()
    if is_paused:
        ok(server.post("/pause_generation", {"mode": "in_place"}))
    reply = ok(server.post("/update_weights_from_disk", {"model_path": "one", "weight_version": "v", **field}))
    paused = server.client.get("/is_paused").json()["is_paused"]
    ok(server.post("/continue_generation", {}))
    assert (reply["weight_version"], paused) == ("v", is_paused)
    assert Stream(server, prompt, SHORT).result().num_cached_tokens == 0


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


@pytest.mark.parametrize("form", UPDATE_FORMS)
def test_every_other_way_to_send_weights_is_refused_by_name(server: Running, form: str) -> None:
    for body in ({form: [1]}, {"update_info": {form: [1]}}):
        assert refused(server.post("/update_weights", body), 501, form)["param"] == form
    refused(server.post("/update_weights", {form: None, "update_info": {form: []}}), 400, "no update is open")
