"""Measure exact log-probabilities in a trainer: one step of the optimizer beside Transformers'.

    python benchmarks/exact.py [--rounds 3]

Each trainer runs in a process of its own, on one thread: CPU seconds of a forward and a backward pass (medians) over
texts that no cache has seen: eight of equal lengths, eight of 24 to 112 tokens, 64 of 20 to 40. The peak of memory is
that over the parameters: gradients are made anew in each step, as `zero_grad` leaves it to a trainer.
Ours are `train_logprobs` by layer and whole; Transformers' are padded, plain and with activation checkpointing. `score`
is the engine's own forward pass; a refresh is `Policy.sync` after a change, beside a plain copy of the parameters; a
step with top-k needs the engine's own logits a second time. The last line is JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from harness import options, print_row, random_ids
from peers.roster import float32_directory

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.loading.catalog import default_cache, resolve
from nano_inference.rl.exact import Policy, train_logprobs

PROMPT = 16
LENGTHS = {
    "equal": [64] * 8,
    "ragged": [24, 32, 40, 48, 64, 80, 96, 112],
    "short": [20 + index % 21 for index in range(64)],
}
TRAINERS = ("exact", "exact, whole", "Transformers", "Transformers, checkpointed")
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
Times = dict[str, float]


def memory_mib(field: str) -> float:
    """Return a field of /proc/self/status: VmRSS now, VmHWM at most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """Give free memory back and start a new peak: loading a model raises the first one above what a step needs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def seconds_of(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def padded(model: transformers.PreTrainedModel, texts: list[list[int]]) -> torch.Tensor:
    """Return Transformers' log-probabilities of the tokens after the prompts, of one padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0] * mask[:, PROMPT:]


def measure(trainer: str, directory: str, rounds: int) -> dict[str, Times]:
    """Return the figures of one trainer by kind of lengths."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rng, policy = random.Random(7), None
    found: dict[str, Times] = {}
    if trainer.startswith("exact"):
        config = EngineConfig(model_path=directory, dtype="float32", device="cpu", kv_cache_bytes=64 << 20)
        policy = Policy(InferenceEngine(config), model, by_layer=trainer == "exact")
        policy.sync()
        copy = [parameter.detach().clone() for parameter in model.parameters()]
        refresh, plain = [], []
        for _ in range(rounds + 1):
            policy.changed()
            refresh.append(seconds_of(policy.sync))
            plain.append(
                seconds_of(lambda: [a.copy_(b.detach()) for a, b in zip(copy, model.parameters(), strict=True)])
            )
        found["refresh"] = {"ours": statistics.median(refresh[1:]), "copy": statistics.median(plain[1:])}
        del copy
    if trainer.endswith("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    for kind, lengths in LENGTHS.items():
        step(model, policy, lengths, rng)  # touches the parameters for the first time
        model.zero_grad()
        forget_peak()
        before = memory_mib("VmRSS")
        rounds_done = [step(model, policy, lengths, rng) for _ in range(rounds)]
        found[kind] = {name: statistics.median(one[name] for one in rounds_done) for name in rounds_done[0]}
        found[kind]["MiB"] = memory_mib("VmHWM") - before
    if policy is not None:
        steps = [step(model, policy, LENGTHS["equal"], rng, SamplingParams(top_k=50)) for _ in range(rounds)]
        found["top-k"] = {"backward": statistics.median(one["backward"] for one in steps)}
    return found


def step(
    model: transformers.PreTrainedModel,
    policy: Policy | None,
    lengths: list[int],
    rng: random.Random,
    params: SamplingParams | None = None,
) -> Times:
    """Return the seconds of one step, without the optimizer's."""
    texts = [[token % model.config.vocab_size for token in random_ids(rng, length)] for length in lengths]
    starts, loss, times = [PROMPT] * len(texts), [], {}
    model.zero_grad()
    if policy is not None:
        times["score"] = seconds_of(lambda: policy.engine.score(texts, starts))
        policy.engine.flush_cache()
        times["forward"] = seconds_of(lambda: loss.append(train_logprobs(policy, texts, starts, params=params).sum()))
    else:
        times["forward"] = seconds_of(lambda: loss.append(padded(model, texts).sum()))
    return times | {"backward": seconds_of(lambda: loss[0].backward())}


def write_tiny(directory: str) -> None:
    """Write a tiny random model."""
    torch.manual_seed(0)
    common = {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4096, **TINY, **common)).save_pretrained(
        directory
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer", choices=TRAINERS, help="measure this one in the directory --model; for children")
    args = parser.parse_args()
    if args.trainer:
        print(json.dumps(measure(args.trainer, args.model, args.rounds)))
        return
    report = {}
    with tempfile.TemporaryDirectory() as tiny:
        write_tiny(tiny)
        default = float32_directory(resolve("default", default_cache(os.environ)))
        for name, directory in (("tiny", tiny), ("default", str(default))):
            tables = report[name] = {}
            for trainer in TRAINERS:
                command = [sys.executable, __file__, "--model", directory, "--trainer", trainer]
                command += ["--rounds", str(args.rounds)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                tables[trainer] = json.loads(done.stdout.splitlines()[-1])
            for kind in LENGTHS:
                print(f"\n{name}, {kind} lengths: CPU seconds")
                print_row("", "score", "forward", "backward", "step", "peak MiB")
                for trainer, table in tables.items():
                    row = table[kind]
                    step = row["forward"] + row["backward"]
                    print_row(trainer, row.get("score", "-"), row["forward"], row["backward"], step, row["MiB"])
            times = tables["exact"]["refresh"]
            print(f"refresh {times['ours']:.3f} s, a copy of the parameters {times['copy']:.3f} s")
            plain, restricted = tables["exact"]["equal"], tables["exact"]["top-k"]
            print(f"backward with top-k {restricted['backward']:.3f} s, without {plain['backward']:.3f} s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
