"""nanochat's reinforcement learning on a tiny checkpoint: each step's log-probabilities are the sampler's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import TrainingSample
from nano_inference.nanochat import GPT
from nano_inference.rl.exact import Policy, StaleWeights, train_logprobs
from tests.nanochat.example_modules import load_example
from tests.nanochat.tiny import SPECIAL_IDS, model_config, state_dict, write_checkpoint, write_tokenizer

example = load_example("nanochat_rl")
LIKELY = {"python_start": 1.9, "python_end": 2.0, "assistant_end": 1.3, "bos": -2.0}
STEPS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that writes digits and calls the calculator now and then."""
    directory = tmp_path_factory.mktemp("tiny")
    config = model_config("G4")
    state = state_dict("G4", config)
    state["transformer.wte.weight"][:, 0] += 12.0  # a direction that every hidden state has
    head = state["lm_head.weight"]
    head *= 0.3
    head[:, 0] = 0.0
    head[48:58, 0] = 1.6  # digits
    for name, value in LIKELY.items():
        head[SPECIAL_IDS[name], 0] = value
    write_tokenizer(directory)
    write_checkpoint(directory, "G4", config=config, state=state)
    return directory


def run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[TrainingSample]]:
    """Run the example; return each group of samples that it trained on."""
    seen: list[list[TrainingSample]] = []
    before = example.loss_of

    def loss_of(policy: Policy, samples: list[TrainingSample], *rest: Any) -> torch.Tensor:
        seen.append(samples)
        return before(policy, samples, *rest)

    sizes = ["--steps", str(STEPS), "--examples-per-step", "2", "--num-samples", "4", "--max-new-tokens", "40"]
    monkeypatch.setattr(example, "is_right", lambda text, right: len(text) % 3)  # a random model is never right
    monkeypatch.setattr(example, "loss_of", loss_of)
    monkeypatch.setattr(sys, "argv", ["nanochat_rl.py", "--model", str(checkpoint), *sizes, *arguments])
    example.main()
    return seen


def test_steps_have_the_samplers_log_probabilities(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = run(checkpoint, monkeypatch, "--out", str(tmp_path))
    assert [one[0].weight_version for one in groups] == [1, 1, 2, 2, 3, 3]
    assert any(0 in sample.mask for one in groups for sample in one), "the calculator was never called"
    assert capsys.readouterr().out.count("reward") == STEPS
    old, new = (dict(GPT.from_checkpoint(one, device="cpu").named_parameters()) for one in (checkpoint, tmp_path))
    assert all(not torch.equal(old[name], new[name]) for name in old)


def without_top_k(policy: Policy, samples: list[TrainingSample], *, params: Any) -> torch.Tensor:
    return train_logprobs(policy, samples, params=replace(params, top_k=0))


def with_results(policy: Policy, samples: list[TrainingSample], *, params: Any) -> torch.Tensor:
    return train_logprobs(policy, [replace(one, mask=(1,) * len(one.mask)) for one in samples], params=params)


def sync_once(policy: Policy) -> int:
    return sync(policy) if policy.engine.weight_info().version == 0 else 0


sync = Policy.sync
MUTANTS: dict[str, tuple[object, str, Callable[..., object], type[Exception]]] = {
    "no sync after a step": (Policy, "sync", sync_once, StaleWeights),
    "top-k left out": (example, "train_logprobs", without_top_k, AssertionError),
    "the tool's tokens count": (example, "train_logprobs", with_results, AssertionError),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistake_ends_the_program(mutant: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, error = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(error):
        run(checkpoint, monkeypatch)
