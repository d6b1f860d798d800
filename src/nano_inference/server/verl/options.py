"""verl's configuration of a rollout (`RolloutConfig`, `HFModelConfig`) as `RolloutOptions`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nano_inference.config import EngineConfig
from nano_inference.server.verl import NAME
from nano_inference.types import BadRequest, SamplingParams

RolloutMode = Literal["hybrid", "colocated", "standalone"]
_LONGEST = 1 << 20  # `max_model_len` without a limit of the configuration; the engine clamps it to the model's
_LOGPROBS_MODES = {None: "processed", "processed_logprobs": "processed", "raw_logprobs": "raw"}
_TEXT_FIELDS = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
"""Parameters of text, which is not returned."""
_MEDIA = ("image_data", "video_data", "audio_data", "mm_processor_kwargs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What an engine server needs of verl's configuration."""

    engine: EngineConfig
    mode: RolloutMode  # hybrid and colocated servers share their devices with the trainer, so that they sleep
    prompt_length: int = 512
    response_length: int = 512
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None  # set by `full_determinism`
    frees_memory: bool = True  # verl's `free_cache_engine`: sleep frees memory
    has_adapter: bool = False  # the trainer sends an adapter, and the weights under it once at most
    served_name: str = ""


def rollout_options(config: Any, model_config: Any, mode: RolloutMode, replica_rank: int = 0) -> RolloutOptions:
    """Return the options of a `RolloutConfig`. Raises `ValueError` naming a field that would change the results.

    `engine_kwargs.nano_inference` has fields of `EngineConfig` that replace those made from verl's.
    """
    _refuse(config)
    if mode == "standalone" and serves_adapter(model_config):
        raise ValueError("model.lora.merge: must be true for a standalone server, to which verl sends no adapter")
    fields: dict[str, Any] = {
        "model_path": str(model_config.local_path),
        "dtype": config.dtype,
        "max_batch_size": config.max_num_seqs,
        "max_model_len": config.max_model_len or _LONGEST,
        "max_tokens_per_batch": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel": config.tensor_model_parallel_size,
        "logprobs_mode": _LOGPROBS_MODES[config.logprobs_mode],
    }
    own = (config.engine_kwargs or {}).get(NAME) or {}
    return RolloutOptions(
        engine=EngineConfig.from_dict(fields | dict(own)),
        mode=mode,
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        repetition_penalty=config.repetition_penalty,
        ignore_eos=config.ignore_eos,
        seed=config.seed + replica_rank if config.full_determinism else None,
        frees_memory=config.free_cache_engine,
        has_adapter=serves_adapter(model_config),
        served_name=config.prometheus.served_model_name or str(model_config.path),
    )


def _refuse(config: Any) -> None:
    """Raise `ValueError` for what this backend lacks."""
    for name in ("data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size"):
        if (getattr(config, name) or 1) != 1:
            raise ValueError(f"rollout.{name}: only 1 is supported by {NAME}, got {getattr(config, name)}")
    for name in ("quantization", "enable_rollout_routing_replay"):
        if getattr(config, name):
            raise ValueError(f"rollout.{name}: is not supported by {NAME}")
    if config.qat and config.qat.get("enable"):
        raise ValueError(f"rollout.qat.enable: is not supported by {NAME}")
    if config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout:
        raise ValueError(f"rollout.mtp: {NAME} has no draft models; engine_kwargs.{NAME}.speculation=ngram needs none")
    if config.logprobs_mode not in _LOGPROBS_MODES:
        known = "processed_logprobs, raw_logprobs"
        raise ValueError(f"rollout.logprobs_mode: must be one of {known}, got {config.logprobs_mode!r}")


def serves_adapter(model_config: Any) -> bool:
    """Return whether the trainer sends an adapter instead of merged weights: `lora.merge` is false."""
    lora = getattr(model_config, "lora", None) or {}
    rank = lora.get("rank", 0) or getattr(model_config, "lora_rank", 0)
    return rank > 0 and not lora.get("merge", False)


def params_of(
    given: Mapping[str, Any], options: RolloutOptions, num_prompt: int, max_model_len: int, request_id: str
) -> tuple[SamplingParams, bool]:
    """Return a request's sampling parameters, and whether it asks for log-probabilities.

    Without a limit, a response has `response_length` tokens, or what the prompt leaves of both lengths; no limit
    exceeds the context. Raises `ValueError` naming an unknown parameter.
    """
    fields = {name: value for name, value in given.items() if name not in _TEXT_FIELDS}
    wants_logprobs = bool(fields.pop("logprobs", False))
    limits = [fields.pop(name) for name in ("max_tokens", "max_new_tokens") if name in fields]
    rest = options.prompt_length + options.response_length - num_prompt
    room = max_model_len - num_prompt
    if room < 1:
        raise BadRequest("prompt_ids", f"{num_prompt} tokens leave no room in the context of {max_model_len} tokens")
    wanted = limits[0] if limits and limits[0] is not None else min(options.response_length, rest)
    fields["max_tokens"] = max(1, min(wanted, room))
    fields["top_k"] = max(0, fields.get("top_k") or 0)  # verl turns it off by -1
    fields.setdefault("repetition_penalty", options.repetition_penalty)
    fields.setdefault("ignore_eos", options.ignore_eos)
    if options.seed is not None and fields.get("seed") is None:
        fields["seed"] = seed_of(options.seed, request_id)
    if fields.pop("n", 1) != 1:
        raise BadRequest("n", "verl sends a request for each sample")
    return SamplingParams.from_dict(fields), wants_logprobs


def seed_of(seed: int, request_id: str) -> int:
    """Return a request's seed under full determinism: samples of one prompt have different request ids."""
    digest = hashlib.sha256(f"{seed} {request_id}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def refuse_media(*given: Any) -> None:
    """Raise `BadRequest` for images, videos or audio, given in the order of `_MEDIA`."""
    for name, value in zip(_MEDIA, given, strict=True):
        if value:
            raise BadRequest(name, "this engine generates from text only")
