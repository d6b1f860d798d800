"""OpenVINO GenAI's continuous batching as a worker, in its own environment: openvino_cb.py MODEL.gguf THREADS.

Activations are float32, and weights keep the file's types; the KV cache is its default, 8 bits.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Request, serve, take_stdout

ALL_TOKENS = 2**31
EOS = 2


def sampling(request: Request, seed: int) -> Any:
    """Say how a request is drawn; sampled ones are asked for log-probabilities."""
    config = genai.GenerationConfig()
    config.max_new_tokens = request["new_tokens"]
    config.num_return_sequences = request["num_samples"]
    config.ignore_eos = True
    config.eos_token_id = EOS
    config.do_sample = request["temperature"] > 0
    if config.do_sample:
        config.temperature, config.top_p, config.top_k = request["temperature"], 1.0, ALL_TOKENS
        config.rng_seed, config.logprobs = seed, 1
    return config


def main() -> None:
    """Load the model and answer workloads."""
    out = take_stdout()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = 2, True, True
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 64, 2048
    properties = {"INFERENCE_NUM_THREADS": int(sys.argv[2]), "INFERENCE_PRECISION_HINT": "f32"}
    properties |= {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", properties)
    numbers = iter(range(10**9))

    def run(requests: list[Request]) -> tuple[float | None, int]:
        handles = []
        for request in requests:
            number = next(numbers)
            prompt = ov.Tensor(np.array([request["prompt"]], dtype=np.int64))
            handles.append(pipeline.add_request(number, prompt, sampling(request, number)))
        is_streamed = requests[0]["num_samples"] == 1  # several samples of a prompt can only be read at the end
        first, total = None, 0
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle in handles if is_streamed else []:
                while handle.can_read():
                    total += sum(len(output.generated_ids) for output in handle.read().values())
                    first = first or time.perf_counter()
        if not is_streamed:
            total = sum(len(output.generated_ids) for handle in handles for output in handle.read_all())
        return first, total

    serve(run, genai.__version__, out)


if __name__ == "__main__":
    main()
