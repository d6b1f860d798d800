"""Updates of a world's weights: every way of sending them, and partial ones."""

from __future__ import annotations

from typing import get_args

from differential.models import changed, named
from differential.worlds import Fault, HeldWeights, World, require
from nano_inference import UpdateBusy
from nano_inference.types import OnRunning
from nano_inference.weights.directory import save_weights, weights_in
from nano_inference.weights.updates import NamedWeights


def is_stuck(world: World, how: OnRunning) -> bool:
    """Whether an update that waits for running requests would wait for ever."""
    return how == "wait" and (world.engine.is_asleep or not world.engine.has_weights)


def mark_abortable(world: World) -> None:
    """Note that whatever is open now may end as "abort"."""
    world.may_abort |= set(world.asked)


def update(world: World) -> None:
    """Install other weights in one of the ways there are."""
    engine, rng = world.engine, world.rng
    how: OnRunning = rng.choice((*get_args(OnRunning), "keep"))
    if is_stuck(world, how):
        return
    if engine.weight_info().update != "idle":
        try:
            engine.update_weights({}, blocking=rng.random() < 0.5)
        except UpdateBusy:
            return
        raise Fault("a second update was accepted while one is under way")
    version = engine.get_weight_version() + 1
    if version > 6 and world.engine.has_weights:
        return
    old = world.models[version - 1]
    is_partial = rng.random() < 0.3 and world.engine.has_weights
    names = set(rng.sample(sorted(named(old)), rng.randrange(1, 4))) if is_partial else None
    model = changed(old, rng, names)
    weights = {name: value for name, value in named(model).items() if names is None or name in names}
    label = rng.choice([None, f"step-{version}", version * 10])
    world.models[version], world.plans[version] = model, how
    if how == "abort":
        mark_abortable(world)
    if rng.random() < 0.5:
        source: NamedWeights = weights
        if rng.random() < 0.2:
            directory = world.checkpoint.directory / f"version-{version}"
            save_weights(weights, directory)
            source = weights_in(directory)
            world.counts["updates from a directory"] += 1
        found = engine.update_weights(source, blocking=True, on_running=how, partial=is_partial, version=label)
        require(engine.get_weight_version() == version, "a blocking update was not installed")
    else:
        world.held = HeldWeights(weights)
        found = engine.update_weights(
            world.held,
            on_running=how,
            partial=is_partial,
            version=label,
            on_gathered=world.held.gathered.set,
        )
        require(engine.get_weight_version() == version - 1, "an update was installed before it was gathered")
    require(found == version, f"update_weights returned {found}, not {version}")
    world.counts["updates"] += 1
    world.counts[f"updates {how}"] += 1


def land(world: World) -> None:
    """Let the weights on their way arrive; a later step installs them, or `finish_update` does."""
    assert world.held is not None
    world.held.release()
    world.held = None
    how = world.plans[max(world.plans)]
    if how == "abort":
        mark_abortable(world)
    if world.rng.random() < 0.4 and not is_stuck(world, how):
        world.engine.finish_update()
