"""TRL's importance ratios with the default model, by engines in each mode of log-probabilities.

    python benchmarks/trl_ratios.py [--temperature 0.7 1.0] [--only process,server] [--steps 2]

TRL's `GRPOTrainer` trains the default model, loaded from its file by Transformers in float32, with an engine in this
process (`use_engine`) and with `serve --enable-rl` (TRL's own client). One line for each: how many tokens were sampled,
the least and the largest ratio of TRL's probability to the engine's, and the largest difference of log-probabilities.
Ratios are 1 where both compute the same distribution. From the second step on this needs the trainer's weights in the
engine. "named" marks servers of which TRL warned that ratios would be biased. Exits with 1 if others differ from 1 by
more than 1e-4. Needs the `examples` extra.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by the imports below
sys.path[:0] = [str(Path(__file__).parents[1] / "examples")]

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl_grpo import FIXED, QUIET, patch_trl_client, served  # noqa: E402

from nano_inference import EngineConfig, InferenceEngine  # noqa: E402
from nano_inference.loading.catalog import default_cache, resolve  # noqa: E402
from nano_inference.rl.trl import use_engine  # noqa: E402

BAR = 1e-4
QUANTISED = "quantization_config"
TOPICS = ("the sea", "bread", "chess", "glaciers", "jazz", "honey", "Roman roads", "satellites")
RATIO, DIFFERENCE = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that differ within a group."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def write_plain(file: Path, path: Path) -> None:
    """Write the directory of a model that Transformers read from a GGUF file, with its weights in float32."""
    stored = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = LlamaConfig.from_dict(
        {name: value for name, value in stored.config.to_dict().items() if name != QUANTISED}
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(stored.state_dict())
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)


class Warned(logging.Handler):
    """Notes whether TRL warned of a server's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def emit(self, record: logging.LogRecord) -> None:
        self.found |= "--logprobs-mode" in record.getMessage()


def make_trainer(path: Path, output: str, temperature: float, wish: argparse.Namespace, **more: Any) -> GRPOTrainer:
    """Return a trainer of the model in `path`, whose ratios are those of single tokens."""
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"What is special about {one}?"}]} for one in TOPICS]
    )
    sizes = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": wish.steps,
        "temperature": temperature,
    }
    options = FIXED | QUIET | sizes | {"max_completion_length": wish.tokens, "learning_rate": 1e-5, "seed": 1}
    config = GRPOConfig(output, **options, **more, vllm_importance_sampling_mode="token_truncate")
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = GRPOTrainer(model, lengths, config, data, None, AutoTokenizer.from_pretrained(path))
    trainer.remove_callback(PrinterCallback)
    return trainer


def in_process(path: Path, output: str, temperature: float, mode: Any, wish: argparse.Namespace) -> GRPOTrainer:
    """Train with an engine in this process."""
    trainer = make_trainer(path, output, temperature, wish)
    with InferenceEngine(EngineConfig(str(path), device="cpu", seed=1, logprobs_mode=mode)) as engine:
        use_engine(trainer, engine)
        trainer.train()
    return trainer


def over_http(path: Path, output: str, temperature: float, mode: Any, wish: argparse.Namespace) -> GRPOTrainer:
    """Train with a server that installs the trainer's weights from directories."""
    with tempfile.TemporaryDirectory() as weights, served(str(path), weights, 1, "--logprobs-mode", mode) as url:
        patch_trl_client(weights)
        address = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 120}
        trainer = make_trainer(path, output, temperature, wish, use_vllm=True, **address)
        trainer.train()
    return trainer


def main() -> int:
    """Print a line for each engine, mode and temperature; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.7, 1.0])
    parser.add_argument("--only", default="process,server")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    wish = parser.parse_args()
    trains = {"process": in_process, "server": over_http}
    is_wrong = False
    print("engine    mode       temperature  tokens      least    largest      logp", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path, file = Path(directory, "model"), resolve("default", default_cache(os.environ))
        write_plain(file, path)
        for where, mode, temperature in (
            (where, mode, temperature)
            for where in wish.only.split(",")
            for mode in ("raw", "processed")
            for temperature in wish.temperature
        ):
            handler = Warned()
            logging.getLogger("trl").addHandler(handler)
            log = trains[where](path, directory, temperature, mode, wish).state.log_history[:-1]
            logging.getLogger("trl").removeHandler(handler)
            least, most = min(one[f"{RATIO}/min"] for one in log), max(one[f"{RATIO}/max"] for one in log)
            tokens = sum(round(8 * one["completions/mean_length"]) for one in log)
            difference = max(one[f"{DIFFERENCE}/max"] for one in log)
            head = f"{where:10}{mode:11}{temperature:11.1f}{tokens:8}{least:11.6f}{most:11.6f}{difference:10.1e}"
            print(head + (" named" if handler.found else ""), flush=True)
            is_wrong |= not handler.found and max(1 - least, most - 1) > BAR
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
