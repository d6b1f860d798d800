"""vLLM on a CPU (float32) as a worker, in its own environment: vllm_cpu.py MODEL THREADS."""

from __future__ import annotations

import os
import sys
import time

from protocol import Request, serve, take_stdout


def main() -> None:
    """Load the model and answer workloads."""
    out = take_stdout()  # its warnings go to stdout while it loads
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[2]) - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    import vllm
    from vllm.sampling_params import RequestOutputKind

    llm = vllm.LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
    )
    counter = iter(range(10**9))

    def run(requests: list[Request]) -> tuple[float | None, int]:
        for request in requests:
            params = vllm.SamplingParams(
                temperature=request["temperature"],
                max_tokens=request["new_tokens"],
                ignore_eos=True,
                n=request["num_samples"],
                logprobs=0 if request["temperature"] > 0 else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            llm.llm_engine.add_request(str(next(counter)), {"prompt_token_ids": request["prompt"]}, params)
        first, total = None, 0
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                count = sum(len(sample.token_ids) for sample in output.outputs)
                total += count
                first = first or (time.perf_counter() if count else None)
        return first, total

    serve(run, vllm.__version__, out)


if __name__ == "__main__":
    main()
