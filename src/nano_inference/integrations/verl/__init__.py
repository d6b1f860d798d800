"""An engine as a rollout backend of verl (0.9.1): `actor_rollout_ref.rollout.name=nano_inference`.

`replica.py` starts a Ray actor for each replica, `server.py` is what runs in it, and `rollout.py` sends it the
trainer's weights. `register` makes them known to verl, which calls it through the entry point `verl.plugins` in every
process. verl and Ray are imported in functions.
"""

from __future__ import annotations

from nano_inference.integrations.verl.options import NAME as NAME
from nano_inference.integrations.verl.replica import replica_class
from nano_inference.integrations.verl.rollout import EngineRollout


def register() -> None:
    """Register the backend under `NAME`, as those that verl has itself. Can be called again."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, replica_class)
    _ROLLOUT_REGISTRY[NAME, "async"] = f"{EngineRollout.__module__}.{EngineRollout.__qualname__}"
    BaseRollout.register(EngineRollout)
