"""A trainer of several ranks that generates with one divided engine; started by `torchrun`, or by `fork_ranks`.

`python -m torch.distributed.run --standalone --nproc-per-node 2 tests/parallel/trainer.py CONFIG OUT` writes what each
rank saw to OUT/RANK.json. The engines follow each other in the same processes, of which there are 2 or 4.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from nano_inference import EngineConfig, SamplingParams, SpmdEngine
from nano_inference.types import EngineDead

SEEDED = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, seed=3, ignore_eos=True)
UNSEEDED = SamplingParams(max_tokens=8, ignore_eos=True)


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}


def adapter_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return PEFT's tensors of an adapter of two matrices of each layer."""
    names = [name.removesuffix(".weight") for name in weights if name.endswith(("q_proj.weight", "down_proj.weight"))]
    sizes = {f"{name}.lora_{part}": weights[f"{name}.weight"].shape for name in names for part in "AB"}
    return {
        f"base_model.model.{name}.weight": torch.linspace(-1, 1, 2 * (n if name.endswith("B") else k)).view(
            (n, 2) if name.endswith("B") else (2, k)
        )
        for name, (n, k) in sizes.items()
    }


def error_of(work: Callable[[], object]) -> str:
    """Return the exception that a call raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train(engine: SpmdEngine, path: Path) -> dict[str, Any]:
    """Return what a rank sees of generations, updates and refusals."""
    seen: dict[str, Any] = {"rank": engine.rank}
    seen["seeded"] = [one.to_dict() for one in engine.generate([[1, 2, 3], [4] * 20], SEEDED, 2)]
    seen["unseeded"] = [one.completion_tokens for one in engine.generate([[1, 2, 3]], UNSEEDED, 2)]
    seen["scores"] = engine.score([1, 2, 3, 4])
    seen["embedding"] = engine.embed([1, 2, 3, 4])
    seen["refused"] = error_of(lambda: engine.generate([[]], SEEDED))
    weights = load_file(path / "model.safetensors")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = engine.weights_checksum()
    broken = {name: value.clone() for name, value in weights.items()}
    broken["lm_head.weight"][-1, 0] = torch.nan  # the last rank's part
    seen["broken"] = error_of(lambda: engine.update_weights(broken))
    seen["unknown"] = error_of(
        lambda: engine.update_weights({name + "x": distribute_tensor(v, mesh) for name, v in weights.items()})
    )
    others = {name: value * (1 + engine.rank) for name, value in weights.items()}
    seen["mixed"] = error_of(lambda: engine.update_weights(others, checksum=before))
    seen["is_unchanged"] = engine.weights_checksum() == before
    shared = {
        name: distribute_tensor(value * 1.25, mesh, [Shard(0) if value.dim() > 1 else Replicate()])
        for name, value in weights.items()
    }
    seen["version"] = engine.update_weights(shared, version="step-1")
    seen["checksum"] = engine.weights_checksum()
    seen["updated"] = [one.to_dict() for one in engine.generate([[1, 2, 3]], SEEDED)]
    engine.sleep()
    engine.wake()
    seen["awake"] = [one.to_dict() for one in engine.generate([[1, 2, 3]], SEEDED)]
    adapter = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in adapter_of(weights).items()}
    engine.load_adapter("policy", adapter, config=CONFIG, version="step-1")
    seen["adapted"] = [one.to_dict() for one in engine.generate([[1, 2, 3]], SEEDED, adapter="policy")]
    seen["unloaded"] = engine.unload_adapter("policy")
    seen["unknown adapter"] = error_of(lambda: engine.score([1, 2, 3], adapter="policy"))
    return seen


def train_pairs(engine: SpmdEngine, path: Path) -> dict[str, Any]:
    """Return what a rank of two engines sees: prompts of its own engine, and updates from all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    prompts = [[1 + rank // 2, 2, 3], [4] * (20 + rank // 2)]
    mesh = init_device_mesh("cpu", (size,))
    seen: dict[str, Any] = {"before": [one.to_dict() for one in engine.generate(prompts, SEEDED, 2)]}

    def spread(name: str, value: torch.Tensor) -> DTensor:
        if value.dim() == 1 or "self_attn" in name:
            return DTensor.from_local(value * (1.25 / size), mesh, [Partial()])
        return distribute_tensor(value * 1.25, mesh, [Shard(1)])

    weights = load_file(path / "model.safetensors")
    engine.update_weights({name: spread(name, value) for name, value in weights.items()})
    return seen | {
        "checksum": engine.weights_checksum(),
        "after": [one.to_dict() for one in engine.generate(prompts, SEEDED, 2)],
    }


def lose_a_rank(engine: SpmdEngine, victim: int) -> dict[str, Any]:
    """Return what a rank sees of the loss of another one in the middle of a call; `seconds` from the loss."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the others as soon as it sees the loss
    engine.generate([[1, 2, 3]], SEEDED)
    lost_at = time.time() + 0.2
    if engine.rank == victim:
        threading.Timer(lost_at - time.time(), os.kill, (os.getpid(), signal.SIGKILL)).start()
    lost = error_of(lambda: [engine.generate([[1, 2, 3]], LONG) for _ in range(1000)])
    seen = {"lost": lost, "seconds": time.time() - lost_at}
    return seen | {"later": error_of(lambda: engine.generate([[1]], SEEDED))}


def refused(config: EngineConfig, other: str) -> dict[str, Any]:
    """Return what a rank sees if rank 1 has the checkpoint in the directory `other`."""
    if os.environ["RANK"] == "1":
        path = Path(config.model_path).with_name(other)
        config = EngineConfig.from_dict(config.to_dict() | {"model_path": str(path)})
    return {"failed": error_of(lambda: SpmdEngine(config)), "has_group": dist.is_initialized()}


def main() -> None:
    config, out = EngineConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path, seen = Path(config.model_path), dict[str, Any]()

    def note(name: str, found: dict[str, Any]) -> None:
        seen[name] = found
        (out / f"{rank}.json").write_text(json.dumps(seen))

    if size == 2:
        note("other", refused(config, "other"))  # the engine creates the default group, and destroys it
    else:
        with SpmdEngine(config) as engine:
            note("pairs", train_pairs(engine, path))
    dist.init_process_group("gloo", init_method=f"file://{out}/group", rank=rank, world_size=size)
    if size == 2:
        note("changed", refused(config, "changed"))
        with SpmdEngine(config) as engine:
            note("train", train(engine, path))
        assert dist.is_initialized(), "the engine destroyed the trainer's group"
    victim = 0 if size == 2 else 2
    with suppress(EngineDead), SpmdEngine(replace(config, tensor_parallel=size)) as engine:
        note("loss", lose_a_rank(engine, victim))
        raise EngineDead("done")  # so that no shutdown waits for the others


def fork_ranks(size: int, port: int) -> None:
    """Run `main` in children of this process, which has imported torch once for all, and wait for their ends."""
    for rank in range(size):
        if not os.fork():
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            return main()
    for _ in range(size):
        os.wait()


if __name__ == "__main__":
    main()
