"""Weight updates over HTTP from the process group of a trainer, which is a second process with plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.weights.updates import WeightUpdate
from tests.server.tiny import Running, opened
from tests.server.trainer import (
    PROMPT,
    SHORT,
    Stream,
    broadcast,
    fresh_tokens,
    good_names,
    make_weights,
    ok,
    posting,
    refused,
    sampled,
    serving,
    until,
    version_of,
    weights_of,
)
from tests.weights.plain_trainer import Named, Trainer, dtypes_and_shapes, trainer_process
from tests.weights.test_group import free_port

pytestmark = pytest.mark.slow

PLACE = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2}
LISTS = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}


@pytest.fixture(scope="module")
def target(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the trainer's weights."""
    return make_weights(tiny_directory, tmp_path_factory.mktemp("trained") / "next", 21)


@pytest.fixture(scope="module")
def named(target: Path) -> Named:
    """The trainer's weights, with an invalid one."""
    return {**weights_of(target), "short": torch.zeros(3)}


class ReceivingEngine:
    """An engine that lists the tensors that its updates received; everything else is the engine's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.received: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def control(self) -> ReceivingEngine:
        return self

    def start_update(self, update: WeightUpdate) -> Any:
        return self._engine.start_update(replace(update, weights=self._noted(update.weights)))

    def _noted(self, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        with closing(weights):
            for name, tensor in weights:
                self.received.append(name)
                yield name, tensor


def receiving(directory: Path, config: ServerConfig, **options: Any) -> LoadedModel:
    one = opened(directory, config, **options)
    return replace(one, engine=ReceivingEngine(one.engine))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, weight_timeout=60, make=receiving) as one:
        yield one


@pytest.fixture(autouse=True)
def without_groups(server: Running) -> Iterator[None]:
    server.opened.engine.received.clear()  # type: ignore[attr-defined]
    yield
    server.post("/shutdown_weight_transfer_engine", {})


@pytest.fixture
def trainer(named: Named, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_process(named, tmp_path) as one:
        yield one


def join_group(server: Running, trainer: Trainer, dialect: str = "vllm", **fields: Any) -> None:
    """Make the server join the trainer's group; a server that waits for it answers other requests."""
    info = {**PLACE, "master_port": free_port(), **fields}
    path, body = ("/init_weight_transfer_engine", {"init_info": info})
    if dialect == "sglang":
        path, body = "/init_weights_update_group", info
    with posting(server, path, body) as reply:
        assert Stream(server, params=SHORT).result().finish_reason == "length"
        trainer.join(info["master_port"], fields.get("group_name", "weight_update_group"))
        trainer.wait()
        ok(reply.result(60))


def send_part(
    server: Running, trainer: Trainer, named: Named, names: Sequence[str], *how: Any, renamed: Any = None, **fields: Any
) -> Any:
    """Announce tensors through /update_weights and broadcast them; `renamed` maps tensors to announced names."""
    dtypes, shapes = dtypes_and_shapes(named, names)
    info = {"names": [(renamed or {}).get(name, name) for name in names], "dtype_names": dtypes, "shapes": shapes}
    return broadcast(server, trainer, "/update_weights", {"update_info": {**info, **fields}}, names, *how)


@contextmanager
def untouched(server: Running) -> Iterator[None]:
    """Assert that a block leaves the weights, and the update that follows works."""
    before = version_of(server), sampled(server)
    yield
    assert ok(server.client.get("/weight_info"))["update"] == "idle"
    assert (version_of(server), sampled(server)) == before


def update_all(server: Running, trainer: Trainer, named: Named) -> dict[str, Any]:
    """Run an update in three parts."""
    names = good_names(named)
    ok(server.post("/start_weight_update", {}))
    for start in range(0, len(names), 8):
        ok(send_part(server, trainer, named, names[start : start + 8]))
    return ok(server.post("/finish_weight_update", {"weight_version": 3}))


def test_vllm_update_in_parts(
    server: Running, trainer: Trainer, named: Named, target: Path, tiny_directory: Path
) -> None:
    join_group(server, trainer)
    before, streams = version_of(server), [Stream(server, (i, 3)).started() for i in range(4)]
    reply = update_all(server, trainer, named)
    assert (reply["weight_version"], reply["version"]) == ("3", before + 1)
    for stream in streams:
        versions = stream.result().token_versions
        assert list(versions) == sorted(versions) and versions[0] == before
    assert sampled(server) == fresh_tokens(tiny_directory, target, PROMPT, SHORT)
    assert update_all(server, trainer, named)["version"] == before + 2
    ok(server.post("/start_weight_update", {}))
    ok(send_part(server, trainer, named, good_names(named)[1:]))
    refused(server.post("/finish_weight_update", {}), 400, "lacks 1 tensors", good_names(named)[0])
    assert version_of(server) == before + 2
    assert ok(server.post("/shutdown_weight_transfer_engine", {}))["num_groups"] == 1


def test_each_sglang_bucket_is_an_update(
    server: Running, trainer: Trainer, named: Named, target: Path, tiny_directory: Path
) -> None:
    join_group(server, trainer, "sglang", group_name="slime-pp_0", backend="gloo")
    names, before = good_names(named), version_of(server)
    for number, start in enumerate(range(0, len(names), 7), start=1):
        bucket = names[start : start + 7]
        dtypes, shapes = dtypes_and_shapes(named, bucket, prefix="torch.")
        body = {"names": bucket, "dtypes": dtypes, "shapes": shapes, "group_name": "slime-pp_0"}
        body["weight_version"] = f"v{number}"
        reply = ok(broadcast(server, trainer, "/update_weights_from_distributed", body, bucket))
        assert (reply["success"], reply["weight_version"], reply["version"]) == (True, f"v{number}", before + number)
    assert sampled(server) == fresh_tokens(tiny_directory, target, PROMPT, SHORT)
    for lists, part in (({"dtypes": ["int8"]}, "dtypes[0]"), ({"dtypes": []}, "dtypes"), ({"shapes": []}, "shapes")):
        body = {**LISTS, **lists, "group_name": "slime-pp_0"}
        refused(server.post("/update_weights_from_distributed", body), 400, part)
    assert ok(server.post("/destroy_weights_update_group", {"group_name": "slime-pp_0"}))["success"] is True
    refused(server.post("/destroy_weights_update_group", {"group_name": "slime-pp_0"}), 400, "no group")


@pytest.mark.parametrize(("where", "limit"), [("init", 5000), ("update", None)])
def test_packed_broadcasts(
    where: str, limit: int | None, server: Running, trainer: Trainer, named: Named, target: Path, tiny_directory: Path
) -> None:
    """TRL 1.16 packs its tensors, by its version of vLLM as said at the start or with each update."""
    fields = {"packed": True} if limit is None else {"packed": True, "packed_buffer_size_bytes": limit}
    join_group(server, trainer, **(fields if where == "init" else {}))
    names = good_names(named)
    ok(server.post("/start_weight_update", {}))
    for part in (names[:5], names[5:]):
        more = fields if where == "update" else {}
        ok(send_part(server, trainer, named, part, "pack", limit or 1 << 30, **more))
    ok(server.post("/finish_weight_update", {}))
    assert sampled(server) == fresh_tokens(tiny_directory, target, PROMPT, SHORT)


def test_buckets_of_another_size_end_the_update_and_the_group(
    server: Running, trainer: Trainer, named: Named, tmp_path: Path
) -> None:
    """After a bucket with other tensors than announced, it is unknown where the next one ends."""
    join_group(server, trainer)
    fields = {"packed": True, "packed_buffer_size_bytes": 1}
    with untouched(server):
        ok(server.post("/start_weight_update", {}))
        reply = send_part(server, trainer, named, good_names(named), "pack", 1 << 30, **fields)  # one broadcast of all
        refused(reply, 400, "a packed broadcast of 1 tensors", "has more", "Join the group again")
    (tmp_path / "again").mkdir()
    with trainer_process(named, tmp_path / "again") as restarted:
        join_group(server, restarted)
        update_all(server, restarted, named)


def test_invalid_tensors_abort_the_update_and_keep_the_group_usable(
    server: Running, trainer: Trainer, named: Named
) -> None:
    join_group(server, trainer)
    norm, head = "model.norm.weight", "lm_head.weight"
    for names, renamed, part in (([norm], {norm: head}, "has the shape (32,)"), ([norm, norm], {}, "occurs twice")):
        with untouched(server):
            ok(server.post("/start_weight_update", {}))
            ok(send_part(server, trainer, named, ["model.embed_tokens.weight"]))
            # The tensors after the invalid one are broadcast too and must be received.
            refused(send_part(server, trainer, named, [*names, head], renamed=renamed), 400, part)
    for sent, dtype, shape, part in (
        (norm, "bfloat16", [32], "has more; it seems to be float32 [32]"),
        (norm, "float32", [31], "has more"),
        ("short", "float32", [32], "has fewer"),
    ):
        with untouched(server):
            body = {"names": [norm], "shapes": [shape], "dtypes": [dtype]}
            reply = broadcast(server, trainer, "/update_weights_from_distributed", body, [sent])
            refused(reply, 400, f"{norm}: ", "announced as", part)
    update_all(server, trainer, named)


def test_tensors_that_do_not_fit_are_logged_before_they_are_received(
    server: Running, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    join_group(server, trainer)
    body = {"names": ["model.nothing", "model.norm.weight"], "dtypes": ["float32"] * 2, "shapes": [[32], [3]]}
    with untouched(server), posting(server, "/update_weights_from_distributed", body) as reply:
        until(server, lambda: "will be rejected" in caplog.text)
        assert "model.nothing: the model has no such tensor" in caplog.text
        assert "model.norm.weight: has the shape (3,), the model (32,)" in caplog.text
        assert not reply.done()
        trainer.send(["model.norm.weight", "short"])
        trainer.wait()
        refused(reply.result(60), 400, "no such tensor")


@pytest.mark.parametrize("end", ["abort", "death"])
def test_an_update_that_waits_for_a_broadcast_can_be_aborted(
    end: str, server: Running, trainer: Trainer, named: Named, tmp_path: Path
) -> None:
    engine: Any = server.opened.engine
    join_group(server, trainer)
    names = good_names(named)
    dtypes, shapes = dtypes_and_shapes(named, names)
    body = {"names": names, "dtypes": dtypes, "shapes": shapes}
    with untouched(server):
        with posting(server, "/update_weights_from_distributed", body) as reply:
            trainer.send(names[:2])
            trainer.wait()
            until(server, lambda: engine.received == names[:2])
            if end == "abort":
                aborted = ok(server.post("/abort_weight_update", {}))
                assert (aborted["aborted"], aborted["closed_groups"]) == (True, ["weight_update_group"])
                refused(reply.result(60), 409, "aborted")
            trainer.die()  # only this ends the thread that waits in the broadcast
            if end == "death":
                refused(reply.result(60), 400, "the broadcast failed")
        refused(server.post("/finish_weight_update", {}), 400, "no update is open")
    (tmp_path / "second").mkdir()
    with trainer_process(named, tmp_path / "second") as second:
        join_group(server, second)
        update_all(server, second, named)


def test_join_times_out_without_a_trainer(tiny_directory: Path) -> None:
    info = {**PLACE, "master_port": free_port()}
    with (
        serving(tiny_directory, weight_timeout=1) as server,
        posting(server, "/init_weights_update_group", info) as one,
    ):
        assert Stream(server, params=SHORT).result().finish_reason == "length"
        assert refused(one.result(60), 400, "no weight group of 2")["code"] == "no_group"


GOOD = {**PLACE, "master_port": 5000}


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {**GOOD, "packed_buffer_size_bytes": 0}}, "packed_buffer_size"),
        ("/init_weight_transfer_engine", {"init_info": {**GOOD, "backend": "mpi"}}, "backend"),
        ("/init_weights_update_group", {**GOOD, "backend": "nccl"}, "nccl is not available"),
        ("/init_weights_update_group", {**GOOD, "rank_offset": 0}, "rank_offset"),
        ("/init_weights_update_group", {**GOOD, "rank_offset": 2}, "rank_offset"),
        ("/init_weights_update_group", {**GOOD, "master_port": 0}, "master_port"),
        ("/init_weights_update_group", {**GOOD, "group_name": ""}, "group_name"),
        ("/update_weights_from_distributed", LISTS, "no group"),
        ("/update_weights_from_distributed", {**LISTS, "load_format": "flattened_bucket"}, "load_format"),
        ("/update_weights_from_distributed", {**LISTS, "shapes": [[-1]]}, "shapes"),
        ("/destroy_weights_update_group", {}, "no group"),
    ],
)
def test_invalid_group_field_is_named(server: Running, path: str, body: Any, part: str) -> None:
    refused(server.post(path, body), 400, part)
