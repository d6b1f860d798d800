"""Runs verl's own classes with this backend on a local Ray cluster, and prints what they return as JSON.

Arguments: a model's directory, and a directory of weights to install. Runs in verl's virtual environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import verl
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

PROMPT = [72, 101, 108, 108, 111]
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def configured(model: str, *overrides: str) -> Any:
    """Return verl's configuration of a PPO trainer, with this backend."""
    rollout = "actor_rollout_ref.rollout"
    fields = [
        *(f"actor_rollout_ref.model.path={model}", f"{rollout}.name=nano_inference", f"{rollout}.dtype=float32"),
        *(f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1", f"{rollout}.tensor_model_parallel_size=1"),
        *(f"{rollout}.prompt_length=64", f"{rollout}.response_length=1500", f"{rollout}.agent.num_workers=1"),
        f"+{rollout}.engine_kwargs.nano_inference={{kv_cache_bytes: 33554432, num_threads: 1, device: cpu}}",
        *overrides,
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", fields)


async def main(model: str, weights: str) -> dict[str, Any]:
    """Return what a trainer sees of a standalone server."""
    config = configured(model)
    manager = await LLMServerManager.create(config)
    (replica,) = manager.get_replicas()
    client = manager.get_client()
    found: dict[str, Any] = {
        "is_replica": isinstance(replica, RolloutReplica),
        "missing": sorted(BaseRollout.__abstractmethods__ - set(dir(get_rollout_class("nano_inference")))),
    }

    async def ask(**params: Any) -> Any:
        return await client.generate("a", prompt_ids=PROMPT, sampling_params={**GREEDY, **params})

    found["before"] = recorded(await ask(max_tokens=8))
    patient = manager.get_client(FullyAsyncLLMServerClient)
    found["whole"] = recorded(await ask(ignore_eos=True))
    task = asyncio.create_task(patient.generate("b", prompt_ids=PROMPT, sampling_params={**GREEDY, "ignore_eos": True}))
    address = manager.get_addresses()[0]
    while not await asyncio.to_thread(num_running, address):
        assert not task.done()
    await replica.abort_all_requests()
    await replica.release_kv_cache()
    await replica.resume_kv_cache()
    await replica.resume_generation()
    found["resumed"] = recorded(await task)

    (worker,) = replica.workers  # a CheckpointEngineWorker, which verl made with this backend's `EngineRollout`
    pairs = list(load_file(Path(weights) / "model.safetensors").items())
    await worker.execute_checkpoint_engine.remote("send_weights", pairs)
    await worker.update_weights.remote(global_steps=7)
    found["after"] = recorded(await ask(max_tokens=8))
    await worker.execute_checkpoint_engine.remote("send_weights", pairs[:1])
    try:
        await worker.update_weights.remote(global_steps=8)
    except Exception as error:
        found["refused"] = str(error)
    await replica.clear_kv_cache()
    found["kept"] = recorded(await ask(max_tokens=8))
    found["rank"] = await worker.get_replica_rank.remote(), await worker.is_leader_rank.remote()
    found["chat"] = await asyncio.to_thread(chat, address)
    return found | await hybrid(model, weights)


class Trainer:
    """The rollout's part of verl's hybrid worker, which installs weights as `ActorRolloutRefWorker` does."""

    def __init__(self, model: str) -> None:
        rollout = get_rollout_class("nano_inference")
        fields = configured(model).actor_rollout_ref
        self._rollout = rollout(config=fields.rollout, model_config=fields.model, device_mesh=None, replica_rank=1)

    async def update_weights(self, weights: str, steps: int) -> None:
        await self._rollout.resume(tags=["weights"])
        pairs = load_file(Path(weights) / "model.safetensors").items()
        await self._rollout.update_weights(iter(pairs), peft_config=None, base_sync_done=True, global_steps=steps)
        await self._rollout.resume(tags=["kv_cache"])


async def hybrid(model: str, weights: str) -> dict[str, Any]:
    """Return what a trainer sees of a server that sleeps while the trainer works."""
    trainer = ray.remote(num_cpus=0)(Trainer).remote(model)
    group: Any = SimpleNamespace(workers=[None, trainer], world_size=1)
    manager = await LLMServerManager.create(configured(model), worker_group=group, start_rank=1)
    (replica,) = manager.get_replicas()
    await replica.sleep()
    waiting = asyncio.create_task(
        manager.get_client().generate("a", prompt_ids=PROMPT, sampling_params={**GREEDY, "max_tokens": 8})
    )
    await trainer.update_weights.remote(weights, 3)
    return {"awake": recorded(await waiting), "mode": replica.rollout_mode.value}


def recorded(output: Any) -> dict[str, Any]:
    """Return a `TokenOutput` as plain values."""
    fields: dict[str, Any] = output.model_dump()
    return fields


def num_running(address: str) -> float:
    """Return how many requests ran in the server's latest step."""
    with urllib.request.urlopen(f"http://{address}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def chat(address: str) -> dict[str, Any]:
    """Return the reply of verl's `main_generation_server` request."""
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    headers = {"content-type": "application/json", "authorization": "Bearer token-abc123"}
    request = urllib.request.Request(f"http://{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        fields: dict[str, Any] = json.load(reply)["usage"]
    return fields


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=1,  # what verl reserves; the engine uses the CPU
            include_dashboard=False,
            object_store_memory=200 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=directory,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        try:
            print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
        finally:
            ray.shutdown()
