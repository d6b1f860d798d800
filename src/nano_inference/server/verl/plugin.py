"""Registers the backend when it is imported: the entry point `verl.plugins`, or `VERL_USE_EXTERNAL_MODULES`."""

from __future__ import annotations

from typing import Any

from nano_inference.server.verl import NAME

ROLLOUT = "nano_inference.server.verl.rollout.EngineRollout"
"""The class that verl makes in the processes of a trainer."""


def register() -> None:
    """Register the backend under `NAME`, as those that verl has itself. Can be called again."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, _replica_class)
    _ROLLOUT_REGISTRY[NAME, "async"] = ROLLOUT


def _replica_class() -> type[Any]:
    from nano_inference.server.verl.replica import replica_class

    return replica_class()


register()
