"""The program of a rank other than 0, started by `parallel.processes`: reads its task from stdin, serves rank 0."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from nano_inference.config import EngineConfig
from nano_inference.executors.devices import rank_device, set_threads
from nano_inference.loading.catalog import default_cache
from nano_inference.loading.kinds import installed_kinds, opened
from nano_inference.parallel.follower import Follower
from nano_inference.parallel.links import local_links
from nano_inference.parallel.opening import divided_model, load_rank
from nano_inference.types import EngineDead


def main() -> None:
    """Serve until rank 0 ends the engine, or its process ends."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    directory, rank, size = Path(task["directory"]), int(task["rank"]), int(task["size"])
    try:
        config = EngineConfig.from_dict(task["config"])
        set_threads(config)
        device = rank_device(config.device, rank, size)
        kinds = installed_kinds()
        checkpoint = opened(config, kinds, default_cache(os.environ))
        model, program = divided_model(checkpoint, config, kinds)
        (directory / f"ready-{rank}").touch()
        links = local_links(directory, rank, size, device)
        own = load_rank(checkpoint, model, program, config, links, device)
        follower = Follower(own, program, links, is_fed=True)
    except Exception as error:
        (directory / f"fault-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    try:
        follower.serve()
    except EngineDead:
        os._exit(1)  # rank 0 reports it
    os._exit(0)  # a thread may still wait inside torch, which ends the process with an error otherwise


def _end_with_parent() -> None:
    """End this process when rank 0's does: stdin is a pipe that only it has open."""
    while sys.stdin.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
