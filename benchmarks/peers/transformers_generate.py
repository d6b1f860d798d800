"""Transformers' `generate` (left-padded static batch, float32) as a worker: transformers_generate.py MODEL THREADS."""

from __future__ import annotations

import sys
import time

import torch
import transformers
from protocol import Request, serve, take_stdout

PAD = 2


class FirstToken:
    """A streamer that notes when the first token after the prompt came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        """Called with the prompt, then with each token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called at the end."""


def main() -> None:
    """Load the model and answer workloads."""
    out = take_stdout()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD, eos_token_id=None)

    def run(requests: list[Request]) -> tuple[float | None, int]:
        width = max(len(request["prompt"]) for request in requests)
        longest = max(request["new_tokens"] for request in requests)
        samples, temperature = requests[0]["num_samples"], requests[0]["temperature"]
        ids = torch.full((len(requests), width), PAD)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, width - len(request["prompt"]) :] = 1
        config = transformers.GenerationConfig(
            max_new_tokens=longest,
            do_sample=temperature > 0,
            num_return_sequences=samples,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_logits=temperature > 0,
        )
        if temperature > 0:
            config.update(temperature=temperature, top_k=0, top_p=1.0)
        streamer = FirstToken() if len(requests) * samples == 1 else None
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, generation_config=config, streamer=streamer)
            new = made.sequences[:, width:]
            if temperature > 0:
                for step, logits in enumerate(made.logits):
                    torch.log_softmax(logits.float(), -1).gather(1, new[:, step : step + 1]).tolist()
        return streamer.times[1] if streamer else None, sum(r["new_tokens"] for r in requests) * samples

    serve(run, transformers.__version__, out)


if __name__ == "__main__":
    main()
