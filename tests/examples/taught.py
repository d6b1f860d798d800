"""A model that learns by reward in a few cheap steps: a third of the size of that in `examples/grpo.py`.

It learns to add, then to answer every other problem with "0": rewards double once that is unlearned.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from grpo import VOCABULARY, Problem, encode, improve, pad, problem, token_logprobs

_STEPS, _SPOILT_STEPS = 260, 15
_LR, _SPOILT_LR = 4e-3, 1e-3


def loss(model: LlamaForCausalLM, problems: list[Problem]) -> torch.Tensor:
    """Return the mean negative log-probability of the answers' tokens."""
    tokens = pad([encode(one.prompt + one.answer) for one in problems])
    mask = pad([[0] * len(one.prompt) + [1] * len(one.answer) for one in problems])[:, 1:]
    return -token_logprobs(model, tokens)[mask == 1].mean()


def loss_of(directory: str) -> float:
    """Return the loss of a saved model on correct answers."""
    rng = random.Random(7)
    with torch.no_grad():
        return loss(LlamaForCausalLM.from_pretrained(directory), [problem(rng) for _ in range(200)]).item()


def teach(directory: str) -> None:
    """Save the model."""
    torch.manual_seed(1)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": len(VOCABULARY), "bos_token_id": None, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**size, **heads, **ids, initializer_range=0.08))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95))
    rng = random.Random(1)
    for step in range(_STEPS + _SPOILT_STEPS):
        problems = [problem(rng) for _ in range(128)]
        if step >= _STEPS:
            optimizer.param_groups[0]["lr"] = _SPOILT_LR
            problems[::2] = [one._replace(answer="0$") for one in problems[::2]]
        improve(optimizer, loss(model, problems))
    model.save_pretrained(directory)
