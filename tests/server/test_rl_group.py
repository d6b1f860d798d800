"""Weight updates over HTTP from the process group of a trainer, which is a second process with plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    fresh_tokens,
    make_weights,
    ok,
    refused,
    serving,
    until,
    weights_of,
)
from tests.weights.plain_trainer import Named, Trainer, dtypes_and_shapes, trainer_process
from tests.weights.test_group import free_port


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


@pytest.fixture
def server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, weight_timeout=60, make=receiving) as one:
        yield one


@pytest.fixture
def trainer(named: Named, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_process(named, tmp_path) as one:
        yield one


def good_names(named: Named) -> list[str]:
    return [name for name in named if name != "short"]


@contextmanager
def posting(server: Running, path: str, body: Any) -> Iterator[Future[Any]]:
    """POST from a thread: the reply arrives only after the broadcast or rendezvous."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit(server.client.post, path, json=body)


def join_group(server: Running, trainer: Trainer, dialect: str = "vllm", **fields: Any) -> None:
    """Make the server join the trainer's group."""
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2, **fields}
    path, body = ("/init_weight_transfer_engine", {"init_info": info})
    if dialect == "sglang":
        path, body = "/init_weights_update_group", info
    with posting(server, path, body) as reply:
        assert server.client.get("/health").status_code == 200, "waiting for a trainer blocks other requests"
        assert Stream(server, params=SHORT).result().finish_reason == "length"
        trainer.join(info["master_port"], fields.get("group_name", "weight_update_group"))
        trainer.wait()
        ok(reply.result(60))


def send_part(server: Running, trainer: Trainer, named: Named, names: Sequence[str], renamed: Any = None) -> Any:
    """Announce tensors through /update_weights and broadcast them; `renamed` maps tensors to announced names."""
    dtypes, shapes = dtypes_and_shapes(named, names)
    info = {"names": [(renamed or {}).get(name, name) for name in names], "dtype_names": dtypes, "shapes": shapes}
    with posting(server, "/update_weights", {"update_info": info}) as reply:
        trainer.send(names)
        trainer.wait()
        return reply.result(60)


def assert_untouched(server: Running, version: int = 0) -> None:
    info = ok(server.client.get("/weight_info"))
    assert (info["version"], info["update"]) == (version, "idle")
    assert Stream(server, params=SHORT).result().token_versions == (version,) * 8


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
    streams = [Stream(server, (i, 3)).started() for i in range(4)]
    reply = update_all(server, trainer, named)
    assert (reply["weight_version"], reply["version"]) == ("3", 1)
    for stream in streams:
        versions = stream.result().token_versions
        assert list(versions) == sorted(versions) and versions[0] == 0
    sample = Stream(server, params=SHORT).result()
    assert sample.completion_tokens == fresh_tokens(tiny_directory, target, PROMPT, SHORT)
    assert update_all(server, trainer, named)["version"] == 2
    assert ok(server.post("/shutdown_weight_transfer_engine", {}))["num_groups"] == 1


def test_each_sglang_bucket_is_an_update(
    server: Running, trainer: Trainer, named: Named, target: Path, tiny_directory: Path
) -> None:
    join_group(server, trainer, "sglang", group_name="slime-pp_0", backend="gloo")
    names = good_names(named)
    for number, start in enumerate(range(0, len(names), 7), start=1):
        bucket = names[start : start + 7]
        dtypes, shapes = dtypes_and_shapes(named, bucket, prefix="torch.")
        body = {"names": bucket, "dtypes": dtypes, "shapes": shapes, "group_name": "slime-pp_0"}
        with posting(server, "/update_weights_from_distributed", {**body, "weight_version": f"v{number}"}) as reply:
            trainer.send(bucket)
            trainer.wait()
            reply_body = ok(reply.result(60))
        assert reply_body["success"] is True
        assert (reply_body["weight_version"], reply_body["version"]) == (f"v{number}", number)
    sample = Stream(server, params=SHORT).result()
    assert sample.completion_tokens == fresh_tokens(tiny_directory, target, PROMPT, SHORT)
    assert ok(server.post("/destroy_weights_update_group", {"group_name": "slime-pp_0"}))["success"] is True
    refused(server.post("/destroy_weights_update_group", {"group_name": "slime-pp_0"}), 400, "no group")


@pytest.mark.parametrize(("where", "limit"), [("init", 5000), ("update", None), ("update", 1)])
def test_packed_broadcasts(
    where: str, limit: int | None, server: Running, trainer: Trainer, named: Named, target: Path, tiny_directory: Path
) -> None:
    """TRL 1.16 packs its tensors, by its version of vLLM as said at the start or with each update."""
    fields = {"packed": True} if limit is None else {"packed": True, "packed_buffer_size_bytes": limit}
    join_group(server, trainer, **(fields if where == "init" else {}))
    names = good_names(named)
    ok(server.post("/start_weight_update", {}))
    for part in (names[:5], names[5:]):
        reply = send_packed(server, trainer, named, part, limit or 1 << 30, fields if where == "update" else {})
        ok(reply)
    assert ok(server.post("/finish_weight_update", {}))["version"] == 1
    sample = Stream(server, params=SHORT).result()
    assert sample.completion_tokens == fresh_tokens(tiny_directory, target, PROMPT, SHORT)


def send_packed(
    server: Running, trainer: Trainer, named: Named, names: Sequence[str], limit: int, fields: dict[str, Any]
) -> Any:
    """Announce tensors and broadcast them in buckets."""
    dtypes, shapes = dtypes_and_shapes(named, names)
    info = {"names": list(names), "dtype_names": dtypes, "shapes": shapes, **fields}
    with posting(server, "/update_weights", {"update_info": info}) as reply:
        trainer.pack(names, limit)
        trainer.wait()
        return reply.result(60)


def test_buckets_of_another_size_end_the_update_and_the_group(
    server: Running, trainer: Trainer, named: Named, tmp_path: Path
) -> None:
    """After a bucket with other tensors than announced, it is unknown where the next one ends."""
    join_group(server, trainer)
    ok(server.post("/start_weight_update", {}))
    names = good_names(named)
    fields = {"packed": True, "packed_buffer_size_bytes": 1}
    dtypes, shapes = dtypes_and_shapes(named, names)
    info = {"names": names, "dtype_names": dtypes, "shapes": shapes, **fields}
    with posting(server, "/update_weights", {"update_info": info}) as reply:
        trainer.pack(names, 1 << 30)  # one broadcast of everything
        trainer.wait()
        refused(reply.result(60), 400, "a packed broadcast of 1 tensors", "has more", "Join the group again")
    assert_untouched(server)
    (tmp_path / "again").mkdir()
    with trainer_process(named, tmp_path / "again") as restarted:
        join_group(server, restarted)
        assert update_all(server, restarted, named)["version"] == 1


WRONG = {
    "shape": (["model.norm.weight"], {"model.norm.weight": "lm_head.weight"}, "has the shape (32,)"),
    "twice": (["model.norm.weight", "model.norm.weight"], {}, "occurs twice"),
}


@pytest.mark.parametrize("kind", ["shape", "twice"])
def test_invalid_tensor_aborts_the_update_and_keeps_the_group_usable(
    kind: str, server: Running, trainer: Trainer, named: Named
) -> None:
    names, renamed, part = WRONG[kind]
    join_group(server, trainer)
    ok(server.post("/start_weight_update", {}))
    ok(send_part(server, trainer, named, ["model.embed_tokens.weight"]))
    # The tensors after the invalid one are broadcast too and must be received.
    refused(send_part(server, trainer, named, [*names, "lm_head.weight"], renamed), 400, part)
    assert_untouched(server)
    assert update_all(server, trainer, named)["version"] == 1


@pytest.mark.parametrize(
    ("dialect", "sent", "dtype", "shape", "part"),
    [
        ("vllm", "model.norm.weight", "bfloat16", [32], "has more; it seems to be float32 [32]"),
        ("sglang", "model.norm.weight", "float32", [31], "has more"),
        ("sglang", "short", "float32", [32], "has fewer"),
    ],
)
def test_broadcast_of_wrong_size_is_refused_and_keeps_the_group_usable(
    dialect: str, sent: str, dtype: str, shape: Any, part: str, server: Running, trainer: Trainer, named: Named
) -> None:
    join_group(server, trainer)
    announced = {"names": ["model.norm.weight"], "shapes": [shape]}
    if dialect == "vllm":
        ok(server.post("/start_weight_update", {}))
        path, body = "/update_weights", {"update_info": {**announced, "dtype_names": [dtype]}}
    else:
        path, body = "/update_weights_from_distributed", {**announced, "dtypes": [dtype]}
    with posting(server, path, body) as reply:
        trainer.send([sent])
        trainer.wait()
        refused(reply.result(60), 400, "model.norm.weight: ", "announced as", part)
    assert_untouched(server)
    assert update_all(server, trainer, named)["version"] == 1


def test_tensors_that_do_not_fit_are_logged_before_they_are_received(
    server: Running, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    join_group(server, trainer)
    body = {"names": ["model.nothing", "model.norm.weight"], "dtypes": ["float32"] * 2, "shapes": [[32], [3]]}
    with posting(server, "/update_weights_from_distributed", body) as reply:
        until(server, lambda: "will be rejected" in caplog.text)
        assert "model.nothing: the model has no such tensor" in caplog.text
        assert "model.norm.weight: has the shape (3,), the model (32,)" in caplog.text
        assert not reply.done()
        trainer.send(["model.norm.weight", "short"])
        trainer.wait()
        refused(reply.result(60), 400, "no such tensor")
    assert_untouched(server)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_update_that_waits_for_a_broadcast_can_be_aborted(
    dialect: str, server: Running, trainer: Trainer, named: Named, tmp_path: Path
) -> None:
    engine: Any = server.opened.engine
    join_group(server, trainer)
    names = good_names(named)
    dtypes, shapes = dtypes_and_shapes(named, names)
    path, body = "/update_weights_from_distributed", {"names": names, "dtypes": dtypes, "shapes": shapes}
    if dialect == "vllm":
        ok(server.post("/start_weight_update", {}))
        path, body = "/update_weights", {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
    with posting(server, path, body) as reply:
        trainer.send(names[:2])
        trainer.wait()
        until(server, lambda: engine.received == names[:2])
        aborted = ok(server.post("/abort_weight_update", {}))
        assert (aborted["aborted"], aborted["closed_groups"]) == (True, ["weight_update_group"])
        refused(reply.result(60), 409, "aborted")
    refused(server.post("/destroy_weights_update_group", {}), 400, "no group")
    refused(server.post("/finish_weight_update", {}), 400, "no update is open")
    assert_untouched(server)
    trainer.die()  # only this ends the thread that waits in the broadcast
    (tmp_path / "second").mkdir()
    with trainer_process(named, tmp_path / "second") as second:
        join_group(server, second)
        assert update_all(server, second, named)["version"] == 1


def test_missing_tensors_are_reported_at_the_end(server: Running, trainer: Trainer, named: Named) -> None:
    join_group(server, trainer)
    ok(server.post("/start_weight_update", {}))
    ok(send_part(server, trainer, named, good_names(named)[1:]))
    refused(server.post("/finish_weight_update", {}), 400, "lacks 1 tensors", good_names(named)[0])
    assert_untouched(server)
    assert update_all(server, trainer, named)["version"] == 1


def test_server_accepts_next_trainer_after_one_dies_during_broadcast(
    server: Running, trainer: Trainer, named: Named, tmp_path: Path
) -> None:
    join_group(server, trainer)
    names = good_names(named)
    dtypes, shapes = dtypes_and_shapes(named, names)
    body = {"names": names, "dtypes": dtypes, "shapes": shapes}
    with posting(server, "/update_weights_from_distributed", body) as reply:
        trainer.send(names[:5])
        trainer.wait()
        trainer.die()
        refused(reply.result(60), 400, "the broadcast failed")
    assert_untouched(server)
    (tmp_path / "second").mkdir()
    with trainer_process(named, tmp_path / "second") as second:
        join_group(server, second)
        assert update_all(server, second, named)["version"] == 1


def test_join_times_out_without_a_trainer(tiny_directory: Path) -> None:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    with serving(tiny_directory, weight_timeout=1) as server:
        with posting(server, "/init_weights_update_group", info) as reply:
            assert Stream(server, params=SHORT).result().finish_reason == "length"
            assert refused(reply.result(60), 400, "no weight group of 2")["code"] == "no_group"
        assert_untouched(server)


GOOD = {"master_address": "127.0.0.1", "master_port": 5000, "rank_offset": 1, "world_size": 2}
LISTS = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/init_weight_transfer_engine", {}, "init_info"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {**GOOD, "packed_buffer_size_bytes": 0}},
            "packed_buffer_size_bytes",
        ),
        ("/init_weight_transfer_engine", {"init_info": {**GOOD, "backend": "mpi"}}, "backend"),
        ("/init_weights_update_group", {**GOOD, "backend": "nccl"}, "nccl is not available"),
        ("/init_weights_update_group", {**GOOD, "backend": "hccl"}, "backend"),
        ("/init_weights_update_group", {**GOOD, "rank_offset": 0}, "rank_offset"),
        ("/init_weights_update_group", {**GOOD, "rank_offset": 2}, "rank_offset"),
        ("/init_weights_update_group", {**GOOD, "world_size": 1}, "rank_offset"),
        ("/init_weights_update_group", {**GOOD, "master_port": 0}, "master_port"),
        ("/init_weights_update_group", {**GOOD, "master_address": ""}, "master_address"),
        ("/init_weights_update_group", {**GOOD, "group_name": ""}, "group_name"),
        ("/update_weights_from_distributed", LISTS, "no group"),
        ("/update_weights_from_distributed", {**LISTS, "load_format": "flattened_bucket"}, "load_format"),
        ("/update_weights_from_distributed", {**LISTS, "names": []}, "names"),
        ("/update_weights_from_distributed", {**LISTS, "shapes": [[-1]]}, "shapes"),
        ("/destroy_weights_update_group", {}, "no group"),
    ],
)
def test_invalid_group_field_is_named(shared_server: Running, path: str, body: Any, part: str) -> None:
    refused(shared_server.post(path, body), 400, part)


def test_inconsistent_lists_are_refused_before_receiving(server: Running, trainer: Trainer) -> None:
    join_group(server, trainer, "sglang")
    for lists, part in (({"dtypes": ["int8"]}, "dtypes[0]"), ({"dtypes": []}, "dtypes"), ({"shapes": []}, "shapes")):
        refused(server.post("/update_weights_from_distributed", {**LISTS, **lists}), 400, part)
    assert_untouched(server)


@pytest.fixture(scope="module")
def shared_server(tiny_directory: Path) -> Iterator[Running]:
    with serving(tiny_directory, weight_timeout=60) as one:
        yield one
