"""What trainers may send: one pydantic model for each body, strict, under vLLM's and SGLang's names.

vLLM's: vllm/entrypoints/serve/*/api_router.py and distributed/weight_transfer/base.py. SGLang's:
sglang/srt/managers/io_struct.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nano_inference.server.schema import Body

MAX_TENSORS = 100_000
GROUP = "weight_update_group"
"""What SGLang's trainers call their group unless they say otherwise."""

Label = Annotated[str, Field(min_length=1, max_length=256)] | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
Dtypes = Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MAX_TENSORS, fail_fast=True)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=8)]
Shapes = Annotated[list[Shape], Field(max_length=MAX_TENSORS, fail_fast=True)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
Address = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Nothing(Body):
    """A command that needs no words."""


# ---- vLLM -----------------------------------------------------------------------------------------------------------


class PauseBody(Body):
    """POST /pause; each field may be in the query instead."""

    mode: Literal["abort", "wait", "keep"] | None = None
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None
    """vLLM's older way to say mode=wait."""


class AbortBody(Body):
    """POST /abort_requests; without the field, all. An empty list is nobody."""

    request_ids: Annotated[list[Name], Field(max_length=MAX_TENSORS)] | None = None


class ResetBody(Body):
    """POST /reset_prefix_cache."""

    reset_running_requests: bool | None = None


class SleepBody(Body):
    """POST /sleep: level 0 only pauses, 1 gives memory back, 2 drops the weights, too."""

    level: Annotated[int, Field(ge=0, le=2)] | None = None
    mode: Literal["abort", "wait", "keep"] | None = None


class WakeBody(Body):
    """POST /wake_up; without tags, everything."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class InitInfo(Body):
    """Where to meet the trainer; `group_name` and `backend` are ours."""

    master_address: Address
    master_port: Port
    rank_offset: Count
    world_size: Count
    packed: bool | None = None
    group_name: GroupName | None = None
    backend: Literal["gloo", "nccl"] | None = None


class InitTransferBody(Body):
    """POST /init_weight_transfer_engine."""

    init_info: InitInfo


class StartUpdateBody(Body):
    """POST /start_weight_update."""

    is_checkpoint_format: bool | None = None


class UpdateInfo(Body):
    """Either tensors that the trainer broadcasts now, or a directory."""

    names: Names | None = None
    dtype_names: Dtypes | None = None
    shapes: Shapes | None = None
    packed: bool | None = None
    group_name: GroupName | None = None
    weight_dir: Path | None = None
    path: Path | None = None


class UpdateWeightsBody(Body):
    """POST /update_weights: vLLM's form, or prime-rl's with a directory."""

    update_info: UpdateInfo | None = None
    weight_dir: Path | None = None
    weight_version: Label | None = None


class FinishUpdateBody(Body):
    """POST /finish_weight_update."""

    weight_version: Label | None = None


class LabelBody(Body):
    """POST /update_weight_version. Nothing is aborted unless it is asked for, as with vLLM, and unlike SGLang's own."""

    new_version: Label
    abort_all_requests: bool | None = None


class CheckBody(Body):
    """POST /weight_checker."""

    action: Annotated[str, Field(max_length=64)]
    checksum: Annotated[str, Field(max_length=256)] | None = None
    """What `compare` compares with."""


# ---- SGLang ---------------------------------------------------------------------------------------------------------


class PauseGenerationBody(Body):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class AbortRequestBody(Body):
    """POST /abort_request."""

    rid: Name | Annotated[list[Name], Field(max_length=MAX_TENSORS)] | Literal[""] | None = None
    abort_all: bool | None = None


class FromDiskBody(Body):
    """POST /update_weights_from_disk."""

    model_path: Path
    load_format: Annotated[str, Field(max_length=64)] | None = None
    weight_version: Label | None = None
    flush_cache: bool | None = None
    """Taken: cached prefixes of older weights are never found again, whatever it says."""
    abort_all_requests: bool | None = None
    keep_pause: bool | None = None
    """Taken: an update never ends a pause."""
    token_step: int | None = None
    """Taken, and left out."""


class InitGroupBody(Body):
    """POST /init_weights_update_group."""

    master_address: Address
    master_port: Port
    rank_offset: Count
    world_size: Count
    group_name: GroupName = GROUP
    backend: Literal["gloo", "nccl"] | None = None


class FromGroupBody(Body):
    """POST /update_weights_from_distributed: tensors that are not named keep their values."""

    names: Names
    dtypes: Dtypes
    shapes: Shapes
    group_name: GroupName = GROUP
    load_format: Annotated[str, Field(max_length=64)] | None = None
    weight_version: Label | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None


class DestroyGroupBody(Body):
    """POST /destroy_weights_update_group."""

    group_name: GroupName = GROUP


class MemoryBody(Body):
    """POST /release_memory_occupation and /resume_memory_occupation; without tags, everything."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class AnyBody(Body):
    """What is refused anyway."""

    model_path: Any = None
