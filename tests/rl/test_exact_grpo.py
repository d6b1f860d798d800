"""GRPO whose first inner step has ratios of exactly 1; the assertion of that finds each usual mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample, WeightError
from nano_inference.rl.exact import Policy, StaleWeights, train_logprobs
from tests.models.families import make_model
from tests.models.hybrids import HYBRIDS, make_hybrid

PROMPTS = [[7, 3, 99, 21, 4, 60], [12], list(range(30, 70))]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8)
COUNT = 8
Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One trainer; a mutant replaces a field."""

    sync: Callable[[Policy], object] = Policy.sync
    sent: Callable[[str], bool] = lambda name: True  # which weights the sampler gets
    partial: bool = False
    temperature: float = 0.8
    texts: Callable[[list[TrainingSample]], list[TrainingSample]] = lambda samples: samples

    def run(self, model: transformers.PreTrainedModel, path: Path, steps: int) -> tuple[list[float], list[float]]:
        """Return each step's mean reward, and its KL to the weights of the start at the first inner step."""
        config = EngineConfig(str(path), dtype="float32", device="cpu", num_threads=1, kv_cache_bytes=8 << 20)
        optimizer, rewards, kls = torch.optim.AdamW(model.parameters(), lr=3e-3), [], []
        with InferenceEngine(config) as sampler, InferenceEngine(config) as scorer, scorer.copy() as reference:
            policy = Policy(scorer, model, optimizer)
            for step in range(steps):
                self.sync(policy)
                named = [(name, value.detach()) for name, value in model.named_parameters() if self.sent(name)]
                if step and named:
                    sampler.update_weights(named, blocking=True, partial=self.partial)
                samples = sampler.generate(PROMPTS, replace(PARAMS, seed=step), COUNT)
                old = torch.tensor([value for one in samples for value in one.logprobs])
                found = torch.tensor([sum(token % 2 for token in one.completion_tokens) / 12 for one in samples])
                advantages = (found.view(-1, COUNT) - found.view(-1, COUNT).mean(1, keepdim=True)).flatten()
                weights = torch.cat([a.repeat(len(s.mask)) for a, s in zip(advantages, samples, strict=True)])
                for inner in range(2):
                    self.sync(policy)
                    new = train_logprobs(policy, self.texts(samples), temperature=self.temperature)
                    ratio = (new - old).exp()
                    if inner == 0:
                        assert (ratio == 1).all()
                        kls.append(self.kl(new, samples, reference))
                    optimizer.zero_grad()
                    (-torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights).mean()).backward()
                    optimizer.step()
                rewards.append(float(found.mean()))
        return rewards, kls

    def kl(self, new: Tensor, samples: list[TrainingSample], reference: InferenceEngine) -> float:
        texts = [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
        rows = reference.score(texts, [len(one.prompt_tokens) for one in samples], temperature=self.temperature)
        gap = torch.tensor([value for row in rows for value in row]) - new.detach()  # type: ignore[union-attr]
        return float((gap.exp() - 1 - gap).mean())


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[transformers.PreTrainedModel]:
    name = getattr(request, "param", "llama3-rope-ratio3-tied")
    yield (make_hybrid if name in HYBRIDS else make_model)(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama3-rope-ratio3-tied", "equal-heads-tied", "grouped"], indirect=True)
def test_ratios_are_1_and_the_kl_starts_at_0(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    rewards, kls = Loop().run(model, tmp_path, 20)
    assert kls[0] == 0 < min(kls[1:])
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5


def retokenised(samples: list[TrainingSample]) -> list[TrainingSample]:
    one = samples[5]
    return [*samples[:5], replace(one, prompt_tokens=(*one.prompt_tokens[:-1], 61)), *samples[6:]]


def sync_once(policy: Policy) -> None:
    if policy.engine.weight_info().version == 0:
        policy.sync()


MUTANTS: dict[str, tuple[Loop, type[Exception]]] = {
    "no sync after a step": (Loop(sync=sync_once), StaleWeights),
    "no update of the sampler": (Loop(sent=lambda name: False), AssertionError),
    "tied head not sent": (Loop(sent=lambda name: "embed_tokens" not in name), WeightError),
    "tied head left out": (Loop(sent=lambda name: "embed_tokens" not in name, partial=True), AssertionError),
    "one norm left out": (Loop(sent=lambda name: name != "model.norm.weight", partial=True), AssertionError),
    "temperature off by 1e-3": (Loop(temperature=0.801), AssertionError),
    "one prompt token of another tokenization": (Loop(texts=retokenised), AssertionError),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistake_is_found_in_two_steps(mutant: str, model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    loop, error = MUTANTS[mutant]
    with pytest.raises(error):
        loop.run(model, tmp_path, 2)
