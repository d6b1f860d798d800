"""nanochat's chat_rl, with log-probabilities of the distribution that it samples from.

Upstream's scripts/chat_rl.py samples from the 50 most probable tokens and differentiates the log-probabilities of all.
Here both are of the 50: `train_logprobs` repeats the truncation, and at each step every log-probability equals the
sampler's bit for bit, else the program ends.

    python examples/nanochat_rl.py --steps 30
    python examples/nanochat_rl.py --model path/to/chatsft_checkpoints/d20 --out path/to/chatrl_checkpoints/d20

The rest is upstream's REINFORCE: no KL, no clipping, one step of Muon and AdamW a batch; an advantage is a sample's
reward minus its group's mean, and a group's loss is the mean over its sampled tokens. What the calculator inserts is no
choice of the model and has no gradient. Unlike upstream, the token that ends an answer counts: it was sampled, too.
Questions are those of `calculator_data`, and a reward is 1 if the last number of an answer is the right one.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

import torch
from calculator_data import draw, is_right, result_text
from torch import nn

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.build import locate
from nano_inference.nanochat import GPT
from nano_inference.nanochat.calculator import python_tool
from nano_inference.nanochat.checkpoint_manager import save_checkpoint
from nano_inference.nanochat.dialogue import render_for_completion
from nano_inference.rl.exact import Policy, train_logprobs


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the defaults are upstream's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="calculator", help="a checkpoint of nanochat; default: the packaged model")
    parser.add_argument("--out", type=Path, help="directory of the trained checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--examples-per-step", type=int, default=16)
    parser.add_argument("--num-samples", type=int, default=16, help="answers to each question")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--embedding-lr", type=float, default=0.2, help="AdamW")
    parser.add_argument("--unembedding-lr", type=float, default=0.004, help="AdamW")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="Muon")
    parser.add_argument("--init-lr-frac", type=float, default=0.05, help="of each learning rate, which falls to 0")
    return parser.parse_args(arguments)


def problem(rng: random.Random) -> tuple[str, str]:
    """Return a question and its result."""
    while True:
        turn = draw(rng, None)
        result = result_text(turn.expression) if turn.expression else None
        if result is not None:
            return turn.question, result


def optimizers_of(leaves: dict[str, nn.Parameter], args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the rest."""
    matrices = [one for name, one in leaves.items() if name.startswith("transformer.h.")]
    heads = [one for name, one in leaves.items() if name.startswith("lm_head.")]
    rest = [one for name, one in leaves.items() if not name.startswith(("transformer.h.", "lm_head."))]
    tables = [one for one in rest if one.dim() == 2]
    numbers = [one for one in rest if one.dim() < 2]  # factors of residuals
    scale = (heads[0].size(1) / 768) ** -0.5
    groups = [
        {"params": heads, "lr": args.unembedding_lr * scale},
        {"params": tables, "lr": args.embedding_lr * scale},
        {"params": numbers, "lr": args.unembedding_lr},
    ]
    adam = torch.optim.AdamW([one for one in groups if one["params"]], betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    return [torch.optim.Muon(matrices, lr=args.matrix_lr, weight_decay=0.0), adam]


def train(engine: InferenceEngine, leaves: dict[str, nn.Parameter], args: argparse.Namespace) -> None:
    """Train the parameters; print each step's mean reward."""
    tokenizer, rng = engine.tokenizer, random.Random(args.seed)
    tool = python_tool(tokenizer)
    params = SamplingParams(temperature=args.temperature, top_k=args.top_k, max_tokens=args.max_new_tokens)
    optimizers = optimizers_of(leaves, args)
    policy = Policy(engine, leaves, optimizers)
    groups = [group for one in optimizers for group in one.param_groups]
    rates = [group["lr"] * args.init_lr_frac for group in groups]
    for step in range(args.steps):
        policy.sync()
        problems = [problem(rng) for _ in range(args.examples_per_step)]
        chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": ""}] for text, _ in problems]
        prompts = [render_for_completion(tokenizer, chat) for chat in chats]
        seeded = [replace(params, seed=rng.getrandbits(32)) for _ in prompts]
        samples = engine.generate(prompts, seeded, args.num_samples, program=tool)
        texts = [tokenizer.decode(one.completion_tokens) for one in samples]
        rewards = [is_right(text, problems[i // args.num_samples][1]) for i, text in enumerate(texts)]
        rewards_PN = torch.tensor(rewards).float().view(len(prompts), -1)
        for i, advantage_N in enumerate(rewards_PN - rewards_PN.mean(1, keepdim=True)):
            group = samples[i * args.num_samples :][: args.num_samples]
            (loss_of(policy, group, advantage_N, params) / len(prompts)).backward()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * (1 - step / args.steps)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        length = sum(len(one.mask) for one in samples) / len(samples)
        print(f"step {step:4}  reward {rewards_PN.mean():.3f}  {length:.1f} tokens an answer", flush=True)


def loss_of(
    policy: Policy, samples: list[TrainingSample], advantage_N: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """Return one group's loss, from log-probabilities that must be the sampler's."""
    logprobs = train_logprobs(policy, samples, params=params)
    sampled = torch.tensor([value for one in samples for value in one.logprobs])
    assert torch.equal(logprobs, sampled), "sampler and trainer differ: stale weights, or another distribution"
    num_sampled = sum(sum(one.mask) for one in samples)
    weights = torch.cat([a.repeat(len(one.mask)) for a, one in zip(advantage_N, samples, strict=True)])
    return -(logprobs * weights).sum() / num_sampled  # log-probabilities of forced tokens are 0, without gradient


def main() -> None:
    """Train, and save the checkpoint under `--out`."""
    args = options()
    path = str(locate(args.model))
    model = GPT.from_checkpoint(path, device="cpu", dtype="float32")
    leaves = {name: nn.Parameter(value.clone()) for name, value in model.named_parameters()}
    with InferenceEngine(EngineConfig(model_path=path, device="cpu", dtype="float32")) as engine:
        train(engine, leaves, args)
    if args.out:
        save_checkpoint(args.out, args.steps, leaves, None, {"step": args.steps, "model_config": vars(model.config)})


if __name__ == "__main__":
    main()
