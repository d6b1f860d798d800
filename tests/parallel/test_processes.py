"""Ranks as processes: started by the engine, or by a trainer. Lost ranks end the engine everywhere."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nano_inference import AsyncEngine, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.parallel.executor import ShardedExecutor
from nano_inference.types import EngineDead
from tests.parallel.test_engine import assert_same, config_of

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
SOON_S = 30.0
"""Limit of a wait for the loss of a rank, in seconds: six times the documented one, far below the links' own."""


def config(path: Path, **options: Any) -> EngineConfig:
    return config_of(path, tensor_parallel=2, **options)


def ranks_of(parent: int) -> list[int]:
    """Return the ids of live processes of ranks that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            status, line = (entry / "status").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        is_alive = "\nState:\tZ" not in status and f"\nPPid:\t{parent}\n" in status
        if entry.name.isdigit() and is_alive and b"nano_inference.parallel.rank" in line:
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)


def listening_sockets(pid: int) -> dict[str, str]:
    """Return the inode of each socket at which a process accepts connections, and its address in hexadecimal."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [*Path("/proc/net/tcp").read_text().splitlines()[1:], *Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    sockets = [line.split() for line in lines]
    return {parts[9]: parts[1].split(":")[0] for parts in sockets if parts[3] == "0A" and parts[9] in inodes}


def test_processes_compute_what_one_process_does_and_accept_connections_from_this_machine_only(tiny: Path) -> None:
    with InferenceEngine(config_of(tiny)) as whole:
        right = whole.generate([[1, 2, 3], [4] * 30], PARAMS, 2)
    before = listening_sockets(os.getpid()).keys()  # of other tests in this process
    with InferenceEngine(config(tiny)) as engine:
        (rank,) = ranks_of(os.getpid())
        for pid in (os.getpid(), rank):
            opened = listening_sockets(pid)
            assert {address for inode, address in opened.items() if inode not in before} == {"0100007F"}
        assert_same(engine.generate([[1, 2, 3], [4] * 30], PARAMS, 2), right)
        executor = engine.parts.executor
        assert isinstance(executor, ShardedExecutor)
    assert not ranks_of(os.getpid())
    with pytest.raises(EngineDead):
        engine.generate([[1]], PARAMS)


def test_a_killed_rank_ends_the_engine(tiny: Path) -> None:
    with InferenceEngine(config(tiny)) as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        engine.tick()
        os.kill(*ranks_of(os.getpid()), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDead, match="rank 0 of 2 lost another rank"):
            while True:
                engine.tick()
        assert time.monotonic() - start < SOON_S
        assert not engine.is_alive
        with pytest.raises(EngineDead, match="rank 0 of 2 lost another rank"):
            engine.generate([[1]], PARAMS)


def test_a_rank_that_is_lost_between_steps_is_noticed(tiny: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(lambda: InferenceEngine(config(tiny))) as engine:
            await engine.generate([[1, 2, 3]], PARAMS)
            os.kill(*ranks_of(os.getpid()), signal.SIGKILL)
            start = time.monotonic()
            while engine.failure is None:
                await asyncio.sleep(0.05)
            assert time.monotonic() - start < SOON_S
            assert isinstance(engine.failure, EngineDead)
            with pytest.raises(EngineDead):
                await engine.generate([[1, 2, 3]], PARAMS)

    asyncio.run(main())


_LEADERS = """
import json, os, sys, time
from nano_inference import EngineConfig, InferenceEngine
for _ in range(2):
    if not os.fork():
        engine = InferenceEngine(EngineConfig.from_dict(json.loads(sys.argv[1])))
        print(os.getpid(), flush=True)
        time.sleep(600)
for _ in range(2):
    os.wait()
"""
"""Two leaders, forked from a process that has imported torch."""


def test_no_rank_outlives_its_leader(tiny: Path) -> None:
    """One leader is killed, one is interrupted."""
    command = [sys.executable, "-P", "-c", _LEADERS, json.dumps(config(tiny).to_dict())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        leaders = [int(parent.stdout.readline()) for _ in range(2)]
        try:
            for leader, how in zip(leaders, (signal.SIGKILL, signal.SIGINT), strict=True):
                (rank,) = ranks_of(leader)
                os.kill(leader, how)
                wait_until(partial(has_ended, leader), 10)
                wait_until(partial(has_ended, rank), SOON_S)
        finally:
            for leader in leaders:
                with suppress(ProcessLookupError):
                    os.kill(leader, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "mps"}, "device 'mps': torch sees no Apple GPU"),
        ({"deterministic": True}, "deterministic: requires the CPU or the CUDA kernels"),
        ({"max_model_len": 8, "kv_cache_bytes": 1}, "kv_cache_bytes: 1 bytes do not hold one block of"),
    ],
)
def test_a_set_up_that_cannot_work_is_refused_in_one_line(options: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        InferenceEngine(EngineConfig.from_dict(config(tiny).to_dict() | options))
    assert "\n" not in str(caught.value)
    wait_until(lambda: not ranks_of(os.getpid()), SOON_S)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "avx2"}, "tensor_parallel: cannot be combined with kernels=avx2"),
        ({"dtype": "int8"}, "tensor_parallel: cannot be combined with dtype=int8"),
        ({"kv_cache_dtype": "bfloat16"}, "tensor_parallel: cannot be combined with kv_cache_dtype"),
        ({"tensor_parallel": 0}, "tensor_parallel must be in \\[1, 64\\], got 0"),
    ],
)
def test_options_that_need_kernels_are_refused(options: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_dict(config(tiny).to_dict() | options)
