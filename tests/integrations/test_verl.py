"""The server and the sender of the verl backend, without verl and Ray; tests/clients/test_verl.py has both."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams, WeightError
from nano_inference.server.verl.options import RolloutMode, rollout_options, seed_of
from nano_inference.server.verl.replica import Place, device_variables
from nano_inference.server.verl.rollout import EngineRollout
from nano_inference.server.verl.server import RolloutServer
from tests.server.tiny import make_tiny
from tests.server.trainer import adapter_config, adapter_of

pytestmark = pytest.mark.slow

PROMPT = [72, 101, 108, 108, 111]
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
LONG = {**GREEDY, "ignore_eos": True, "max_tokens": 1500}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("verl"), 2048)


def rollout_config(**changes: Any) -> Any:
    """Return the fields of verl's `RolloutConfig` that the backend reads, with verl's defaults for a CPU."""
    fields: dict[str, Any] = {
        **{"dtype": "float32", "max_num_seqs": 16, "max_model_len": None, "max_num_batched_tokens": 8192},
        **{"gpu_memory_utilization": 0.5, "tensor_model_parallel_size": 1, "data_parallel_size": 1},
        **{"pipeline_model_parallel_size": 1, "expert_parallel_size": 1, "logprobs_mode": "processed_logprobs"},
        **{"prompt_length": 16, "response_length": 8, "repetition_penalty": 1.0, "ignore_eos": False, "seed": 42},
        **{"full_determinism": False, "free_cache_engine": True, "quantization": None, "qat": {"enable": False}},
        **{"enable_rollout_routing_replay": False, "mtp": None},
        "engine_kwargs": {"nano_inference": {"kv_cache_bytes": 16 << 20, "num_threads": 1, "device": "cpu"}},
        "prometheus": SimpleNamespace(served_model_name=None),
        "checkpoint_engine": SimpleNamespace(update_weights_bucket_megabytes=1),
    }
    return SimpleNamespace(**{**fields, **changes})


def model_config(directory: Path, **changes: Any) -> Any:
    fields = {"path": "org/policy", "local_path": str(directory), "lora": {}, "lora_rank": 0}
    return SimpleNamespace(**{**fields, **changes})


@asynccontextmanager
async def opened(
    directory: Path, mode: RolloutMode = "hybrid", lora_rank: int = 0, **changes: Any
) -> AsyncIterator[RolloutServer]:
    """A launched server."""
    model = model_config(directory, lora_rank=lora_rank)
    read = lambda: rollout_options(rollout_config(**changes), model, mode)  # noqa: E731
    server = RolloutServer(read, SimpleNamespace)
    await server.launch_server("127.0.0.1")
    try:
        async with asyncio.timeout(120):
            yield server
    finally:
        await server.shutdown()


class Remote:
    """A server as its actor's handle: each method has `remote`."""

    def __init__(self, server: RolloutServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._server, name))


def sender(server: RolloutServer, **changes: Any) -> EngineRollout:
    """Return the trainer's side, which finds the server without Ray."""
    found = {"nano_inference_server_0": Remote(server)}
    return EngineRollout(rollout_config(**changes), None, get_actor=found.__getitem__)


def engine_of(directory: Path) -> InferenceEngine:
    return InferenceEngine(EngineConfig(str(directory), device="cpu", dtype="float32", kv_cache_bytes=16 << 20))


def changed_weights(directory: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(directory)
    return {name: value.detach() + torch.randn_like(value) * 0.05 for name, value in model.named_parameters()}


async def test_generate_returns_what_the_engine_samples(directory: Path) -> None:
    with engine_of(directory) as engine:
        (wanted,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))

    async with opened(directory) as server:
        output = await server.generate(PROMPT, dict(GREEDY), "a")
        assert output.token_ids == list(wanted.completion_tokens)
        assert output.log_probs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert output.stop_reason == "completed" and output.num_preempted == 0
        assert output.extra_fields["global_steps"] is None and output.extra_fields["finish_reason"] == "length"
        quiet = await server.generate(PROMPT, {**GREEDY, "logprobs": False}, "b")
        assert quiet.log_probs is None and quiet.token_ids == output.token_ids
        assert quiet.extra_fields["num_cached_tokens"] == len(PROMPT) - 1


async def test_limits_of_a_response_are_verls(directory: Path) -> None:
    async with opened(directory, max_model_len=64) as server:

        async def length(num_prompt: int, **limits: int) -> int:
            output = await server.generate([5] * num_prompt, {**GREEDY, "ignore_eos": True, **limits}, "a")
            return len(output.token_ids)

        assert await length(4) == 8, "response_length"
        assert await length(20) == 4, "what the prompt leaves of both lengths"
        assert await length(4, max_tokens=3) == await length(4, max_new_tokens=3) == 3
        assert await length(60, max_tokens=50) == 4, "what the prompt leaves of the context"
        with pytest.raises(BadRequest, match="prompt_ids: 64 tokens leave no room in the context of 64"):
            await length(64)


async def test_unsupported_options_of_verl_are_refused_by_name(directory: Path) -> None:
    async with opened(directory) as server:
        for field, value in (("guided", 1), ("top_p", 3), ("n", 2)):
            with pytest.raises(ValueError, match=field):
                await server.generate(PROMPT, {**GREEDY, field: value}, "a")
        with pytest.raises(ValueError, match="image_data"):
            await server.generate(PROMPT, GREEDY, "a", image_data=["a picture"])
        assert (await server.generate(PROMPT, GREEDY, "a", image_data=[], priority=3)).token_ids


async def test_full_determinism_seeds_each_request_by_its_id(directory: Path) -> None:
    hot = {**GREEDY, "temperature": 1.5, "ignore_eos": True}

    async with opened(directory, full_determinism=True) as server:
        first, again, other = [(await server.generate(PROMPT, hot, name)).token_ids for name in ("a", "a", "b")]
        assert first == again != other
    assert seed_of(1, "a") != seed_of(2, "a")


@pytest.mark.parametrize("count", [0, 3])
async def test_prompt_logprobs_are_in_the_rows_of_distillation(directory: Path, count: int) -> None:
    with engine_of(directory) as engine:
        scores = engine.score(PROMPT)

    async with opened(directory) as server:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count, "detokenize": False}
        output = await server.generate(PROMPT, params, "a")
        ids, logprobs = output.extra_fields["prompt_ids"], output.extra_fields["prompt_logprobs"]
        assert [len(row) for row in ids] == [len(row) for row in logprobs] == [max(count, 1)] * len(PROMPT)
        if not count:
            assert [row[0] for row in ids] == [*PROMPT[1:], 0]
            assert [row[0] for row in logprobs[:-1]] == pytest.approx(scores, abs=1e-5)
        else:
            assert all(row == sorted(row, reverse=True) for row in logprobs)


async def num_running(server: RolloutServer) -> float:
    """Return how many requests ran in the latest step, as /metrics has it; each of them has a token."""
    host, port = server.get_server_address()

    def read() -> float:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    return await asyncio.to_thread(read)


async def started(server: RolloutServer, request_id: str) -> asyncio.Task[Any]:
    """Start a long request; return when it has tokens."""
    task = asyncio.create_task(server.generate(PROMPT, LONG, request_id))
    while not await num_running(server):
        assert not task.done()
    return task


async def test_aborted_requests_return_their_tokens_and_continue(directory: Path) -> None:
    async with opened(directory) as server:
        whole = await server.generate(PROMPT, LONG, "whole")
        task = await started(server, "part")
        assert await server.abort_all_requests() == {"aborted_count": 1, "request_ids": ["part"]}
        part = await task
        assert part.stop_reason == "aborted" and 0 < len(part.token_ids) < 1500
        assert part.token_ids == whole.token_ids[: len(part.token_ids)] and len(part.log_probs) == len(part.token_ids)
        rest = {**LONG, "max_tokens": 1500 - len(part.token_ids)}
        waiting = asyncio.create_task(server.generate([*PROMPT, *part.token_ids], rest, "part"))
        await asyncio.sleep(0)
        assert (await server.abort_all_requests())["aborted_count"] == 0 and not waiting.done()
        await server.resume_generation()
        assert part.token_ids + (await waiting).token_ids == whole.token_ids


async def test_requests_that_arrive_behind_a_closed_gate_can_be_returned(directory: Path) -> None:
    async with opened(directory) as server:
        await server.abort_all_requests(reject_request=True)
        output = await server.generate(PROMPT, GREEDY, "a")
        assert (output.token_ids, output.stop_reason) == ([], "aborted")
        await server.resume_generation()
        assert (await server.generate(PROMPT, GREEDY, "a")).stop_reason == "completed"


@pytest.mark.parametrize("mode", ["hybrid", "colocated", "standalone"])
async def test_sleep_frees_memory_and_wake_restores_it(directory: Path, mode: RolloutMode) -> None:
    async with opened(directory, mode) as server:
        before = (await server.generate(PROMPT, GREEDY, "a")).token_ids
        await server.sleep()
        assert (await server.get_state()).is_asleep == (mode != "standalone")
        if mode == "hybrid":
            rollout, weights = sender(server), changed_weights(directory)
            await rollout.resume(["weights"])
            await rollout.update_weights(iter(weights.items()), global_steps=1)
            await rollout.resume(["kv_cache"])
        await server.wake_up()
        after = await server.generate(PROMPT, GREEDY, "b")
        assert (after.token_ids == before) == (mode != "hybrid") and after.stop_reason == "completed"
        await server.release_kv_cache()
        assert (await server.get_state()).is_asleep
        await server.resume_kv_cache()
        assert (await server.generate(PROMPT, GREEDY, "c")).token_ids == after.token_ids
        with pytest.raises(ValueError, match="tags: must be kv_cache or weights, got 'cuda'"):
            await server.resume_memory(["cuda"])


async def test_without_free_cache_engine_nothing_sleeps(directory: Path) -> None:
    async with opened(directory, free_cache_engine=False) as server:
        await server.sleep()
        await server.release_kv_cache()
        assert not (await server.get_state()).is_asleep


async def later(pairs: Any) -> AsyncIterator[Any]:
    for pair in pairs:
        await asyncio.sleep(0)
        yield pair


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_update_is_installed_with_the_trainers_step(directory: Path, is_async: bool) -> None:
    weights = changed_weights(directory)
    with engine_of(directory) as engine:
        engine.update_weights(weights, blocking=True)
        (wanted,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))

    async with opened(directory) as server:
        before = await server.generate(PROMPT, GREEDY, "a")
        pairs = later(weights.items()) if is_async else iter(weights.items())
        await sender(server).update_weights(pairs, global_steps=7)
        assert (await server.get_state()).version == 1
        after = await server.generate(PROMPT, GREEDY, "b")
        assert after.token_ids == list(wanted.completion_tokens) != before.token_ids
        steps = [after.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")]
        assert steps == [7, 7, 7]


async def test_a_request_that_spans_an_update_reports_both_steps(directory: Path) -> None:
    async with opened(directory) as server:
        rollout, weights = sender(server), changed_weights(directory)
        await rollout.update_weights(iter(weights.items()), global_steps=3)
        task = await started(server, "long")
        await rollout.update_weights(iter(weights.items()), global_steps=4)
        extra = (await task).extra_fields
        assert (extra["min_global_steps"], extra["max_global_steps"], extra["global_steps"]) == (3, 4, 4)


async def test_a_failed_update_leaves_the_old_weights(directory: Path) -> None:
    weights = changed_weights(directory)

    def failing() -> Any:
        yield next(iter(weights.items()))
        raise RuntimeError("a node was lost")

    async with opened(directory) as server:
        before, rollout = await server.generate(PROMPT, GREEDY, "a"), sender(server)
        with pytest.raises(RuntimeError, match="a node was lost"):
            await rollout.update_weights(failing(), global_steps=1)
        with pytest.raises(WeightError, match="no_such_name"):
            await rollout.update_weights(iter([("no_such_name", torch.zeros(3))]), global_steps=1)
        with pytest.raises(WeightError):
            await rollout.update_weights(iter(list(weights.items())[:1]), global_steps=1)
        assert (await server.get_state()).version == 0
        assert (await server.generate(PROMPT, GREEDY, "b")).token_ids == before.token_ids
        await server.begin_update(2)  # its sender died
        await rollout.update_weights(iter(weights.items()), global_steps=3)
        assert (await server.get_state()).version == 1


def test_weights_of_other_forms_are_refused(directory: Path) -> None:
    rollout = EngineRollout(rollout_config(), model_config(directory))
    with pytest.raises(ValueError, match=r"checkpoint_engine.backend.*delta_flush"):
        asyncio.run(rollout.update_weights(iter([]), wire_format="delta_flush"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data_parallel_size": 2}, "rollout.data_parallel_size"),
        ({"quantization": "fp8"}, "rollout.quantization"),
        ({"enable_rollout_routing_replay": True}, "rollout.enable_rollout_routing_replay"),
        ({"mtp": SimpleNamespace(enable=True, enable_rollout=True)}, "rollout.mtp"),
        ({"engine_kwargs": {"nano_inference": {"page_size": 1}}}, "page_size"),
    ],
)
def test_options_that_are_missing_are_refused_by_name(directory: Path, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        rollout_options(rollout_config(**changes), model_config(directory), "hybrid")


@pytest.mark.parametrize("lora", [{"lora_rank": 8}, {"lora": {"rank": 8}}])
def test_adapters_must_be_merged_for_a_standalone_server(directory: Path, lora: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.merge"):
        rollout_options(rollout_config(), model_config(directory, **lora), "standalone")
    assert rollout_options(rollout_config(), model_config(directory, **lora), "hybrid").has_adapter
    merged = {**lora, "lora": {**lora.get("lora", {}), "merge": True}}
    assert not rollout_options(rollout_config(), model_config(directory, **merged), "standalone").has_adapter


async def test_an_adapter_follows_one_update_of_the_weights_under_it(directory: Path) -> None:
    """verl's calls with `lora.merge=False` (verl/workers/engine_workers.py, `update_weights`)."""
    weights = changed_weights(directory)
    under = {name.replace("q_proj.", "q_proj.base_layer."): value for name, value in weights.items()}
    with engine_of(directory) as engine:
        engine.update_weights(weights, blocking=True)
        wanted = []
        for seed in (1, 2):
            engine.load_adapter("a", adapter_of(seed).items(), config=adapter_config())
            wanted += engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8), adapter="a")

    async with opened(directory, lora_rank=4) as server:
        rollout = sender(server)
        for step, found in enumerate(wanted, start=1):
            await server.sleep()
            await rollout.resume(tags=["weights"])
            if step == 1:
                await rollout.update_weights(iter(under.items()), 1, peft_config=adapter_config())
            tensors = iter(adapter_of(step).items())
            await rollout.update_weights(tensors, step, peft_config=adapter_config(), base_sync_done=True)
            await rollout.resume(tags=["kv_cache"])
            output = await server.generate(PROMPT, dict(GREEDY), "a")
            assert output.token_ids == list(found.completion_tokens)
            assert output.log_probs == pytest.approx(found.logprobs, abs=1e-5)
            fields = output.extra_fields
            assert {fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")} == {step}
        assert (await server.get_state()).version == 1, "the weights were installed once"
        bad = {"peft_config": adapter_config(use_dora=True), "base_sync_done": True}
        with pytest.raises(BadRequest, match="use_dora"):
            await rollout.update_weights(iter(adapter_of(3).items()), 3, **bad)
        assert (await server.generate(PROMPT, dict(GREEDY), "a")).token_ids == output.token_ids


def test_fields_of_the_engine_come_from_verl_and_engine_kwargs(directory: Path) -> None:
    own = {"nano_inference": {"speculation": "ngram", "dtype": "bfloat16"}}
    config = rollout_config(tensor_model_parallel_size=2, max_model_len=77, engine_kwargs=own)
    engine = rollout_options(config, model_config(directory), "standalone").engine
    assert (engine.tensor_parallel, engine.max_model_len, engine.max_batch_size) == (2, 77, 16)
    assert (engine.speculation, engine.dtype, engine.gpu_memory_utilization) == ("ngram", "bfloat16", 0.5)


def test_an_actor_uses_the_devices_of_its_workers() -> None:
    places = [Place("n", "127.0.0.1", devices) for devices in (("10", "2"), ("0", "2"))]
    assert device_variables(places)["CUDA_VISIBLE_DEVICES"] == "0,2,10"
    assert device_variables([Place("n", "127.0.0.1", ())]) == {}


async def test_the_address_serves_chats_under_any_name(directory: Path) -> None:
    async with opened(directory) as server:
        host, port = server.get_server_address()
        body = {"model": "whatever", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}

        def ask() -> Any:
            headers = {"content-type": "application/json"}
            url = f"http://{host}:{port}/v1/chat/completions"
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
                return json.load(reply)

        assert (await asyncio.to_thread(ask))["usage"]["completion_tokens"] <= 3
