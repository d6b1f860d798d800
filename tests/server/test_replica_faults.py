"""Faults of replicas and of clients in the middle of trainers' commands, step by step with emulated replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.emulated import ABORT, COMMIT, DISK, Emulated, emulated

ONE, TWO = {"model_path": "one"}, {"model_path": "two"}
HELD = {"model_path": "one", "hold": True}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize("body", [ONE, HELD])
def test_an_abort_at_the_end_of_a_gather_ends_no_replica(shelf: Path, body: dict[str, object]) -> None:
    async def test(group: Emulated) -> None:
        gathered, aborted = group.gate(1, DISK), group.gate(1, ABORT)
        update = group.posting(DISK, body)
        await group.until(lambda: DISK in group.running[1].paths)
        abort = group.posting(ABORT)
        await group.until(lambda: ABORT in group.running[1].paths)
        gathered.set()
        await group.settle()
        aborted.set()
        assert (await abort)[1]["aborted"] is True
        status, reply = await update
        assert (status, reply["error"]["code"]) == (409, "aborted")
        assert group.states == ["ready", "ready"] and [len(one) for one in group.started] == [1, 1]
        assert (await group.post(COMMIT))[1]["error"]["code"] == "no_update"
        assert (await group.post(DISK, TWO))[1]["version"] == 1

    emulated(shelf, test)
