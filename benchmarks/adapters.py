"""What adapters cost: tokens a second of 32 rows with none, one and 32 of rank 16, in turns, and the time of an update.

    python benchmarks/adapters.py [--threads 2] [--adapters 0,1,32] [--dtype float32] [--rounds 7]

Random adapters of all projections but the head. Medians; of CPU time with one thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from harness import alternate, numbers, options, print_row, processor, wait_for_pages
from safetensors.torch import save_file
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.executors.protocol import Executor
from nano_inference.models.ops import Linear
from nano_inference.types import EngineRequest

ROWS, PROMPT, RANK = 32, 16, 16
Clock = Callable[[], float]


def tensors_of(executor: Executor, rank: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a random adapter's tensors as PEFT names them."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for spec in (spec for op in executor.program.body if isinstance(op, Linear) for spec in op.matrices):
        module, (num_out, num_in) = spec.name.removesuffix(".weight"), spec.shape
        for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            values = torch.randn(shape, generator=generator) * 0.02
            found[f"base_model.model.{module}.lora_{side}.weight"] = values.to(dtype)
    return found


def config_of(rank: int) -> dict[str, object]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}


def update(engine: InferenceEngine, tensors: dict[str, Tensor], rank: int, rounds: int, clock: Clock) -> None:
    """Print the milliseconds of an adapter's update, from memory and from files."""
    size = sum(one.nbytes for one in tensors.values()) / 1e6
    with TemporaryDirectory() as name:
        save_file(tensors, Path(name) / "adapter_model.safetensors")
        (Path(name) / "adapter_config.json").write_text(json.dumps(config_of(rank)))

        def timed(load: Callable[[], object]) -> Callable[[int], float]:
            def measure(_: int) -> float:
                start = clock()
                load()
                return (clock() - start) * 1e3

            return measure

        ways = {
            "memory": timed(lambda: engine.load_adapter("updated", tensors.items(), config=config_of(rank))),
            "files": timed(lambda: engine.load_adapter("updated", name)),
        }
        times = alternate(ways, rounds)
    engine.unload_adapter("updated")
    print_row(f"update, rank {rank}, {size:.0f} MB", *(f"{median(own):.1f} ms {way}" for way, own in times.items()))


def generating(engine: InferenceEngine, num_adapters: int, num_tokens: int, clock: Clock) -> Callable[[int], float]:
    """Return a function that generates with so many adapters, which the rows take in turn, and returns tokens/s."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    def measure(turn: int) -> float:
        for row in range(ROWS):
            prompt = tuple(100 + 7 * row + i for i in range(PROMPT))
            name = f"a{row % num_adapters}" if num_adapters else None
            engine.add(EngineRequest(prompt=prompt, params=params, adapter=name, salt=f"{turn}"))
        start = clock()
        while engine.has_pending():
            engine.step()
        return ROWS * num_tokens / (clock() - start)

    return measure


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--adapters", type=numbers, default=[0, 1, 32], help="how many; ratios are to the first")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the adapters' values")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    dtype, clock = getattr(torch, given.dtype), time.process_time if given.threads == 1 else time.perf_counter
    limits = {"max_adapters": max(*given.adapters, 1) + 1, "adapter_memory": 8 << 30}
    config = EngineConfig(given.model, device="cpu", num_threads=given.threads, max_batch_size=ROWS, **limits)
    print(f"{processor()}, {given.threads or 'all'} threads")
    with InferenceEngine(config) as engine:
        executor = engine.parts.executor
        assert executor is not None
        wait_for_pages(engine)
        for rank in (RANK, 2 * RANK):
            update(engine, tensors_of(executor, rank, 0, dtype), rank, given.rounds, clock)
        for number in range(max(given.adapters)):
            tensors = tensors_of(executor, RANK, number, dtype)
            engine.load_adapter(f"a{number}", tensors.items(), config=config_of(RANK))
        contenders = {str(count): generating(engine, count, given.tokens, clock) for count in given.adapters}
        speeds = alternate(contenders, given.rounds)
    for count, own in speeds.items():
        ratio = median(one / first for one, first in zip(own, speeds[str(given.adapters[0])], strict=True))
        print_row(f"{count} adapters", f"{median(own):.0f} tokens/s", ratio)


if __name__ == "__main__":
    main()
