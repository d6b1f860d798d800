"""Loads an adapter into all workers of a pool, or into none."""

from __future__ import annotations

import asyncio

from nano_inference.rl.pool.members import Members
from nano_inference.rl.pool.worker import WorkerDied
from nano_inference.weights.updates import AdapterLoad


async def load_adapter(members: Members, load: AdapterLoad) -> None:
    """Stage an adapter in all workers, then install it in all; raise what the first that refuses it raises.

    A worker that dies meanwhile, or refuses what it has staged, is replaced, and gets the adapters in force.
    """
    async with members.lock:
        members.require_some()
        alive = members.alive
        calls = (one.worker.call("stage_adapter", load) for one in alive)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failed = [one for one in zip(alive, outcomes, strict=True) if isinstance(one[1], BaseException)]
        done: list[list[str] | BaseException] = []
        if failed:
            drops = (one.worker.call("stage_adapter", None) for one in alive)
            await asyncio.gather(*drops, return_exceptions=True)
        else:
            members.adapters.pop(load.name, None)
            members.adapters[load.name] = load
            done = await asyncio.gather(*(one.worker.call("install_adapter") for one in alive), return_exceptions=True)
            loaded = {load.name}.union(*(names for names in done if not isinstance(names, BaseException)))
            for name in members.adapters.keys() - loaded:  # evicted by all workers
                del members.adapters[name]
    for member, outcome in [*failed, *zip(alive, done, strict=False)]:
        if isinstance(outcome, WorkerDied) or (isinstance(outcome, BaseException) and not failed):
            await members.replace(member, WorkerDied(f"{member.worker.name}: could not install: {outcome}"))
    if failed:
        raise failed[0][1]
