"""Bodies of the trainer routes: strict pydantic models with vLLM's and SGLang's field names.

vLLM's: vllm/entrypoints/serve/*/api_router.py and distributed/weight_transfer/base.py. SGLang's:
sglang/srt/managers/io_struct.py. Unknown fields are rejected: a trainer that misspells `checksum` must not believe that
it was checked.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nano_inference.server.schema import Body

MAX_TENSORS = 100_000
GROUP = "weight_update_group"  # SGLang's default name of a group


def _number(value: Any) -> Any:
    """Return the number that a text of a few digits means; leave anything else to the schema."""
    is_digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
    return int(value) if is_digits else value


Label = Annotated[str, Field(min_length=1, max_length=256)] | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
Dtypes = Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MAX_TENSORS, fail_fast=True)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=8)]
Shapes = Annotated[list[Shape], Field(max_length=MAX_TENSORS, fail_fast=True)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
Address = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_number)]  # a number, or its digits: AReaL sends text
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


Checksum = Annotated[str, Field(min_length=1, max_length=256)]
"""The result of `weights_checksum` over all weights of a version."""
UPDATE_FORMS = ("ipc_handles", "ipc_handles_pickled", "sparse", "handles", "serialized_named_tensors")
"""Fields of vLLM's other weight transfer methods, which are rejected unless they are empty."""


class EmptyBody(Body):
    """A command without fields."""


# ---- vLLM -----------------------------------------------------------------------------------------------------------


class PauseBody(Body):
    """POST /pause."""

    mode: Literal["abort", "wait", "keep"] | None = None
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None  # vLLM's older form of mode=wait


class AbortBody(Body):
    """POST /abort_requests: all requests without the field, none for an empty list."""

    request_ids: Annotated[list[Name], Field(max_length=MAX_TENSORS)] | None = None


class ResetBody(Body):
    """POST /reset_prefix_cache."""

    reset_running_requests: bool | None = None
    reset_external: bool | None = None
    reset_connector: bool | None = None  # both are ignored: there is no external cache


class SleepBody(Body):
    """POST /sleep: level 0 only pauses, 1 releases memory, 2 also discards the weights."""

    level: Annotated[int, Field(ge=0, le=2)] | None = None
    mode: Literal["abort", "wait", "keep"] | None = None


class WakeBody(Body):
    """POST /wake_up; without tags, all parts."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class InitInfo(Body):
    """The trainer's rendezvous; `group_name` and `backend` are extensions."""

    master_address: Address
    master_port: Port
    rank_offset: Count
    world_size: Count
    packed: bool | None = None  # the trainer broadcasts several tensors as one array of bytes
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=2**36)] | None = None
    packed_num_buffers: Count | None = None  # ignored: it concerns the sender
    group_name: GroupName | None = None
    backend: Literal["gloo", "nccl"] | None = None


class InitTransferBody(Body):
    """POST /init_weight_transfer_engine."""

    init_info: InitInfo


class StartUpdateBody(Body):
    """POST /start_weight_update."""

    is_checkpoint_format: bool | None = None


class UpdateInfo(Body):
    """Either tensors that the trainer broadcasts next, or a directory."""

    neutral_names: ClassVar[frozenset[str]] = frozenset(UPDATE_FORMS)

    names: Names | None = None
    dtype_names: Dtypes | None = None
    shapes: Shapes | None = None
    packed: bool | None = None  # the trainer broadcasts several tensors as one array of bytes
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=2**36)] | None = None
    packed_num_buffers: Count | None = None  # ignored: it concerns the sender
    group_name: GroupName | None = None
    weight_dir: Path | None = None
    path: Path | None = None


class UpdateWeightsBody(Body):
    """POST /update_weights: vLLM's form, or prime-rl's with a directory."""

    neutral_names: ClassVar[frozenset[str]] = frozenset(UPDATE_FORMS)
    update_info: UpdateInfo | None = None
    weight_dir: Path | None = None
    weight_version: Label | None = None
    version: Label | None = None  # another name of `weight_version`
    checksum: Checksum | None = None
    hold: bool | None = None
    """An extension: gather the weights of a directory, and install them at /commit_weight_update."""
    on_running: Literal["keep", "recompute", "abort", "wait"] | None = None
    """An extension: what the update does to started requests, with `hold`."""
    partial: bool | None = None  # an extension: weights that the directory lacks keep their values, with `hold`
    allow_nonfinite: bool | None = None  # an extension: accept NaN and infinity, with `hold`


class FromBodyQuery(Body):
    """Query of POST /update_weights_from_body."""

    weight_version: Label | None = None
    checksum: Checksum | None = None
    partial: bool | None = None  # weights that the body lacks keep their values
    abort_all_requests: bool | None = None


class FinishUpdateBody(Body):
    """POST /finish_weight_update."""

    weight_version: Label | None = None
    checksum: Checksum | None = None


class LabelBody(Body):
    """POST /update_weight_version. By default no request is aborted, as in vLLM and unlike SGLang."""

    new_version: Label
    abort_all_requests: bool | None = None


class CheckBody(Body):
    """POST /weight_checker."""

    action: Annotated[str, Field(max_length=64)]
    checksum: Annotated[str, Field(max_length=256)] | None = None  # expected checksum, for the action `compare`


class InitBroadcasterBody(Body):
    """POST /init_broadcaster, of prime-rl; `backend` is an extension."""

    host: Address
    port: Port
    rank_offset: Count
    inference_world_size: Annotated[int, Field(ge=1, le=2**31 - 2)]
    timeout: Count | None = None  # ignored: the server has its own limit
    quantize_in_weight_transfer: bool | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    backend: Literal["gloo", "nccl"] | None = None


class ParameterInfo(Body):
    """A tensor that PipelineRL's trainer broadcasts."""

    name: Name
    shape: Shape
    dtype: Annotated[str, Field(max_length=64)]


class ReceiveUpdateBody(Body):
    """POST /receive_weight_update, of PipelineRL; `group_name` is an extension."""

    version: Label
    parameters_info: Annotated[list[ParameterInfo], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
    kind: Literal["weight_update_request"] | None = None
    timestamp: float | None = None  # ignored
    group_name: GroupName = GROUP


# ---- SGLang ---------------------------------------------------------------------------------------------------------


class PauseGenerationBody(Body):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class AbortRequestBody(Body):
    """POST /abort_request."""

    rid: Name | Annotated[list[Name], Field(max_length=MAX_TENSORS)] | Literal[""] | None = None
    abort_all: bool | None = None
    abort_message: str | None = None  # ignored


class ContinueBody(Body):
    """POST /continue_generation."""

    torch_empty_cache: bool | None = None  # ignored: torch's cache is kept


class FlushBody(Body):
    """POST /flush_cache."""

    timeout: float | Annotated[str, Field(max_length=32)] | None = None  # ignored: the flush does not wait


class FromDiskBody(Body):
    """POST /update_weights_from_disk."""

    model_path: Path
    load_format: Annotated[str, Field(max_length=64)] | None = None
    weight_version: Label | None = None
    checksum: Checksum | None = None
    flush_cache: bool | None = None  # ignored: cached prefixes are never reused with other weights
    abort_all_requests: bool | None = None
    is_async: bool | None = None
    """Ignored: requests always continue during the update, and the reply is sent at its end."""
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None  # both are ignored
    manifest: None = None
    keep_pause: bool | None = None  # ignored: an update never ends a pause
    token_step: int | None = None  # ignored


class InitGroupBody(Body):
    """POST /init_weights_update_group."""

    master_address: Address
    master_port: Port
    rank_offset: Count
    world_size: Count
    group_name: GroupName = GROUP
    backend: Literal["gloo", "nccl"] | None = None


class FromGroupBody(Body):
    """POST /update_weights_from_distributed; weights that are not named keep their values."""

    names: Names
    dtypes: Dtypes
    shapes: Shapes
    group_name: GroupName = GROUP
    load_format: Annotated[str, Field(max_length=64)] | None = None
    weight_version: Label | None = None
    checksum: Checksum | None = None
    flush_cache: bool | None = None
    torch_empty_cache: bool | None = None  # both are ignored, as in `FromDiskBody`
    abort_all_requests: bool | None = None


class FromTensorBody(Body):
    """POST /update_weights_from_tensor; weights that are not named keep their values."""

    serialized_named_tensors: Annotated[list[str], Field(min_length=1, max_length=1024)]
    """A pickle in base64 for each tensor-parallel rank."""
    load_format: Annotated[str, Field(max_length=256)] | None = None
    weight_version: Label | None = None
    checksum: Checksum | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None
    torch_empty_cache: bool | None = None
    disable_draft_model: bool | None = None
    """All three are ignored: cached prefixes are never reused with other weights, and there is no draft model."""


class DestroyGroupBody(Body):
    """POST /destroy_weights_update_group."""

    group_name: GroupName = GROUP


class PostProcessBody(Body):
    """POST /post_process_weights. Both are done in every update here: it takes a checkpoint's weights as they are."""

    restore_weights_before_load: bool | None = None
    post_process_quantization: bool | None = None


class WeightsCheckerBody(Body):
    """POST /weights_checker."""

    action: Literal["checksum"] = "checksum"


class MemoryBody(Body):
    """POST /release_memory_occupation and /resume_memory_occupation; without tags, all parts."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None
