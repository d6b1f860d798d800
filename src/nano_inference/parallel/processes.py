"""`Processes`: the ranks of an engine that are child processes on this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_inference.support.processes import PYTHON, Process, has_ended, start_worker

_POLL_S = 0.02
_END_S = 5.0  # longest wait for a process that was asked to end; it is killed afterwards


class Processes:
    """Owns the processes of ranks 1 to size - 1 and the directory where all ranks meet."""

    def __init__(self, config: Mapping[str, Any], size: int) -> None:
        """Start them; `config` is that of the engine, as `EngineConfig.to_dict` returns it."""
        self.directory = Path(tempfile.mkdtemp(prefix="nano-inference-"))  # only this user can read it
        self._children: list[Process] = []
        for rank in range(1, size):
            child = start_worker([*PYTHON, "-m", "nano_inference.parallel.rank"], cwd=Path("/"), is_read=False)
            self._children.append(child)
            task = {"config": config, "rank": rank, "size": size, "directory": str(self.directory)}
            assert child.stdin is not None
            child.stdin.write(json.dumps(task) + "\n")
            child.stdin.flush()  # stays open: a rank ends when rank 0's process does

    def wait_until_ready(self) -> None:
        """Wait until every process has opened the model. Raises `ValueError` with the reason of one that failed."""
        waiting = dict(enumerate(self._children, start=1))
        while waiting:
            for rank, child in tuple(waiting.items()):
                if (self.directory / f"ready-{rank}").exists():
                    del waiting[rank]
                elif child.poll() is not None:
                    fault = self.directory / f"fault-{rank}"
                    why = fault.read_text() if fault.exists() else f"it ended with code {child.returncode}"
                    raise ValueError(f"tensor_parallel: rank {rank} failed: {why}")
            time.sleep(_POLL_S)

    def has_lost(self) -> bool:
        """Return whether a process has ended."""
        return any(child.poll() is not None for child in self._children)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def end(self) -> None:
        """Wait for the processes, which have been asked to end or have lost rank 0; kill those that do not end."""
        for child in self._children:
            if not has_ended(child, _END_S):
                child.kill()
                child.wait()
            if child.stdin is not None:
                child.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """Kill the processes now."""
        for child in self._children:
            child.kill()
        self.end()
