"""Transformers' continuous batching (float32) as a worker: transformers_cb.py MODEL THREADS."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from protocol import Request, serve, take_stdout
from transformers import ContinuousBatchingConfig, GenerationConfig

NO_EOS = -1


def main() -> None:
    """Load the model and answer workloads; one manager for each way of sampling."""
    out = take_stdout()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    running: dict[str, Any] = {}

    def manager(request: Request) -> Any:
        key = (request["temperature"], request["num_samples"])
        if running.get("key") != key:
            if running:
                running["manager"].stop(block=True)
            sampled = request["temperature"] > 0
            generation = GenerationConfig(
                max_new_tokens=256,
                do_sample=sampled,
                eos_token_id=NO_EOS,
                pad_token_id=2,
                num_return_sequences=request["num_samples"],
                **({"temperature": request["temperature"], "top_k": 0, "top_p": 1.0} if sampled else {}),
            )
            options = ContinuousBatchingConfig(
                page_size=32, num_blocks=1024, max_batch_tokens=1024, return_logprobs=sampled
            )
            running["manager"] = model.init_continuous_batching(
                generation_config=generation, continuous_batching_config=options
            )
            running["manager"].start()
            running["key"] = key
        return running["manager"]

    def run(requests: list[Request]) -> tuple[float | None, int]:
        cb = manager(requests[0])
        for request in requests:
            cb.add_request(
                request["prompt"],
                max_new_tokens=request["new_tokens"],
                record_timestamps=True,
                eos_token_id=NO_EOS,
            )
        left = len(requests) * requests[0]["num_samples"]
        first, total = None, 0
        while left:
            result = cb.get_result(timeout=1)
            if result is None:
                if not cb.is_running():
                    raise RuntimeError("the continuous batching thread ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                left -= 1
                total += len(result.generated_tokens)
                if result.timestamps:
                    first = min(first or result.timestamps[0], result.timestamps[0])
        return first, total

    serve(run, transformers.__version__, out)
    if running:
        running["manager"].stop(block=True)


if __name__ == "__main__":
    main()
