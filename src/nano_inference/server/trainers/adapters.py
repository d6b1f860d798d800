"""Routes that load and unload LoRA adapters, with vLLM's and SGLang's paths and bodies; `--enable-lora` opens them.

vLLM's: vllm/entrypoints/serve/lora/api_router.py and entrypoints/openai/models/serving.py, whose successes are texts.
SGLang's: sglang/srt/entrypoints/http_server.py and managers/io_struct.py. `version` is an extension: the trainer's name
of this load, which replies report for each token. An adapter that cannot be loaded leaves the old one of its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request

from nano_inference.server.errors import ApiError, refused
from nano_inference.server.generation import JSON
from nano_inference.server.model import tagged
from nano_inference.server.schema import Body
from nano_inference.server.trainers.context import Command, RLContext
from nano_inference.server.trainers.places import adapter_at, relative_to
from nano_inference.server.trainers.schema import Format, Label, Name, Path
from nano_inference.server.trainers.sglang import TENSORS_FIELD, require_same_machine, shared_source
from nano_inference.types import BadRequest, WeightLabel

NOT_FOUND = "adapter_not_found"  # code of the error of an unload


class LoadBody(Body):
    """vLLM's."""

    lora_name: Name
    lora_path: Path
    load_inplace: bool | None = None  # replace the adapter of this name
    is_3d_lora_weight: bool | None = None
    version: Label | None = None


class UnloadBody(Body):
    lora_name: Name
    lora_int_id: int | None = None  # ignored, as in vLLM: the name finds it
    lora_id: str | None = None  # SGLang's, likewise


class SglangLoadBody(Body):
    lora_name: Name
    lora_path: Path
    pinned: bool | None = None
    lora_id: str | None = None  # ignored: the engine numbers its adapters
    added_tokens_config: dict[str, Any] | None = None
    version: Label | None = None


class FromTensorsBody(Body):
    lora_name: Name
    config_dict: dict[str, Any]  # PEFT's adapter_config.json
    serialized_named_tensors: Annotated[list[str], Field(min_length=1, max_length=1024)]
    """A pickle in base64 for each tensor-parallel rank."""
    load_format: Format | None = None
    expected_checksums: dict[str, Any] | None = None
    pinned: bool | None = None
    lora_id: str | None = None  # ignored, as above
    added_tokens_config: dict[str, Any] | None = None
    version: Label | None = None


async def _load(rl: RLContext, body: LoadBody, _: Request) -> JSON:
    if body.is_3d_lora_weight:
        raise refused("is_3d_lora_weight", "adapters of fused experts are not supported")
    _check_name(rl, body.lora_name, may_replace=bool(body.load_inplace))
    path = await adapter_at(rl.root, body.lora_path, "lora_path")
    await _install(rl, body.lora_name, "lora_path", path, None, body.version)
    return {"message": f"Success: LoRA adapter '{body.lora_name}' added successfully."}


async def _unload(rl: RLContext, body: UnloadBody, _: Request) -> JSON:
    found = await rl.link.engine.unload_adapter(body.lora_name)
    await rl.serve_adapters()
    if not found:
        text = f"The lora adapter '{body.lora_name}' cannot be found."
        raise ApiError(404, text, param="lora_name", code=NOT_FOUND)
    return {"message": f"Success: LoRA adapter '{body.lora_name}' removed successfully."}


async def _load_sglangs(rl: RLContext, body: SglangLoadBody, _: Request) -> JSON:
    _refuse_options(body)
    _check_name(rl, body.lora_name)
    path = await adapter_at(rl.root, body.lora_path, "lora_path")
    await _install(rl, body.lora_name, "lora_path", path, None, body.version)
    return _loaded(rl)


async def _load_tensors(rl: RLContext, body: FromTensorsBody, request: Request) -> JSON:
    require_same_machine(request)
    _refuse_options(body)
    if body.expected_checksums:
        raise refused("expected_checksums", "is not supported")
    _check_name(rl, body.lora_name)
    tensors = shared_source(body.serialized_named_tensors, body.load_format)
    await _install(rl, body.lora_name, TENSORS_FIELD, tensors, body.config_dict, body.version)
    return _loaded(rl)


async def _unload_sglangs(rl: RLContext, body: UnloadBody, request: Request) -> JSON:
    """SGLang answers 400 for an unknown name."""
    try:
        await _unload(rl, body, request)
    except ApiError as error:
        raise ApiError(400, error.message, param=error.param, code=error.code) from None
    return _loaded(rl)


def _refuse_options(body: SglangLoadBody | FromTensorsBody) -> None:
    if body.pinned:
        raise refused("pinned", "adapters that no request uses are unloaded if memory is needed; raise max_adapters")
    if body.added_tokens_config:
        raise refused("added_tokens_config", "adapters with tokens of their own are not supported")


def _check_name(rl: RLContext, name: str, *, may_replace: bool = False) -> None:
    """Raise `ApiError` for a name in use, with vLLM's text for an adapter's."""
    model = rl.opened().model
    if tagged(name) in map(tagged, model.names):
        raise refused("lora_name", f"{name} is the name of the model")
    if not may_replace and model.adapter_for(name) is not None:
        text = (
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        )
        raise ApiError(400, text, param="lora_name", code="adapter_exists")


async def _install(
    rl: RLContext,
    name: str,
    field: str,
    source: FilePath | Iterator[tuple[str, Any]],
    config: Mapping[str, Any] | None,
    version: WeightLabel | None,
) -> None:
    """Load an adapter; an error names `field`, or `config_dict` for a field of the given configuration."""
    try:
        await rl.link.engine.load_adapter(name, source, config=config, version=version)
    except BadRequest as error:
        field = field if config is None or error.field == "adapter" else "config_dict"
        raise ApiError(400, f"{field}: {error}", param=field, code="bad_adapter") from None
    finally:
        await rl.serve_adapters()  # others may have been unloaded to make room


def _loaded(rl: RLContext) -> JSON:
    return {"loaded_adapters": {one.name: relative_to(rl.root, one.source) for one in rl.opened().model.adapters}}


_REPLY: Mapping[str, Any] = {"success": True, "error_message": None}
LOAD, UNLOAD, FROM_TENSORS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter_from_tensors"
VLLM_LORA_COMMANDS = (
    Command(LOAD, LoadBody, _load, {}, is_text=True),
    Command(UNLOAD, UnloadBody, _unload, {}, is_text=True),
)
SGLANG_LORA_COMMANDS = (
    Command("/load_lora_adapter", SglangLoadBody, _load_sglangs, _REPLY),
    Command(FROM_TENSORS, FromTensorsBody, _load_tensors, _REPLY),
    Command("/unload_lora_adapter", UnloadBody, _unload_sglangs, _REPLY),
)
