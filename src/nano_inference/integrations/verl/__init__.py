"""An engine as a rollout backend of verl (0.9.1): `actor_rollout_ref.rollout.name=nano_inference`.

`replica.py` starts a Ray actor for each replica, `server.py` is what runs in it, and `rollout.py` sends it the
trainer's weights. `register` makes them known to verl, which calls it through the entry point `verl.plugins` in every
process that imports verl, so they are imported when they are used. verl and Ray are imported in functions.
"""

from __future__ import annotations

from typing import Any

NAME = "nano_inference"
"""Of the backend, in `rollout.name`, `rollout.engine_kwargs` and the names of actors."""
ROLLOUT = "nano_inference.integrations.verl.rollout.EngineRollout"
"""The class that verl makes in the processes of a trainer."""


def register() -> None:
    """Register the backend under `NAME`, as those that verl has itself. Can be called again."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, _replica_class)
    _ROLLOUT_REGISTRY[NAME, "async"] = ROLLOUT


def _replica_class() -> type[Any]:
    from nano_inference.integrations.verl.replica import replica_class

    return replica_class()
