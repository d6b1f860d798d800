"""GRPO with this engine: a tiny Llama learns to add, and log-probabilities of sampler and trainer agree.

The trainer is plain PyTorch on a Transformers model; the engine generates the samples and receives new weights after
every step. The model is pretrained on examples of which half are wrong, and then solves about a third of the problems;
further learning is by reward alone, 1 for a correct answer and 0 otherwise:

    python examples/grpo.py --seed 0 --plot grpo.png

Each output line is a step: the mean reward, and the difference between the engine's and the trainer's
log-probabilities of the sampled tokens, with the same weights. It is 0: the trainer's values are the engine's, computed
anew after the update (`nano_inference.rl.exact`), and a first inner step in which one bit differs ends the program.
With `--plain` they are Transformers', and the difference is what two correct programs have.

With `--in-flight` the trainer is plain, too. The next batch is generated during
training, and updates are committed in the middle of it: samples that span an update have tokens of two versions. Their
K/V is kept, so tokens after the update attend to K/V of older weights, which the trainer does not have; the column
"after" is the difference there. With `--in-flight recompute` the K/V is recomputed, and the difference vanishes.
With `--replicas 2` a pool of two engines, Ray actors, generates the samples; rewards and log-probabilities are those of
one engine.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from nano_inference import EngineConfig, InferenceEngine, RayFleet, RolloutPool, SamplingParams, TrainingSample
from nano_inference.rl.exact import Policy, train_logprobs

VOCABULARY = "_$0123456789+="
"""One token per character: the first is padding, the second ends an answer."""
MAX_ANSWER = 4
CLIP = 0.2
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 32 << 20}


class Problem(NamedTuple):
    """A prompt such as "27+45=", and its correct completion, "72$"."""

    prompt: str
    answer: str


Engine = InferenceEngine | RolloutPool
Rollouts = Iterator[tuple[list[Problem], list[TrainingSample]]]


def problem(rng: random.Random, mistakes: tuple[int, ...] = (0,)) -> Problem:
    """Return a sum of two random numbers below 100; a random one of `mistakes` is added to the answer."""
    a, b = rng.randrange(100), rng.randrange(100)
    return Problem(f"{a}+{b}=", f"{max(0, a + b + rng.choice(mistakes))}$")


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [VOCABULARY.index(character) for character in text]


def pad(rows: list[Any]) -> Tensor:
    """Return rows as one tensor, padded with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def token_logprobs(model: LlamaForCausalLM, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of tokens[:, 1:]."""
    logits = model(input_ids=tokens[:, :-1]).logits / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def improve(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Run one optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def warm_model(directory: str, steps: int) -> LlamaForCausalLM:
    """Return the model in the directory, pretraining and saving it first if it is missing; independent of the seed."""
    if Path(directory, "model.safetensors").exists():
        return LlamaForCausalLM.from_pretrained(directory)
    print("supervised start, half of the examples wrong", flush=True)
    size = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": len(VOCABULARY), "bos_token_id": None, "eos_token_id": 1}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**size, **heads, **ids, initializer_range=0.08))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    rng, mistakes = random.Random(1), (0,) * 8 + (-20, -10, -2, -1, 1, 2, 10, 20)
    for _ in range(steps):
        problems = [problem(rng, mistakes) for _ in range(128)]
        mask = pad([[0] * len(prompt) + [1] * len(answer) for prompt, answer in problems])[:, 1:]
        tokens = pad([encode(prompt + answer) for prompt, answer in problems])
        improve(optimizer, -token_logprobs(model, tokens)[mask == 1].mean())
    model.save_pretrained(directory)
    return model


def on_policy(engine: Engine, args: argparse.Namespace) -> Rollouts:
    """Yield problems and their samples, each batch generated completely with the current weights."""
    rng, params = random.Random(args.seed), SamplingParams(temperature=args.temperature, max_tokens=MAX_ANSWER)
    while True:
        problems = [problem(rng) for _ in range(args.prompts)]
        seeded = [replace(params, seed=rng.getrandbits(32)) for _ in problems]
        yield problems, engine.generate([encode(p.prompt) for p in problems], seeded, args.group)


def in_flight(engine: InferenceEngine, args: argparse.Namespace) -> Rollouts:
    """Yield problems and their samples while the next batch is generated; updates are committed during that batch."""
    rng, params = random.Random(args.seed), SamplingParams(temperature=args.temperature, max_tokens=MAX_ANSWER)
    queue: deque[tuple[list[Problem], list[int]]] = deque()
    ended: dict[int, list[TrainingSample]] = defaultdict(list)
    while True:
        while len(queue) < 2:
            problems = [problem(rng) for _ in range(args.prompts)]
            queue.append((problems, [engine.add_request(encode(p.prompt), params, args.group) for p in problems]))
        problems, ids = queue.popleft()
        while any(len(ended[one]) < args.group for one in ids):
            for sample in engine.step():
                ended[sample.request_id].append(sample)
        yield problems, [s for one in ids for s in sorted(ended.pop(one), key=lambda s: s.sample_index)]
        while engine.weight_info().update == "staging":  # generate while the new weights are staged
            for sample in engine.step():
                ended[sample.request_id].append(sample)
        engine.finish_update()  # raises the update's error; after it the trainer may modify its tensors


def pack(samples: list[TrainingSample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens [N, T]; and mask of sampled tokens, log-probabilities and versions, aligned with tokens[:, 1:]."""
    tokens = pad([[*s.prompt_tokens, *s.completion_tokens] for s in samples])
    mask, logprobs, versions = (
        pad([[0] * len(s.prompt_tokens) + list(getattr(s, name)) for s in samples])[:, 1:]
        for name in ("mask", "logprobs", "token_versions")
    )
    return tokens, mask == 1, logprobs, versions


def policy_loss(new: Tensor, old: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """Return PPO's clipped objective over sampled tokens, with advantages within groups; `old` is from the engine."""
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages = advantages.view(-1, 1)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain[mask].mean()


def compare(difference: Tensor, mask: Tensor, versions: Tensor) -> dict[str, float]:
    """Return mean and maximum of the differences, and separately the mean for tokens sampled after an update."""
    oldest = versions.masked_fill(~mask, versions.max()).amin(1, keepdim=True)
    before, after = difference[mask & (versions == oldest)], difference[mask & (versions > oldest)]
    mean_after = after.mean().item() if len(after) else 0.0
    return {"mean": before.mean().item(), "max": before.max().item(), "after": mean_after}


def rewards_of(problems: list[Problem], samples: list[TrainingSample], group: int) -> Tensor:
    """Return 1 for each correct answer, else 0; [problems, group]."""
    right = [list(s.completion_tokens) == encode(problems[i // group].answer) for i, s in enumerate(samples)]
    return torch.tensor(right).float().view(-1, group)


def train_exact(
    model: LlamaForCausalLM, engine: Engine, scorer: InferenceEngine, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Run the steps with the engine's own log-probabilities; return the printed row of each.

    `scorer` computes them: the engine that samples, or one beside a pool.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    policy, log = Policy(scorer, model, optimizer), []
    rollouts = on_policy(engine, args)
    print("step  reward  |engine - trainer| mean      max", flush=True)
    for step in range(args.steps):
        problems, samples = next(rollouts)
        rewards = rewards_of(problems, samples, args.group)
        _, mask, old, _ = pack(samples)
        for epoch in range(args.epochs):
            policy.sync()
            new = train_logprobs(policy, samples, temperature=args.temperature)
            if epoch == 0:
                assert torch.equal(new, old[mask]), "sampler and trainer differ: stale weights, or another distribution"
            improve(optimizer, policy_loss(torch.zeros_like(old).masked_scatter(mask, new), old, mask, rewards))
        policy.sync()
        if engine is not scorer:
            engine.update_weights(model.named_parameters(), version=step + 1, blocking=True)
        log.append({"reward": rewards.mean().item(), "spanning": 0, "mean": 0.0, "max": 0.0})
        print(f"{step:4} {log[-1]['reward']:7.3f}                {0:.1e}  {0:.1e}", flush=True)
    return log


def train(model: LlamaForCausalLM, engine: Engine, args: argparse.Namespace) -> list[dict[str, float]]:
    """Run the steps with Transformers' log-probabilities; return the printed row of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    how = {"blocking": False, "on_running": args.in_flight} if args.in_flight else {"blocking": True}
    rollouts = (
        in_flight(engine, args) if isinstance(engine, InferenceEngine) and args.in_flight else on_policy(engine, args)
    )
    policies, log = {0: copy.deepcopy(model)}, []
    print("step  reward  |engine - trainer| mean      max" + "  spanning    after" * bool(args.in_flight), flush=True)
    for step in range(args.steps):
        problems, samples = next(rollouts)
        for s in samples:
            assert step - bool(args.in_flight) <= s.weight_version <= max(s.token_versions) <= step
        rewards = rewards_of(problems, samples, args.group)
        tokens, mask, old, versions = pack(samples)
        theirs = torch.zeros_like(old)
        for version in versions[mask].unique().tolist():
            with torch.no_grad():
                found = token_logprobs(policies[version], tokens, args.temperature)
            theirs = theirs.where(versions != version, found)
        row = {"reward": rewards.mean().item(), "spanning": sum(len(s.version_spans) > 1 for s in samples)}
        row |= compare((old - theirs).abs(), mask, versions)
        log.append(row)
        text = f"{step:4} {row['reward']:7.3f}                {row['mean']:.1e}  {row['max']:.1e}"
        print(text + f"  {row['spanning']:8}  {row['after']:7.1e}" * bool(args.in_flight), flush=True)
        for _ in range(args.epochs):
            improve(optimizer, policy_loss(token_logprobs(model, tokens, args.temperature), old, mask, rewards))
        policies = {step: policies[step], step + 1: copy.deepcopy(model)}
        engine.update_weights(model.named_parameters(), version=step + 1, **how)
    return log


def run(model: LlamaForCausalLM, path: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train with one engine, or with a pool of `--replicas`."""
    config = EngineConfig(model_path=path, seed=args.seed, max_batch_size=args.prompts * args.group, **ENGINE)
    with InferenceEngine(config) as engine:
        if args.replicas == 1:
            return train(model, engine, args) if args.plain else train_exact(model, engine, engine, args)
        with RolloutPool(RayFleet(config, args.replicas), seed=args.seed) as pool:
            return train(model, pool, args) if args.plain else train_exact(model, pool, engine, args)


def report(log: list[dict[str, float]], columns: dict[str, str], args: argparse.Namespace, **more: float) -> None:
    """Plot rewards and differences (`columns`) over the steps; print a summary as JSON."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([row["reward"] for row in log])
    left.set(title="mean reward", xlabel="step")
    for name, label in columns.items():
        right.plot([row[name] for row in log], label=label.replace("_", " "))
    right.set_yscale("symlog", linthresh=1e-8)
    right.set(title="|engine's logprob - trainer's|", xlabel="step")
    right.legend()
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=80)
    first, last = (torch.tensor([row["reward"] for row in part]) for part in (log[:10], log[-10:]))
    errors = {"first10_error": first.std() / len(first) ** 0.5, "last10_error": last.std() / len(last) ** 0.5}
    gain = (last.mean() - first.mean()) / math.hypot(*errors.values())
    summary = {"first10": first.mean(), "last10": last.mean(), **errors, "gain_in_errors": gain}
    summary |= {f"largest_{label}": torch.tensor([row[name] for row in log]).max() for name, label in columns.items()}
    summary |= {"seconds": time.perf_counter() - args.start}
    rounded = {name: float(f"{number:.3g}") for name, number in summary.items()}
    print(json.dumps({"seed": args.seed, "steps": args.steps, **more, **rounded}))


def options(description: str | None, plot: str) -> argparse.ArgumentParser:
    """Return a parser of the common options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="random seed of problems and samples")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pretraining", type=int, default=500, help="supervised steps before the first one")
    parser.add_argument("--prompts", type=int, default=32, help="problems per step")
    parser.add_argument("--group", type=int, default=8, help="samples per problem")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--cache", type=Path, help="directory of the pretrained model; by default a temporary one")
    parser.add_argument("--plot", type=Path, default=Path(plot))
    parser.set_defaults(start=time.perf_counter())
    torch.set_num_threads(1)  # more threads do not help with so small a model
    disable_progress_bar()
    return parser


def main() -> None:
    """Train, and print a summary as the last line."""
    parser = options(__doc__, "grpo.png")
    modes: dict[str, Any] = {"nargs": "?", "const": "keep", "choices": ("keep", "recompute")}
    parser.add_argument(
        "--in-flight", **modes, help="update while samples are generated: keep their K/V, or recompute it"
    )
    parser.add_argument("--plain", action="store_true", help="train with Transformers' log-probabilities")
    parser.add_argument("--epochs", type=int, default=2, help="optimizer steps per batch")
    parser.add_argument("--replicas", type=int, default=1, help="engines that generate samples; several need Ray")
    args = parser.parse_args()
    args.plain |= bool(args.in_flight)  # samples that span an update have no one model's log-probabilities
    if args.replicas > 1 and args.in_flight:
        parser.error("--in-flight drives the steps of one engine and cannot be combined with --replicas")
    with tempfile.TemporaryDirectory() as temporary:
        path = str(args.cache or temporary)
        log = run(warm_model(path, args.pretraining), path, args)
    columns = {"mean": "mean", "max": "max"} | ({"after": "mean_after_an_update"} if args.in_flight else {})
    report(log, columns, args, spanning=sum(row["spanning"] for row in log))


if __name__ == "__main__":
    main()
