"""TRL's own GRPOTrainer with this engine, in the same process, in the place of vLLM; every update lands in flight.

Task and model are those of grpo.py. TRL hands its generation backend the weights, asks it for samples, and logs how far
the log-probabilities that come with these lie from its own: "sampling/sampling_logp_difference". Here another request
is being decoded in the engine all the time, and no update waits for it: `python examples/trl_grpo.py --plot trl.png`.
"""

from __future__ import annotations

import os
import random
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything below reads it

from datasets import Dataset
from grpo import ENGINE, MAX_ANSWER, VOCABULARY, encode, options, problem, report, warm_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample

METRIC = "sampling/sampling_logp_difference"
FIXED = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "max_completion_length": MAX_ANSWER}
QUIET = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}


class EngineGeneration:
    """What TRL expects of a generation backend, done by an engine."""

    def __init__(self, engine: InferenceEngine, trainer: GRPOTrainer) -> None:
        self.engine, self.trainer, self.background = engine, trainer, list[TrainingSample]()

    def decode_background(self) -> None:
        """Let a request that nobody waits for take a step; begin one when there is none."""
        self.background += self.engine.step()
        if not self.engine.has_pending():
            self.engine.add_request(encode("1+1="), SamplingParams(max_tokens=50, ignore_eos=True))
            self.engine.step()

    def sync_weights(self) -> None:
        """Take the trainer's weights while that request is being decoded."""
        self.decode_background()
        self.engine.update_weights(self.trainer.model.named_parameters(), blocking=False)
        while self.engine.weight_info().update == "staging":
            self.decode_background()
        self.engine.finish_update()

    def generate(self, prompts: list[list[int]], images: None, num_generations: int, profiler: Any = None) -> tuple:
        """Draw completions; every prompt stands there `num_generations` times in a row."""
        args = self.trainer.args
        same = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        params = SamplingParams(max_tokens=args.max_completion_length, min_p=args.min_p or 0.0, **same)
        samples = self.engine.generate(prompts[::num_generations], params, num_generations)
        ids = [list(sample.completion_tokens) for sample in samples]
        logprobs = [[[logprob] for logprob in sample.logprobs] for sample in samples]
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]


class Progress(TrainerCallback):
    """Prints a line for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            print(f"{state.global_step:4} {logs['reward']:7.3f}   {logs[METRIC + '/mean']:.1e}", flush=True)


def is_right(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    """The reward."""
    return [float(ids == encode(right)) for ids, right in zip(completion_ids, answer, strict=True)]


def main() -> None:
    """Train, and print a summary as the last line."""
    args = options(__doc__, "trl.png").parse_args()
    rng = random.Random(args.seed)
    data = Dataset.from_list([problem(rng)._asdict() for _ in range(args.prompts * args.steps)])
    characters = Tokenizer(models.BPE({character: i for i, character in enumerate(VOCABULARY)}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="_", eos_token="$")
    size = {"per_device_train_batch_size": args.prompts * args.group, "num_generations": args.group}
    rates = {"learning_rate": args.lr, "temperature": args.temperature, "lr_scheduler_type": "constant"}
    with tempfile.TemporaryDirectory() as temporary:
        path = str(args.cache or temporary)
        config = GRPOConfig(temporary, seed=args.seed, max_steps=args.steps, **size, **rates, **FIXED, **QUIET)
        trainer = GRPOTrainer(warm_model(path), is_right, config, data, None, tokenizer, callbacks=[Progress])
        trainer.remove_callback(PrinterCallback)
        with InferenceEngine(EngineConfig(model_path=path, seed=args.seed, **ENGINE)) as engine:
            trainer.vllm_generation = backend = EngineGeneration(engine, trainer)
            trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
            print(f"step  reward   {METRIC}/mean", flush=True)
            trainer.train()
            landed = sum(len(sample.version_spans) - 1 for sample in (*backend.background, *engine.abort_all()))
    report(trainer.state.log_history[:-1], {f"{METRIC}/mean": "mean", f"{METRIC}/max": "max"}, args, in_flight=landed)


if __name__ == "__main__":
    main()
