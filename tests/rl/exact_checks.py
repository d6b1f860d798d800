"""What holds on every device: equal bits, and the gradient of the head; for engines on CPU tensors and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl.exact import Policy, train_logprobs
from tests.models.families import VOCAB_SIZE, make_model
from tests.models.hybrids import HYBRIDS, make_hybrid

PROMPTS = [[7, 3, 99, 21, 4, 60], [12], list(range(30, 70))]
PARAMS = SamplingParams(max_tokens=12, seed=5, temperature=0.8)


@dataclass(frozen=True)
class Case:
    model: transformers.PreTrainedModel
    engine: InferenceEngine
    policy: Policy

    def samples(self, **options: Any) -> list[TrainingSample]:
        params = SamplingParams(**{"max_tokens": 20, "seed": 5, "temperature": 0.8} | options)
        return self.engine.generate(PROMPTS, params, 3)


def texts_of(samples: list[TrainingSample]) -> tuple[list[list[int]], list[int]]:
    texts = [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
    return texts, [len(one.prompt_tokens) for one in samples]


def sampled(samples: list[TrainingSample]) -> Tensor:
    return torch.tensor([value for one in samples for value in one.logprobs])


def made(name: str, directory: Path) -> Iterator[Case]:
    model = (make_hybrid if name in HYBRIDS else make_model)(name, directory)
    with InferenceEngine(
        EngineConfig(model_path=str(directory), dtype="float32", device="cpu", num_threads=1)
    ) as engine:
        policy = Policy(engine, model)
        policy.sync()
        yield Case(model, engine, policy)


def check_bits(engine: InferenceEngine, model: transformers.PreTrainedModel) -> None:
    """Sampled, scored and trained log-probabilities are equal, also after a step of the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = Policy(engine, model, optimizer)
    for params in (PARAMS, replace(PARAMS, top_p=0.9, repetition_penalty=1.2)):
        policy.sync()
        samples = engine.generate(PROMPTS, params, 2)
        texts, starts = texts_of(samples)
        assert engine.score(texts, starts, params=params) == [list(one.logprobs) for one in samples]
        values = train_logprobs(policy, samples, params=params)
        assert torch.equal(values.detach().cpu(), sampled(samples))
        assert not torch.equal(train_logprobs(policy, samples, temperature=0.801).detach().cpu(), sampled(samples))
        optimizer.zero_grad()
        values.sum().backward()
        optimizer.step()


def check_gradient(engine: InferenceEngine, model: transformers.PreTrainedModel, bound: float) -> None:
    """The gradient is that of Transformers in float64, within a bound relative to each parameter's."""
    policy = Policy(engine, model)
    policy.sync()
    samples = engine.generate(PROMPTS, PARAMS, 2)
    model.zero_grad()
    train_logprobs(policy, samples, temperature=0.8).sum().backward()
    exact = type(model)(model.config).double()
    exact.load_state_dict({name: value.detach().cpu().double() for name, value in model.state_dict().items()})
    for ids, start in zip(*texts_of(samples), strict=True):
        logits_TV = exact(torch.tensor([ids])).logits[0, start - 1 : -1] / 0.8
        logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None]).sum().backward()
    for (name, one), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (one.grad.cpu().double() - other.grad).norm() <= bound * other.grad.norm(), name


def check_head(engine: InferenceEngine, model: transformers.PreTrainedModel) -> None:
    """The gradient at the logits has the probabilities that the engine reports, and the weights as it has them."""
    policy = Policy(engine, model)
    policy.sync()
    samples = engine.generate(PROMPTS, replace(PARAMS, logprobs=VOCAB_SIZE), 2)
    values = train_logprobs(policy, samples, temperature=0.8)
    assert torch.equal(values.detach().cpu(), sampled(samples))
    weight_N = torch.randn(len(values), generator=torch.Generator().manual_seed(0))
    (values * weight_N.to(values.device)).sum().backward()
    executor = engine.parts.executor
    assert executor is not None
    rounded = type(model)(model.config)
    rounded.load_state_dict({name: value.float() for name, value in executor.weights.values()}, strict=False)
    tops = [dict(top) for one in samples for top in one.top_logprobs or ()]
    p_NV = torch.tensor([[top[token] for token in range(VOCAB_SIZE)] for top in tops]).exp()
    ids_N = torch.tensor([token for one in samples for token in one.completion_tokens])
    grad_NV = weight_N[:, None] / 0.8 * (torch.eye(VOCAB_SIZE)[ids_N] - p_NV)
    pairs = zip(*texts_of(samples), strict=True)
    hidden = [rounded.model(torch.tensor([ids])).last_hidden_state[0, start - 1 : -1].detach() for ids, start in pairs]
    expected = grad_NV.T @ torch.cat(hidden)
    assert (model.lm_head.weight.grad.cpu() - expected).norm() <= 5e-6 * expected.norm()
