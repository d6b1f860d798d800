"""Frozen records say no at construction, naming the field, and survive every trip there and back."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import pickle
import struct
import subprocess
import sys
from typing import Any

import pytest

from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.core.cache import compute_block_hash
from nano_inference.types import BadRequest, EngineRequest, SamplingParams, TokenLogprob, TrainingSample

NAN, INF = math.nan, math.inf
NO_NUMBER: tuple[Any, ...] = (NAN, INF, -INF, "1", None, True, [1], 1 + 2j)
NO_INTEGER: tuple[Any, ...] = (1.0, NAN, INF, "1", True, [1])
NO_IDS: tuple[Any, ...] = (5, "12", b"12", [-1], [1.0], ["1"], [True], [None], [[1]], 1.5)

WRONG_PARAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (*NO_NUMBER, -0.1, 1e9),
    "max_tokens": (*NO_INTEGER, -1),
    "min_tokens": (*NO_INTEGER, None, -1, 257),
    "top_k": (*NO_INTEGER, None, -2),
    "top_p": (*NO_NUMBER, 0, -0.5, 1.01),
    "min_p": (*NO_NUMBER, -0.01, 1.01),
    "repetition_penalty": (*NO_NUMBER, 0, -1),
    "presence_penalty": (*NO_NUMBER, -2.1, 2.1),
    "frequency_penalty": (*NO_NUMBER, -2.1, 2.1),
    "logit_bias": (5, [1], None, {-1: 1.0}, {"x": 1.0}, {1.5: 1.0}, {True: 1.0}, {1: NAN}, {1: "2"}, {1: None}),
    "allowed_token_ids": (*NO_IDS, [], ()),
    "stop_token_ids": (*NO_IDS, None),
    "stop": (5, None, [""], "", ["a", 1], b"a", {"a"}),
    "seed": (*NO_INTEGER, 2**64, -(2**63) - 1),
    "logprobs": (*NO_INTEGER, -1),
    "logprob_token_ids": (*NO_IDS, None, [1]),
    "prompt_logprobs": (*NO_INTEGER, -1),
    "logprobs_mode": ("", "processed ", 1, True, ["raw"]),
    "ignore_eos": (1, "no", None, 0.0),
    "raw_logprobs": (1, "no", None, 0.0),
    "sampling_mask": (1, "no", None, 0.0),
    "pooling": ("", "max", 1, True, ["mean"], "mean"),
}
WRONG_CONFIG: dict[str, tuple[Any, ...]] = {
    "model_path": ("", None, 5, b"m"),
    "cache_type": ("", "lru", None, 1, ["radix"]),
    "block_size": (*NO_INTEGER, None, 0, -1, 5000),
    "max_batch_size": (*NO_INTEGER, None, 0, -1, 70_000),
    "max_model_len": (*NO_INTEGER, None, 0, -1),
    "allow_long_context": (1, "no", None),
    "max_tokens_per_batch": (*NO_INTEGER, None, 0, -1),
    "gpu_memory_utilization": (*NO_NUMBER, 0, -0.1, 1.1),
    "kv_cache_bytes": (*NO_INTEGER, 0, -1),
    "device": ("", None, 5),
    "dtype": ("", "float64", None, 16),
    "kv_cache_dtype": ("", "float32", "int8", None, True),
    "kernels": ("", "sse", None, True),
    "attention": ("", "flash", None),
    "tensor_parallel": (*NO_INTEGER, None, 0, -1, 65),
    "speculation": ("", "eagle", None, True),
    "max_draft_tokens": (*NO_INTEGER, None, 0, -1, 65),
    "lookahead": (*NO_INTEGER, 0, -1, 65),
    "max_adapters": (*NO_INTEGER, 0, 65537),
    "adapter_memory": (*NO_INTEGER, -1),
    "max_adapter_rank": (*NO_INTEGER, 0, 65537),
    "seed": (*NO_INTEGER, 2**64, -(2**63) - 1),
    "logprobs_mode": ("", "cooked", None, 1),
    "deterministic": (1, "no", None),
    "num_threads": (*NO_INTEGER, 0, -1),
    "lineage": ("", 5, b"x", True, "x" * 129),
    "overrides": ["softcap=20", (1,)],
}


def cases(wrong: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in wrong.items() for value in values]


def one_line_naming(error: BaseException, name: str) -> bool:
    return name in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(("name", "value"), cases(WRONG_PARAMS))
def test_sampling_params_reject_invalid_values_naming_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert one_line_naming(caught.value, name)


@pytest.mark.parametrize(("name", "value"), cases(WRONG_CONFIG))
def test_engine_config_rejects_invalid_values_naming_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        EngineConfig(**({"model_path": "m"} | {name: value}))
    assert one_line_naming(caught.value, name)


def test_every_field_is_in_the_tables_above() -> None:
    assert {f.name for f in dataclasses.fields(SamplingParams)} == WRONG_PARAMS.keys()
    assert {f.name for f in dataclasses.fields(EngineConfig)} == WRONG_CONFIG.keys()
    assert all(f.metadata["help"] for f in dataclasses.fields(EngineConfig))


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SchedulerConfig)])
def test_scheduler_config_rejects_invalid_values_naming_the_field(name: str) -> None:
    for value in (*NO_INTEGER, None, -1, *(() if name == "max_draft_tokens" else (0,))):
        with pytest.raises(ValueError, match=name):
            SchedulerConfig(**{name: value})


def test_the_edges_of_every_range_are_allowed() -> None:
    for options in (
        {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "max_tokens": 0, "seed": -(2**63)},
        {"temperature": 100, "top_p": 1e-12, "min_p": 1, "top_k": 10**9, "max_tokens": None, "seed": 2**64 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 100, "logprobs": 0},
        {"min_tokens": 5, "max_tokens": 5, "allowed_token_ids": {0}, "stop_token_ids": [2], "logit_bias": {0: -1e6}},
    ):
        SamplingParams(**options)
    SchedulerConfig(**{field.name: 1 for field in dataclasses.fields(SchedulerConfig)})
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0), "-1 is off, as elsewhere"
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1.0}


FULL = SamplingParams(
    temperature=0.3, max_tokens=9, min_tokens=2, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2,
    presence_penalty=-1, frequency_penalty=0.5, logit_bias={3: 1.5, 1: -2}, allowed_token_ids=[5, 3],
    stop_token_ids=[9, 7], stop=["a", "ü\n"], ignore_eos=True, seed=2**64 - 1, logprobs=3, logprob_token_ids=[7, 2],
    prompt_logprobs=0, logprobs_mode="raw", raw_logprobs=True, sampling_mask=True,
)  # fmt: skip
CONFIG = EngineConfig(model_path="m", cache_type="paged", kv_cache_bytes=5, seed=-1, dtype="bfloat16", num_threads=2)
NEEDED: dict[str, Any] = {
    "request_id": 1, "sample_index": 2, "prompt_tokens": (1, 2), "completion_tokens": (3, 4), "mask": (1, 0),
    "logprobs": (-0.1234567890123, 0.0), "token_versions": (0, 1), "weight_version": 0, "finish_reason": "stop",
}  # fmt: skip
SAMPLE = TrainingSample(
    **NEEDED, stop_reason="\n", version_labels={0: "step-0", 1: 7}, logprobs_mode="tempered",
    raw_logprobs=(-9999.0, 0.0), sampling_masks=((3, 8), ()), ref_logprobs=(-0.5, -0.25),
    top_logprobs=((TokenLogprob(3, -0.1), TokenLogprob(9, -3.0)), ()), prompt_logprobs=(-2.0,),
    prompt_top_logprobs=((TokenLogprob(2, -2.0),),), prompt_ranks=(1,), num_cached_tokens=1, num_preemptions=3,
)  # fmt: skip
PLAIN = TrainingSample(**NEEDED)


@pytest.mark.parametrize("record", [FULL, SamplingParams(), CONFIG, SAMPLE, PLAIN], ids=lambda r: type(r).__name__)
def test_records_survive_dictionaries_json_pickle_and_copies(record: Any) -> None:
    kind = type(record)
    for copied in (
        kind.from_dict(record.to_dict()),
        kind.from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False))),
        pickle.loads(pickle.dumps(record)),
        copy.copy(record),
        copy.deepcopy(record),
        dataclasses.replace(record),
    ):
        assert copied == record and hash(copied) == hash(record)
        assert {f.name: type(getattr(copied, f.name)) for f in dataclasses.fields(kind)} == {
            f.name: type(getattr(record, f.name)) for f in dataclasses.fields(kind)
        }
    if kind is TrainingSample and record.top_logprobs:
        again = kind.from_dict(json.loads(json.dumps(record.to_dict())))
        assert again.top_logprobs[0][1].token == 9


@pytest.mark.parametrize("record", [FULL, CONFIG, SAMPLE], ids=lambda r: type(r).__name__)
def test_unknown_fields_are_refused_by_name(record: Any) -> None:
    with pytest.raises(ValueError, match=r"has no field 'max_token'; known: .*") as caught:
        type(record).from_dict(record.to_dict() | {"max_token": 5})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("record", [FULL, CONFIG, SchedulerConfig(), SAMPLE], ids=lambda r: type(r).__name__)
def test_records_are_deeply_frozen(record: Any) -> None:
    assert not hasattr(record, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(record)[0].name, None)
    for mapping in (FULL.logit_bias, SAMPLE.version_labels):
        with pytest.raises(TypeError):
            mapping[1] = 2.0  # type: ignore[index]


def test_records_copy_mutable_arguments() -> None:
    bias, stops = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops, stop_token_ids=(ids := [4]))
    bias[1], ids[0], stops[0] = 9.0, 9, "z"
    assert (params.logit_bias[1], params.stop_token_ids, params.stop) == (1.0, {4}, ("a",))


def test_a_bad_request_is_a_value_error() -> None:
    assert issubclass(BadRequest, ValueError)


def test_a_block_hash_is_the_same_on_every_machine_and_in_every_process() -> None:
    assert compute_block_hash([1, 2, 3]) == 101895316201027005612819548676209751100
    digest = hashlib.sha256(b"\x10" + (5).to_bytes(16, "little") + b"q" + struct.pack("<2q", 7, 300)).digest()
    assert compute_block_hash([7, 300], 5) == int.from_bytes(digest[:16], "little")
    code = "from nano_inference import compute_block_hash as h; print(h([1, 2**70], h([300])))"
    environments = [os.environ | {"PYTHONHASHSEED": seed} for seed in "12"]
    printed = {subprocess.check_output([sys.executable, "-c", code], env=env, text=True) for env in environments}
    assert printed == {f"{compute_block_hash([1, 2**70], compute_block_hash([300]))}\n"}


def test_repr_omits_defaults_and_shortens_sequences() -> None:
    params = SamplingParams(temperature=0.5, stop=("a",))
    assert repr(params) == "SamplingParams(temperature=0.5, stop=('a',))" and eval(repr(params)) == params
    assert repr(EngineConfig(model_path="default")) == "EngineConfig(model_path='default')"
    request = EngineRequest(prompt=tuple(range(1000)))
    assert repr(request) == "EngineRequest(prompt=(0, 1, 2, 3, 4, 5, 6, 7, … 1000 in all))"
