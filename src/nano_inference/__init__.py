"""nano-inference: an exact, fast and readable LLM inference engine.

The public names, each with the file it lives in. They are imported when first asked for, so that what needs no torch
(the command line's help, the records) does not wait for it; `__init__.pyi` tells type checkers the same.
"""

from __future__ import annotations

import importlib
import sys

_HOMES = {
    "AsyncEngine": "async_engine",
    "BadRequest": "types",
    "CacheAllocation": "types",
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
    "KVCacheManager": "kv",
    "KVStore": "executors.torch.store",
    "ModelError": "types",
    "PagedKVCache": "kv",
    "RadixKVCache": "kv",
    "Rollout": "rollout",
    "SamplingParams": "types",
    "SchedulerConfig": "config",
    "SchedulerOutput": "types",
    "Segment": "rollout",
    "SeqView": "types",
    "Span": "executors.step_input",
    "TrainingSample": "types",
    "Turn": "rollout",
    "UpdateBusy": "types",
    "VersionSpan": "types",
    "WeightError": "types",
    "WeightGroup": "weights.group",
    "WeightInfo": "types",
    "WeightSyncManager": "weights.sync",
    "compute_block_hash": "kv",
    "create_attention_mask": "executors.torch.attention",
    "create_sliding_window_causal_mask": "executors.torch.attention",
    "model_forward": "executors.forward",
    "run_rollouts": "rollout",
    "sample_with_logprobs": "sampling",
    "save_weights": "weights.directory",
    "schedule": "scheduling",
    "weights_checksum": "weights.checksum",
    "weights_in": "weights.directory",
    "with_ref_logprobs": "reference",
}

__all__ = sorted([*_HOMES, "__version__"])
__version__ = "0.1.0"


def _leave_current_directory() -> None:
    """Take the current directory off `sys.path` if `python -m nano_inference…` put it there.

    Python calls argv[0] "-m" until it has found the module to run. The script `nano-inference` is started without it.
    """
    words = sys.orig_argv
    names = [words[i + 1] for i, word in enumerate(words[:-1]) if word[:1] == "-" and word[-1:] == "m"]
    names += [word[2:] for word in words if word[:2] == "-m"]
    is_ours = sys.argv[:1] == ["-m"] and any(name.partition(".")[0] == __name__ for name in names)
    if is_ours and not sys.flags.safe_path:
        del sys.path[0]


_leave_current_directory()


def __getattr__(name: str) -> object:
    """Import a public name from its home at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nano_inference' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nano_inference.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
