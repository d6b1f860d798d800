"""Transformers' continuous batching (float32) as a worker: transformers_cb.py MODEL THREADS."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from protocol import Request, serve, take_stdout
from transformers import ContinuousBatchingConfig, GenerationConfig

NO_EOS = -1


class Managers:
    """Owns the manager that runs now; another way of sampling takes another, in its place."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._key: tuple[float, int] | None = None
        self._running: Any = None

    def of(self, request: Request) -> Any:
        """Return a running manager that samples as a request asks."""
        key = (request["temperature"], request["num_samples"])
        if self._key != key:
            self.stop()
            self._key, self._running = key, self._start(*key)
        return self._running

    def stop(self) -> None:
        """End the manager that runs, if one does."""
        if self._running is not None:
            self._running.stop(block=True)

    def _start(self, temperature: float, num_samples: int) -> Any:
        is_sampled = temperature > 0
        generation = GenerationConfig(
            max_new_tokens=256,
            do_sample=is_sampled,
            eos_token_id=NO_EOS,
            pad_token_id=2,
            num_return_sequences=num_samples,
            **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if is_sampled else {}),
        )
        options = ContinuousBatchingConfig(
            page_size=32, num_blocks=1024, max_batch_tokens=1024, return_logprobs=is_sampled
        )
        manager = self._model.init_continuous_batching(generation_config=generation, continuous_batching_config=options)
        manager.start()
        return manager


def run(managers: Managers, requests: list[Request]) -> tuple[float | None, int]:
    """Answer requests of one kind; return when the first token came, and how many came."""
    manager = managers.of(requests[0])
    for request in requests:
        manager.add_request(
            request["prompt"], max_new_tokens=request["new_tokens"], record_timestamps=True, eos_token_id=NO_EOS
        )
    left = len(requests) * requests[0]["num_samples"]
    first, total = None, 0
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
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


def main() -> None:
    """Load the model and answer workloads."""
    out = take_stdout()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[2]))
    managers = Managers(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval())
    serve(lambda requests: run(managers, requests), transformers.__version__, out)
    managers.stop()


if __name__ == "__main__":
    main()
