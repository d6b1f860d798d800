"""Bodies of the trainer routes: strict pydantic models with vLLM's and SGLang's field names.

vLLM's: vllm/entrypoints/serve/*/api_router.py and distributed/weight_transfer/base.py. SGLang's:
sglang/srt/managers/io_struct.py. The tables of routes say which path takes which body. Unknown fields are rejected: a
trainer that misspells `checksum` must not believe that it was checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from nano_inference.server.errors import ApiError
from nano_inference.server.schema import Body
from nano_inference.weights.updates import NamedWeights, WeightUpdate

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
Dtype = Annotated[str, Field(max_length=64)]
Dtypes = Annotated[list[Dtype], Field(max_length=MAX_TENSORS, fail_fast=True)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=8)]
Shapes = Annotated[list[Shape], Field(max_length=MAX_TENSORS, fail_fast=True)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
Backend = Literal["gloo", "nccl"]
Address = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_number)]  # a number, or its digits: AReaL sends text
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Format = Annotated[str, Field(max_length=256)]
Mode = Literal["abort", "wait", "keep"]
Checksum = Annotated[str, Field(min_length=1, max_length=256)]
"""The result of `weights_checksum` over all weights of a version."""
UPDATE_FORMS = ("ipc_handles", "ipc_handles_pickled", "sparse", "handles", "serialized_named_tensors")
"""Fields of vLLM's other weight transfer methods, which are rejected unless they are empty."""
BUCKET_BYTES = 1 << 30  # vLLM's default size of packed broadcasts


class EmptyBody(Body):
    """A command without fields."""


class NewWeights(Body):
    """New weights in one request. By default requests continue, as in vLLM and unlike SGLang."""

    weight_version: Label | None = None
    checksum: Checksum | None = None
    abort_all_requests: bool | None = None

    def update(self, weights: NamedWeights, *, partial: bool = False, hold: bool = False) -> WeightUpdate:
        """Return the update with these weights; with `partial`, weights that are not among them keep their values."""
        return WeightUpdate(
            weights=weights,
            label=self.weight_version,
            checksum=self.checksum,
            on_running="abort" if self.abort_all_requests else "keep",
            partial=partial,
            hold=hold,
        )


class Rendezvous(Body):
    """Where a trainer's process group meets."""

    master_address: Address
    master_port: Port
    rank_offset: Count
    world_size: Count
    group_name: GroupName | None = None
    backend: Backend | None = None


class Packing(Body):
    """How a trainer broadcasts its tensors."""

    packed: bool | None = None  # several tensors as one array of bytes
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=2**36)] | None = None
    packed_num_buffers: Count | None = None  # ignored: it concerns the sender

    @property
    def bucket_bytes(self) -> int | Literal[False] | None:
        """The size of packed broadcasts; False for single ones, None if the trainer does not say."""
        if self.packed is None:
            return None
        return (self.packed_buffer_size_bytes or BUCKET_BYTES) if self.packed else False


# ---- vLLM -----------------------------------------------------------------------------------------------------------


class PauseBody(Body):
    mode: Mode | None = None
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None  # vLLM's older form of mode=wait


class AbortBody(Body):
    request_ids: Annotated[list[Name], Field(max_length=MAX_TENSORS)] | None = None  # None: all


class ResetBody(Body):
    reset_running_requests: bool | None = None
    reset_external: bool | None = None
    reset_connector: bool | None = None  # both are ignored: there is no external cache


class SleepBody(Body):
    level: Annotated[int, Field(ge=0, le=2)] | None = None  # 0 only pauses, 1 releases memory, 2 discards the weights
    mode: Mode | None = None


class WakeBody(Body):
    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None  # none: all parts


class InitInfo(Rendezvous, Packing):
    """The trainer's rendezvous; `group_name` and `backend` are extensions."""


class InitTransferBody(Body):
    init_info: InitInfo


class StartUpdateBody(Body):
    is_checkpoint_format: bool | None = None


class UpdateInfo(Packing):
    """Either tensors that the trainer broadcasts next, or a directory."""

    names: Names | None = None
    dtype_names: Dtypes | None = None
    shapes: Shapes | None = None
    group_name: GroupName | None = None
    weight_dir: Path | None = None
    path: Path | None = None


class UpdateWeightsBody(Body):
    """vLLM's form, or prime-rl's with a directory."""

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

    def directory(self) -> tuple[str | None, str]:
        """Return (directory, its field), or (None, ""). Raises `ApiError` for two sources or unsupported fields."""
        info = self.update_info
        extra = {**(self.model_extra or {}), **((info.model_extra or {}) if info else {})}
        for name in UPDATE_FORMS:
            if extra.get(name):
                text = f"{name} is not supported: broadcast plain tensors or name a directory"
                raise ApiError(501, text, param=name)
        paths: Mapping[str, str | None] = {"weight_dir": self.weight_dir}
        if info is not None:
            paths = {**paths, "update_info.weight_dir": info.weight_dir, "update_info.path": info.path}
        found = [(path, field) for field, path in paths.items() if path is not None]
        if len(found) > 1 or (found and info is not None and info.names is not None):
            raise ApiError(400, "update_info: give either names, dtype_names and shapes, or one directory")
        return found[0] if found else (None, "")

    def update(self, weights: NamedWeights) -> WeightUpdate:
        """Return the update with these weights. Raises `ApiError` 400 if `version` and `weight_version` differ."""
        if self.version is not None and self.weight_version not in (None, self.version):
            raise ApiError(400, "version and weight_version disagree", param="version")
        return WeightUpdate(
            weights=weights,
            label=self.version if self.weight_version is None else self.weight_version,
            on_running=self.on_running or "keep",
            partial=bool(self.partial),
            allow_nonfinite=bool(self.allow_nonfinite),
            checksum=self.checksum,
            hold=bool(self.hold),
        )


class FromBodyQuery(NewWeights):
    partial: bool | None = None  # weights that the body lacks keep their values
    hold: bool | None = None  # as in `UpdateWeightsBody`


class FinishUpdateBody(Body):
    weight_version: Label | None = None
    checksum: Checksum | None = None


class CommitBody(Body):
    version: Annotated[int, Field(ge=1, le=2**63 - 2**32)] | None = None
    """The weights' number; none: the next one. Numbers up to 2**63 - 1 are left for later updates."""


class LabelBody(Body):
    new_version: Label
    abort_all_requests: bool | None = None


class CheckBody(Body):
    action: Annotated[str, Field(max_length=64)]
    checksum: Annotated[str, Field(max_length=256)] | None = None  # expected checksum, for the action `compare`


class InitBroadcasterBody(Body):
    """prime-rl's rendezvous; `backend` is an extension."""

    host: Address
    port: Port
    rank_offset: Count
    inference_world_size: Annotated[int, Field(ge=1, le=2**31 - 2)]
    timeout: Count | None = None  # ignored: the server has its own limit
    quantize_in_weight_transfer: bool | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    backend: Backend | None = None


class ParameterInfo(Body):
    """A tensor that PipelineRL's trainer broadcasts."""

    name: Name
    shape: Shape
    dtype: Dtype


class ReceiveUpdateBody(Body):
    """PipelineRL's update; `group_name` is an extension."""

    version: Label
    parameters_info: Annotated[list[ParameterInfo], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
    kind: Literal["weight_update_request"] | None = None
    timestamp: float | None = None  # ignored
    group_name: GroupName = GROUP


# ---- SGLang ---------------------------------------------------------------------------------------------------------


class PauseGenerationBody(Body):
    mode: Literal["abort", "retract", "in_place"] | None = None


class AbortRequestBody(Body):
    rid: Name | Annotated[list[Name], Field(max_length=MAX_TENSORS)] | Literal[""] | None = None
    abort_all: bool | None = None
    abort_message: str | None = None  # ignored


class ContinueBody(Body):
    torch_empty_cache: bool | None = None  # ignored: torch's cache is kept


class FlushBody(Body):
    timeout: float | Annotated[str, Field(max_length=32)] | None = None  # ignored: the flush does not wait


class FromDiskBody(NewWeights):
    model_path: Path
    hold: bool | None = None  # an extension: as in `UpdateWeightsBody`
    load_format: Format | None = None
    flush_cache: bool | None = None  # ignored: cached prefixes are never reused with other weights
    is_async: bool | None = None
    """Ignored: requests always continue during the update, and the reply is sent at its end."""
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None  # both are ignored
    manifest: None = None
    keep_pause: bool | None = None  # ignored: an update never ends a pause
    token_step: int | None = None  # ignored


class FromGroupBody(NewWeights):
    names: Names
    dtypes: Dtypes
    shapes: Shapes
    group_name: GroupName = GROUP
    load_format: Format | None = None
    flush_cache: bool | None = None
    torch_empty_cache: bool | None = None  # both are ignored, as in `FromDiskBody`


class FromTensorBody(NewWeights):
    serialized_named_tensors: Annotated[list[str], Field(min_length=1, max_length=1024)]
    """A pickle in base64 for each tensor-parallel rank."""
    load_format: Format | None = None
    flush_cache: bool | None = None
    torch_empty_cache: bool | None = None
    disable_draft_model: bool | None = None
    """All three are ignored: cached prefixes are never reused with other weights, and there is no draft model."""


class DestroyGroupBody(Body):
    group_name: GroupName = GROUP


class PostProcessBody(Body):
    """Both are done in every update here: it takes a checkpoint's weights as they are."""

    restore_weights_before_load: bool | None = None
    post_process_quantization: bool | None = None


class WeightsCheckerBody(Body):
    action: Literal["checksum"] = "checksum"


class MemoryBody(Body):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None  # none: all parts
