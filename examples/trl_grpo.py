"""TRL's GRPOTrainer with this engine instead of vLLM: in the same process, or over HTTP with `--server`.

Task and model are those of grpo.py. TRL passes weights to its generation backend, requests samples, and logs the
difference between their log-probabilities and its own as "sampling/sampling_logp_difference". In one process, another
request is decoded during all updates: `python examples/trl_grpo.py --plot trl.png`.

With `--server`, TRL's server mode uses its client with `nano-inference serve --enable-rl`, which this script starts:
`python examples/trl_grpo.py --server --plot trl_server.png`. vLLM is not needed: TRL's check for it is patched, and two
methods of its client, which send weights between GPUs, write them into a directory instead.

`--lora adapter` trains a LoRA of PEFT, which alone is sent to the engine; `--lora merged` merges it into the weights
for each update. The last line has the bytes that an update sends.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by the imports below

from datasets import Dataset
from grpo import ENGINE, MAX_ANSWER, VOCABULARY, encode, options, problem, report, warm_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl.trl import EngineGeneration, use_engine
from nano_inference.weights.directory import save_weights

METRIC = "sampling/sampling_logp_difference"
FIXED = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "max_completion_length": MAX_ANSWER}
QUIET = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}


class Background:
    """A request that is decoded while weights are updated; `use_engine` is enough without it."""

    def __init__(self, backend: EngineGeneration) -> None:
        self.engine, self.backend, self.samples = backend.engine, backend, list[TrainingSample]()

    def decode(self) -> None:
        """Run one step of the background request; add one if there is none."""
        self.samples += self.engine.step()
        if not self.engine.has_pending():
            self.engine.add_request(encode("1+1="), SamplingParams(max_tokens=50, ignore_eos=True))
            self.engine.step()

    def sync_weights(self) -> None:
        """Update the engine's weights while the background request is decoded."""
        self.decode()
        self.engine.update_weights(self.backend.named_weights(), blocking=False)
        while self.engine.weight_info().update == "staging":
            self.decode()
        self.engine.finish_update()


@contextmanager
def served(model: str, weights: str, seed: int, *options: str) -> Iterator[str]:
    """Serve the model in another process, with these further options; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "nano_inference", "serve", "--model", model]
    command += ["--port", str(port), "--seed", str(seed), *options]
    command += ["--enable-rl", "--weights-dir", weights, "--no-log-requests", "--num-threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def patch_trl_client(weights: str) -> None:
    """Patch TRL's vLLM client to work without vLLM, and to write weights into new directories below `weights`."""

    def write_weights(client: Any, metadata: list[Any], named: Iterator[tuple[str, Tensor]]) -> None:
        number = sum(1 for _ in Path(weights).iterdir()) + 1
        directory = save_weights({name: tensor.clone() for name, tensor in named}, Path(weights, f"version-{number}"))
        body = {"model_path": str(directory), "weight_version": str(number)}
        client._post(f"{client.base_url}/update_weights_from_disk", json=body)

    for module in (vllm_client, vllm_generation):
        module.is_vllm_available = lambda min_version=None: True
    vllm_client.VLLMClient.init_communicator = lambda client, device=0: None
    vllm_client.VLLMClient.update_named_params = write_weights


class Progress(TrainerCallback):
    """Prints a line per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            print(f"{state.global_step:4} {logs['reward']:7.3f}   {logs[METRIC + '/mean']:.1e}", flush=True)


def is_right(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    """Return the rewards: 1 for a correct answer, else 0."""
    return [float(ids == encode(right)) for ids, right in zip(completion_ids, answer, strict=True)]


def warm_pair(path: str, steps: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model in `path`, training and saving it first if it is missing, and save its tokenizer there."""
    characters = Tokenizer(models.BPE({character: i for i, character in enumerate(VOCABULARY)}, []))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="_", eos_token="$")
    model = warm_model(path, steps)
    tokenizer.save_pretrained(path)
    return model, tokenizer


def make_trainer(args: argparse.Namespace, path: str, output: str, **more: Any) -> GRPOTrainer:
    """Return TRL's trainer of the model in `path`."""
    rng = random.Random(args.seed)
    data = Dataset.from_list([problem(rng)._asdict() for _ in range(args.prompts * args.steps)])
    size = {"per_device_train_batch_size": args.prompts * args.group, "num_generations": args.group}
    rates = {"learning_rate": args.lr, "temperature": args.temperature, "lr_scheduler_type": "constant"}
    config = GRPOConfig(output, seed=args.seed, max_steps=args.steps, **size, **rates, **FIXED, **QUIET, **more)
    model, tokenizer = warm_pair(path, args.pretraining)
    lora = None
    if args.lora:
        from peft import LoraConfig

        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    trainer = GRPOTrainer(model, is_right, config, data, None, tokenizer, callbacks=[Progress], peft_config=lora)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_in_process(args: argparse.Namespace, path: str, output: str) -> tuple[GRPOTrainer, dict[str, float]]:
    """Train with an engine in this process; count the updates committed during background requests."""
    trainer = make_trainer(args, path, output)
    with InferenceEngine(EngineConfig(model_path=path, seed=args.seed, **ENGINE)) as engine:
        backend = use_engine(trainer, engine)
        if args.lora:
            if args.lora == "merged":
                backend.sync_weights = lambda: engine.update_weights(backend.named_weights(), blocking=True)
            trainer.train()
            sent = [one.num_bytes for one in engine.adapters()]
            return trainer, {"bytes": sum(sent or [tensor.nbytes for _, tensor in backend.named_weights()])}
        background = Background(backend)
        backend.sync_weights = background.sync_weights
        trainer.train()
        landed = sum(len(sample.version_spans) - 1 for sample in (*background.samples, *engine.abort_all()))
    return trainer, {"in_flight": landed}


def train_over_http(args: argparse.Namespace, path: str, output: str) -> tuple[GRPOTrainer, dict[str, float]]:
    """Train with TRL's server mode; count the updates of the server."""
    warm_pair(path, args.pretraining)
    with tempfile.TemporaryDirectory() as weights, served(path, weights, args.seed) as url:
        patch_trl_client(weights)
        server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 120}
        trainer = make_trainer(args, path, output, **server)
        trainer.train()
        version = trainer.vllm_generation.vllm_client._get(f"{url}/weight_info")["version"]
    return trainer, {"updates": version}


def main() -> None:
    """Train, and print a summary as the last line."""
    parser = options(__doc__, "trl.png")
    parser.add_argument("--server", action="store_true", help="use the engine over HTTP")
    parser.add_argument("--lora", choices=["adapter", "merged"], help="train a LoRA, in this process")
    args = parser.parse_args()
    print(f"step  reward   {METRIC}/mean", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        train = train_over_http if args.server else train_in_process
        trainer, counts = train(args, str(args.cache or temporary), temporary)
    report(trainer.state.log_history[:-1], {f"{METRIC}/mean": "mean", f"{METRIC}/max": "max"}, args, **counts)


if __name__ == "__main__":
    main()
