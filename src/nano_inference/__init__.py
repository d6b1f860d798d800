"""nano-inference: an exact, fast and readable LLM inference engine.

`_HOMES` maps each public name to its module. Modules are imported on first use, so that the command line's help and the
records do not wait for torch. `__init__.pyi` declares the same names for type checkers.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

_HOMES = {
    "AdapterInfo": "types",
    "AsyncEngine": "async_engine",
    "BadRequest": "types",
    "Block": "compat",
    "CacheAllocation": "compat",
    "CacheFull": "types",
    "Delta": "types",
    "EngineConfig": "config",
    "EngineBusy": "types",
    "EngineDead": "types",
    "EngineRequest": "types",
    "EnginePaused": "types",
    "FlexAttentionBackend": "executors.torch.attention",
    "ForwardInput": "executors.step_input",
    "InferenceEngine": "engine",
    "KVCacheManager": "compat",
    "KVStore": "executors.torch.store",
    "LLM": "llm",
    "LoRARequest": "llm",
    "LocalFleet": "rl.pool.local",
    "ModelError": "types",
    "PagedKVCache": "compat",
    "RadixAttention": "compat",
    "RadixKVCache": "compat",
    "RayFleet": "rl.pool.ray_workers",
    "Rollout": "rl.rollout",
    "RolloutPool": "rl.pool.pool",
    "SamplingParams": "types",
    "SpmdEngine": "rl.spmd",
    "SchedulerConfig": "config",
    "SchedulerOutput": "compat",
    "Segment": "rl.rollout",
    "SeqView": "core.scheduler",
    "Sequence": "compat",
    "SequenceStatus": "compat",
    "Span": "executors.step_input",
    "TrainingSample": "types",
    "Turn": "rl.rollout",
    "UpdateBusy": "types",
    "UpdateCancelled": "types",
    "UrlFleet": "rl.pool.urls",
    "VersionSpan": "types",
    "WeightError": "types",
    "WeightGroup": "weights.group",
    "WeightInfo": "types",
    "WeightSyncManager": "weights.sync",
    "compute_block_hash": "compat",
    "create_attention_mask": "executors.torch.attention",
    "create_sliding_window_causal_mask": "executors.torch.attention",
    "model_forward": "compat",
    "run_rollouts": "rl.rollout",
    "sample_with_logprobs": "compat",
    "save_weights": "weights.directory",
    "schedule": "compat",
    "weights_checksum": "weights.checksum",
    "weights_in": "weights.directory",
}
_MOVED = {
    "catalog": "loading.catalog",
    "chat_defaults": "text.generation_config",
    "first_names": "compat",
    "integrations": "rl",
    "integrations.ray_serve": "server.ray_serve",
    "integrations.verl": "server.verl",
    "kernels": "executors.cpu",
    "loader": "loading",
    "pool": "rl.pool",
    "rollout": "rl.rollout",
    "seeds": "core.seeds",
    "server.hosted": "server.run",
}
"""Modules and packages that documentation named, and where they are now."""

__all__ = sorted([*_HOMES, "__version__"])
__version__ = "0.1.0"


def _leave_current_directory() -> None:
    """Remove the current directory from `sys.path` if `python -m nano_inference…` put it there.

    While Python searches for the module, argv[0] is "-m". The script `nano-inference` starts without that entry.
    """
    words = sys.orig_argv
    names = [words[i + 1] for i, word in enumerate(words[:-1]) if word[:1] == "-" and word[-1:] == "m"]
    names += [word[2:] for word in words if word[:2] == "-m"]
    is_run_as_module = sys.argv[:1] == ["-m"] and any(name.partition(".")[0] == __name__ for name in names)
    if is_run_as_module and not sys.flags.safe_path:
        del sys.path[0]


_leave_current_directory()


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nano_inference' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nano_inference.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)


class _MovedModules:
    """Imports a module by a name in `_MOVED`, with a `DeprecationWarning`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a specification for a module of `_MOVED` or below one; None for others."""
        return None if _new_name(name) == name else ModuleSpec(name, self)  # type: ignore[arg-type]  # abc.Loader is slow

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module under its new name in place of the one under its old."""
        old, new = module.__name__, _new_name(module.__name__)
        warnings.warn(f"{old} is deprecated: import {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def _new_name(name: str) -> str:
    """Return a module's name with its longest beginning that `_MOVED` has replaced."""
    package, _, rest = name.partition(".")
    parts = rest.split(".") if package == __name__ else []
    for count in range(len(parts), 0, -1):
        moved = _MOVED.get(".".join(parts[:count]))
        if moved is not None:
            return ".".join([package, moved, *parts[count:]])
    return name


sys.meta_path.insert(0, _MovedModules())
