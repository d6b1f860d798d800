"""nano-inference: an exact, fast and readable LLM inference engine.

The public names, each with the file it lives in. They are imported when first asked for, so that what needs no torch
(the command line's help, the records) does not wait for it; `__init__.pyi` tells type checkers the same.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "BadRequest": "types",
    "CacheAllocation": "types",
    "CacheFull": "types",
    "Delta": "types",
    "EngineConfig": "config",
    "EngineDead": "types",
    "EnginePaused": "types",
    "FlexAttentionBackend": "attention",
    "ForwardInput": "attention",
    "InferenceEngine": "engine",
    "KVCacheManager": "kv",
    "KVStore": "kv.store",
    "ModelError": "types",
    "PagedKVCache": "kv",
    "RadixKVCache": "kv",
    "Rollout": "rollout",
    "SamplingParams": "types",
    "SchedulerConfig": "config",
    "SchedulerOutput": "types",
    "Segment": "rollout",
    "SeqView": "types",
    "Span": "attention",
    "TrainingSample": "types",
    "Turn": "rollout",
    "UpdateBusy": "types",
    "VersionSpan": "types",
    "WeightError": "types",
    "WeightGroup": "weights.group",
    "WeightInfo": "types",
    "WeightSyncManager": "weights.sync",
    "compute_block_hash": "kv",
    "create_attention_mask": "attention",
    "create_sliding_window_causal_mask": "attention",
    "model_forward": "runner",
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


def __getattr__(name: str) -> object:
    """Import a public name from its home at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nano_inference' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nano_inference.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
