"""Runs an environment of verifiers and prints its traces as JSON. Arguments: a server's URL, the model's directory.

Runs in verifiers' virtual environment, in this directory, whose module `verifiers_environment` verifiers imports.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from renderers import DefaultRendererConfig

NAME = "verifiers_environment"


async def main(url: str, directory: str) -> dict[str, Any]:
    """Return a trace by each of verifiers' clients: chats relayed, and token ids for training."""
    trained = vf.TrainClientConfig(
        base_url=f"{url}/v1", renderer_model_name=directory, renderer=DefaultRendererConfig(tool_parser="qwen3")
    )
    return {"eval": await episode(vf.EvalClientConfig(base_url=f"{url}/v1")), "train": await episode(trained)}


async def episode(client: Any) -> dict[str, Any]:
    config = vf.SingleAgentEnvConfig.model_validate(
        {"taskset": {"id": NAME}, "agent": {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}}}
    )
    env = vf.load_environment(config)
    sampling = vf.SamplingConfig(temperature=0, max_tokens=200)
    ctx = vf.ModelContext(model="by-heart", client=client, sampling=sampling)
    (task,) = env.taskset
    async with env.serving():
        found = await env.run_episode(task, ctx)
    fields: dict[str, Any] = found.model_dump(mode="json")
    return fields


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
