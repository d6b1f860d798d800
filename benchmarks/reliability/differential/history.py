"""Runs a world: requests arrive, random things interfere, and the engine steps until nothing is left to do."""

from __future__ import annotations

from differential.updates import land, mark_abortable, update
from differential.worlds import Fault, World, abort, arrive, follow, require, take

MAX_STEPS = 8_000


def hold(world: World, what: str) -> None:
    """Pause, or put to sleep."""
    engine, rng = world.engine, world.rng
    if engine.is_asleep or not world.engine.has_weights or engine.is_pausing:
        return
    world.counts[what] += 1
    if what == "sleep":
        engine.sleep(discard_weights=rng.random() < 0.3 and engine.weight_info().update == "idle")
        return
    mode = rng.choice(["keep", "keep", "wait", "abort"])
    if mode == "abort":
        mark_abortable(world)
    engine.pause(mode, clear_cache=rng.random() < 0.5, blocking=mode != "wait" or rng.random() < 0.5)


def revive(world: World) -> None:
    """Undo whatever holds the engine."""
    engine = world.engine
    engine.wake()
    engine.resume()
    if world.held is None and not world.engine.has_weights and engine.weight_info().update == "idle":
        update(world)


ACTIONS = (*("update",) * 4, *("abort",) * 3, "pause", "resume", "sleep", "wake", "flush")


def interfere(world: World) -> None:
    """Do one random thing that a trainer or a client may do."""
    engine = world.engine
    action = world.rng.choice(ACTIONS)
    if action == "update":
        update(world)
    elif action == "abort":
        abort(world)
    elif action in ("pause", "sleep"):
        hold(world, action)
    elif action == "resume":
        engine.resume()
    elif action == "wake":
        engine.wake()
    else:
        engine.flush_cache()


def is_over(world: World) -> bool:
    """Whether nothing is left to do."""
    engine = world.engine
    is_held = engine.is_halted or engine.is_pausing or engine.weight_info().update != "idle"
    return not (world.arrivals or world.streams or engine.has_pending() or is_held)


def run_world(world: World) -> None:
    """Run the history to its end. Raises `Fault` when the engine breaks a promise on the way."""
    engine, rng = world.engine, world.rng
    for _ in range(MAX_STEPS):
        if is_over(world):
            break
        while world.arrivals and rng.random() < 0.4:
            arrive(world)
        if world.held is not None and rng.random() < 0.25:
            land(world)
        if rng.random() < 0.18:
            interfere(world)
        if rng.random() < 0.2:
            revive(world)
        if world.streams and not engine.is_halted and rng.random() < 0.3:
            follow(world)
        take(world, engine.step())
        engine.parts.kv.check()
        world.counts["steps"] += 1
    else:
        raise Fault(f"the world did not end in {MAX_STEPS} steps")
    num_free, num_blocks = engine.parts.kv.num_free_blocks(), engine.parts.kv.num_blocks
    require(num_free == num_blocks, f"{num_blocks - num_free} blocks are held by nothing")
    require(not world.open, f"requests {sorted(world.open)} never ended")


def release(world: World) -> None:
    """Let go of the engine, however the world ended."""
    if world.held is not None:
        world.held.release()
    world.engine.shutdown()
