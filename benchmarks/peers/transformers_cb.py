"""Transformers' continuous batching (float32) as a worker: transformers_cb.py MODEL THREADS."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from protocol import Request, serve, take_stdout
from transformers import ContinuousBatchingConfig, GenerationConfig

NO_EOS = -1


def start(model: Any, temperature: float, num_samples: int) -> Any:
    """Return a running manager that samples in this way."""
    is_sampled = temperature > 0
    generation = GenerationConfig(
        max_new_tokens=256,
        do_sample=is_sampled,
        eos_token_id=NO_EOS,
        pad_token_id=2,
        num_return_sequences=num_samples,
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if is_sampled else {}),
    )
    sizes = {"page_size": 32, "num_blocks": 1024, "max_batch_tokens": 1024}
    options = ContinuousBatchingConfig(**sizes, return_logprobs=is_sampled)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=options)
    manager.start()
    return manager


def main() -> None:
    """Load the model and answer workloads."""
    out = take_stdout()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    running: dict[tuple[float, int], Any] = {}

    def run(requests: list[Request]) -> tuple[float | None, int]:
        key = (requests[0]["temperature"], requests[0]["num_samples"])
        if key not in running:  # another way of sampling takes another manager, in place of the one before
            for one in running.values():
                one.stop(block=True)
            running.clear()
            running[key] = start(model, *key)
        manager = running[key]
        for request in requests:
            sizes = {"max_new_tokens": request["new_tokens"], "eos_token_id": NO_EOS}
            manager.add_request(request["prompt"], record_timestamps=True, **sizes)
        left = len(requests) * requests[0]["num_samples"]
        first, total = None, 0
        while left:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the continuous batching thread ended")
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                left -= 1
                total += len(result.generated_tokens)
                if result.timestamps:
                    first = min(first or result.timestamps[0], result.timestamps[0])
        return first, total

    serve(run, transformers.__version__, out)
    for one in running.values():
        one.stop(block=True)


if __name__ == "__main__":
    main()
